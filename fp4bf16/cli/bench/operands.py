"""Operand sets of one shape on the GPU, and the float64 products that results are compared with."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from ...formats import QuantizedArray, get_format
from .raw import Raw

RANK = 64
SAMPLED_ROWS = 16


def container(parts: dict[str, Any], format: str, shape: tuple[int, int]) -> QuantizedArray:
    """The quantiser's results as the public container, blocked along the last axis."""
    outer = parts.get("outer")
    q = QuantizedArray(parts["packed"], parts.get("scale"), None if outer is None else outer[:, None],
                       get_format(format), shape, (0, 1))  # fmt: skip
    q._expanded = parts.get("expanded")
    return q


class Operands:
    """A (M, K) and a weight W (N, K), Gaussian BF16, and what the arms make of them, each made when asked
    for. `d` (M, N) BF16 takes the results.
    """

    def __init__(self, torch: Any, raw: Raw, m: int, n: int, k: int):
        self.torch, self.raw, self.shape = torch, raw, (m, n, k)
        self.a, self.w = self._gaussian(m, k), self._gaussian(n, k)
        self.d = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=self.raw.device)

    def _gaussian(self, *shape: int) -> Any:
        return self.torch.randn(shape, dtype=self.torch.bfloat16, device=self.raw.device)

    def _quantized(self, x: Any, format: str, fast: bool) -> dict[str, Any]:
        parts = self.raw.outputs(x, format)
        args, workspace = self.raw.quantize_args(x, format, fast=fast, **parts)
        self.raw.quantize(args)
        self.raw.wait()
        del workspace
        return parts

    @cached_property
    def a4(self) -> dict[str, Any]:
        return self._quantized(self.a, "nvfp4_exact", fast=True)

    @cached_property
    def w4(self) -> dict[str, Any]:
        return self._quantized(self.w, "nvfp4_exact", fast=False)

    @cached_property
    def aq(self) -> QuantizedArray:
        m, _, k = self.shape
        return container(self.a4, "nvfp4_exact", (m, k))

    @cached_property
    def wq(self) -> QuantizedArray:
        """The prepared weight as the (K, N) operand of a product."""
        _, n, k = self.shape
        return container(self.w4, "nvfp4_exact", (n, k)).T

    @cached_property
    def a_mx(self) -> dict[str, Any]:
        return self._quantized(self.a, "mxfp4", fast=True)

    @cached_property
    def w_mx(self) -> dict[str, Any]:
        return self._quantized(self.w, "mxfp4", fast=True)

    @cached_property
    def t(self) -> Any:
        """(M, 64): what a low-rank branch made of A."""
        return self._gaussian(self.shape[0], RANK)

    @cached_property
    def u(self) -> Any:
        """(N, 64)."""
        return self._gaussian(self.shape[1], RANK)

    # ---- values in float64
    @cached_property
    def rows(self) -> Any:
        """Indices of the rows that are compared."""
        m = self.shape[0]
        return self.torch.randperm(m, device=self.raw.device)[: min(SAMPLED_ROWS, m)]

    def expanded_values(self, parts: dict[str, Any], rows: Any = None, scaled: bool = True) -> Any:
        """float64 of E4M3 bytes, times the outer scale."""
        data, outer = parts["expanded"], parts["outer"]
        if rows is not None:
            data, outer = data[rows], outer[rows]
        values = data.view(self.torch.float8_e4m3fn).double()
        return values * outer.double()[:, None] if scaled else values

    def mx_values(self, parts: dict[str, Any], rows: Any = None) -> Any:
        data, scale = parts["packed"], parts["scale"]
        if rows is not None:
            data, scale = data[rows], scale[rows]
        grid = self.torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=self.torch.float64).to(data.device)
        grid = self.torch.cat([grid, -grid])
        values = self.torch.stack([grid[(data & 15).long()], grid[(data >> 4).long()]], -1).flatten(-2)
        return values * self.torch.exp2(scale.double() - 127).repeat_interleave(32, 1)

    def distance(self, want: Any) -> float:
        """Relative error of the sampled rows of `d`; infinite where any element of `d` was not written."""
        if bool(self.torch.isnan(self.d).any()):
            return float("inf")
        got = self.d[self.rows].double()
        return float(self.torch.linalg.norm(got - want) / self.torch.linalg.norm(want))

    @cached_property
    def exact(self) -> Any:
        """The sampled rows of A W^T."""
        return self.a[self.rows].double() @ self.w.double().T

    @cached_property
    def exact4(self) -> Any:
        """The sampled rows of the product of the quantised operands."""
        return self.expanded_values(self.a4, self.rows) @ self.expanded_values(self.w4).T

    @cached_property
    def exact4_unscaled(self) -> Any:
        left = self.expanded_values(self.a4, self.rows, scaled=False)
        return left @ self.expanded_values(self.w4, scaled=False).T

    @cached_property
    def branch(self) -> Any:
        """The sampled rows of T U^T."""
        return self.t[self.rows].double() @ self.u.double().T


def same_bytes(parts: dict[str, Any], format: str, x: Any, rows: Any, fast: bool) -> tuple[float, float]:
    """(relative error of the decoded rows, share of bytes that differ from the reference) of quantised rows
    of x."""
    from ...python_ref import quantize as ref

    options = {"search": "fast" if fast else "full"} if format == "nvfp4_exact" else {}
    outer = {} if format == "mxfp4" else {"outer": "row"}
    values = x[rows].float().cpu().numpy()
    want = ref.quantize(values, format, **options, **outer)
    decoded = ref.dequantize(want)
    error = float(np.linalg.norm(decoded.astype(np.float64) - values) / np.linalg.norm(values))
    differ = total = 0
    for name, field in (("packed", "packed"), ("scale", "block_scale")):
        if parts.get(name) is not None and getattr(want, field) is not None:
            got = parts[name][rows].cpu().numpy()
            differ, total = differ + int((got != getattr(want, field)).sum()), total + got.size
    if parts.get("expanded") is not None and format != "fp8":
        got = _decode(parts, rows)
        differ, total = differ + int((got[:, : values.shape[1]] != decoded).sum()), total + decoded.size
    return error, differ / max(total, 1)


def _decode(parts: dict[str, Any], rows: Any) -> np.ndarray:
    import ml_dtypes

    values = parts["expanded"][rows].cpu().numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values * parts["outer"][rows].cpu().numpy()[:, None]
