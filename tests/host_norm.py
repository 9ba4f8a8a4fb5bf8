"""Emulation of group normalisation for `host_cuda`: float64, rounded as fp4bf16.h says."""

from __future__ import annotations

import numpy as np
from host_cuda import memory

from fp4bf16.backends import cpu_quantize
from fp4bf16.formats import FORMATS
from fp4bf16.interop import BFLOAT16
from fp4bf16.python_ref.norm import sigmoid, silu

EXACT = FORMATS["nvfp4_exact"]
WORKSPACE = 48  # bytes; the emulation needs none, but checks that the caller gives it


def define(library) -> None:
    """Add group normalisation and its gradient to a `HostCuda`."""
    found = Norm(library)
    for name, function in (("group_norm", found.forward), ("group_norm_backward", found.backward)):
        kind = f"const fp4bf16_{name}_args*"
        library._define(name, f"{kind}, void*", function)
        size = library.ffi.callback(f"int64_t({kind})", lambda args: WORKSPACE)
        setattr(library.lib, f"fp4bf16_{name}_workspace_size", size)
    library.lib.fp4bf16_group_norm_norm_parts = library.ffi.callback(
        "int64_t(const fp4bf16_group_norm_args*)", norm_parts
    )


def norm_parts(a) -> int:
    """Images times chunks of 64 pixels."""
    return a.n * max(1, -(-a.pixels // 64))


def above(v: np.ndarray, room: np.ndarray) -> np.ndarray:
    """float32 over `v`, by a share of `room` at least: upper bounds, as a kernel's are."""
    return np.nextafter((v * (1 + room)).astype(np.float32), np.float32(np.inf))


def static_exponent(gamma: np.ndarray, beta: np.ndarray, count: int) -> int:
    """Least e, -119 to 120, with 288 * 2^e >= max|gamma| sqrt(count - 1) + max|beta|, each step rounded up to
    float32; 0 where all is zero.
    """
    bound = up(up(np.abs(gamma).max() * np.float64(up(np.sqrt(up(count - 1.0))))) + np.abs(beta).max())
    if bound == 0 or not np.isfinite(bound):
        return 0 if bound == 0 else 120
    fraction, e = np.frexp(bound)  # bound = fraction * 2^e, 288 = 0.5625 * 2^9
    return int(np.clip(e - 9 + (fraction > 0.5625), -119, 120))


def up(v: float) -> np.float64:
    """The least float32 that is at least `v`."""
    with np.errstate(over="ignore"):
        near = np.float32(v)
    return np.float64(near if near >= v else np.nextafter(near, np.float32(np.inf)))


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(BFLOAT16)


def means(x: np.ndarray) -> np.ndarray:
    """Those of each group of (n, pixels, groups, channels); over pixels first, where NumPy is much faster."""
    return x.mean(1, keepdims=True).mean(3, keepdims=True)


class Norm:
    def __init__(self, library):
        self.at, self.runs = library.at, library.runs

    def _picture(self, a, name: str) -> np.ndarray:
        """(n, pixels, c), the array itself."""
        address = self.at(getattr(a, name))
        assert address % 2 == 0, f"{name} is not aligned"
        steps = (getattr(a, f"{name}_image"), getattr(a, f"{name}_pixel"), 1)
        return memory(address, (a.n, a.pixels, a.c), BFLOAT16, steps)

    def _floats(self, a, name: str, *shape: int) -> np.ndarray:
        return memory(self.at(getattr(a, name)), shape, np.float32)

    def _check(self, a) -> None:
        assert a.groups >= 1 and a.c % a.groups == 0, f"c is {a.c}, groups is {a.groups}"
        assert a.activation in (0, 1), f"activation is {a.activation}"
        assert self.at(a.workspace) and self.at(a.workspace) % 16 == 0, "workspace"

    def _grouped(self, a, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64).reshape(a.n, a.pixels, a.groups, a.c // a.groups)

    def _given(self, a) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances (n, 1, groups, 1) from the sums by channel."""
        sources = [i for i in range(2) if self.at(a.sums[i])]
        assert sum(a.sum_channels[i] for i in sources) == a.c, "sum_channels"
        shapes = [(a.n, a.sum_parts[i], a.sum_channels[i], 2) for i in sources]
        sums = [memory(self.at(a.sums[i]), s, np.float32) for i, s in zip(sources, shapes, strict=True)]
        by_channel = np.concatenate([s.sum(1, dtype=np.float32) for s in sums], 1).astype(np.float64)
        total = by_channel.reshape(a.n, 1, a.groups, a.c // a.groups, 2).sum(3, keepdims=True)
        first, second = (total[..., k] / (a.pixels * a.c // a.groups) for k in range(2))
        return first.astype(np.float32).astype(np.float64), np.maximum(second - first**2, 0)

    def forward(self, a) -> None:
        self._check(a)
        if 0 in (a.n, a.pixels, a.c) or not self.runs(a.run_if):
            return
        gamma, beta = (self._floats(a, name, a.c).astype(np.float64) for name in ("gamma", "beta"))
        x = self._grouped(a, self._picture(a, "x"))
        if self.at(a.sums[0]):
            mean, variance = self._given(a)
        else:
            mean = means(x).astype(np.float32).astype(np.float64)
            variance = means((x - mean) ** 2)
        rstd = (1 / np.sqrt(variance + a.eps)).astype(np.float32)
        y = ((x - mean) * rstd).reshape(a.n, a.pixels, a.c) * gamma + beta
        y = rounded(silu(y) if a.activation else y)
        for name, value in (("mean", mean), ("rstd", rstd)):
            if self.at(getattr(a, name)):
                self._floats(a, name, a.n, a.groups)[...] = value[:, 0, :, 0]
        if self.at(a.y):
            self._picture(a, "y")[...] = y
        if self.at(a.expanded) or self.at(a.packed):
            self._four_bit(a, y, static_exponent(gamma, beta, a.pixels * a.c // a.groups))

    def _four_bit(self, a, y: np.ndarray, e: int) -> None:
        assert a.c % 16 == 0, f"c is {a.c}, no multiple of 16"
        outer = np.float32(2.0**e)
        self._floats(a, "outer_scale", 1)[0] = outer
        rows = a.n * a.pixels
        flat = y.astype(np.float32).reshape(rows, a.c)
        q = cpu_quantize.quantize_rows(flat, EXACT, np.full(rows, outer), None, "fast", "propagate")
        if self.at(a.expanded):
            target = memory(self.at(a.expanded), (rows, a.c), np.uint8)
            target[...] = cpu_quantize.expand_rows(q.packed, q.block_scale, EXACT)
        if self.at(a.packed):
            assert self.at(a.block_scale), "block_scale is NULL, but packed needs it"
            memory(self.at(a.packed), (rows, a.c // 2), np.uint8)[...] = q.packed
            memory(self.at(a.block_scale), (rows, a.c // 16), np.uint8)[...] = q.block_scale
        if self.at(a.norms):
            by_row = np.stack([q.sums[:, 2], q.sums[:, 1]], 1).reshape(a.n, a.pixels, 2)
            chunks = norm_parts(a) // a.n
            parts = [run.sum(1) for run in np.array_split(by_row, chunks, axis=1)]
            target = memory(self.at(a.norms), (a.n, chunks, 2), np.float32)
            target[...] = above(np.stack(parts, 1), np.array([0.24, 1e-4]))

    def backward(self, a) -> None:
        self._check(a)
        if 0 in (a.n, a.pixels, a.c):
            return
        gamma, beta = (self._floats(a, name, a.c).astype(np.float64) for name in ("gamma", "beta"))
        mean, rstd = (self._floats(a, n, a.n, 1, a.groups, 1).astype(np.float64) for n in ("mean", "rstd"))
        h = (self._grouped(a, self._picture(a, "x")) - mean) * rstd
        g = self._picture(a, "g").astype(np.float64)
        if a.activation:
            z = h.reshape(g.shape) * gamma + beta
            s = sigmoid(z)
            g = g * (s * (1 + z * (1 - s)))
        u = self._grouped(a, g * gamma)
        dx = rstd * (u - means(u) - h * means(u * h))
        dx = dx.reshape(g.shape)
        for name, value in (("dgamma", (g * h.reshape(g.shape)).sum((0, 1))), ("dbeta", g.sum((0, 1)))):
            if self.at(getattr(a, name)):
                self._floats(a, name, a.c)[...] += value.astype(np.float32)
        if self.at(a.dshift):
            self._floats(a, "dshift", a.n, a.c)[...] = dx.sum(1)
        if self.at(a.add):
            dx = dx + self._picture(a, "add").astype(np.float64)
        self._picture(a, "dx")[...] = rounded(dx)
