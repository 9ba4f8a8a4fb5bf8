"""The quantiser that also makes T = X D on a GPU: what it quantises is what the plain one gives, bit for bit,
and T is the product rounded once.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = {"nvfp4_exact": 0, "nvfp4": 1, "mxfp4": 2, "fp8": 3}
BLOCK = {"nvfp4_exact": 16, "nvfp4": 16, "mxfp4": 32, "fp8": 1}
FULL, FAST = 0, 1
# One row, less than a block, ragged rows and k, one to eight CTAs a cluster, many tiles a CTA.
SHAPES = [
    (1, 16, 1), (3, 40, 8), (64, 1024, 64), (65, 1152, 64), (130, 1000, 128), (70, 2072, 20), (129, 4608, 64),
    (77, 8192, 64), (9000, 96, 32), (1300, 3336, 100), (1300, 4104, 33), (1200, 8168, 64),
]  # fmt: skip


def _data(rng, rows, k, stride):
    """Rows of many magnitudes with zero blocks, -0, subnormals and a few large elements."""
    x = rng.standard_normal((rows, stride)) * np.exp2(rng.integers(-20, 20, (rows, 1)))
    x *= np.exp2(rng.integers(-6, 7, x.shape) * (rng.random(x.shape) < 0.1))
    x[rng.random(x.shape) < 0.05] = -0.0
    x[:, :16] *= rng.random((rows, 1)) < 0.8
    x[rows // 2] *= 2.0**-120
    return x.astype(BF16)


class Case:
    """One set of arguments, run with any rank on fresh memory."""

    def __init__(self, library, gpu, x, k, fmt="nvfp4_exact", search=FAST, outliers=(), tail=0, given=None,
                 packed=True, stochastic=False, stats=False):  # fmt: skip
        self.loaded, self.gpu, self.x, self.k, self.fmt, self.search = library, gpu, x, k, fmt, search
        self.outliers = np.asarray(outliers, np.int32)
        self.tail, self.given, self.packed = tail, given, packed
        self.stochastic, self.stats = stochastic, stats

    def run(self, down=None):
        """(results by name, T); `down` (k, rank)."""
        gpu, (rows, stride) = self.gpu, self.x.shape
        rank = 0 if down is None else down.shape[1]
        block = BLOCK[self.fmt]
        kp = -(-self.k // block) * block
        expanded_stride = -(-kp // 128) * 128 + self.tail
        width = rank + len(self.outliers) + self.tail
        args = self.loaded.ffi.new("fp4bf16_quantize_args*")
        args.rows, args.k_size, args.after, args.x_stride, args.k_stride = rows, self.k, 1, stride, 1
        args.dtype, args.format, args.search = 1, FORMATS[self.fmt], self.search
        args.mid, args.inner = 1, rows
        args.rounding, args.seed = int(self.stochastic), 7
        shapes = {} if self.fmt == "mxfp4" else {"outer_scale": ((rows,), np.uint32)}
        if self.stats:
            shapes["sums"] = ((rows, 3), np.float64)
        if self.fmt in ("nvfp4_exact", "fp8"):
            shapes["expanded"] = ((rows, expanded_stride), np.uint8)
            args.expanded_stride = expanded_stride
        if self.packed:
            shapes["packed"] = ((rows, kp if self.fmt == "fp8" else kp // 2), np.uint8)
        if self.packed and self.fmt != "fp8":
            shapes["block_scale"] = ((rows, kp // block), np.uint8)
        if width:
            shapes["hidden"] = ((rows, width), BF16)
            args.hidden_stride = width
        self.put(args, "x", self.x)
        where = {}
        for name, (shape, dtype) in shapes.items():
            where[name] = gpu.empty(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            self.point(args, name, where[name])
        if self.given is not None:
            self.put(args, "outer_given", self.given)
            args.outer_given_stride = 1
        if len(self.outliers):
            self.put(args, "outlier_index", self.outliers)
            args.outliers = len(self.outliers)
        if rank:
            pitch = -(-self.k // 8) * 8 + 8
            down_t = np.full((rank, pitch), 777, BF16)  # what lies behind k must not matter
            down_t[:, : self.k] = down.T
            self.put(args, "down_t", down_t)
            args.rank, args.down_stride = rank, pitch
        size = self.loaded.lib.fp4bf16_quantize_workspace_size(args)
        assert size >= 0
        if size:
            self.point(args, "workspace", gpu.empty(size))
        self.loaded.call("quantize", args, 0)
        gpu.check(gpu.rt.cudaDeviceSynchronize())
        got = {name: gpu.get(where[name], *shapes[name]) for name in shapes}
        gpu.free()
        hidden = got.pop("hidden", np.empty((rows, 0), BF16))
        got["rest of hidden"] = hidden[:, rank:].view(np.uint16)
        return got, hidden[:, :rank]

    def put(self, args, name, array):
        self.point(args, name, self.gpu.put(array))

    def point(self, args, name, address):
        field = dict(self.loaded.ffi.typeof(args[0]).fields)[name]
        setattr(args, name, self.loaded.ffi.cast(field.type, address))

    def check(self, down, exact_t=True):
        want, _ = self.run()
        got, t = self.run(down)
        assert got.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        if exact_t:
            x = self.x[:, : self.k].astype(np.float64)
            x[:, self.outliers] = 0
            product, size = x @ down.astype(np.float64), abs(x) @ abs(down.astype(np.float64))
            error = abs(t.astype(np.float64) - product)
            # Terms under FP32's normal numbers may be lost.
            limit = 2.0**-8 * abs(product) + self.k * (2.0**-27 * size + 2.0**-126)
            assert (error <= limit).all(), f"{np.max(error / limit)} of the limit"
        again, t2 = self.run(down)
        np.testing.assert_array_equal(t2.view(np.uint16), t.view(np.uint16))
        for name in want:
            np.testing.assert_array_equal(again[name], want[name], err_msg=name)


def _down(rng, k, rank, outliers=()):
    down = (rng.standard_normal((k, rank)) / np.sqrt(k)).astype(BF16)
    down[list(outliers)] = 0
    return down


@pytest.mark.gpu
@pytest.mark.parametrize("rows, k, rank", SHAPES)
def test_both_results(library, gpu, rng, rows, k, rank):
    stride = -(-k // 8) * 8 + 8 * int(rng.integers(0, 3))
    Case(library, gpu, _data(rng, rows, k, stride), k).check(_down(rng, k, rank))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fmt, search", [("nvfp4_exact", FAST), ("nvfp4_exact", FULL), ("nvfp4", FULL), ("fp8", FULL)]
)
@pytest.mark.parametrize("packed", [True, False])
def test_formats(library, gpu, rng, fmt, search, packed):
    for rows, k, rank in [(5, 48, 3), (300, 1168, 64)]:
        x = _data(rng, rows, k, k)
        Case(library, gpu, x, k, fmt, search, packed=packed, tail=16).check(_down(rng, k, rank))
        given = np.exp2(rng.integers(-8, 8, rows)).astype(np.float32)
        Case(library, gpu, x, k, fmt, search, packed=packed, given=given).check(_down(rng, k, rank))


@pytest.mark.gpu
@pytest.mark.parametrize("rows, k, rank", [(1, 32, 1), (70, 1160, 64), (600, 8192, 24)])
def test_outliers_leave(library, gpu, rng, rows, k, rank):
    for outliers in ([0], [k - 1], sorted({int(i) for i in rng.integers(0, k, 40)})):
        x = _data(rng, rows, k, k)
        x[:, outliers] = 1e6
        Case(library, gpu, x, k, outliers=outliers, tail=16).check(_down(rng, k, rank, outliers))
    x[0, outliers[0]] = np.nan  # an outlier's NaN stays in its own column
    Case(library, gpu, x, k, outliers=outliers).check(_down(rng, k, rank, outliers))


@pytest.mark.gpu
def test_non_finite_rows(library, gpu, rng):
    x = _data(rng, 130, 2048, 2048)
    x[3, 5], x[66, 2047], x[129, 1024] = np.nan, np.inf, -np.inf
    case = Case(library, gpu, x, 2048)
    down = _down(rng, 2048, 16)
    case.check(down, exact_t=False)
    finite = np.isfinite(x.astype(np.float32)).all(1)
    _, t = case.run(down)
    np.testing.assert_array_equal(np.isfinite(t.astype(np.float32)).all(1), finite)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_beside_what_the_fused_form_does_not_make(library, gpu, rng, fmt):
    x = _data(rng, 140, 1120, 1120)
    Case(library, gpu, x, 1120, fmt, stats=True, outliers=[3]).check(_down(rng, 1120, 64, [3]))
    Case(library, gpu, x, 1120, fmt, stochastic=True, tail=8).check(_down(rng, 1120, 10))
    if fmt == "mxfp4":
        Case(library, gpu, x, 1120, fmt).check(_down(rng, 1120, 64))


@pytest.mark.gpu
def test_what_the_fast_form_does_not_take(library, gpu, rng):
    # Too long, and rows that are not 16-byte aligned.
    for rows, k, rank in [(33, 9000, 8), (40, 4200, 72), (5, 65, 4)]:
        Case(library, gpu, _data(rng, rows, k, k), k).check(_down(rng, k, rank))
