"""Device arrays handed over in ways nobody should: the result is right or one sentence says what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from host_cuda import FakeArray, host_cuda, put  # noqa: F401  (fixtures)
from test_gemm_device import close, draw, gpu  # noqa: F401

import fp4bf16 as fb
from fp4bf16 import gemm_cuda


# ---- containers made by hand, plans
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4_exact"])
def test_expanded_bytes_of_a_ragged_k(rng, fmt):
    """K that TMA cannot read, expanded by the quantiser, by `.expanded` or not at all: the same product."""
    x, w = draw(rng, (5, 33)), draw(rng, (33, 4))
    want = fb.matmul(fb.quantize(x, fmt), fb.quantize(w, fmt, axis=-2))
    for how in ("late", "at once", "asked", "late"):
        a, b = (fb.quantize(put(m), fmt, i, expand=how == "at once") for m, i in ((x, -1), (w, -2)))
        if how == "asked":
            a.expanded, b.expanded  # noqa: B018
        for _ in range(2):
            close(fb.matmul(a, b), want)
            close(fb.linear(a, b.T), want)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "nvfp4_exact"])
def test_a_plan_is_not_for_other_strides_of_a_part(rng, fmt):
    x, w = draw(rng, (16, 64)), draw(rng, (64, 16))
    q = fb.quantize(put(w), fmt, axis=-2)
    for _ in range(2):
        want = fb.matmul(put(x), q)
    wide = np.ones((16, 2 * q.block_scale.shape[1]), np.uint8)
    wide[:, ::2] = q.block_scale.array
    strided = FakeArray(wide[:, ::2])
    by_hand = fb.QuantizedArray(q.packed, strided, q.outer_scale, fmt, q.shape, q.order)
    for _ in range(2):
        close(fb.matmul(put(x), by_hand), want.array)


def test_a_plan_sees_a_scale_that_was_replaced(rng):
    x, w = draw(rng, (16, 64)), draw(rng, (64, 16))
    q, dual = fb.quantize(put(w), "mxfp4", axis=-2), fb.DualWeight(put(w), 0, "mxfp4")
    for _ in range(2):
        want, other = fb.matmul(put(x), q), fb.matmul(put(x), dual)
    for container in (q, dual.twin):
        container.block_scale = put(container.block_scale.array + 1)
    close(fb.matmul(put(x), q), 2 * want.array)
    close(fb.matmul(put(x), dual), 2 * other.array)


# ---- sentences
class Stream:
    def __init__(self, answer):
        self.answer = answer

    def __repr__(self):
        return f"Stream({self.answer!r})"

    def __cuda_stream__(self):
        return self.answer


@pytest.mark.parametrize("stream,sentence", [
    (Stream(None), "stream, a Stream, gives None, but .0, handle. is needed; pass its handle"),
    (Stream((0, 1, 2)), "gives .0, 1, 2., but"), (Stream((0,)), "gives .0,., but"), (Stream, "a type, gives"),
    (Stream(("0", 5)), "version '0' of __cuda_stream__"), (Stream((0, "x")), "handle of stream is 'x'"),
    (Stream((0, 1.5)), "handle of stream is 1.5"), (Stream((0, True)), "handle of stream is True"),
    (Stream((0, -3)), "stream is -3, but"), (Stream((0, 2**64)), "has 64 bits; pass 0"),
    (2**64, "has 64 bits; pass 0"), (Stream((0, None)), "stream is a Stream, but a stream is needed"),
], ids=str)  # fmt: skip
def test_broken_streams(rng, stream, sentence):
    x, w = put(draw(rng, (2, 32))), put(draw(rng, (32, 3)))
    for call in (lambda: fb.quantize(x, stream=stream), lambda: fb.matmul(x, w, stream=stream)):
        with pytest.raises((TypeError, ValueError), match=sentence):
            call()


@pytest.mark.parametrize("place", [np.asarray, put], ids=["host", "device"])
def test_sentences(rng, place):
    x, w = place(draw(rng, (2, 32))), place(draw(rng, (32, 3)))
    row, both = fb.quantize(place(draw(rng, 3))), fb.quantize(place(draw(rng, (2, 3))))
    for call, sentence in (
        (lambda: fb.matmul(x, w, activation=["silu"]), "activation: .'silu'. is not an activation"),
        (lambda: fb.matmul(x, w, bias=row), "bias is a QuantizedArray, but a plain array is needed; deq"),
        (lambda: fb.matmul(x, w, residual=both), "residual is a QuantizedArray, but a plain array"),
        (lambda: fb.matmul(x, w, bias=fb.DualWeight(w)), "bias is a DualWeight, but .*; pass its master"),
        (lambda: fb.matmul(x, w, certify="x"), "certify is 'x', but .*; pass one"),
        (lambda: fb.quantize(x, axis="0"), "axis='0', but x of shape .* to 1; pass one of these"),
        (lambda: fb.quantize(x, outer=1.5), "outer=1.5 is neither an exponent .*; pass one of these"),
        (lambda: fb.quantize(x, outer=200), "from 200 to 200, but -119 to 120 .*; clip them"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            call()
    for rank in (None, float("nan"), float("inf"), "3", 1.5, -1, [1]):
        with pytest.raises(ValueError, match="rank is .*, but a whole number of at .*; pass 0"):
            fb.DualWeight(w, rank)
    for outliers in ("x", None, 1.5, [1.5], [True], [2**70], [[1, 2]], [[1], [1, 2]], put(np.array([1]))):
        with pytest.raises(TypeError, match="outliers is .*, but .* pass an int or a list of ints"):
            fb.DualWeight(w, 2, outliers=outliers)
    with pytest.raises(fb.ShapeError, match="outliers holds row 32, .*; leave it out"):
        fb.DualWeight(w, 2, outliers=[32])
    assert fb.DualWeight(w, 2, outliers=[5, 5, 1]).outlier_index.tolist() == [1, 5]


def test_places_are_told(rng):
    x, w = draw(rng, (2, 32)), draw(rng, (32, 3))
    with pytest.raises(TypeError, match="x is a numpy array on the host but outer is a fake array on cuda:0"):
        fb.quantize(x, outer=put(np.ones((2, 1), np.int32)))
    with pytest.raises(TypeError, match="a is a fake array on cuda:0 but out is a QuantizedArray; move"):
        fb.matmul(put(x), put(w), out=fb.quantize(put(x)))
    with pytest.raises(TypeError, match="a is a fake array on cuda:0 but out is a Python str; move"):
        fb.matmul(put(x), put(w), out="x")


def test_certificate_of_an_empty_contraction(rng):
    w = put(np.empty((0, 4), np.float32))
    y, certificate = fb.matmul(put(np.empty((3, 0), np.float32)), fb.DualWeight(w), certify=True)
    assert not y.array.any() and certificate.bound == 0


# ---- containers whose arrays were replaced by hand
def replaced(q, **fields):
    new = q.T.T
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def uses(x, q):
    """What reads a container."""
    yield lambda: fb.dequantize(q)
    for track in ("fp4", "bf16"):
        yield lambda track=track: fb.matmul(x, q, track=track)
    yield lambda: fb.linear(x, q.T)
    yield lambda: fb.quantize(fb.dequantize(fb.quantize(x.T)), axis=-2, out=q)


def test_parts_on_two_devices(rng):
    x, w = draw(rng, (16, 32)), draw(rng, (32, 16))
    q = fb.quantize(put(w), axis=-2)
    for name in ("block_scale", "outer_scale"):
        there, here = FakeArray(getattr(q, name).array, 1), getattr(q, name).array
        for part, place in ((there, "fake array on cuda:1"), (here, "numpy array on the host")):
            for call in uses(put(x), replaced(q, **{name: part})):
                with pytest.raises(TypeError, match=f"cuda:0 but .*{name} is a {place}; move"):
                    call()


def test_parts_that_do_not_fit(rng):
    x, w = draw(rng, (16, 32)), draw(rng, (32, 16))
    q = fb.quantize(put(w), axis=-2)
    want = fb.matmul(put(x), q)
    for fields, sentence in (
        ({"packed": q.packed[:4]}, r"packed of .* must be \(16, 16\), but is \(4, 16\); pass"),
        ({"block_scale": None}, r"block_scale of .* must be \(16, 2\), but is None; pass"),
        ({"outer_scale": q.outer_scale[:4]}, r"outer_scale of .*, but is \(4, 1\); reshape it"),
        ({"outer_scale": None}, "outer_scale of .*, but is None; reshape it"),
        ({"outer_scale": put(np.ones((16, 1), np.int32))}, "has dtype int32, but float32 is needed; pass"),
        ({"_expanded": put(np.ones((3, 3), np.uint8))}, r"expanded of .*, but is \(3, 3\); pass"),
        ({"format": "nvfp5"}, "'nvfp5' is not a format"), ({"order": (0, 0)}, "not a permutation .*; pass"),
    ):  # fmt: skip
        for call in list(uses(put(x), replaced(q, **fields)))[:3]:
            with pytest.raises((TypeError, ValueError), match=sentence):
                call()
    close(fb.matmul(put(x), q), want.array)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_outer_scale_of_another_dtype(rng, dtype):
    """Converted where it is read; nothing is written to it."""
    x, w = draw(rng, (16, 32)), draw(rng, (32, 16))
    for fmt in ("nvfp4_exact", "nvfp4", "fp8"):
        q = fb.quantize(put(w), fmt, axis=-2, outer=-3)
        outer = put(q.outer_scale.array.astype(fb.interop.BFLOAT16 if dtype == "bfloat16" else dtype))
        other = fb.QuantizedArray(q.packed, q.block_scale, outer, fmt, q.shape, q.order)
        for track in ("fp4", "bf16"):
            for _ in range(2):
                close(fb.matmul(put(x), other, track=track), fb.matmul(put(x), q, track=track).array)
        close(fb.dequantize(other), fb.dequantize(q).array)
        with pytest.raises(
            fb.DTypeError, match=f"outer_scale has dtype {dtype}, but float32 is written; pass"
        ):
            fb.quantize(put(w), fmt, axis=-2, outer=-3, out=other)
    for place in (put, np.asarray):
        q, exponents = fb.quantize(place(w), axis=-2), place(np.ones((16, 1), np.int32))
        with pytest.raises(fb.DTypeError, match="dtype int32, but float32 is needed; pass the decode scales"):
            fb.QuantizedArray(q.packed, q.block_scale, exponents, q.format, q.shape, q.order)


@pytest.mark.parametrize("place", [np.asarray, put], ids=["host", "device"])
def test_parts_of_a_weight_that_do_not_fit(rng, place):
    w, x = draw(rng, (32, 16)), place(draw(rng, (8, 32)))
    other = fb.DualWeight(place(w[:8, :8].copy()))
    for fields, sentence in (
        ({"master": other.master}, r"master has shape \(8, 8\) but the weight has shape \(32, 16\); make"),
        ({"twin": other.twin}, r"twin has shape \(8, 8\) but .*; make"),
        ({"shape": (3, 3)}, r"master has shape \(32, 16\) but the weight has shape \(3, 3\); make"),
    ):
        dual = fb.DualWeight(place(w), 4, outliers=2)
        fb.matmul(x, dual), fb.matmul(x, dual)
        for name, value in fields.items():
            setattr(dual, name, value)
        calls = [lambda d=dual, t=t: fb.matmul(x, d, track=t) for t in ("dual", "fp4", "bf16", "reference")]
        for call in (*calls, dual.refresh, lambda d=dual: d.refresh(factors=False)):
            with pytest.raises((fb.ShapeError, ValueError), match=sentence):
                call()


def test_parts_of_a_weight_on_two_devices(rng):
    w, x = draw(rng, (32, 16)), put(draw(rng, (8, 32)))
    there, here = fb.DualWeight(FakeArray(w, 1)), fb.DualWeight(w)
    for name in ("master", "twin"):
        for other, where in ((there, "fake array on cuda:1"), (here, "numpy array on the host")):
            dual = fb.DualWeight(put(w), 4)
            setattr(dual, name, getattr(other, name))
            for call in (lambda d=dual: fb.matmul(x, d), dual.refresh):
                with pytest.raises(TypeError, match=f"DualWeight: .*{where}.*; move"):
                    call()
    dual = fb.DualWeight(put(w), 4)
    dual.rank = 7
    with pytest.raises(ValueError, match=r"rank and outlier rows are \(7, 0\), but .* \(4, 0\); make"):
        fb.matmul(x, dual)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_weight_on_a_device_that_is_not_current(rng, dtype, gpu):  # noqa: F811
    """Everything is made on the weight's device: `Fake` asserts that it is current then."""
    kind = fb.interop.BFLOAT16 if dtype == "bfloat16" else dtype
    x, w, new = (draw(rng, shape).astype(kind) for shape in ((8, 32), (32, 16), (32, 16)))
    there = fb.DualWeight(FakeArray(w.copy(), 1), 4, outliers=2)
    for factors in (True, False):
        there.refresh(FakeArray(new, 1), factors)
        assert there.master.device == there.twin.packed.device == there.up.device == 1
        assert np.isfinite(fb.matmul(FakeArray(x, 1), there).array.astype(np.float32)).all()
    assert gpu.fake.device == 0


def test_gradient_that_is_a_container(rng):
    g, x, w = (put(draw(rng, shape)) for shape in ((8, 16), (8, 32), (32, 16)))
    for wrong in (fb.quantize(g), fb.DualWeight(g)):
        with pytest.raises(
            TypeError, match=f"g is a {type(wrong).__name__}, but .*; pass that of the product"
        ):
            fb.matmul_vjp(wrong, x, w)


def test_out_over_any_part_of_an_operand(rng):
    """Expanded bytes, twin and branch of a weight are inputs, too; without a plan and with one."""
    w, x = draw(rng, (64, 64)), put(draw(rng, (8, 64)))
    q, dual = fb.quantize(put(w), axis=-2, expand=True), fb.DualWeight(put(w), 8)
    parts = [(q, q._expanded), (dual, dual.twin.packed), (dual, dual.twin._expanded)]
    parts += [(dual, dual.branch.up_t.owner), (dual, dual.branch.down_t.owner), (dual, dual.master)]
    for planned in (False, True):
        for weight, part in parts:
            if planned:
                fb.matmul(x, weight, dtype="bfloat16", out=put(np.zeros((8, 64), fb.interop.BFLOAT16)))
            flat = part.array.reshape(-1).view(np.uint8)[:1024].view(fb.interop.BFLOAT16)
            with pytest.raises(ValueError, match="out overlaps b in memory; pass an out that shares nothing"):
                fb.matmul(x, weight, dtype="bfloat16", out=FakeArray(flat.reshape(8, 64)))


def test_signatures_are_not_kept_for_ever(rng, monkeypatch):
    monkeypatch.setattr(gemm_cuda, "_MOST", 4)
    w = draw(rng, (32, 16))
    q = fb.quantize(put(w), axis=-2)
    for m in range(1, 12):
        x = draw(rng, (m, 32))
        for _ in range(2):
            y = fb.matmul(fb.quantize(put(x), search="fast"), q)
            close(y, fb.matmul(x, fb.quantize(w, axis=-2)))
        assert len(gemm_cuda._NUMBERS) <= 4


# ---- pictures and sequences
@pytest.mark.parametrize("track", ["bf16", "fp4", "dual"])
@pytest.mark.parametrize("shape", [(2, 0, 4, 8), (1, 3, 0, 24), (2, 0, 0, 17), (1, 2, 3, 0)], ids=str)
def test_padding_around_nothing(rng, track, shape):
    """All that the kernel sees is padding: zeros, then the epilogue. No quantiser has made scales."""
    w, bias = draw(rng, (3, 3, 3, shape[3])), draw(rng, 3)
    a, b = (fb.DualWeight(w, 2), fb.DualWeight(put(w), 2)) if track == "dual" else (w, put(w))
    x = np.zeros(shape, np.float32)
    for more in ({}, {"bias": bias, "activation": "silu"}):
        want = fb.conv2d(x, a, padding=2, track=track, **more)
        placed = more | ({"bias": put(bias)} if more else {})
        y = fb.conv2d(put(x), b, padding=2, track=track, **placed)
        assert y.shape == want.shape and want.size
        np.testing.assert_allclose(y.array, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", [np.asarray, put], ids=["host", "device"])
@pytest.mark.parametrize("track", ["bf16", "fp4"])
def test_no_output_channels(rng, place, track):
    """O = 0 (N = 0) with an epilogue."""
    x, w, bias = place(draw(rng, (1, 3, 3, 16))), place(draw(rng, (0, 3, 3, 16))), place(draw(rng, 0))
    more = {"bias": bias, "residual": place(draw(rng, (1, 3, 3, 0))), "activation": "silu", "track": track}
    assert fb.conv2d(x, w, padding=1, **more).shape == (1, 3, 3, 0)
    more["residual"] = place(draw(rng, (3, 0)))
    assert fb.matmul(place(draw(rng, (3, 16))), place(draw(rng, (16, 0))), **more).shape == (3, 0)


@pytest.mark.parametrize("place", [np.asarray, put], ids=["host", "device"])
def test_attention_settings(rng, place):
    q = place(draw(rng, (1, 4, 2, 16)))
    mask = place(np.ones((4, 4), bool))
    for settings, sentence in (
        ({"scale": "x"}, "scale is 'x', but a finite number"), ({"scale": 1e300}, "scale is 1e.300, but a"),
        ({"scale": place(np.ones(()))}, "scale is .*, but a finite number"),
        ({"scale": float("nan")}, "scale is nan, but a finite"), ({"scale": 10**400}, "scale is 100.*finite"),
        ({"outliers": None}, "outliers is None, but a number"), ({"outliers": "x"}, "outliers is 'x', but"),
        ({"outliers": 1.5}, "outliers is 1.5, but"), ({"causal": mask}, "causal is a .*array.*, but True"),
        ({"causal": "no"}, "causal is a str, but True or False"), ({"causal": None}, "causal is a NoneType"),
    ):  # fmt: skip
        for call in (lambda **s: fb.attention(q, q, q, **s), lambda **s: fb.attention_vjp(q, q, q, q, **s)):
            with pytest.raises((TypeError, ValueError), match=f"(?i)attention: {sentence}"):
                call(**settings)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", range(3))
@pytest.mark.parametrize("causal", [False, True])
def test_attention_does_not_hide_what_is_not_finite(rng, bad, where, causal):
    arrays = [draw(rng, (1, 4, 2, 16)) for _ in range(3)]
    arrays[where][0, 1, 0, 3] = bad
    with np.errstate(all="ignore"):
        want = fb.attention(*arrays, causal=causal)
        got = fb.attention(*map(put, arrays), causal=causal).array
    assert not np.isnan(bad) or np.isnan(got).any()
    assert np.array_equal(np.isnan(got), np.isnan(want))  # a key of -inf may rightly have no weight
