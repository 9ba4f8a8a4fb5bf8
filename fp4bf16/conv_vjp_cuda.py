"""Gradients of convolutions of device arrays: BF16 products of the rounded g and the decoded operands.

The decoded operands are BF16 numbers, outer scales included: exact in "nvfp4_exact" and "mxfp4"; in "nvfp4"
and "fp8", whose outer scales are no powers of two, rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import device
from .backends import cuda_conv, cuda_math
from .backends import cuda_gemm as kernels
from .backends.cuda_conv import Geometry
from .backends.cuda_gemm import DTYPES, Matrices
from .backends.cuda_tape import call
from .conv_cuda import bf16, branch_weights, copied, padded, storable, tap_of, taps, used
from .device import DeviceArray
from .formats import Format
from .gemm_cuda import exact
from .operands import Arg


class Gradients:
    """The gradients of one convolution; g, x and w are checked, of one framework and device.

    Attributes:
        op: for errors. stream: the caller's. inputs: memory that no result may overlap.
        summed: whether `weight` is to leave the sums of g over the pixels for `bias`, at no cost.
    """

    def __init__(self, op: str, g: Arg, geo: Geometry, fmt: Format, inputs: list[Any], stream: Any):
        self.op, self.g, self.geo, self.fmt, self.inputs, self.stream = op, g, geo, fmt, inputs, stream
        self.summed = False
        self._rounded: DeviceArray | None = None
        self._sums: DeviceArray | None = None

    def _ordered(self):
        return device.ordered(self.op, self.stream, [self.g.place])

    def _target(self, shape, dtype, out: Any) -> DeviceArray:
        like = replace(self.g.place, name="g")
        return device.out_operand(self.op, out, shape, str(dtype), like, self.inputs)

    def _gradient(self, stream: int) -> DeviceArray:
        """g in BF16 as the kernels read it; made once."""
        if self._rounded is None:
            self._rounded = bf16(self.g.array, False, stream)
        return self._rounded

    # ---- in the pictures -----------------------------------------------------------------------------------
    def pictures(self, w: Arg, part: Arg, track: str, c: int, dtype, out: Any) -> Any:
        """The gradient in x (N, H, W, C); `part`: what `track` multiplies of `w`."""
        geo = self.geo
        with self._ordered() as stream:
            d = self._target((geo.n, geo.h, geo.w, c), dtype, out)
            if d.size == 0:
                return d.owner
            if track == "reference":
                return _store(self._exact_pictures(part, c, stream), d, c, stream)
            weight = used(part, True, track, self.fmt, stream)
            width = weight.shape[3]
            target = d
            if width != c or not storable(d) or d.dtype == "float16":
                kind = "bfloat16" if d.dtype == "bfloat16" else "float32"
                target = kernels.empty((*d.shape[:3], width), kind, like=d)
            residual = None
            if track == "dual" and w.value.rank:
                residual = self._through_branch(w.value, width, d, stream)
            cuda_conv.dgrad(geo, self._gradient(stream), weight, target, stream, residual=residual)
            return _store(target, d, c, stream)

    def _through_branch(self, w: Any, width: int, like: DeviceArray, stream: int) -> DeviceArray:
        """dgrad(bf16(g U^T), D), float32."""
        down, up = branch_weights(w, stream)
        g, geo = self._gradient(stream), self.geo
        pixels, ranks = geo.n * geo.oh * geo.ow, up.shape[1]
        flat = _pixels(g, geo.o) or _pixels(copied(g, stream), geo.o)
        through = kernels.empty((geo.n, geo.oh, geo.ow, ranks), "bfloat16", like=like)
        d = Matrices(through, (), (), pixels, ranks, ranks, 1)
        turned = Matrices(up, (), (), geo.o, ranks, ranks, 1).T
        kernels.product(d, stream, sixteen=(flat, turned))
        added = kernels.empty((geo.n, geo.h, geo.w, width), "float32", like=like)
        cuda_conv.dgrad(geo._replace(o=ranks), through, down, added, stream)
        return added

    def _exact_pictures(self, w: Arg, c: int, stream: int) -> DeviceArray:
        dtype = _exact_dtype(self.g, w)
        g, weight = exact(self.g, dtype, stream), exact(w, dtype, stream)
        wide, inner = padded(self.geo, c, dtype, g)
        for i, j, rows, columns in taps(self.geo):
            met = cuda_math.part(wide, slice(None), rows, columns)
            term = cuda_math.matmul(g, tap_of(weight, i, j))
            device.assign(met, cuda_math.epilogue(met, None, None, term))
        return inner

    # ---- in the weight -------------------------------------------------------------------------------------
    def weight(self, x: Arg, track: str, dtype, out: Any) -> Any:
        """The gradient in w (O, kh, kw, C)."""
        geo, c = self.geo, x.shape[3]
        with self._ordered() as stream:
            d = self._target((geo.o, geo.kh, geo.kw, c), dtype, out)
            if d.size == 0:
                return d.owner
            if track == "reference":
                return _store(self._exact_weight(x, stream), d, c, stream)
            pictures = used(x, False, track, self.fmt, stream)
            width, target = pictures.shape[3], d
            if width != c or d.dtype != "float32" or not d.c_contiguous:
                target = kernels.empty((*d.shape[:3], width), "float32", like=d)
            if self.summed:
                self._sums = kernels.empty((geo.o,), "float32", like=d)
            cuda_conv.wgrad(geo, self._gradient(stream), pictures, target, stream, db=self._sums)
            return _store(target, d, c, stream)

    def _exact_weight(self, x: Arg, stream: int) -> DeviceArray:
        dtype, geo = _exact_dtype(self.g, x), self.geo
        g, values = exact(self.g, dtype, stream), exact(x, dtype, stream)
        pixels, c = geo.n * geo.oh * geo.ow, x.shape[3]
        turned = device.permute(cuda_math.reshaped(g, (pixels, geo.o)), (1, 0))
        wide, inner = padded(geo, c, dtype, values)
        device.assign(inner, values)
        dw = device.full((geo.o, geo.kh, geo.kw, c), 0, dtype, like=values)
        for i, j, rows, columns in taps(geo):
            met = cuda_math.part(wide, slice(None), rows, columns)
            term = cuda_math.matmul(turned, cuda_math.reshaped(met, (pixels, c)))
            device.assign(tap_of(dw, i, j), term)
        return dw

    # ---- in the bias ---------------------------------------------------------------------------------------
    def bias(self, track: str, out: Any) -> Any:
        """Sum of g, rounded to BF16 except on the "reference" track, over the pixels, in float32."""
        with self._ordered():
            g, sums = self.g.array, self._sums
            d = self._target((self.geo.o,), self.g.dtype, out)
            if sums is None:
                if track != "reference":
                    g = device.astype(device.astype(g, "bfloat16"), "float32")
                elif g.dtype != "float64":
                    g = device.astype(g, "float32")
                sums = cuda_math.total(g, (0, 1, 2))
            device.assign(d, device.astype(sums, d.dtype))
            return d.owner


def _exact_dtype(*args: Arg) -> str:
    return "float64" if any(str(a.dtype) == "float64" for a in args) else "float32"


def _pixels(g: DeviceArray, o: int) -> Matrices | None:
    """g (N, OH, OW, at least O) as one matrix of pixels."""
    n, h, w, _ = g.shape
    x = Matrices(g, (n, h), g.strides[:2], w, g.strides[2], o, 1)
    return kernels.folded(x)


def _store(y: DeviceArray, d: DeviceArray, c: int, stream: int) -> Any:
    """d = the first `c` channels of y, in d's dtype."""
    if y is d:
        return d.owner
    if y.dtype in DTYPES and d.dtype in DTYPES and y.c_contiguous and d.c_contiguous:
        rows, width = y.size // y.shape[3], y.shape[3]
        call("convert", y.address, DTYPES[y.dtype], 1, rows, c, 0, width, 1, d.address, DTYPES[d.dtype], c,
             stream)  # fmt: skip
    else:
        y = cuda_math.part(y, slice(None), slice(None), slice(None), slice(0, c))
        device.assign(d, device.astype(y, d.dtype))
    return d.owner
