"""Certificates on a GPU: the norms of group normalisation's FP4 results against float64 of what they decode
to, `fp4bf16_certificate` against `certify.certificate`."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import test_cuda_norm as norms
from graphs import captured
from test_certificate_host import Case, above
from test_cuda_gemm import Product
from test_cuda_norm import Norm
from test_cuda_norm_sums import LAYERS as SUMMED
from test_cuda_norm_sums import ODD as SUMMED_ODD
from test_cuda_norm_sums import Given

from fp4bf16 import device
from fp4bf16.backends import cuda_certificate, cuda_norm
from fp4bf16.python_ref.formats import E4M3

gpu_only = pytest.mark.gpu
SHAPES = [s for s in norms.LAYERS + norms.ODD + norms.SLABS if s[2] % 16 == 0]
GIVEN = [s for s in SUMMED + SUMMED_ODD if sum(s[3]) % 16 == 0]
#: What the sums are over the truth by rounding: FP32 sums of up to 64 blocks a thread, over 32 lanes and 8
#: warps, each rounded up by 2^-23.
ROUNDED = 1 + 128 * 2.0**-23


@pytest.fixture(autouse=True)
def _free(request):
    yield
    if "gpu" in request.fixturenames:
        request.getfixturevalue("gpu").free()


# ---- norms
def with_norms(norm: Norm, **wanted):
    """(results as without norms, norms (parts, 2)); the results are the same bits with and without them."""
    want = norm.forward(**wanted)
    lib, name = norm.loaded.lib, "group_norm"
    parts = lib.fp4bf16_group_norm_norm_parts(norm.args(name))
    assert parts > 0
    found = []
    for _ in range(2):
        norm.fields["norms"] = norm.gpu.empty(8 * parts)
        norm.loaded.call(name, norm.args(name), 0)
        for key, value in norm.fetch().items():
            np.testing.assert_array_equal(value.view(np.uint8), want[key].view(np.uint8))
        found.append(norm.gpu.get(norm.fields.pop("norms"), (parts, 2), np.float32))
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))
    return want, found[0].astype(np.float64)


def check_norms(norm: Norm, whole, parts: np.ndarray) -> None:
    """`whole`: y, codes and scales. Nothing is missing, and no more is added than is given away."""
    outer = float(whole["outer_scale"][0])
    t = whole["y"].astype(np.float64).reshape(-1, 16) / outer
    decoded = E4M3.astype(np.float64)[whole["expanded"].reshape(-1, 16)]
    lost, used = ((t - decoded) ** 2).sum(1), (decoded**2).sum(1)
    s = E4M3.astype(np.float64)[whole["block_scale"].reshape(-1)] / 16
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(s > 0, s**2 * (9 / 8 * (np.sqrt(lost) / s + 2) ** 2 + 36), lost)
    assert (parts >= 0).all()
    error, all_used = (parts / outer / outer).sum(0)
    tiny = 4 * len(parts) * 2.0**-149 / outer / outer  # a product with the outer scale's square, rounded up
    assert lost.sum() <= error <= most.sum() * ROUNDED + tiny
    assert used.sum() <= all_used <= used.sum() * ROUNDED + tiny


def every_way(norm: Norm) -> None:
    """All that may be wanted beside norms."""
    whole, parts = with_norms(norm, expanded=True, packed=True)
    check_norms(norm, whole, parts)
    for wanted in ({"expanded": True}, {"packed": True}, {"expanded": True, "y": True}):
        got, again = with_norms(norm, **({"y": False, "stats": False} | wanted))
        for name, value in got.items():
            np.testing.assert_array_equal(value.view(np.uint8), whole[name].view(np.uint8))
        check_norms(norm, whole, again)


@gpu_only
@pytest.mark.parametrize("layout", norms.LAYOUTS)
@pytest.mark.parametrize("n, pixels, c, groups", SHAPES)
def test_norms(library, gpu, rng, n, pixels, c, groups, layout):
    if layout == "odd" and pixels > 1000:
        pytest.skip("the kernels for any shape, seen at smaller ones")
    every_way(Norm(library, gpu, rng, n, pixels, c, groups, layout=layout, silu=bool(rng.integers(2))))


@gpu_only
@pytest.mark.parametrize("layout", norms.LAYOUTS)
@pytest.mark.parametrize("n, pixels, groups, channels, parts", GIVEN)
def test_norms_with_given_sums(library, gpu, rng, n, pixels, groups, channels, parts, layout):
    if layout == "odd" and pixels > 1000:
        pytest.skip("the kernels for any shape, seen at smaller ones")
    silu = bool(rng.integers(2))
    every_way(Given(library, gpu, rng, n, pixels, groups, channels, parts, layout=layout, silu=silu))


#: One shape for each of the ways: slabs, tiles, tiles of a cluster, any shape; then with given sums.
WAYS = [(3, 64, 64, 16), (2, 100, 80, 8), (2, 1023, 64, 16), (2, 49, 2064, 1)]
ways = pytest.mark.parametrize("n, pixels, c, groups", WAYS)


def made(library, gpu, rng, n, pixels, c, groups, given: bool, **more) -> Norm:
    if given:
        return Given(library, gpu, rng, n, pixels, groups, (c,), (3,), **more)
    return Norm(library, gpu, rng, n, pixels, c, groups, **more)


@gpu_only
@ways
@pytest.mark.parametrize("given", [False, True])
def test_norms_of_special_blocks(library, gpu, rng, n, pixels, c, groups, given):
    """Tiny and subnormal results, zeros, and a block that is not finite: its part alone is infinite."""
    x = rng.standard_normal((n, pixels, c))
    beta = np.repeat([-80, -70, -95, 1], c // 4)
    norm = made(library, gpu, rng, n, pixels, c, groups, given, x=x, gamma=3, beta=beta)
    whole, parts = with_norms(norm, expanded=True, packed=True)
    check_norms(norm, whole, parts)
    norm = made(library, gpu, rng, n, pixels, c, groups, given, x=x, gamma=0, beta=0)
    whole, parts = with_norms(norm, expanded=True, packed=True)
    assert not whole["expanded"].any() and not parts.any()
    x[n - 1, pixels // 2, c - 1] = np.nan
    norm = made(library, gpu, rng, n, pixels, c, groups, given, x=x)
    whole, parts = with_norms(norm, expanded=True, packed=True)
    bad = np.isinf(parts)
    assert bad.any() and (bad[:, 0] == bad[:, 1]).all() and not np.isnan(parts).any()
    if len(parts) > n and c != WAYS[3][2]:  # parts of other images; threads of the last stride over all
        assert not bad.all()


@gpu_only
@pytest.mark.parametrize("gamma, beta", [(2.0**-126, 0), (1e-30, 1e-32), (1e30, 1e25), (288, 0), (9, 3)])
@ways
def test_norms_under_any_outer_scale(library, gpu, rng, n, pixels, c, groups, gamma, beta):
    """A square of the outer scale may leave FP32's range: the sums then are rounded up, to Inf or 2^-149."""
    norm = Norm(library, gpu, rng, n, pixels, c, groups, gamma=gamma, beta=beta, silu=False)
    whole, parts = with_norms(norm, expanded=True, packed=True)
    if gamma == 1e30:
        assert np.isinf(parts).any()
    else:
        check_norms(norm, whole, parts)


def test_norm_parts_are_refused_or_none(library):
    kind = "fp4bf16_group_norm_args"
    parts = library.lib.fp4bf16_group_norm_norm_parts
    assert parts(library.ffi.new(f"{kind}*", dict(n=2, pixels=0, c=16, groups=1))) == 0
    wrong = {"c is 8, but FP4 results need a multiple of 16": dict(c=8),
             "c is 16, but must be a multiple of groups, 3": dict(c=16, groups=3)}  # fmt: skip
    for sentence, fields in wrong.items():
        assert parts(library.ffi.new(f"{kind}*", dict(n=2, pixels=4, groups=1) | fields)) == -1
        assert sentence in library._text(library.lib.fp4bf16_last_error())


def test_norms_without_fp4_results_are_refused(library):
    at = library.ffi.cast("void*", 64)
    floats = library.ffi.cast("float*", 64)
    args = library.ffi.new("fp4bf16_group_norm_args*", dict(
        n=1, pixels=1, c=16, groups=1, x=at, gamma=floats, beta=floats, y=at, norms=floats))  # fmt: skip
    with pytest.raises(ValueError, match="norms is given, but neither expanded nor packed"):
        library.call("group_norm", args, 0)
    args.norms, args.run_if = library.ffi.NULL, library.ffi.cast("int32_t*", 66)
    with pytest.raises(ValueError, match="run_if is 2 bytes past a multiple of 4"):
        library.call("group_norm", args, 0)


# ---- the certificate
def put_sums(case: Case, gpu, rng, parts: int, squares: int) -> dict[str, int]:
    """Random sums on the device, some zero, squares every second float; the case knows them."""

    def positive(shape) -> np.ndarray:
        return rng.exponential(1, shape) * (rng.random(shape) < 0.9)

    fields = {}
    if case.by_norms:
        values = positive((parts, 2)).astype(np.float32) + np.float32(1e-6)
        error, used = values.astype(np.float64).sum(0)
        case.sums[:3] = [0.0, used, error]
        fields |= dict(norms=gpu.put(values), norm_parts=parts)
    else:
        values = positive((parts, 3)) + 1e-9
        case.sums[:3] = values.sum(0)
        fields |= dict(sums=gpu.put(values), sum_rows=parts)
    full, used, error = (math.sqrt(v) for v in case.sums[:3])
    case.activations = (used + error if case.by_norms else full, used, error)
    if squares:
        values = np.full((squares, 2), np.nan, np.float32)
        values[:, 1] = positive(squares) + 1e-6
        case.sums[3] = float(values[:, 1].astype(np.float64).sum())
        fields |= dict(squares=gpu.put(values) + 4, square_count=squares, square_stride=2)
    return fields


class Call:
    """`fp4bf16_certificate` for a case."""

    def __init__(self, library, gpu, case: Case, threshold=-1.0, **fields):
        self.loaded, self.gpu = library, gpu
        self.out, self.flag = gpu.empty(16), gpu.put(np.array([77], np.int32))
        self.counts = gpu.put(np.array([5, 3], np.int32))
        outer = 0 if case.outer is None else gpu.put(np.float32([case.outer]))
        self.fields = dict(
            weight=gpu.put(case.weight), k=case.k, columns=case.columns, elements=case.elements,
            factor=case.factor, gain=case.gain, output=("float32", "bfloat16", "float16").index(case.dtype),
            slope=case.slope, out=self.out, flag=self.flag, counts=self.counts, threshold=threshold,
            outer_scale=outer,
        ) | fields  # fmt: skip

    @property
    def args(self):
        kinds = dict(self.loaded.ffi.typeof("fp4bf16_certificate_args").fields)
        cast = {n: self.loaded.ffi.cast(kinds[n].type, v) if kinds[n].type.kind == "pointer" else v
                for n, v in self.fields.items()}  # fmt: skip
        return self.loaded.ffi.new("fp4bf16_certificate_args*", cast)

    def run(self, stream=0) -> np.ndarray:
        self.loaded.call("certificate", self.args, stream)
        return self.read()

    def read(self) -> np.ndarray:
        return self.gpu.get(self.out, (4,), np.float32).astype(np.float64)

    def state(self) -> tuple[int, ...]:
        flag, counts = self.gpu.get(self.flag, (1,), np.int32), self.gpu.get(self.counts, (2,), np.int32)
        return (*flag.tolist(), *counts.tolist())


@gpu_only
@pytest.mark.parametrize("parts, squares", [(1, 0), (1, 1), (7, 100), (1025, 3000), (9000, 0), (100, 70001),
                                            (40000, 5), (33000, 200000)])  # fmt: skip
def test_certificates(library, gpu, rng, parts, squares):
    """Never less than the host's for the same numbers; by one thread block and by a cluster of them."""
    for dtype in ("float32", "bfloat16", "float16"):
        for accumulate in ("fp32", "promoted", "fast"):
            activation = rng.choice([None, "silu", "gelu"])
            case = Case(rng, dtype, accumulate, activation, bool(rng.integers(2)), bool(rng.integers(2)))
            call = Call(library, gpu, case, **put_sums(case, gpu, rng, parts, squares))
            got, (bound, accumulation) = call.run(), case.expected()
            np.testing.assert_array_equal(got, call.run())
            if math.isinf(bound):
                assert got[0] == math.inf and dtype == "float16"
                continue
            above(got[0], bound), above(got[1], accumulation)
            if squares:
                product = math.sqrt(case.sums[3])
                above(got[2], (bound + accumulation) / product), above(got[3], product)
            else:
                assert got[2] == math.inf and got[3] == 0
            assert call.state() == (0, 7, 3)
        gpu.free()


@gpu_only
def test_a_certificate_over_its_threshold_redoes_the_product(library, gpu, rng):
    """In one graph: the certificate's flag, a product under it as condition; norms change in between."""
    case = Case(rng, "bfloat16", "fast", None)
    call = Call(library, gpu, case, **put_sums(case, gpu, rng, 100, 100))
    ratio = call.run()[2]
    p = Product(library, gpu, rng, 200, 136, k16=64, d_dtype=1)
    d, size, rt = gpu.empty(200 * 136 * 2), 200 * 136 * 2, gpu.rt
    want = p.run()[0].tobytes()
    call.fields["threshold"] = 4 * ratio
    args, product = call.args, p.args(d=d, run_if=call.flag)
    before = gpu.get(call.fields["norms"], (100, 2), np.float32)

    def launch(stream):
        library.call("certificate", args, stream)
        library.call("gemm", product, stream)

    calls, redone = 6, 3
    with captured(gpu, launch) as replay:
        for factor in (1, 400, 1, 1, 400, math.nan):  # roots grow by 20
            now = (before * np.float32(factor)).astype(np.float32)
            kind = rt.cudaMemcpyKind.cudaMemcpyHostToDevice
            gpu.check(rt.cudaMemcpy(call.fields["norms"], now.ctypes.data, now.nbytes, kind))
            gpu.check(rt.cudaMemset(d, gpu.POISON, size))
            replay()
            over = factor != 1
            calls, redone = calls + 1, redone + over
            assert call.state() == (over, calls, redone)
            found = gpu.get(d, (size,), np.uint8)
            assert (found.tobytes() == want) if over else (found == gpu.POISON).all()


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"norms": 0}, "norms and sums are both NULL"),
        ({"sums": 64}, "norms and sums are both given"),
        ({"norms": 68}, "norms is 4 bytes past a multiple of 8"),
        ({"weight": 0}, "weight is NULL"),
        ({"out": 0}, "out is NULL"),
        ({"flag": 66}, "flag is 2 bytes past a multiple of 4"),
        ({"counts": 66}, "counts is 2 bytes past a multiple of 4"),
        ({"outer_scale": 66}, "outer_scale is 2 bytes past a multiple of 4"),
        ({"squares": 64, "square_stride": 0}, "square_stride is 0, but must be 1"),
        ({"k": -1}, "k is -1"),
        ({"gain": math.inf}, "gain is inf, but must be finite and at least 0"),
        ({"factor": math.nan}, "factor is nan, but must be finite"),
        ({"slope": -1.0}, "slope is -1, but must be finite and at least 0"),
        ({"output": 3}, "output is 3"),
        ({"threshold": math.nan}, "threshold is NaN; pass -1 for none"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_any_launch(library, change, sentence):
    fields = dict(norms=64, norm_parts=1, weight=64, k=1, columns=1, elements=1, factor=1.0, slope=1.0,
                  output=1, threshold=-1.0, out=64)  # fmt: skip
    call = SimpleNamespace(loaded=library, fields=fields | change)
    with pytest.raises(ValueError, match=sentence):
        library.call("certificate", Call.args.fget(call), 0)


# ---- fronts
@gpu_only
def test_fronts(cupy, rng):
    """Norms by a function of the parts, the certificate, a condition, through `backends`."""
    x = cupy.asarray(rng.standard_normal((2, 64, 64)).astype(np.float32))
    like = device.operand(x, "x")
    xb = device.astype(like, "bfloat16")
    gamma, beta = (device.full((64,), v, "float32", like=like) for v in (1, 0))
    expanded, outer = (device.empty(*kind, like=like) for kind in (((2, 64, 64), "uint8"), ((1,), "float32")))
    asked = []

    def memory(parts: int):
        asked.append(parts)
        return device.empty((parts, 2), "float32", like=like)

    how = {"silu": True, "stream": 0}
    found = cuda_norm.group_norm(xb, gamma, beta, 16, 1e-5, expanded=expanded, outer_scale=outer,
                                 norms=memory, **how)  # fmt: skip
    assert asked == [found.shape[0]]
    weight = device.from_host(np.float32([3, 3, 1, 1, 0.1, 0.01, 0, 0]), like, "weight")
    out, flag = device.empty((4,), "float32", like=like), device.full((1,), 7, "int32", like=like)
    cuda_certificate.certificate(weight, out, 0, k=64, columns=8, elements=1024, output="bfloat16",
                                 norms=found, outer_scale=outer, gain=0.01, threshold=0.5,
                                 flag=flag)  # fmt: skip
    got = device.to_host(out)
    assert 0 < got[0] < math.inf and 0 < got[1] < math.inf and got[2] == math.inf
    assert device.to_host(flag)[0] == 1
    y, none = device.empty((2, 64, 64), "bfloat16", like=like), device.full((1,), 0, "int32", like=like)
    before = device.to_host(y).tobytes()
    for condition, same in ((none, True), (flag, False)):
        cuda_norm.group_norm(xb, gamma, beta, 16, 1e-5, y=y, run_if=condition, **how)
        assert (device.to_host(y).tobytes() == before) == same
