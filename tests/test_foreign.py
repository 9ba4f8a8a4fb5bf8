"""Containers of other programs' bytes, and exact changes of format: no value changes, or a sentence."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16.python_ref import formats as F

FORMATS = ["nvfp4_exact", "nvfp4", "mxfp4", "fp8"]


def numbers(rng, shape, octaves=2):
    """Normal numbers under row scales a few octaves apart."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-octaves, octaves + 1, (*shape[:-1], 1)))
    return x.astype(np.float32)


def same_values(a, b):
    np.testing.assert_array_equal(fb.dequantize(a), fb.dequantize(b))


# ---- from_parts --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape, axis", [((4, 64), -1), ((64, 6), 0), ((3, 32, 5), 1), ((2, 3, 96), -1)])
def test_parts_come_back(rng, format, shape, axis):
    xq = fb.quantize(numbers(rng, shape), format, axis=axis)
    again = fb.from_parts(xq.packed, xq.block_scale, xq.outer_scale, format, axis=axis)
    assert (again.shape, again.order, again.format, again.stats) == (xq.shape, xq.order, xq.format, None)
    assert np.shares_memory(again.packed, xq.packed)
    same_values(again, xq)


@pytest.mark.parametrize("k", [1, 15, 16, 17, 31, 33, 48])
@pytest.mark.parametrize("format", ["nvfp4_exact", "nvfp4", "mxfp4"])
def test_any_length_and_nibble_order(rng, k, format):
    """Files keep ceil(K / 2) bytes, the container pads to whole blocks; the rest of a byte is not read."""
    xq = fb.quantize(numbers(rng, (5, k)), format)
    file = xq.packed[:, : -(-k // 2)].copy()
    if k % 2:
        file[:, -1] |= 0x70
    for order in ("low_first", "high_first"):
        data = file if order == "low_first" else (file >> 4) | (file << 4)
        again = fb.from_parts(data, xq.block_scale, xq.outer_scale, format, xq.shape, nibble_order=order)
        same_values(again, xq)
        assert again.packed.shape == xq.packed.shape


def test_names_of_four_bits_in_ml_dtypes_and_torch(rng):
    for k in (32, 37):
        x = numbers(rng, (6, k))
        xq = fb.quantize(x, "nvfp4")
        codes = F.unpack(xq.packed)[:, :k].view(ml_dtypes.float4_e2m1fn)  # one code a byte
        scale = xq.block_scale.view(ml_dtypes.float8_e4m3fn)
        same_values(fb.from_parts(codes, scale, xq.outer_scale), xq)
    torch = pytest.importorskip("torch")
    tq = fb.quantize(torch.from_numpy(x[:, :32].copy()), "nvfp4")
    pairs = tq.packed.view(torch.float4_e2m1fn_x2)
    again = fb.from_parts(pairs, tq.block_scale.view(torch.float8_e4m3fn), tq.outer_scale)
    assert isinstance(again.packed, torch.Tensor) and again.shape == (6, 32)
    assert torch.equal(fb.dequantize(again), fb.dequantize(tq))
    mx = fb.quantize(x[:, :32], "mxfp4")
    same_values(fb.from_parts(mx.packed, mx.block_scale.view(ml_dtypes.float8_e8m0fnu), None, "mxfp4"), mx)


def test_a_right_operand_multiplies(rng):
    w, a = numbers(rng, (64, 10)), numbers(rng, (3, 64))
    wq = fb.quantize(w, "nvfp4", axis=-2)
    foreign = fb.from_parts(wq.packed, wq.block_scale, float(wq.outer_scale.item()), axis=-2)
    np.testing.assert_array_equal(fb.matmul(a, foreign), fb.matmul(a, wq))


def test_reads_a_comfy_file(shared):
    """High nibble first; scales in 128 x 4 tiles, which the test lays out in rows."""
    z = np.load(shared / "conformance/layouts/comfy_kitchen_nvfp4.npz")
    want = z["128x64.dequant"]
    r, c = np.mgrid[:128, :4]
    scale = z["128x64.weight_scale"].reshape(-1)[(r % 32) * 16 + r // 32 * 4 + c]
    parts = z["128x64.weight"], scale, z["128x64.weight_scale_2"]
    weight = fb.from_parts(*parts, nibble_order="high_first")
    np.testing.assert_allclose(fb.dequantize(weight), want, rtol=1e-6)
    assert not np.allclose(fb.dequantize(fb.from_parts(*parts)), want, rtol=1e-6)


P, S = np.full((4, 16), 0x21, np.uint8), np.full((4, 2), 0x38, np.uint8)


@pytest.mark.parametrize("arguments, kind, sentence", [
    ((P, S[:, :1]), fb.ShapeError, r"block_scale of a nvfp4 .* must be \(4, 2\), but is \(4, 1\)"),
    ((P,), fb.ShapeError, r"block_scale .* but is None"),
    ((P, S, 1.0, "nvfp4", (4, 30)), fb.ShapeError, r"an array of shape \(4, 32\) .* shape is \(4, 30\)"),
    ((P, S, 1.0, "nvfp4", (32, 4)), fb.ShapeError, r"holds an array of shape \(4, 32\)"),
    ((P, S, 1.0, "nvfp4", None, 2), fb.ShapeError, "axis=2, but packed has axes -2 to 1"),
    ((P, S, np.ones(4, np.float32)), fb.ShapeError, r"has shape \(4,\), but one number or \(4, 1\)"),
    ((P, S, 1.0, "mxfp4"), ValueError, "outer_scale is 1.0, but mxfp4 has none"),
    ((P.astype(np.int32), S), fb.DTypeError, "packed has dtype int32, but uint8 or float4_e2m1fn"),
    ((P, S.astype(np.float32)), fb.DTypeError, "block_scale has dtype float32, but uint8 or float8_e4m3fn"),
    ((P, S | 0x80), ValueError, "8 of the 8 bytes of block_scale are negative"),
    ((P, S + 1, 1.0, "nvfp4_exact"), ValueError, "8 of the 8 block scales cannot be of format nvfp4_exact"),
    ((P, S, 3.0, "nvfp4_exact"), ValueError, "an outer scale that is no power of two"),
    ((P, S, 1.0, "nvfp4", None, -1, "big"), ValueError, "nibble_order: 'big' is not known"),
    ((np.uint8(3), S), fb.ShapeError, "packed has no axes"),
])  # fmt: skip
def test_parts_that_do_not_fit(arguments, kind, sentence):
    with pytest.raises(kind, match=sentence):
        fb.from_parts(*arguments)


# ---- recast ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape, axis", [((6, 70), -1), ((33, 7), 0), ((2, 3, 40), 1), ((0, 16), -1), ((3, 0), -1)]
)
@pytest.mark.parametrize("source", ["nvfp4_exact", "mxfp4"])
@pytest.mark.parametrize("target", ["fp8", "nvfp4", "nvfp4_exact"])
def test_the_values_stay(rng, source, target, shape, axis):
    xq = fb.quantize(numbers(rng, shape), source, axis=axis)
    other = fb.recast(xq, target)
    assert other.format.name == target and (other.shape, other.order) == (xq.shape, xq.order)
    same_values(other, xq)
    if target == "nvfp4":
        assert other.outer_scale.size == 1
        if source == "nvfp4_exact":
            same_values(fb.recast(other, "nvfp4_exact"), xq)


def test_fp8_of_nvfp4_exact_is_its_expansion(rng):
    xq = fb.quantize(numbers(rng, (8, 48)))
    other = fb.recast(xq, "fp8")
    np.testing.assert_array_equal(other.packed, xq.expanded)
    np.testing.assert_array_equal(other.outer_scale, xq.outer_scale)
    a = numbers(rng, (5, 48))
    np.testing.assert_array_equal(fb.matmul(a, other.T, track="bf16"), fb.matmul(a, xq.T, track="bf16"))


def test_foreign_nvfp4_with_exact_mantissas_takes_a_shift_a_row(rng):
    """Every E4M3 scale with mantissa 1, 1.25, 1.5, under a global scale that is no power of two: 6 * 448 lies
    beyond E4M3, so the row takes a power of two to its outer scale."""
    scales = np.array([b for b in range(0x20, 0x78) if b & 7 in (0, 2, 4)], np.uint8)
    block = rng.choice(scales[(scales >= 0x40)], (20, 4))
    xq = fb.from_parts(rng.integers(0, 256, (20, 32), np.uint8), block, 0.0137)
    other = fb.recast(xq, "fp8")
    same_values(other, xq)
    ratio = other.outer_scale / np.float32(0.0137)
    assert other.outer_scale.shape == (20, 1) and (ratio >= 1).all() and (ratio > 1).any()
    assert (np.frexp(ratio)[0] == 0.5).all()
    with pytest.raises(ValueError, match="products of a code and its block scale"):
        xq.expanded  # noqa: B018  (without a shift, 6 * 128 is too large)


def test_what_would_change_is_refused_or_said(rng):
    x = numbers(rng, (6, 64))
    te = fb.quantize(x, "nvfp4")
    with pytest.raises(ValueError, match=r"\d+ of the 384 numbers of nvfp4 do not fit E4M3.*approx=True"):
        fb.recast(te, "fp8")
    with pytest.warns(RuntimeWarning, match=r"of the 384 numbers of nvfp4 were rounded to E4M3"):
        rounded = fb.recast(te, "fp8", approx=True)
    value, near = fb.dequantize(te), fb.dequantize(rounded)
    assert not np.array_equal(near, value) and np.allclose(near, value, rtol=2**-4, atol=0)
    with pytest.raises(ValueError, match="outer scale of nvfp4 is no power of two"):
        fb.recast(te, "nvfp4_exact")
    odd = fb.from_parts(P, S + 1, 1.0)
    with pytest.raises(ValueError, match="8 of the 8 block scales are not m"):
        fb.recast(odd, "nvfp4_exact")
    far = fb.quantize(np.float32([[1.0] * 16, [2.0**-30] * 16]))
    with pytest.raises(ValueError, match=r"block scales of one tensor spread over 3\d\.\d octaves"):
        fb.recast(far, "nvfp4")
    same_values(fb.recast(far, "fp8"), far)  # a row has a scale of its own
    wide = fb.quantize(np.float32([[1.0] * 32 + [2.0**-30] * 32]), "mxfp4")
    with pytest.raises(ValueError, match="of mxfp4 do not fit E4M3"):
        fb.recast(wide, "fp8")
    rows = fb.quantize(x, "nvfp4", outer="row")
    with pytest.raises(ValueError, match="do not differ by powers of two; quantize with outer='tensor'"):
        fb.recast(rows, "nvfp4")
    assert fb.recast(te, "nvfp4") is te
    for bad, target in ((te, "mxfp4"), (fb.quantize(x, "fp8"), "nvfp4")):
        with pytest.raises(ValueError, match="without rounding"):
            fb.recast(bad, target)
    with pytest.raises(ValueError, match="never approximated"):
        fb.recast(te, "nvfp4_exact", approx=True)
    with pytest.raises(TypeError, match="quantize it first"):
        fb.recast(x, "fp8")


def test_spread_at_the_edge():
    """Two rows whose scales lie 14 octaves apart still share one outer scale; 18 do not."""
    for octaves, fits in ((0, True), (14, True), (18, False)):
        xq = fb.quantize(np.float32([[6.0] * 16, [6 * 2.0**-octaves] * 16]))
        if fits:
            same_values(fb.recast(xq, "nvfp4"), xq)
        else:
            with pytest.raises(ValueError, match="spread over 18.0 octaves"):
                fb.recast(xq, "nvfp4")


def test_nan_blocks_and_zeros_stay(rng):
    x = numbers(rng, (4, 64))
    x[1, 20], x[2] = np.nan, 0
    xq = fb.quantize(x, nan="propagate")
    for target in ("fp8", "nvfp4"):
        same_values(fb.recast(xq, target), xq)
    torch = pytest.importorskip("torch")
    tq = fb.recast(fb.quantize(torch.from_numpy(x[2:].copy())), "fp8")
    assert isinstance(tq.packed, torch.Tensor) and tq.packed.shape == (2, 64)
