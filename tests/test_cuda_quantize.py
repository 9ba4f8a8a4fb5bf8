"""The CUDA quantisers through the C ABI, bit-equal to python_ref: formats, rules, layouts, rounding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fp4bf16.backends import cpu_quantize
from fp4bf16.python_ref.quantize import expand, quantize

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float32": (0, np.dtype(np.float32)), "bfloat16": (1, BF16), "float16": (2, np.dtype(np.float16))}
FORMATS = {"nvfp4_exact": 0, "nvfp4": 1, "mxfp4": 2, "fp8": 3}
FOUR_OVER_SIX = ("four_over_six", "four_over_six_mae", "four_over_six_448", "four_over_six_mae_448")
RULES = (None, "te", *FOUR_OVER_SIX, "even", "floor", "rceil", "ceil")
#: (format, rule, search, stochastic)
CASES = [
    ("nvfp4_exact", None, "full", False), ("nvfp4_exact", None, "fast", False),
    ("nvfp4", "te", "full", False), *(("nvfp4", rule, "full", False) for rule in FOUR_OVER_SIX),
    *(("mxfp4", rule, "full", False) for rule in ("even", "floor", "rceil", "ceil")),
    ("fp8", None, "full", False), ("nvfp4_exact", None, "full", True), ("nvfp4", None, "full", True),
    ("mxfp4", "rceil", "full", True), ("mxfp4", "ceil", "full", True), ("fp8", None, "full", True),
]  # fmt: skip
SEED = (0x9E3779B97F4A7C15, 11, 12)
SHAPES = [(1, 1), (3, 15), (7, 333), (9, 512), (33, 1024), (65, 1152), (2, 4097), (3, 4096), (2, 20480)]


def data(rng, rows, k, dtype):
    """Mixed magnitudes, ties, zero blocks, tiny and huge rows, subnormals, -0."""
    wide = 40 if dtype != np.float16 else 4
    x = rng.standard_normal((rows, k)) * np.exp2(rng.integers(-wide, wide + 1, (rows, 1)))
    x *= np.exp2(rng.integers(-6, 7, x.shape) * (rng.random(x.shape) < 0.2))
    blocks = -(-k // 16)
    small = np.exp2(rng.integers(-20, 3, (rows, blocks)) * (rng.random((rows, blocks)) < 0.3))
    x *= np.repeat(small, 16, 1)[:, :k]
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))) - 2)
    x = np.where(rng.random(x.shape) < 0.3, np.round(x / step) * step, x)  # few bits: ties
    x[rng.random(x.shape) < 0.05] = -0.0
    x[:, :16] *= rng.random((rows, 1)) < 0.8
    if rows > 4 and dtype != np.float16:
        x[1] *= 1e-38 / max(np.abs(x[1]).max(), 1e-30)
        x[2] = np.clip(x[2] * 1e37, -3e38, 3e38)
        x[3] *= 1e-30 / max(np.abs(x[3]).max(), 1e-30)
    return x.astype(dtype)


def spoil(rng, x):
    """NaN and Inf in about a third of the rows."""
    for row in range(0, len(x), 3):
        x[row, rng.integers(x.shape[1])] = rng.choice([np.nan, np.inf, -np.inf])
    return x


class Call:
    """One fp4bf16_quantize: every result allocated (poisoned) and brought back."""

    def __init__(self, library, gpu, x, fmt, rule=None, search="full", stochastic=False, *, groups=None,
                 given=None, expanded=None, stats=True, slack=0, outliers=None, down=None, extra=0,
                 x_offset=0, stream=0, stride_slack=0):  # fmt: skip
        """`x` (rows, k), or (before, k, after) blocked along its middle axis. `groups`: (mid, inner)."""
        self.loaded, self.gpu, self.fmt, self.stream = library, gpu, fmt, stream
        before = x.shape[0]
        self.rows, self.k = (before, x.shape[1]) if x.ndim == 2 else (before * x.shape[2], x.shape[1])
        block = {"mxfp4": 32, "fp8": 1}.get(fmt, 16)
        self.blocks = -(-self.k // block)
        self.kp = self.blocks * block
        args = self.args = library.ffi.new("fp4bf16_quantize_args*")
        self.keep = []
        code = next(c for c, d in DTYPES.values() if d == x.dtype)
        stride = self.k + stride_slack
        if x.ndim == 2:
            padded = np.zeros((before, stride), x.dtype)
            padded[:, : self.k] = x
            args.after, args.x_stride, args.k_stride = 1, stride, 1
        else:
            padded = x
            args.after, args.x_stride, args.k_stride = x.shape[2], self.k * x.shape[2], x.shape[2]
        flat = np.concatenate([np.zeros(x_offset, x.dtype), padded.reshape(-1)])
        self.set("x", gpu.put(flat) + x_offset * x.dtype.itemsize)
        args.rows, args.k_size, args.dtype, args.format = self.rows, self.k, code, FORMATS[fmt]
        args.rule, args.search, args.rounding = RULES.index(rule), search == "fast", stochastic
        args.seed, args.stream_word, args.call_word = SEED
        args.mid, args.inner = groups or (1, self.rows)
        self.groups = -(-self.rows // (args.mid * args.inner)) * args.inner
        if given is not None:
            self.set("outer_given", gpu.put(np.asarray(given, np.float32).reshape(-1)))
            args.outer_given_stride = np.size(given) > 1
        self.results(expanded, stats, slack)
        self.branch(outliers, down, extra)
        size = library.lib.fp4bf16_quantize_workspace_size(args)
        assert size >= 0
        if size:
            self.set("workspace", gpu.empty(size))

    def set(self, name, address):
        kind = self.loaded.ffi.typeof("fp4bf16_quantize_args")
        field = dict(kind.fields)[name].type
        setattr(self.args, name, self.loaded.ffi.cast(field, address))
        return address

    def result(self, name, shape, dtype, zero=False):
        address = self.gpu.put(np.zeros(shape, dtype)) if zero else None
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.keep.append((name, self.set(name, address or self.gpu.empty(size)), shape, dtype))

    def results(self, expanded, stats, slack):
        fp8 = self.fmt == "fp8"
        if expanded != "only":
            self.result("packed", (self.rows, self.kp if fp8 else self.kp // 2), np.uint8)
        if not fp8:
            self.result("block_scale", (self.rows, self.blocks), np.uint8)
        if expanded:
            self.args.expanded_stride = self.kp + slack
            self.result("expanded", (self.rows, self.kp + slack), np.uint8)
        if self.fmt != "mxfp4":
            self.result("outer_scale", (self.groups,), np.float32)
        if stats:
            self.result("sums", (self.rows, 3), np.float64)
            self.result("counts", (5,), np.int32, zero=True)

    def branch(self, outliers, down, extra):
        count = 0 if outliers is None else len(outliers)
        rank = 0 if down is None else down.shape[1]
        if count:
            self.set("outlier_index", self.gpu.put(np.asarray(outliers, np.int32)))
        if rank:
            self.set("down_t", self.gpu.put(down.T.copy()))
        self.args.outliers, self.args.rank, self.args.down_stride = count, rank, self.k
        if count + rank:
            self.args.hidden_stride = count + rank + extra
            self.result("hidden", (self.rows, count + rank + extra), BF16)

    def run(self):
        self.loaded.call("quantize", self.args, self.stream)
        return {name: self.gpu.get(address, shape, dtype) for name, address, shape, dtype in self.keep}


def check(got, want, cpu=None):
    """Bytes and outer scales equal; norms upper bounds; counts those of the CPU backend."""
    if want.outer_scale is not None and "outer_scale" in got:
        outer = np.broadcast_to(want.outer_scale.reshape(-1), got["outer_scale"].shape)
        np.testing.assert_array_equal(got["outer_scale"].view(np.uint32), outer.view(np.uint32))
    if want.block_scale is not None:
        np.testing.assert_array_equal(got["block_scale"], want.block_scale.reshape(got["block_scale"].shape))
    if "packed" in got:
        np.testing.assert_array_equal(got["packed"], want.packed.reshape(got["packed"].shape))
    if "expanded" in got:
        bytes_ = expand(want)
        bytes_ = bytes_.reshape(-1, bytes_.shape[-1])
        np.testing.assert_array_equal(got["expanded"][:, : bytes_.shape[1]], bytes_)
        assert (got["expanded"][:, bytes_.shape[1] :] == 0).all()
    if cpu is not None:
        np.testing.assert_array_equal(got["counts"], cpu.counts)
        exact, sums = cpu.sums, got["sums"]
        finite = np.isfinite(exact).all(1)
        exact, sums = exact[finite], sums[finite]
        assert (sums >= exact * (1 - 2.0**-40)).all(), "a norm is no upper bound"
        assert (sums <= exact * (1 + 2.0**-17) + 1e-38).all(), "a norm is loose"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt, rule, search, stochastic", CASES)
def test_rows(library, gpu, rng, dtype, fmt, rule, search, stochastic):
    """Every format, rule and rounding; one outer scale a row, found and given; packed, expanded and both."""
    for rows, k in SHAPES:
        x = data(rng, rows, k, DTYPES[dtype][1])
        x = spoil(rng, x) if k % 2 else x
        wide = x.astype(np.float32)
        for given in (None, int(rng.integers(-12, 12))) if fmt != "mxfp4" else (None,):
            outer = None if fmt == "mxfp4" else "row" if given is None else given
            rounding = "stochastic" if stochastic else "nearest"
            want = quantize(wide, fmt, outer=outer, scale_rule=rule, search=search, nan="propagate",
                            rounding=rounding, seed=SEED)  # fmt: skip
            cpu = None
            if not stochastic:
                rows_outer = None if given is None else np.float32(2.0**given)
                cpu = cpu_quantize.quantize_rows(wide, fmt, rows_outer, rule, search, "propagate")
            can = fmt in ("nvfp4_exact", "fp8")
            for stats, expanded, slack in ((True, can and "both", 16), (False, can and "only", 0)):
                call = Call(library, gpu, x, fmt, rule, search, stochastic, stats=stats, expanded=expanded,
                            given=None if given is None else 2.0**given, slack=slack)  # fmt: skip
                check(call.run(), want, cpu=cpu if stats else None)
        gpu.free()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt, search", [("nvfp4_exact", "full"), ("nvfp4_exact", "fast"), ("nvfp4", "full"),
                                         ("mxfp4", "full"), ("fp8", "full")])  # fmt: skip
def test_every_bfloat16(library, gpu, rng, fmt, search):
    """All 65 536 bit patterns, next to neighbours of every kind."""
    bits = np.arange(65536, dtype=np.uint16)
    for shuffle in (False, True):
        x = (rng.permutation(bits) if shuffle else bits).view(BF16).reshape(64, 1024)
        want = quantize(x.astype(np.float32), fmt, outer=None if fmt == "mxfp4" else "row", search=search,
                        nan="propagate")  # fmt: skip
        check(Call(library, gpu, x, fmt, None, search).run(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt, search", [("nvfp4_exact", "full"), ("nvfp4_exact", "fast"), ("nvfp4", "full"),
                                         ("mxfp4", "full"), ("fp8", "full")])  # fmt: skip
@pytest.mark.parametrize("rows, k", [(2000, 96), (70, 1568), (40, 2080), (9, 4096), (9, 4128), (9, 8192),
                                     (5, 8224), (5, 16384), (3, 16416)])  # fmt: skip
def test_rows_of_every_length(library, gpu, rng, fmt, search, rows, k):
    """BF16 rows for each of the fast kernels, filled and not; with NaN and Inf, and with outliers."""
    x = data(rng, rows, k, BF16)
    outer = None if fmt == "mxfp4" else "row"
    columns = np.array([3, k // 2, k - 1])
    without = x.copy()
    without[:, columns] = 0
    for y, outliers in ((spoil(rng, x.copy()), None), (without, columns)):
        want = quantize(y.astype(np.float32), fmt, outer=outer, search=search, nan="propagate")
        cpu = cpu_quantize.quantize_rows(y, fmt, None, None, search, "propagate")
        given = y if outliers is None else x
        check(Call(library, gpu, given, fmt, None, search, outliers=outliers).run(), want, cpu=cpu)
        check(Call(library, gpu, given, fmt, None, search, outliers=outliers, stats=False).run(), want)
    gpu.free()


@pytest.mark.gpu
@pytest.mark.parametrize("search", ["full", "fast"])
def test_search_on_blocks_near_ties(library, gpu, rng, search):
    """Blocks whose elements lie on and around the midpoints of their scales."""
    n = 1 << 16
    exponent = 127 + rng.integers(-6, 1, (n, 16))
    bits = (exponent << 7 | rng.integers(0, 128, (n, 16))).astype(np.uint16)
    bits[:, 0] = 127 << 7 | np.arange(n) % 128
    bits = np.where(rng.random((n, 16)) < 0.5, bits | 0x8000, bits).astype(np.uint16)
    x = bits.view(BF16).reshape(256, -1)
    want = quantize(x.astype(np.float32), "nvfp4_exact", search=search)
    check(Call(library, gpu, x, "nvfp4_exact", None, search, expanded="both").run(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["nvfp4_exact", "nvfp4", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outer_scale_groups(library, gpu, rng, fmt, dtype):
    """(batch, seq, heads, dim): one outer scale a row, head, image, tensor."""
    shape = (3, 5, 4, 96)
    x = data(rng, 60, 96, DTYPES[dtype][1]).reshape(shape)
    for outer, groups in (("row", (1, 60)), ("head", (5, 4)), ("image", (20, 1)), ("tensor", (60, 1))):
        want = quantize(x.astype(np.float32), fmt, outer=outer)
        got = Call(library, gpu, x.reshape(60, 96), fmt, groups=groups).run()
        check(got, want)
    given = np.exp2(rng.integers(-3, 4, (3, 1, 4))).astype(np.float32)
    want = quantize(x.astype(np.float32), fmt, outer=np.log2(given).astype(int).reshape(3, 1, 4, 1))
    got = Call(library, gpu, x.reshape(60, 96), fmt, groups=(5, 4), given=given).run()
    got.pop("outer_scale")
    check(got, want)


def pictures(rng, count, pixels, k):
    """(count * pixels, k) BF16: pictures of numbers of different sizes, of all sizes, of zeros, with NaN."""
    x = rng.standard_normal((count, pixels, k)) * np.exp2(rng.integers(-3, 4, (count, pixels, 1)))
    x *= np.exp2(rng.integers(-20, 21, (count, 1, 1)))
    x[rng.random((count, pixels)) < 0.02] = 0
    x = x.astype(BF16)
    for i in range(1, count, 4):
        x[i] = data(rng, pixels, k, BF16)  # of all magnitudes
    for i in range(2, count, 4):
        x[i] = 0
    for i in range(3, count, 8):
        x[i] = spoil(rng, x[i])
    for i in range(7, count, 8):
        x[i] = rng.choice([np.nan, np.inf])
    return x.reshape(-1, k)


def check_as_float32(library, gpu, x, fmt, search, results=(("both", 16), ("only", 0), (None, 0)), **options):
    """Results of BF16 x are, bit by bit, those of the kernel that takes FP32."""
    given = options.pop("given", None)
    for expanded, slack in results:
        expanded = expanded if fmt in ("nvfp4_exact", "fp8") else None
        asked = {"stats": False, "expanded": expanded, "slack": slack, "given": given}
        want = Call(library, gpu, x.astype(np.float32), fmt, None, search, **asked, **options | PLAIN).run()
        got = Call(library, gpu, x, fmt, None, search, **asked, **options).run()
        for name in want:
            if given is None or name != "outer_scale":
                np.testing.assert_array_equal(got[name].view(np.uint8), want[name].view(np.uint8), name)


PLAIN = {"x_offset": 0, "stride_slack": 0}
IMAGES = [
    (1, 1, 16), (50, 1, 48), (3, 2, 8192), (9, 5, 16), (70, 16, 128), (6, 255, 32), (9, 64, 384),
    (5, 37, 272), (12, 256, 64), (3, 1024, 128), (2, 4096, 512), (1, 70000, 32), (3, 45001, 48), (6, 50, 3),
    (4, 100, 20), (2, 900, 200), (1, 9, 20000),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("fmt, search", [("nvfp4_exact", "full"), ("nvfp4_exact", "fast"), ("nvfp4", "full"),
                                         ("fp8", "full")])  # fmt: skip
@pytest.mark.parametrize("count, pixels, k", IMAGES)
def test_outer_scale_of_pictures(library, gpu, rng, fmt, search, count, pixels, k):
    """One outer scale for the pixels of a picture, the last one with fewer; ranges of channels."""
    x = pictures(rng, count, pixels, k)
    groups = (pixels, 1)
    check_as_float32(library, gpu, x, fmt, search, groups=groups)
    for stride_slack, x_offset in ((64, 8), (3, 1)):
        check_as_float32(library, gpu, x, fmt, search, (("only", 0),), groups=groups,
                         stride_slack=stride_slack, x_offset=x_offset)  # fmt: skip
    if count > 1 and pixels > 3:
        check_as_float32(library, gpu, x[:-3], fmt, search, (("both", 0),), groups=groups)
    gpu.free()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt, search", [("nvfp4_exact", "full"), ("nvfp4_exact", "fast"), ("nvfp4", "full"),
                                         ("mxfp4", "full"), ("fp8", "full")])  # fmt: skip
@pytest.mark.parametrize("rows, k", [(2016, 16), (1008, 32), (777, 96), (252, 272), (63, 1040), (105, 40),
                                     (42, 5)])  # fmt: skip
def test_short_rows(library, gpu, rng, fmt, search, rows, k):
    """Rows whose blocks are dealt out together: one outer scale a row, a head, a tensor, and given ones."""
    x = spoil(rng, pictures(rng, rows, 1, k))
    check_as_float32(library, gpu, x, fmt, search, groups=(1, rows))
    check_as_float32(library, gpu, x, fmt, search, (("only", 0),), groups=(1, rows), x_offset=1)
    if fmt == "mxfp4":
        return
    for groups in ((7, 3), (rows, 1)):
        check_as_float32(library, gpu, x, fmt, search, groups=groups)
    for given in (2.0**3, np.exp2(rng.integers(-9, 9, rows))):
        check_as_float32(library, gpu, x, fmt, search, groups=(1, rows), given=given)
    gpu.free()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt, rule, search, stochastic", [c for c in CASES if c[1] in (None, "te", "even")])
def test_blocks_across_rows(library, gpu, rng, dtype, fmt, rule, search, stochastic):
    """axis=-2: the blocked axis is strided, the result transposed."""
    for before, k, after in ((1, 33, 7), (2, 64, 48), (3, 130, 40), (1, 512, 129), (2, 1056, 72)):
        x = data(rng, before * k, after, DTYPES[dtype][1])
        x = (spoil(rng, x) if k > 100 else x).reshape(before, k, after)
        wide = x.astype(np.float32)
        lines = np.moveaxis(wide, 1, -1).reshape(-1, k)
        cpu = cpu_quantize.quantize_rows(lines, fmt, None, rule, search, "propagate")
        groups = {"row": (1, before * after), "tensor": (before * after, 1), "image": (after, 1)}
        for outer, group in groups.items() if fmt != "mxfp4" else [(None, (1, before * after))]:
            want = quantize(wide, fmt, axis=1, outer=outer, scale_rule=rule, search=search, seed=SEED,
                            nan="propagate", rounding="stochastic" if stochastic else "nearest")  # fmt: skip
            got = Call(library, gpu, x, fmt, rule, search, stochastic, groups=group,
                       expanded="both" if fmt == "nvfp4_exact" else None).run()  # fmt: skip
            check(got, want, cpu=cpu if outer in (None, "row") and not stochastic else None)
        gpu.free()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unaligned_rows(library, gpu, rng, fmt, dtype):
    """Strides and addresses that no wide load takes."""
    x = data(rng, 9, 256, DTYPES[dtype][1])
    want = quantize(x.astype(np.float32), fmt, outer=None if fmt == "mxfp4" else "row")
    for offset, stride in ((1, 0), (0, 3), (3, 5)):
        check(Call(library, gpu, x, fmt, x_offset=offset, stride_slack=stride).run(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rank", [0, 3, 32])
def test_outliers_and_branch(library, gpu, rng, fmt, rank):
    """Outlier columns go to hidden and count as zero; hidden's left part is X D."""
    for rows, k in ((5, 100), (64, 1024), (130, 4096)):
        x = rng.standard_normal((rows, k)).astype(BF16)
        index = np.sort(rng.choice(k, 5, replace=False))
        x[:, index] = (x[:, index].astype(np.float32) * 100).astype(BF16)
        x[0, index[0]] = np.inf
        inside = x.copy()
        inside[:, index] = 0
        down = (rng.standard_normal((k, rank)) / np.sqrt(k)).astype(BF16) if rank else None
        if rank:
            down[index] = 0
        want = quantize(inside.astype(np.float32), fmt, outer=None if fmt == "mxfp4" else "row")
        got = Call(library, gpu, x, fmt, outliers=index, down=down, extra=3).run()
        check(got, want)
        hidden = got["hidden"]
        np.testing.assert_array_equal(hidden[:, rank : rank + 5].view(np.uint16), x[:, index].view(np.uint16))
        assert (hidden[:, rank + 5 :].view(np.uint16) == 0).all()
        if rank:
            exact = inside.astype(np.float64) @ down.astype(np.float64)
            error = np.abs(hidden[:, :rank].astype(np.float64) - exact)
            assert (error <= 2.0**-8 * np.abs(exact) + 1e-5).all()
        gpu.free()


@pytest.mark.gpu
def test_amax(library, gpu, rng):
    for code, dtype in DTYPES.values():
        for rows, k in SHAPES:
            x = spoil(rng, data(rng, rows, k, dtype))
            wide = np.abs(np.where(np.isfinite(x.astype(np.float32)), x.astype(np.float32), 0))
            for group in {1, 2, rows}:
                groups = -(-rows // group)
                amax = gpu.empty(4 * groups)
                library.call("amax", gpu.put(x), code, rows, k, k, group, amax, 0)
                want = [wide[i * group : (i + 1) * group].max() for i in range(groups)]
                np.testing.assert_array_equal(gpu.get(amax, (groups,), np.float32), np.float32(want))
        gpu.free()


@pytest.mark.gpu
def test_empty_blocks_axis(library, gpu):
    """k = 0: outer scales of one, sums of zero."""
    call = Call(library, gpu, np.zeros((3, 0), np.float32), "nvfp4_exact")
    got = call.run()
    assert (got["outer_scale"] == 1).all() and (got["sums"] == 0).all() and (got["counts"] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_results_repeat(library, gpu, rng, fmt):
    x = data(rng, 40, 2048, BF16)
    first, second = (Call(library, gpu, x, fmt).run() for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name].view(np.uint8), second[name].view(np.uint8))


@pytest.mark.gpu
def test_captured_in_a_graph_and_replayed(library, gpu, rng):
    rt, rows, k = gpu.rt, 33, 272
    stream = gpu.check(rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
    calls = [Call(library, gpu, np.zeros((rows, k), BF16), fmt, groups=group, stats=False, stream=int(stream))
             for fmt, group in (("nvfp4_exact", None), ("nvfp4", (rows, 1)))]  # fmt: skip
    gpu.check(rt.cudaStreamBeginCapture(stream, rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    for call in calls:
        library.call("quantize", call.args, int(stream))
    graph = gpu.check(rt.cudaStreamEndCapture(stream))
    run = gpu.check(rt.cudaGraphInstantiate(graph, 0))
    for _ in range(3):
        x = data(rng, rows, k, BF16)
        for call in calls:
            source = int(library.ffi.cast("intptr_t", call.args.x))
            kind = rt.cudaMemcpyKind.cudaMemcpyHostToDevice
            gpu.check(rt.cudaMemcpy(source, x.ctypes.data, x.nbytes, kind))
        gpu.check(rt.cudaGraphLaunch(run, stream))
        gpu.check(rt.cudaStreamSynchronize(stream))
        for call, outer in zip(calls, ("row", "tensor"), strict=True):
            want = quantize(x.astype(np.float32), call.fmt, outer=outer)
            check({n: gpu.get(a, s, d) for n, a, s, d in call.keep}, want)


# ---- without a GPU
@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"dtype": 7}, "dtype is 7"),
        ({"format": 9}, "format is 9"),
        ({"search": 5}, "search is 5"),
        ({"rounding": 2}, "rounding is 2"),
        ({"rule": 1}, "rule is 1, but format 0"),
        ({"format": 1, "rule": 2, "rounding": 1}, "rule is 2, but format 1 with rounding 1 takes 1 to 1"),
        ({"format": 2, "rule": 6, "rounding": 1}, "rule is 6, but format 2 with rounding 1 takes 8 to 9"),
        ({"after": 0}, "after is 0"),
        ({"rows": -1}, r"x is \(-1, 32\)"),
        ({"x_stride": 8}, "row stride of x is 8 elements, less than its 32 columns"),
        ({"mid": 0}, "mid is 0"),
        ({"inner": 9}, "inner is 9"),
        ({"x": 0}, "x is NULL"),
        ({"x": 65}, "x is 1 bytes past a multiple of 4"),
        ({"block_scale": 0}, "block_scale is NULL, but packed needs it"),
        ({"format": 1, "expanded": 64, "expanded_stride": 32}, "expanded is set, but E4M3"),
        ({"expanded": 64, "expanded_stride": 31}, "expanded_stride is 31, less than its 32 bytes"),
        ({"format": 2, "outer_given": 64}, "mxfp4"),
        ({"outlier_index": 0, "outliers": 1}, "outlier_index is NULL"),
        ({"outliers": 33}, "outliers is 33"),
        ({"outlier_index": 64, "outliers": 2, "hidden": 64, "hidden_stride": 1}, "hidden_stride is 1"),
        ({"mid": 2, "inner": 1}, "workspace is NULL"),
    ],
)
def test_bad_arguments_are_refused_before_any_launch(library, fields, sentence):
    args = library.ffi.new("fp4bf16_quantize_args*")
    good = {"x": 64, "rows": 2, "k_size": 32, "after": 1, "x_stride": 32, "k_stride": 1, "mid": 1, "inner": 2,
            "packed": 64, "block_scale": 64, "outer_scale": 64}  # fmt: skip
    types = dict(library.ffi.typeof("fp4bf16_quantize_args").fields)
    for name, value in (good | fields).items():
        setattr(args, name, library.ffi.cast(types[name].type, value))
    with pytest.raises(ValueError, match=sentence):
        library.call("quantize", args, 0)
    args.rows = 0
    if set(fields) <= {"x", "block_scale"}:
        library.call("quantize", args, 0)  # nothing to do, and no error is left behind
