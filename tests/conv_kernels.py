"""What the tests of the convolutions share: geometries, float64 results, pictures with poisoned gaps on the
device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from test_cuda_gemm import POISON


class Geometry(NamedTuple):
    """Pictures (n, h, w, c), results (n, oh, ow, o), kernel kh x kw."""

    n: int
    h: int
    w: int
    c: int
    o: int
    kh: int = 3
    kw: int = 3
    stride: int = 1
    top: int = 1
    left: int = 1
    bottom: int = 1
    right: int = 1

    @property
    def oh(self) -> int:
        return (self.top + self.h + self.bottom - self.kh) // self.stride + 1

    @property
    def ow(self) -> int:
        return (self.left + self.w + self.right - self.kw) // self.stride + 1

    def fields(self) -> dict:
        names = ("n", "h", "w", "oh", "ow", "o", "kh", "kw", "stride", "top", "left")
        return {name: getattr(self, name) for name in names}


def point(n, h, w, c, o):
    """The geometry of a 1x1 convolution."""
    return Geometry(n, h, w, c, o, 1, 1, 1, 0, 0, 0, 0)


def conv_args(library, function, **fields):
    """The struct of `function`; addresses are plain integers, strides lists."""
    kind = f"fp4bf16_{function.removesuffix('_simple')}_args"
    kinds = dict(library.ffi.typeof(kind).fields)
    cast = {
        name: library.ffi.cast(kinds[name].type, value) if kinds[name].type.kind == "pointer" else value
        for name, value in fields.items()
    }
    return library.ffi.new(f"{kind}*", cast)


# ---- float64
def shifted(x, oh, ow, stride, dy, dx):
    """x (n, h, w, c) at (p * stride + dy, q * stride + dx), zero outside: (n, oh, ow, c)."""
    y, z = np.arange(oh) * stride + dy, np.arange(ow) * stride + dx
    out = x[:, np.clip(y, 0, x.shape[1] - 1)][:, :, np.clip(z, 0, x.shape[2] - 1)]
    inside = ((y >= 0) & (y < x.shape[1]))[:, None] & ((z >= 0) & (z < x.shape[2]))
    return np.where(inside[None, :, :, None], out, 0)


def taps(geo):
    """(r, s, its shift in y, in x) of every tap."""
    return [(r, s, r - geo.top, s - geo.left) for r in range(geo.kh) for s in range(geo.kw)]


def conv64(x, w, geo):
    """x (n, h, w, c) conv w (o, kh, kw, c), and the same of the absolute values."""
    y = size = np.zeros((geo.n, geo.oh, geo.ow, len(w)))
    if 0 in x.shape:
        return y, size
    x, w = x.astype(np.float64), w.astype(np.float64)
    for r, s, dy, dx in taps(geo):
        part, by = shifted(x, geo.oh, geo.ow, geo.stride, dy, dx), w[:, r, s].T
        y, size = y + part @ by, size + abs(part) @ abs(by)
    return y, size


def dgrad64(g, w, geo):
    g, w = g.astype(np.float64), w.astype(np.float64)
    pad = geo.kh + geo.kw + geo.stride + abs(geo.top) + abs(geo.left) + max(geo.bottom, geo.right, 0)
    wide = np.zeros((2, geo.n, geo.h + 2 * pad, geo.w + 2 * pad, w.shape[-1]))
    rows, columns = np.arange(geo.oh) * geo.stride, np.arange(geo.ow) * geo.stride
    for r, s, dy, dx in taps(geo):
        at = (slice(None), (rows + pad + dy)[:, None], columns + pad + dx)
        wide[0][at] += g @ w[:, r, s]
        wide[1][at] += abs(g) @ abs(w[:, r, s])
    return wide[:, :, pad : pad + geo.h, pad : pad + geo.w]


def wgrad64(g, x, geo):
    """Gradient in the weights (o, kh, kw, c), and the same of the absolute values."""
    out = np.zeros((2, geo.o, geo.kh, geo.kw, geo.c))
    if 0 in g.shape or 0 in x.shape:
        return out
    g, x = g.reshape(-1, geo.o).astype(np.float64).T, x.astype(np.float64)
    for r, s, dy, dx in taps(geo):
        part = shifted(x, geo.oh, geo.ow, geo.stride, dy, dx).reshape(-1, geo.c)
        out[0, :, r, s], out[1, :, r, s] = g @ part, abs(g) @ abs(part)
    return out


# ---- pictures on the device
class Pictures:
    """`x` (n, h, w, c) inside a wider buffer whose gaps hold `fill`.

    gap: rows and pixels around each picture, and 16 bytes of channels (`odd`: one channel) on either side.
    """

    def __init__(self, gpu, x, fill, gap=0, odd=False):
        n, h, w, c = x.shape
        unit = 1 if odd else 16 // x.itemsize
        self.gpu, self.shape, self.dtype = gpu, x.shape, x.dtype
        channels = -(-c // unit) * unit + 2 * gap * unit
        self.held = np.full((n, h + 2 * gap, w + 2 * gap, channels), fill, x.dtype)
        self.at = np.s_[:, gap : gap + h, gap : gap + w, gap * unit : gap * unit + c]
        self.held[self.at] = x
        self.address = gpu.put(self.held)
        self.strides = [s // x.itemsize for s in self.held.strides[:3]]
        self.data = self.address + gap * (sum(self.strides[1:]) + unit) * x.itemsize

    def get(self):
        """What the device holds now; fails where something wrote into the gaps."""
        held, before = self.gpu.get(self.address, self.held.shape, self.dtype), self.held.copy()
        got = held[self.at].copy()
        held[self.at] = before[self.at] = 0
        assert held.tobytes() == before.tobytes(), "wrote between the pictures"
        return got


def poisoned(gpu, shape, dtype, gap=0, odd=False):
    """Pictures that nothing was written to yet."""
    fill = np.full(np.dtype(dtype).itemsize, POISON, np.uint8).view(dtype)[0]
    return Pictures(gpu, np.full(shape, fill, dtype), fill, gap, odd)


def rows(gpu, x, fill, gap=0, odd=False):
    """(address, stride) of `x` (rows, k) in rows that are longer than needed by `gap` times 16 bytes."""
    unit = 1 if odd else 16 // x.itemsize
    stride = -(-x.shape[1] // unit) * unit + gap * unit
    held = np.full((x.shape[0], stride), fill, x.dtype)
    held[:, : x.shape[1]] = x
    return gpu.put(held), stride


def close(results, y, bound, limit) -> None:
    """Each (name, result) as a whole (calc_diff below `limit`) and each element (within `bound` of y)."""
    for name, got in results:
        d = got.astype(np.float64)
        lost, all_ = ((d - y) ** 2).sum(), (d * d + y * y).sum()
        assert lost <= limit * all_, f"{name}: calc_diff {lost / all_:.2e}"
        worst = np.unravel_index(np.argmax(abs(d - y) / bound), d.shape)
        assert abs(d - y)[worst] <= bound[worst], f"{name}: D{worst} is {d[worst]}, not {y[worst]}"


GEOMETRIES = {
    "one pixel": Geometry(1, 1, 1, 16, 24),
    "ragged": Geometry(3, 7, 5, 16, 40),
    "tall": Geometry(2, 33, 3, 32, 64),
    "small pictures": Geometry(37, 4, 4, 64, 72),
    "channels of 2.5 tiles": Geometry(2, 5, 9, 320, 72),
    "one tile and a bit": Geometry(1, 16, 17, 48, 136),
    "1x1": point(2, 9, 11, 64, 96),
    "1x1 of single pixels": point(70, 1, 1, 48, 32),
    "stride 2": Geometry(2, 8, 12, 32, 40, stride=2),
    "stride 2, ragged": Geometry(3, 7, 5, 16, 24, stride=2),
    "stride 2 of DDPM": Geometry(2, 16, 16, 64, 64, stride=2, top=0, left=0),
    "1x1 stride 2": Geometry(2, 6, 7, 32, 16, 1, 1, 2, 0, 0, 0, 0),
    "asymmetric": Geometry(2, 6, 9, 32, 32, top=2, left=0, bottom=0, right=3),
    "no padding": Geometry(2, 6, 9, 32, 32, 3, 3, 1, 0, 0, 0, 0),
    "2x2": Geometry(2, 5, 6, 16, 32, 2, 2, 1, 0, 1, 1, 0),
    "1x5": Geometry(1, 6, 13, 32, 16, 1, 5, 1, 0, 2, 0, 2),
}
