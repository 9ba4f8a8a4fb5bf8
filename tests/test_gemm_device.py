"""Device front end of matmul, linear, DualWeight and gradients on an emulated GPU, beside the CPU's results.

What the tensor cores add is not seen here (the emulation sums in float64): which bytes and scales they get,
where results go, every sentence, what is allocated and that nothing is read back.
"""

from __future__ import annotations

import copy
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
from host_cuda import Arrays, FakeArray, host_cuda, put  # noqa: F401  (host_cuda is a fixture)

import fp4bf16 as fb
from fp4bf16.backends import cuda_gemm, cuda_math, cuda_tape
from fp4bf16.gemm import branch_vjp

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("nvfp4_exact", "nvfp4", "mxfp4", "fp8")
TRACKS = [("bf16", None), ("reference", None)] + [("fp4", f) for f in FORMATS]
SHAPES = [
    ((37, 100), (100, 19)), ((1, 64), (64, 33)), ((130, 48), (48, 1)), ((0, 32), (32, 8)), ((5, 0), (0, 3)),
    ((4, 16), (16, 0)), ((32,), (32, 7)), ((5, 32), (32,)), ((32,), (32,)), ((2, 3, 5, 32), (32, 7)),
    ((2, 3, 5, 32), (3, 32, 7)), ((32,), (3, 32, 7)), ((2, 5, 32), (1, 32, 7)), ((2, 5, 32), (32,)),
    ((2, 0, 32), (2, 32, 4)), ((1, 5, 32), (4, 32, 3)), ((2, 1, 5, 48), (4, 48, 16)),
    ((3, 2, 1, 48), (48, 16)), ((3, 1, 5, 32), (1, 4, 32, 6)), ((2, 1, 3, 4, 32), (5, 1, 32, 6)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def gpu(host_cuda, monkeypatch):  # noqa: F811
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())
    monkeypatch.setattr(cuda_tape, "_local", type(cuda_tape._local)())  # no plans of another emulation
    cuda_gemm._struct.cache_clear()
    return host_cuda


def draw(rng, shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def weight(rng, k, n):
    return draw(rng, (k, n)) + draw(rng, (k, 4)) @ draw(rng, (4, n))


def close(got, want, limit=1e-6):
    got, want = (np.asarray(x.array if isinstance(x, FakeArray) else x, np.float64) for x in (got, want))
    assert got.shape == want.shape
    scale = np.abs(want).max(initial=0)
    # of a sum that cancels, what it was made of counts
    assert np.abs(got - want).max(initial=0) <= limit * max(scale, 1.0), np.abs(got - want).max() / scale


def near(got, want, flipped=0.0):
    """Where BF16 numbers are made on the way: one beside a tie may round to the other side.

    flipped: share of FP4 codes that are the other side's neighbours: a step of E2M1 is at most 2 where the
    codes' mean square is about 9, so that they move a product by at most 0.7 of that share's root.
    """
    got, want = (np.asarray(x.array if isinstance(x, FakeArray) else x, np.float64) for x in (got, want))
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= (2e-3 + 0.7 * math.sqrt(flipped)) * np.linalg.norm(want)


def on_device(q):
    """A container of the host in device memory."""
    parts = [None if p is None else put(p) for p in (q.packed, q.block_scale, q.outer_scale)]
    return fb.QuantizedArray(*parts, q.format, q.shape, q.order)


# ---- values ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("track,fmt", TRACKS)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_product_is_the_cpus(rng, shapes, track, fmt):
    a, b = (draw(rng, s) for s in shapes)
    want = fb.matmul(a, b, track=track, format=fmt)
    for _ in range(2):  # the second time by the plan of the first
        y = fb.matmul(put(a), put(b), track=track, format=fmt)
        assert isinstance(y, FakeArray) and y.dtype == want.dtype
        close(y, want, 4e-6)
    if track == "fp4" and b.ndim > 1:
        aq, bq = fb.quantize(a, fmt, search="fast"), fb.quantize(b, fmt, axis=-2)
        for _ in range(2):
            for left, right in (
                (put(a), on_device(bq)),
                (on_device(aq), on_device(bq)),
                (on_device(aq), put(b)),
            ):
                close(fb.matmul(left, right, track="fp4", accumulate="fast"), want, 4e-6)
            close(fb.matmul(on_device(aq), on_device(bq), track="bf16"), fb.matmul(aq, bq, track="bf16"))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("outer", ["row", "tensor", "image", "array"])
def test_outer_scales_and_axis_orders(rng, fmt, outer):
    if fmt == "mxfp4":
        outer = None
    a, b = draw(rng, (3, 2, 9, 48)), draw(rng, (3, 2, 48, 10))
    over = rng.integers(-2, 3, (3, 1, 9, 1)) if outer == "array" else outer
    aq = fb.quantize(a, fmt, outer=over, search="fast")
    bq = fb.quantize(b, fmt, axis=-2, outer="row" if outer == "array" else outer)
    for track in ("fp4", "bf16"):
        close(fb.matmul(on_device(aq), on_device(bq), track=track), fb.matmul(aq, bq, track=track), 4e-6)
    turned = fb.quantize(a.transpose(1, 0, 2, 3), fmt, outer="row" if fmt != "mxfp4" else None).transpose(
        1, 0, 2, 3
    )
    close(fb.matmul(on_device(turned), on_device(bq)), fb.matmul(turned, bq), 4e-6)
    swapped = fb.quantize(b.swapaxes(1, 2), fmt, axis=-3).transpose(
        0, 2, 1, 3
    )  # blocked along K, stored last
    if swapped.axis == 2:
        close(fb.matmul(on_device(aq), on_device(swapped)), fb.matmul(aq, swapped), 4e-6)
    wrong = fb.quantize(a, fmt, axis=2)
    close(fb.matmul(on_device(wrong), put(b), track="bf16"), fb.matmul(wrong, b, track="bf16"), 1e-5)
    with pytest.raises(fb.ShapeError, match="blocked along axis 2, but a left operand"):
        fb.matmul(on_device(wrong), put(b), track="fp4")


@pytest.mark.parametrize("dtypes,result", [
    (("float32", "float32"), "float32"), (("bfloat16", "bfloat16"), "bfloat16"), (("float64", "float64"),
    "float64"), (("float16", "float16"), "float16"), (("float32", "bfloat16"), "float32"), (("float16",
    "bfloat16"), "float32"), (("float64", "bfloat16"), "float64"),
])  # fmt: skip
@pytest.mark.parametrize("track", ["bf16", "fp4", "reference"])
def test_result_dtype(rng, dtypes, result, track):
    a, b = (
        draw(rng, s).astype(fb.interop.np_dtype(d)) for s, d in zip(((9, 48), (48, 6)), dtypes, strict=True)
    )
    for dtype in (None, "float32", "bfloat16", "float64"):
        y = fb.matmul(put(a), put(b), track=track, dtype=dtype)
        assert str(y.dtype) == (dtype or result)
        close(y, fb.matmul(a, b, track=track, dtype="float64"), 1e-2 if y.dtype.itemsize == 2 else 1e-6)


@pytest.mark.parametrize("track", ["bf16", "fp4", "dual", "reference"])
@pytest.mark.parametrize("fmt", ["nvfp4_exact", "nvfp4"])
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_epilogue(rng, track, fmt, activation):
    a, b, bias = draw(rng, (2, 37, 64)), draw(rng, (64, 19)), draw(rng, 38)[::2]
    w, v = (fb.DualWeight(b, 4, fmt), fb.DualWeight(put(b), 4, fmt)) if track == "dual" else (b, put(b))
    how = {"track": track, "activation": activation, "format": None if track == "dual" else fmt}
    for dtype in (np.float32, BF16, np.float64):
        residual = draw(rng, (2, 19, 37)).astype(dtype).swapaxes(1, 2)
        want = fb.matmul(a, w, bias=bias, residual=residual, **how)
        for r in (residual, np.ascontiguousarray(residual)):
            for _ in range(2):
                y = fb.matmul(put(a), v, bias=FakeArray(bias), residual=FakeArray(r), **how)
                near(y, want) if track == "dual" else close(y, want, 4e-6)
        half = bias.astype(BF16)
        near(fb.matmul(put(a), v, bias=put(half), **how), fb.matmul(a, w, bias=half, **how))


def test_any_strides(rng):
    """Views with steps, negative and zero strides, transposes, addresses that are not aligned."""
    base = draw(rng, (66, 99)).astype(BF16)
    views = {
        "rows": base[::2], "columns": base[:, ::3], "odd": base[1:, 1:], "transposed": base.T,
        "one": base[:, 3:4], "negative": base[::-1], "backwards": base[:, ::-1], "both": base.T[::-1, ::-3],
        "row": base[5:6], "repeated": np.broadcast_to(base[:1], base.shape), "aligned": base[:, :96][:, 8:40],
    }  # fmt: skip
    for dtype in (BF16, np.float32, np.float16, np.float64):
        for a in views.values():
            a = a if dtype == BF16 else a.astype(dtype, order="K", copy=False)
            b = draw(rng, (a.shape[1], 24)).astype(dtype)
            for track in ("bf16", "fp4"):
                want = fb.matmul(a, b, track=track, dtype="float32")
                for _ in range(2):
                    close(fb.matmul(FakeArray(a), put(b), track=track, dtype="float32"), want, 2e-6)
                y = fb.matmul(put(b.T), FakeArray(a.T), track=track, dtype="float32")
                close(y, fb.matmul(b.T, a.T, track=track, dtype="float32"), 2e-6)


def test_heads_need_no_copy(rng, gpu):
    """(batch, heads, seq, dim) views of (batch, seq, heads, dim): a loop over the batch, no conversion."""
    q, k = (draw(rng, (3, 16, 4, 32)).astype(BF16).transpose(0, 2, 1, 3) for _ in range(2))
    gpu.calls.clear()
    y = fb.matmul(FakeArray(q), FakeArray(k.swapaxes(-1, -2)), dtype="float32")
    close(y, fb.matmul(q, k.swapaxes(-1, -2), dtype="float32"))
    assert gpu.calls == {"gemm": 3}
    out = np.full((3, 16, 4, 16), 7, np.float32).transpose(0, 2, 1, 3)
    fb.matmul(FakeArray(q), FakeArray(k.swapaxes(-1, -2)), dtype="float32", out=FakeArray(out))
    close(out, y)


def test_out(rng):
    makers = [
        lambda s, d: np.full(s, 7, d),
        lambda s, d: np.full((*s[:-1], 12), 7, d)[..., ::2],
        lambda s, d: np.full(s[::-1], 7, d).T,
        lambda s, d: np.full((4, *s[1:]), 7, d)[::-2],
    ]
    a, b = draw(rng, (2, 9, 48)), draw(rng, (48, 6))
    for track in ("bf16", "fp4", "reference"):
        want = fb.matmul(a, b, track=track)
        for dtype in (np.float32, BF16, np.float64):
            for make in makers:
                for _ in range(2):
                    memory = make(want.shape, dtype)
                    out = FakeArray(memory)
                    assert fb.matmul(put(a), put(b), track=track, out=out, dtype=str(memory.dtype)) is out
                    close(memory, want, 1e-2 if dtype == BF16 else 2e-6)
                    if memory.base is not None and memory.base.shape[-1] == 12:
                        assert (memory.base[..., 1::2] == 7).all()


# ---- what is launched --------------------------------------------------------------------------------------
def test_launches_and_memory(rng, gpu):
    """Prepared operands: one launch, the result alone is allocated. A plain a: one quantiser before it."""
    a, b = draw(rng, (32, 64)).astype(BF16), draw(rng, (64, 48)).astype(BF16)
    x, w, wq, dual = put(a), put(b), fb.quantize(put(b), axis=-2), fb.DualWeight(put(b), 8, outliers=[3])
    aq = fb.quantize(x, search="fast")
    wq.expanded, aq.expanded  # noqa: B018
    wanted = {
        "bf16": (lambda: fb.matmul(x, w), {"gemm": 1}, 1),
        "transposed": (lambda: fb.linear(x, FakeArray(np.asfortranarray(b).T)), {"gemm": 1}, 1),
        "prepared": (lambda: fb.matmul(aq, wq), {"gemm": 1}, 1),
        "fp4": (lambda: fb.matmul(x, wq), {"quantize": 1, "gemm": 1}, 4),
        "dual": (lambda: fb.matmul(x, dual), {"quantize": 1, "gemm": 1}, 5),
        "refresh": (lambda: dual.refresh(factors=False), {"quantize": 1, "gemm": 1}, 2),
    }  # fmt: skip
    moved = gpu.fake.moved
    for name, (call, launches, made) in wanted.items():
        for planned in (False, True):  # a plan makes all temporary memory at once
            gpu.calls.clear(), gpu.fake.made.clear()
            call()
            made = min(made, 2) if planned else made
            assert (dict(gpu.calls), len(gpu.fake.made)) == (launches, made), name
    assert gpu.fake.moved == moved, "something was read back"


def test_plans_see_new_contents_and_addresses(rng, gpu):
    w = fb.DualWeight(put(weight(rng, 64, 48)), 8)
    for _ in range(4):
        a, b, bias = draw(rng, (32, 64)).astype(BF16), draw(rng, (64, 48)).astype(BF16), draw(rng, 48)
        x, bq = put(a), fb.quantize(put(b), axis=-2)
        close(fb.matmul(x, put(b), bias=put(bias)), fb.matmul(a, b, bias=bias), 1e-2)
        close(fb.matmul(x, bq, dtype="float32"), fb.matmul(a, b, track="fp4", dtype="float32"))
        w.refresh(put(b.astype(np.float32)))
        near(fb.matmul(x, w, dtype="float32"), fb.matmul(a, fb.DualWeight(b, 8), dtype="float32"))
    with fb.tracks("bf16"):
        close(fb.matmul(x, bq, dtype="float32"), fb.matmul(a, fb.quantize(b, axis=-2), dtype="float32"))
    same = put(draw(rng, (32, 32)))
    for _ in range(2):
        close(fb.matmul(same, same), fb.matmul(same.array, same.array))
    with pytest.raises(ValueError, match="out overlaps a in memory"):
        fb.matmul(same, put(np.ones((32, 32), np.float32)), out=same)
    out = put(np.empty((32, 48), BF16))
    fb.matmul(x, put(b), out=out), fb.matmul(x, put(b), out=out)
    with pytest.raises(ValueError, match="out overlaps"):  # with a plan, too
        fb.matmul(FakeArray(out.array.reshape(-1)[: 32 * 16].reshape(32, 16)), put(b[:16]), out=out)


def test_streams_and_devices(rng, gpu):
    a, b = draw(rng, (8, 32)), draw(rng, (32, 4))
    x, w = put(a, 1), put(b, 1)  # device 0 is current
    gpu.streams.clear()
    for stream in (None, 77):
        close(fb.matmul(x, w, stream=stream), fb.matmul(a, b))
    assert set(gpu.streams) == {0, 77} and gpu.fake.device == 0 and gpu.fake.stream == 0
    assert fb.matmul(x, w).device == 1
    with pytest.raises(TypeError, match="a is a fake array on cuda:0 but b is a fake array on cuda:1"):
        fb.matmul(put(a), w)
    with pytest.raises(TypeError, match="bias is a fake array on cuda:0"):
        fb.matmul(x, w, bias=put(np.zeros(4, np.float32)))


def test_mixed_host_and_device(rng):
    a, b = draw(rng, (8, 32)), draw(rng, (32, 4))
    for left, right in (
        (put(a), b),
        (a, put(b)),
        (put(a), fb.quantize(b, axis=-2)),
        (a, fb.DualWeight(put(b), 2)),
    ):
        with pytest.raises(TypeError, match="a is a .* array on .* but b is a .* array on "):
            fb.matmul(left, right)
    with pytest.raises(TypeError, match="residual|bias"):
        fb.matmul(a, b, bias=put(np.zeros(4, np.float32)))
    with pytest.raises(TypeError, match="bias is a numpy array on the host"):
        fb.matmul(put(a), put(b), bias=np.zeros(4, np.float32))
    with pytest.raises(TypeError, match="g is a numpy array on the host"):
        fb.matmul_vjp(np.zeros((8, 4), np.float32), put(a), put(b))


def test_sentences_are_the_cpus(rng):
    """A wrong call on the device raises what it raises on the CPU."""
    a, b = draw(rng, (4, 32)), draw(rng, (32, 3))
    q, w, v = fb.quantize(b), *(fb.DualWeight(p(b), 2, outliers=[3]) for p in (np.asarray, put))
    calls = [
        lambda p: fb.matmul(p(a), p(b.T)),
        lambda p: fb.linear(p(a), p(b)),
        lambda p: fb.matmul(p(np.zeros((2, 4, 16))), p(np.zeros((3, 16, 4)))),
        lambda p: fb.matmul(p(np.ones((4, 32), np.int64)), p(b)),
        lambda p: fb.matmul(p(a), p(b), dtype="int32"),
        lambda p: fb.matmul(p(a), p(b), out=p(np.empty((4, 3)))),
        lambda p: fb.matmul(p(a), p(b), track="fp5"),
        lambda p: fb.matmul(p(a), p(b), activation="gelo"),
        lambda p: fb.matmul(p(a), p(b), track="dual"),
        lambda p: fb.matmul(p(a), p(b), bias=p(np.zeros(4, np.float32))),
        lambda p: fb.matmul(p(a), p(b), residual=p(np.zeros(3, np.float32))),
        lambda p: fb.matmul(p(a), p(b), out=p(np.empty((3, 4), np.float32))),
        lambda p: fb.matmul(p(a), p(b), accumulate="quick"),
        lambda p: fb.linear(p(a), p(b.T), activaton="silu"),
        lambda p: fb.matmul(p(a), p(b), certify="yes"),
        lambda p: fb.matmul(p(np.float32(2)), p(b)),
        lambda p: fb.matmul_vjp(p(a), p(a), p(b)),
        lambda p: fb.matmul_vjp(p(a @ b), p(a), p(b), save="fp5"),
        lambda p: fb.DualWeight(p(np.ones(64, np.float32))),
        lambda p: fb.DualWeight(p(b), outliers=97),
        lambda p: fb.DualWeight(p(np.full((4, 4), np.inf, np.float32))),
        lambda p: fb.DualWeight(p(b)).refresh(p(a)),
        lambda p: fb.matmul(p(a), q if p is np.asarray else on_device(q)),
        lambda p: fb.matmul(fb.quantize(p(a)), w if p is np.asarray else v),
    ]
    for i, call in enumerate(calls):
        with pytest.raises((TypeError, ValueError)) as on_cpu:
            call(np.asarray)
        with pytest.raises(on_cpu.type) as there:
            call(put)
        strip = str(on_cpu.value).split("; ")[0], str(there.value).split("; ")[0]
        assert strip[0] == strip[1], i


# ---- dual --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("outliers", [0, 2, [3, 50]], ids=str)
@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize("turned", [False, True])
def test_dual_weight(rng, gpu, fmt, outliers, rank, turned):
    x, dense, new = (
        draw(rng, (2, 33, 100)),
        weight(rng, 100, 19).astype(BF16),
        weight(rng, 100, 19).astype(BF16),
    )
    dense = np.asfortranarray(dense) if turned else dense
    master = FakeArray(dense.copy(order="K"))
    w, v = fb.DualWeight(dense, rank, fmt, outliers), fb.DualWeight(master, rank, fmt, outliers)
    assert v.master is master and (v.outlier_index == w.outlier_index).all()

    def same():
        flipped = float((v.twin.packed.array != w.twin.packed).mean())
        assert flipped < 0.01
        for _ in range(2):
            near(fb.matmul(put(x), v), fb.matmul(x, w), flipped)
        near(v.down, w.down), near(v.up, w.up)
        for track in ("bf16", "fp4", "reference"):
            exact = track in ("bf16", "reference")
            near(fb.matmul(put(x), v, track=track), fb.matmul(x, w, track=track), 0.0 if exact else flipped)

    def addresses():
        parts = (v.twin.packed, v.twin.block_scale, v.twin.outer_scale, v.twin._expanded, v.down, v.up)
        return [p.array.__array_interface__["data"][0] for p in parts if p is not None]

    same()
    before = addresses()
    dense[...] = master.array[...] = new
    moved = gpu.fake.moved
    v.refresh(factors=False)
    assert gpu.fake.moved == moved
    w.refresh(factors=False)
    same()
    w.refresh(new.astype(np.float32) * 2), v.refresh(put(new.astype(np.float32) * 2))
    same()
    assert addresses() == before
    for copied in (copy.deepcopy(v), pickle.loads(pickle.dumps(v))):
        near(fb.matmul(put(x), copied), fb.matmul(x, w))
        copied.refresh(factors=False)
        near(fb.matmul(put(x), copied), fb.matmul(x, w))
    same()
    if np.any(outliers) == 0:
        xq = fb.quantize(x, fmt, search="fast")
        near(fb.matmul(on_device(xq), v), fb.matmul(xq, w))
    with pytest.raises(fb.NonFiniteError):
        v.refresh(put(np.full_like(new, np.nan)))
    same()  # a refused weight changes nothing


def test_large_weight_takes_the_randomised_svd(rng):
    dense = weight(rng, 1100, 40)
    w, v = fb.DualWeight(dense, 6), fb.DualWeight(put(dense), 6)
    close(v.down, w.down, 1e-2)
    assert np.linalg.norm(v.twin.packed.array.astype(int) - w.twin.packed) < 0.2 * np.linalg.norm(
        w.twin.packed
    )


# ---- gradients, certificates -------------------------------------------------------------------------------
@pytest.mark.parametrize("track,fmt", TRACKS)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_gradients_are_the_cpus(rng, shapes, track, fmt):
    for dtype in (np.float32, np.float64, BF16):
        a, b = (draw(rng, s, dtype) for s in shapes)
        g = draw(rng, np.matmul(a.astype(np.float32), b.astype(np.float32)).shape, dtype)
        limit = 2e-2 if dtype == BF16 else 1e-2 if fmt == "fp8" else 5e-6
        for got, want in zip(
            fb.matmul_vjp(put(g), put(a), put(b), track=track, format=fmt),
            fb.matmul_vjp(g, a, b, track=track, format=fmt), strict=True,
        ):  # fmt: skip
            assert got.dtype == want.dtype
            close(got, want, limit)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("outliers", [0, [3, 50]], ids=str)
@pytest.mark.parametrize("rank", [0, 6])
def test_dual_gradients(rng, fmt, outliers, rank):
    x, dense, g = draw(rng, (2, 33, 100)), weight(rng, 100, 19), draw(rng, (2, 33, 19))
    w, v = fb.DualWeight(dense, rank, fmt, outliers), fb.DualWeight(put(dense), rank, fmt, outliers)
    limit = 1e-2 if fmt == "fp8" else 5e-6
    for how in ({}, {"save": "bf16"}, {"backward": "master"}, {"track": "fp4"}, {"track": "bf16"}):
        for got, want in zip(
            fb.linear_vjp(put(g), put(x), v, **how), fb.linear_vjp(g, x, w, **how), strict=True
        ):
            near(got, want) if fmt != "fp8" else close(got, want, limit)
    for got, want in zip(branch_vjp(put(g), put(x), v), branch_vjp(g, x, w), strict=True):
        near(got, want) if fmt != "fp8" else close(got, want, limit)
    wt = np.ascontiguousarray(dense.T)
    out = [np.full(s, 7, np.float32) for s in (x.shape, (19, 200), (19,))]
    out[1] = out[1][:, ::2]
    got = fb.linear_vjp(put(g), put(x), put(wt), track="fp4", format=fmt, out=tuple(map(FakeArray, out)))
    for y, memory, want in zip(got, out, fb.linear_vjp(g, x, wt, track="fp4", format=fmt), strict=True):
        assert y.array is memory
        close(y, want, limit)
    with pytest.raises(ValueError, match="out: dx and dbias overlap in memory"):
        fb.linear_vjp(
            put(g), put(x), put(wt), out=(FakeArray(out[0]), None, FakeArray(out[0].reshape(-1)[:19]))
        )


@pytest.mark.parametrize("activation", [None, "silu"])
def test_certificates_are_the_cpus(rng, activation):
    x, dense, bias = draw(rng, (2, 33, 100)), weight(rng, 100, 19), draw(rng, 19)
    pairs = [("bf16", dense, put(dense)), ("fp4", dense, put(dense)), ("reference", dense, put(dense))]
    pairs += [("fp4", fb.quantize(dense, axis=-2), fb.quantize(put(dense), axis=-2))]
    for fmt, outliers in (("nvfp4_exact", 0), ("nvfp4_exact", [3]), ("nvfp4", 0)):
        pairs += [
            ("dual", fb.DualWeight(dense, 6, fmt, outliers), fb.DualWeight(put(dense), 6, fmt, outliers))
        ]
    for track, w, v in pairs:
        how = {"track": track, "activation": activation}
        y, want = fb.matmul(x, w, bias=bias, certify=True, **how)
        z, cert = fb.matmul(put(x), v, bias=put(bias), certify=True, **how)
        near(z, y)
        assert np.isclose(cert.bound, want.bound, rtol=1e-3) and cert.reference == want.reference
        assert cert.accumulation >= want.accumulation * 0.999
        assert (cert.estimate or 0) <= 4 * (want.estimate or 0) + 1e-9
        assert fb.matmul(put(x), v, certify="bound", **how)[1].bound == pytest.approx(
            fb.matmul(x, w, certify="bound", **how)[1].bound, rel=1e-3)  # fmt: skip


def test_plans_of_operands_that_share_memory(rng, gpu):
    """An input that is also the residual, two slices of one buffer: the same launch with other contents."""
    w = put(draw(rng, (64, 64)).astype(BF16))
    for i in range(4):
        x, y = (draw(rng, (32, 64)).astype(BF16) for _ in range(2))
        both = FakeArray(np.hstack([x, y]))
        one, two = both[:, :64], both[:, 64:]
        gpu.calls.clear()
        if i % 2:
            close(fb.matmul(one, w, residual=one), fb.matmul(x, w.array, residual=x), 1e-2)
        else:
            close(fb.matmul(one, w, residual=two), fb.matmul(x, w.array, residual=y), 1e-2)
        assert gpu.calls == {"gemm": 1}
    assert len(cuda_tape.plans("fake").known) == 2
