"""Four-axis DualWeights, gradients and certificates of device arrays on an emulated GPU, beside the CPU's."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
from conv_cases import (
    BF16,
    CASES,
    FORMATS,
    IDS,
    TRACKS,
    close,
    draw,
    gpu,  # noqa: F401  (a fixture)
    image,
    near,
    on_device,
    pictures,
    strong,
    values,
)
from host_cuda import FakeArray, host_cuda, put  # noqa: F401  (host_cuda is a fixture)

import fp4bf16 as fb
from fp4bf16.conv import conv2d_dgrad, conv2d_wgrad
from fp4bf16.python_ref import conv as ref

pytestmark = pytest.mark.usefixtures("gpu")


# ---- dual weight -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [
    ((2, 6, 6, 40), (24, 3, 3, 40), 4), ((2, 5, 5, 20), (9, 3, 2, 20), 12),
    ((1, 4, 4, 16), (16, 1, 1, 16), 8), ((2, 4, 4, 3), (32, 3, 3, 3), 5),
    ((2, 6, 6, 32), (8, 3, 3, 32), 0), ((2, 3, 3, 8), (1, 3, 3, 8), 4),
    ((2, 4, 4, 16), (8, 4, 1, 16), 3),
], ids=str)  # fmt: skip
def test_dual_weight(rng, fmt, shape):
    x_shape, w_shape, rank = shape
    x, dense = pictures(rng, x_shape), strong(rng, w_shape)
    here, there = fb.DualWeight(put(dense), rank, fmt), fb.DualWeight(dense, rank, fmt)
    assert here.rank == there.rank and here.twin.shape == w_shape and here.twin.axis == 3
    assert repr(here) == repr(there) and here.down.shape == there.down.shape
    assert here.twin.packed.shape == there.twin.packed.shape
    outer = there.twin.outer_scale
    assert outer is None or here.twin.outer_scale.shape == outer.shape
    assert np.array_equal(here.master_values(), there.master_values())
    # Of full rank W - D U is what rounding D and U to BF16 leaves: one number of theirs that rounds to the
    # other side changes a row of it, and the twin alone is not compared.
    full = here.rank == min(w_shape[0], dense[0].size)
    product = np.asarray(here.down.array, np.float64) @ np.asarray(here.up.array, np.float64)
    near(product, np.asarray(there.down, np.float64) @ np.asarray(there.up, np.float64), 1e-3)
    if not full:  # it is summed in another order there: a code may tip at a tie
        near(fb.dequantize(here.twin), fb.dequantize(there.twin), 2e-2)
    for track in ("dual", "bf16", "reference") if full else ("dual", "fp4", "bf16", "reference"):
        for stride in (1, 2):
            how = {"padding": 1, "track": track, "stride": stride}
            want = fb.conv2d(x, there, **how)
            for _ in range(2):
                near(fb.conv2d(put(x), here, **how), want, 1e-2)
    if fmt == "nvfp4_exact":
        xq = fb.quantize(x, outer="image", search="fast")
        near(fb.conv2d(on_device(xq), here, padding=1), fb.conv2d(xq, there, padding=1), 1e-2)


def test_dual_weight_is_the_unfused_product(rng):
    """Its own parts, convolved in float64."""
    x, w = pictures(rng, (2, 6, 6, 40)), fb.DualWeight(put(strong(rng, (24, 3, 3, 40))), 4)
    down, up = w.branch_factors()
    down, up = down.T.reshape(4, 3, 3, 40), up.T.reshape(24, 1, 1, 4)
    twin = np.asarray(w.twin)
    hidden = ref.conv2d(x.astype(BF16).astype(np.float64), down, 2, 1).astype(BF16).astype(np.float64)
    want = ref.conv2d(ref.operands(x, x, "fp4")[0], twin, 2, 1) + ref.conv2d(hidden, up)
    close(fb.conv2d(put(x), w, stride=2, padding=1), want, 1e-6)


def test_refresh_in_place(rng):
    dense, new = strong(rng, (16, 3, 3, 24)).astype(BF16), strong(rng, (16, 3, 3, 24)).astype(BF16)
    master = put(dense)
    w = fb.DualWeight(master, rank=6)
    assert w.master is master

    def addresses():
        parts = w.twin.packed, w.twin.block_scale, w.twin.outer_scale, w.twin.expanded, w.down, w.up
        return [p.array.ctypes.data for p in parts]

    before = addresses()
    for factors in (False, True):
        w.refresh(put(new), factors=factors)
        product = values(w.down) @ values(w.up)
        rebuilt = np.asarray(w.twin, np.float64).reshape(16, -1).T + product
        target = new.astype(np.float64).reshape(16, -1).T
        assert np.linalg.norm(rebuilt - target) < 0.2 * np.linalg.norm(target)
        left = (target - product).astype(np.float32).T.reshape(w.shape)
        again = fb.quantize(left, outer="image")
        near(fb.dequantize(w.twin), np.asarray(again), 2e-2)
    assert addresses() == before
    other = copy.deepcopy(w)
    x = put(draw(rng, (1, 5, 5, 24)))
    assert np.array_equal(fb.conv2d(x, other).array, fb.conv2d(x, w).array)
    with pytest.raises(fb.ShapeError, match="but the master has shape"):
        w.refresh(put(new[:8]))


def test_master_of_any_strides(rng):
    """A PyTorch weight (O, C, kh, kw), seen as (O, kh, kw, C), is the master where it lies."""
    dense = np.ascontiguousarray(strong(rng, (8, 3, 3, 16)).transpose(0, 3, 1, 2)).astype(BF16)
    w = fb.DualWeight(FakeArray(dense.transpose(0, 2, 3, 1)), rank=3)
    same = fb.DualWeight(put(np.ascontiguousarray(dense.transpose(0, 2, 3, 1))), rank=3)
    assert np.array_equal(w.twin.packed.array, same.twin.packed.array)
    x = put(draw(rng, (2, 5, 5, 16)))
    assert np.array_equal(fb.conv2d(x, w).array, fb.conv2d(x, same).array)
    near(fb.conv2d(x, w, track="bf16"), fb.conv2d(x.array, dense.transpose(0, 2, 3, 1), track="bf16"))


# ---- out
def test_out_is_checked_by_name_before_any_is_written(rng):
    g, x, w = (draw(rng, s) for s in ((1, 3, 3, 4), (1, 5, 5, 16), (4, 3, 3, 16)))
    for i, (name, shape) in enumerate((("dx", x.shape), ("dw", w.shape), ("dbias", (4,)))):
        out = [FakeArray(np.full(s, 7, np.float32)) for s in (x.shape, w.shape, (4,))]
        out[i] = FakeArray(np.full((2, *shape), 7, np.float32))
        with pytest.raises(fb.ShapeError, match=f"conv2d_vjp: {name}: out has shape"):
            fb.conv2d_vjp(put(g), put(x), put(w), out=tuple(out))
        assert all((o.array == 7).all() for o in out)


# ---- gradients ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("track,fmt", TRACKS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gradients_are_the_cpus(rng, case, track, fmt):
    x_shape, w_shape, stride, padding = case
    x, w = draw(rng, x_shape), draw(rng, w_shape)
    how = {"stride": stride, "padding": padding, "track": track, "format": fmt}
    g = draw(rng, fb.conv2d(x, w, **how).shape)
    # of the sum of the terms' sizes: what FP32 sums lose, and one operand's rounding to BF16 in nvfp4 and fp8
    limit = 2e-6 + (2.0**-8 if fmt in ("nvfp4", "fp8") else 0)
    terms = [limit * t.astype(np.float64) for t in fb.conv2d_vjp(*map(np.abs, (g, x, w)), **how)]

    def check(got, want):
        for a, b, bound in zip(got, want, terms, strict=True):
            assert a is None or a.shape == b.shape and a.dtype == b.dtype
            assert a is None or np.all(np.abs(values(a) - b) <= bound)

    want = fb.conv2d_vjp(g, x, w, **how)
    check(fb.conv2d_vjp(put(g), put(x), put(w), **how), want)
    only = fb.conv2d_vjp(put(g), put(x), put(w), needs=(False, True, False), **how)
    assert only[0] is None and only[1] is not None and only[2] is None
    check(only, want)
    dx, dw = conv2d_dgrad(put(g), put(w), x.shape, **how), conv2d_wgrad(put(g), put(x), w.shape[1:3], **how)
    check((dx, dw, fb.conv2d_vjp(put(g), put(x), put(w), needs=(False, False, True), **how)[2]), want)
    if track == "fp4":
        xq = fb.quantize(x, fmt, outer=image(fmt), search="fast")
        wq = fb.quantize(w, fmt, outer=image(fmt))
        check(fb.conv2d_vjp(put(g), on_device(xq), on_device(wq), **how), fb.conv2d_vjp(g, xq, wq, **how))


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float64])
def test_gradients_of_other_dtypes(rng, dtype):
    x, w, g = (draw(rng, s).astype(dtype) for s in ((2, 5, 5, 12), (6, 3, 3, 12), (2, 5, 5, 6)))
    for track in ("bf16", "fp4", "reference"):
        want = fb.conv2d_vjp(g, x, w, padding=1, track=track)
        for a, b in zip(fb.conv2d_vjp(put(g), put(x), put(w), padding=1, track=track), want, strict=True):
            assert a.dtype == b.dtype == dtype
            near(a, b, 4e-3 if a.dtype.itemsize == 2 else 1e-6)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", [(24, 3, 3, 40, 4), (9, 3, 2, 20, 12), (16, 1, 1, 16, 0)], ids=str)
def test_gradients_of_a_dual_weight(rng, stride, shape):
    *w_shape, rank = shape
    x, dense = draw(rng, (2, 6, 6, w_shape[3])), strong(rng, tuple(w_shape))
    here, there = fb.DualWeight(put(dense), rank), fb.DualWeight(dense, rank)
    g = draw(rng, fb.conv2d(x, there, stride=stride, padding=1).shape)
    for how in ({}, {"save": "bf16"}, {"backward": "master"}, {"track": "bf16"}, {"track": "fp4"}):
        how = how | {"stride": stride, "padding": 1}
        want = fb.conv2d_vjp(g, x, there, **how)
        for a, b in zip(fb.conv2d_vjp(put(g), put(x), here, **how), want, strict=True):
            near(a, b, 1e-2)


# ---- certificates ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("track,fmt", [
    ("fp4", "nvfp4_exact"), ("fp4", "nvfp4"), ("fp4", "fp8"), ("dual", None), ("reference", None),
    ("bf16", None),
])  # fmt: skip
def test_certificate(rng, track, fmt):
    x, w, bias = pictures(rng, (2, 6, 6, 24)), strong(rng, (12, 3, 3, 24)), draw(rng, 12)
    residual = draw(rng, (2, 3, 3, 12))
    a, b = (fb.DualWeight(w, 4), fb.DualWeight(put(w), 4)) if track == "dual" else (w, put(w))
    how = {"stride": 2, "padding": 1, "track": track, "format": fmt, "activation": "silu"}
    bf16 = fb.conv2d(x, w, bias=bias, residual=residual, **how | {"track": "bf16"})
    y, here = fb.conv2d(put(x), b, bias=put(bias), residual=put(residual), certify=True, **how)
    _, there = fb.conv2d(x, a, bias=bias, residual=residual, certify=True, **how)
    near(y, fb.conv2d(x, a, bias=bias, residual=residual, **how), 1e-2)
    if track == "bf16":
        assert here == there and here.limit == 0
        return
    distance = np.linalg.norm(values(y) - bf16)
    assert distance <= here.bound + here.accumulation and here.rows is None
    assert math.isclose(here.bound, there.bound, rel_tol=0.05) and here.reference == there.reference
    assert distance <= here.estimate + here.accumulation and here.estimate < 3 * there.estimate
    assert here.accumulation >= there.accumulation * 0.99
    assert fb.conv2d(put(x), b, certify="bound", **how)[1].estimate is None
    if track == "fp4":
        xq, wq = (fb.quantize(put(v), fmt, outer="image", search=s) for v, s in ((x, "fast"), (w, "full")))
        near(fb.conv2d(xq, wq, certify=True, **how)[0], fb.conv2d(x, w, **how))
        loaded = on_device(fb.quantize(x, fmt, outer="image")), on_device(fb.quantize(w, fmt, outer="image"))
        assert fb.conv2d(*loaded, certify=True, **how)[1].reference == "quantized"


# ---- testing.check -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("track", ["bf16", "fp4", "reference"])
def test_check(rng, track):
    x, w, g = draw(rng, (2, 6, 6, 24)), draw(rng, (8, 3, 3, 24)), draw(rng, (2, 6, 6, 8))
    for fmt in ("nvfp4_exact", "nvfp4", "mxfp4"):
        report = fb.testing.check("conv2d", put(x), put(w), track=track, format=fmt, padding=1)
        assert report, str(report)
        report = fb.testing.check("conv2d_vjp", put(g), put(x), put(w), track=track, format=fmt, padding=1)
        assert report, str(report)
