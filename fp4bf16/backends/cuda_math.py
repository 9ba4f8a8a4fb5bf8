"""What is computed on device arrays outside our kernels, by the arrays' own framework: the "reference" track,
sums over broadcast axes, the factors of a low-rank branch.

`Arrays` holds for CuPy (and NumPy); `TorchArrays` says where PyTorch differs. Matrix products of float32 are
the framework's own: PyTorch's stay float32 unless the caller allows TF32.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import device
from ..device import DeviceArray

_RANDOMISED_ABOVE = 1024  # longest side for which the whole SVD is computed
_OVERSAMPLING, _POWER_STEPS = 16, 3


class Arrays:
    """Functions of arrays of one framework, by NumPy's names."""

    def __init__(self, xp: Any):
        self.xp = xp

    def raw(self, x: DeviceArray) -> Any:
        return x.owner

    def owner(self, raw: Any, like: DeviceArray) -> Any:
        return raw

    def erfc(self, x):
        from cupyx.scipy.special import erfc

        return erfc(x)

    def silu(self, y):
        return y / (1 + self.xp.exp(-y))

    def gelu(self, y):
        return 0.5 * y * self.erfc(-0.7071067811865476 * y.astype(np.float64)).astype(y.dtype)

    def double(self, x):
        return x.astype(np.float64)

    def single(self, x):
        return x.astype(np.float32)

    def qr(self, x):
        return self.xp.linalg.qr(x)[0]

    def svd(self, x):
        return self.xp.linalg.svd(x, full_matrices=False)

    def finite(self, x):
        return self.xp.isfinite(x)

    def zero_rows(self, x, index) -> None:
        x[index] = 0

    def put(self, x, axis: int, index, value) -> None:
        x[(slice(None),) * (x.ndim + axis) + (index,)] = value.astype(x.dtype)


class TorchArrays(Arrays):
    def silu(self, y):
        return self.xp.nn.functional.silu(y)

    def gelu(self, y):
        return (0.5 * y * self.xp.special.erfc(-0.7071067811865476 * y.double())).to(y.dtype)

    def double(self, x):
        return x.double()

    def single(self, x):
        return x.float()

    def svd(self, x):
        return self.xp.linalg.svd(x, full_matrices=False)

    def zero_rows(self, x, index) -> None:
        x.index_fill_(0, index, 0)

    def put(self, x, axis: int, index, value) -> None:
        x.index_copy_(axis, index, value.to(x.dtype))


_KNOWN: dict[str, Arrays] = {}


def of(x: DeviceArray) -> Arrays:
    found = _KNOWN.get(x.framework)
    if found is None:
        kind = TorchArrays if x.framework == "torch" else Arrays
        found = _KNOWN[x.framework] = kind(sys.modules[x.framework])
    return found


def wrapped(raw: Any, like: DeviceArray, name: str | None = None) -> DeviceArray:
    return device.operand(of(like).owner(raw, like), name or like.name)


def matmul(a: DeviceArray, b: DeviceArray) -> DeviceArray:
    raw = of(a).raw
    return wrapped(raw(a) @ raw(b), a)


def epilogue(y: DeviceArray, bias, activation, residual) -> DeviceArray:
    """activation(y + bias) + residual in y's dtype."""
    xp = of(y)
    r = xp.raw(y)
    if bias is not None:
        r = r + xp.raw(device.astype(bias, y.dtype))
    if activation is not None:
        r = getattr(xp, activation)(r)
    if residual is not None:
        r = r + xp.raw(device.astype(residual, y.dtype))
    return wrapped(r, y)


def total(x: DeviceArray, axes: Sequence[int], keepdims: bool = False) -> DeviceArray:
    """Sum over `axes`."""
    return wrapped(of(x).raw(x).sum(axis=tuple(axes), keepdims=keepdims), x)


def reshaped(x: DeviceArray, shape: Sequence[int]) -> DeviceArray:
    """A view where the memory allows, else a copy."""
    return x if x.shape == tuple(shape) else wrapped(of(x).raw(x).reshape(tuple(shape)), x)


def part(x: DeviceArray, *index: Any) -> DeviceArray:
    """x[index], of slices and device arrays of indices."""
    raw = of(x).raw
    return wrapped(raw(x)[tuple(raw(i) if isinstance(i, DeviceArray) else i for i in index)], x)


def zero_rows(x: DeviceArray, index: DeviceArray) -> None:
    xp = of(x)
    xp.zero_rows(xp.raw(x), xp.raw(index))


def put_columns(x: DeviceArray, index: DeviceArray, value: DeviceArray) -> None:
    """x[..., index] = value, whose rows are those of x flattened."""
    xp = of(x)
    value = reshaped(value, (*x.shape[:-1], value.shape[-1]))
    xp.put(xp.raw(x), -1, xp.raw(index), xp.raw(value))


def put_rows(x: DeviceArray, index: DeviceArray, value: DeviceArray) -> None:
    """x[index] = value of a matrix."""
    xp = of(x)
    xp.put(xp.raw(x), -2, xp.raw(index), xp.raw(value))


def not_finite(x: DeviceArray) -> int:
    """How many elements are NaN or Inf. Waits for the device."""
    xp = of(x)
    return x.size - int(device.to_host(wrapped(xp.finite(xp.raw(x)).sum(), x)))


def square_norms(x: DeviceArray) -> np.ndarray:
    """Squares of the norms of the rows, float64, on the host. Waits for the device."""
    xp = of(x)
    d = xp.double(xp.raw(x))
    return device.to_host(wrapped((d * d).sum(axis=1), x))


def low_rank(w: DeviceArray, rank: int) -> tuple[DeviceArray, DeviceArray]:
    """Factors (K, r), (r, N) of `w` (K, N) float32, as `dual.low_rank` has them; the random numbers are the
    same. Waits for the device."""
    xp = of(w)
    x = xp.raw(w)
    if max(w.shape) > _RANDOMISED_ABOVE and rank + _OVERSAMPLING < min(w.shape):
        draw = np.random.Generator(np.random.Philox(key=0)).standard_normal
        start = device.from_host(draw((w.shape[1], rank + _OVERSAMPLING), np.float32), like=w)
        q = x @ xp.raw(start)
        for _ in range(_POWER_STEPS):
            q = x @ (x.T @ xp.qr(q))
        q = xp.qr(q)
        u, s, vt = xp.svd(q.T @ x)
        u = q @ u
    else:
        u, s, vt = xp.svd(xp.double(x))
    root = s[:rank] ** 0.5
    return wrapped(u[:, :rank] * root, w), wrapped(root[:, None] * vt[:rank], w)
