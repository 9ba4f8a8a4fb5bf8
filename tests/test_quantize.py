"""The quantisers on the CPU: bit-equal to the reference over formats, rules, outer scales, axes, dtypes and
shapes.
"""

from __future__ import annotations

import io

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fp4bf16 as fb
from fp4bf16.backends import cpu_quantize as cpu
from fp4bf16.backends import threads
from fp4bf16.python_ref import quantize as Q
from fp4bf16.quantize import expand, fake_quantize

BF16 = ml_dtypes.bfloat16
RULES = [(f, r, s) for f in Q.BLOCK for r in Q.SCALE_RULES[f]
         for s in (("full", "fast") if f == "nvfp4_exact" else ("full",))]  # fmt: skip
SHAPES = [(64, 320), (3, 17), (5, 40), (1, 1), (7, 33), (2, 31), (1, 512), (0, 5), (4, 0)]


def _reference(x, fmt, **kwargs):
    return Q.quantize(np.asarray(x, np.float32), fmt, **kwargs)


def _check(xq: fb.QuantizedArray, q: Q.Quantized) -> None:
    """Same bytes, same decoded values, as stored and in the logical shape."""
    for name in ("packed", "block_scale", "outer_scale"):
        ours, theirs = getattr(xq, name), getattr(q, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert np.asarray(ours).dtype == theirs.dtype
            np.testing.assert_array_equal(np.asarray(ours), theirs, err_msg=name)
    value = np.asarray(fb.dequantize(xq))
    assert value.shape == xq.shape == tuple(q.shape)
    np.testing.assert_array_equal(value, Q.dequantize(q))


def _values(rng, shape, kind):
    if kind == "octaves":
        return rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, shape))
    if kind == "rows":  # zero rows, rows many decades apart, float32 subnormals
        return (
            rng.standard_t(2, shape)
            * 10.0 ** rng.choice([-44, -36, -3, 0, 25], (shape[0], 1))
            * (rng.random((shape[0], 1)) < 0.8)
        )
    if kind == "grid":
        return rng.integers(-12, 13, shape) / 2
    return rng.standard_normal(shape)


# ---- bit equality ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt, rule, search", RULES)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
def test_rows_equal_reference(rng, fmt, rule, search, dtype):
    outer = None if fmt == "mxfp4" else "row"
    for shape in SHAPES:
        for kind in ("gauss", "octaves", "rows", "grid"):
            x = _values(rng, shape, kind).astype(dtype)
            q = _reference(x, fmt, outer=outer, scale_rule=rule, search=search)
            xq = fb.quantize(x, fmt, outer=outer, scale_rule=rule, search=search)
            _check(xq, q)
            want = Q.dequantize(q)
            out = np.full(shape, np.nan, dtype)
            cpu.fake_quantize_rows(x, fmt, search=search, scale_rule=rule, out=out)
            np.testing.assert_array_equal(out, want.astype(dtype))
            np.testing.assert_array_equal(fb.dequantize(xq, "bfloat16"), want.astype(BF16))


@pytest.mark.parametrize("fmt", Q.BLOCK)
@pytest.mark.parametrize("axis", [0, 1, 2, 3, -2])
@pytest.mark.parametrize("outer", ["default", "row", "image", "head", "tensor", 3, "array", None])
def test_axes_and_outers(rng, fmt, axis, outer):
    x = rng.standard_normal((3, 18, 2, 33)).astype(np.float32) * 10.0 ** rng.integers(-3, 4, (3, 1, 2, 1))
    x = x.astype(np.float32)
    lead = [n for i, n in enumerate(x.shape) if i != axis % 4]
    given_outer = rng.integers(-3, 5, (lead[0], 1, lead[2], 1)) if outer == "array" else outer
    refused = (
        (fmt == "mxfp4") != (outer is None) and not (fmt == "mxfp4" and outer == "default")
        or (outer == "image" and axis == 0) or (outer == "head" and axis % 4 not in (1, 3))
    )  # fmt: skip
    if refused:
        with pytest.raises(ValueError, match="outer"):
            fb.quantize(x, fmt, axis=axis, outer=given_outer)
        return
    q = _reference(x, fmt, axis=axis, outer=given_outer)
    xq = fb.quantize(x, fmt, axis=axis, outer=given_outer)
    _check(xq, q)
    assert xq.axis == axis % 4
    np.testing.assert_array_equal(
        fake_quantize(x, fmt, axis=axis, outer=given_outer, search="full"), Q.dequantize(q)
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_floats_are_rounded_to_float32_first(rng, dtype):
    x = rng.standard_normal((5, 50)).astype(dtype)
    for fmt in Q.BLOCK:
        xq = fb.quantize(x, fmt)
        _check(xq, _reference(x.astype(np.float32), fmt))
        assert xq.stats.source_dtype == np.dtype(dtype).name
        np.testing.assert_array_equal(fb.dequantize(xq, dtype), fb.dequantize(xq).astype(dtype))


def test_views(rng):
    """Non-contiguous, reversed, read-only, transposed and zero-stride inputs give the bytes of their copies.
    """
    base = rng.standard_normal((40, 66)).astype(np.float32)
    readonly = base[:]
    readonly.flags.writeable = False
    views = [base[::2], base[:, ::3], base[::-1, ::-1], base.T, readonly, np.broadcast_to(base[:1], (4, 66)),
             base[1:, 1:], np.lib.stride_tricks.as_strided(base, (9, 32), (4, 8))]  # fmt: skip
    for view in views:
        for axis in (0, 1):
            a, b = fb.quantize(view, axis=axis), fb.quantize(view.copy(), axis=axis)
            np.testing.assert_array_equal(a.packed, b.packed)
            np.testing.assert_array_equal(a.block_scale, b.block_scale)
    for array in (base, base.astype(BF16)):  # misaligned by one byte
        raw = np.empty(array.nbytes + 1, np.uint8)
        shifted = raw[1:].view(array.dtype).reshape(array.shape)
        shifted[...] = array
        np.testing.assert_array_equal(fb.quantize(shifted).packed, fb.quantize(array).packed)


def test_read_only_inputs_compile_nothing(rng):
    from fp4bf16.backends import cpu_quantize_kernels as kernels

    x = rng.standard_normal((4, 40)).astype(np.float32)
    want = fb.quantize(x)
    before = len(kernels.exact_rows.signatures), len(kernels.dequantize_rows.signatures)
    for array in (x, want.packed, want.block_scale, want.outer_scale):
        array.flags.writeable = False
    np.testing.assert_array_equal(fb.quantize(x).packed, want.packed)
    assert np.isfinite(fb.dequantize(want)).all() and fb.quantize(x[:0]).packed.size == 0
    assert (len(kernels.exact_rows.signatures), len(kernels.dequantize_rows.signatures)) == before


@pytest.mark.parametrize("shape", [(48, 20), (300, 257), (4096, 17)])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_axis_0_is_the_transpose(rng, shape, dtype):
    w = rng.standard_normal(shape).astype(dtype)
    a, b = fb.quantize(w, axis=0), fb.quantize(np.ascontiguousarray(w.T)).T
    assert a.shape == b.shape == shape and a.axis == b.axis == 0
    np.testing.assert_array_equal(a.packed, b.packed)
    np.testing.assert_array_equal(fb.dequantize(a), fb.dequantize(b))


def test_thread_count_changes_no_byte(rng):
    x = rng.standard_normal((600, 1200)).astype(np.float32)
    before = threads.num_threads()
    results = []
    try:
        for n in (1, 2, 3, 7):
            threads.set_num_threads(n)
            xq = fb.quantize(x, search="fast")
            results.append(
                (xq.packed, xq.block_scale, xq.stats.row_error_sq, xq.stats.clipped, fb.dequantize(xq))
            )
    finally:
        threads.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@given(
    x=hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=40),
                 elements=st.floats(-2.0**100, 2.0**100, width=32)),
    fmt=st.sampled_from(sorted(Q.BLOCK)), data=st.data(),
)  # fmt: skip
def test_any_array(x, fmt, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    rule = data.draw(st.sampled_from(Q.SCALE_RULES[fmt]))
    search = data.draw(st.sampled_from(("full", "fast")))
    xq = fb.quantize(x, fmt, axis=axis, scale_rule=rule, search=search)
    _check(xq, _reference(x, fmt, axis=axis, scale_rule=rule, search=search))
    value = fb.dequantize(xq)
    assert np.isfinite(value).all()
    assert ((value == 0) | (np.sign(value) == np.sign(x))).all()


@given(bits=hnp.arrays(np.uint32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=70)),
       fmt=st.sampled_from(sorted(Q.BLOCK)))  # fmt: skip
def test_any_bits(bits, fmt):
    """Every pattern of 32 bits, NaN, Inf and subnormals among them, under nan="propagate"."""
    x = bits.view(np.float32)
    xq = fb.quantize(x, fmt, nan="propagate")
    _check(xq, Q.quantize(x, fmt, nan="propagate"))


# ---- statistics --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", Q.BLOCK)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_norms(rng, fmt, scale):
    x = (rng.standard_normal((9, 100)) * scale).astype(np.float32)
    xq = fb.quantize(x, fmt)
    wide, value = x.astype(np.float64), fb.dequantize(xq).astype(np.float64)
    s = xq.stats
    np.testing.assert_allclose(s.row_norm_sq, (wide**2).sum(1), rtol=1e-13)
    np.testing.assert_allclose(s.row_quantized_norm_sq, (value**2).sum(1), rtol=1e-13)
    np.testing.assert_allclose(s.row_error_sq, ((wide - value) ** 2).sum(1), rtol=1e-13)
    assert s.error_norm_sq == pytest.approx(((wide - value) ** 2).sum())


def test_counts():
    x = np.zeros((4, 64), np.float32)
    x[0, 0], x[0, 16], x[1, :16], x[2, 5] = 288, 1e-3, 7, 1000
    s = fb.quantize(x, outer=0).stats
    assert (s.zero_blocks, s.underflowed_blocks, s.overflow) == (16 - 4, 1, 1)
    assert s.clipped == 1  # 1000 beyond 6 * 64; 288 is reached and 7 = 4 * 1.75 is rounded within the scale
    s = fb.quantize(x, "nvfp4", outer="tensor").stats
    assert (s.zero_blocks, s.underflowed_blocks, s.overflow) == (12, 1, 0)
    s = fb.quantize(x, "nvfp4", outer=0).stats
    assert (s.underflowed_blocks, s.overflow) == (1, 0) and fb.quantize(
        x * 1e3, "nvfp4", outer=0
    ).stats.overflow == 3
    s = fb.quantize(np.float32([[7.5] + [0] * 31, [1e-38] + [0] * 31]), "mxfp4", scale_rule="floor").stats
    assert (s.clipped, s.underflowed_blocks, s.zero_blocks) == (1, 1, 0)
    assert fb.quantize(np.float32([[1000, 1]]), "fp8", outer=0).stats.clipped == 1


# ---- zeros, NaN, limits ------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", Q.BLOCK)
def test_zeros_stay_zero(fmt):
    for x in (np.zeros((3, 40), np.float32), np.full((3, 40), -0.0, np.float32)):
        xq = fb.quantize(x, fmt)
        assert np.array_equal(fb.dequantize(xq), np.zeros((3, 40)))
        if fmt != "fp8":
            assert not xq.packed.any() and not xq.block_scale.any()
            assert xq.stats.zero_blocks == xq.block_scale.size
    mixed = np.zeros((2, 64), np.float32)
    mixed[1, 40] = 3
    assert fb.dequantize(fb.quantize(mixed, fmt))[1, 40] == pytest.approx(3, rel=0.01)


@pytest.mark.parametrize("fmt", Q.BLOCK)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("outer", ["default", "tensor"])
def test_nan_raises_or_spreads_over_its_block_alone(rng, fmt, bad, outer):
    if fmt == "mxfp4" and outer == "tensor":
        outer = None
    x = rng.standard_normal((4, 96)).astype(np.float32)
    x[2, 50] = bad
    with pytest.raises(fb.NonFiniteError, match=r"1 NaN or Inf .*in row 2 at k = 50.*nan='propagate'"):
        fb.quantize(x, fmt, outer=outer)
    value = fb.dequantize(fb.quantize(x, fmt, outer=outer, nan="propagate"))
    block = Q.BLOCK[fmt]
    expected = np.zeros(x.shape, bool)
    expected[2, 50 // block * block : (50 // block + 1) * block] = True
    np.testing.assert_array_equal(np.isnan(value), expected)
    x[2, 50] = 0
    np.testing.assert_array_equal(
        value[~expected], fb.dequantize(fb.quantize(x, fmt, outer=outer))[~expected]
    )


def test_float64_beyond_float32_is_not_finite():
    with pytest.raises(fb.NonFiniteError, match="beyond float32"):
        fb.quantize(np.full((2, 16), 1e300))


def test_largest_and_smallest(rng):
    big = np.finfo(np.float32).max
    for fmt in Q.BLOCK:
        x = np.full((2, 32), big, np.float32)
        value = fb.dequantize(fb.quantize(x, fmt)).astype(np.float64)
        assert (value > 0.6 * big).all()
        tiny = (rng.standard_normal((32, 256)) * 1e-33).astype(np.float32)
        error = fb.quantize(tiny, fmt).stats
        assert error.error_norm_sq < 0.015 * error.norm_sq


# ---- expansion ---------------------------------------------------------------------------------------------
def test_expand_is_exact(rng):
    x = _values(rng, (6, 70), "octaves").astype(np.float32)
    xq = fb.quantize(x)
    q = _reference(x, "nvfp4_exact")
    np.testing.assert_array_equal(xq.expanded, Q.expand(q))
    value = xq.expanded.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, :70] * xq.outer_scale
    np.testing.assert_array_equal(value, fb.dequantize(xq))
    assert xq.expanded is xq.expanded  # made once
    bad = x.copy()
    bad[1, 3] = np.nan
    spread = fb.quantize(bad, nan="propagate").expanded
    assert (spread[1, :16] == 0x7F).all() and (spread != 0x7F).sum() == spread.size - 16


def test_expand_refuses_what_does_not_fit(rng):
    x = rng.standard_normal((4, 64)).astype(np.float32)
    with pytest.raises(ValueError, match="need more than E4M3's four bits.*use dequantize"):
        expand(fb.quantize(x, "nvfp4"))
    with pytest.raises(ValueError, match="mxfp4 span.*use dequantize"):
        expand(fb.quantize(x, "mxfp4"))
    fp8 = fb.quantize(x, "fp8")
    np.testing.assert_array_equal(expand(fp8), fp8.packed)
    foreign = fb.quantize(
        np.tile(np.float32([6, 1, 2, 3]), (2, 8)) * 64, "nvfp4", outer=0
    )  # every scale is 64
    assert (foreign.block_scale == 0x68).all() and expand(foreign).shape == (2, 32)


def test_round_bf16(rng):
    x = (rng.standard_normal(70001) * np.exp2(rng.integers(-140, 120, 70001))).astype(np.float32)
    x[:4] = np.nan, np.inf, -np.inf, np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        want = x.astype(BF16)
    np.testing.assert_array_equal(cpu.round_bf16(x).astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(cpu.round_bf16(x, np.empty_like(x)), want.astype(np.float32))
    halfway = np.arange(0x3F800000, 0x3F880000, 0x4000, dtype=np.uint32).view(np.float32)
    np.testing.assert_array_equal(cpu.round_bf16(halfway), halfway.astype(BF16))
    inplace = x.copy()
    assert cpu.round_bf16(inplace, inplace) is inplace
    np.testing.assert_array_equal(inplace, want.astype(np.float32))


# ---- arguments ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kwargs, error, message", [
    ({"format": "nvfp5"}, ValueError, "format: 'nvfp5' is not a format; did you mean 'nvfp4'"),
    ({"axis": 2}, fb.ShapeError, r"axis=2, but x of shape \(4, 32\) has axes -2 to 1"),
    ({"axis": 0.5}, fb.ShapeError, "axis=0.5"),
    ({"outer": "rows"}, ValueError, "outer='rows' is unknown; did you mean 'row'"),
    ({"outer": 1.5}, fb.DTypeError, "outer=1.5 is neither an exponent"),
    ({"outer": 121}, ValueError, "from 121 to 121, but -119 to 120"),
    ({"outer": np.zeros((3, 1), int)}, fb.ShapeError, r"\(3, 1\) do not broadcast to the stored rows"),
    ({"outer": None}, ValueError, "outer=None, but nvfp4_exact has an outer scale; pass outer=0"),
    ({"format": "mxfp4", "outer": "row"}, ValueError, "mxfp4 has no outer scale; pass outer=None"),
    ({"format": "nvfp4", "scale_rule": "even"}, ValueError, "'even' is not a rule of nvfp4"),
    ({"scale_rule": "te"}, ValueError, "nvfp4_exact has no scale rules"),
    ({"search": "quick"}, ValueError, "'quick' is not a search"),
    ({"nan": "ignore"}, ValueError, "'ignore' is not a policy"),
    ({"rounding": "up"}, ValueError, "'up' is not a rounding"),
    ({"stream": 7}, ValueError, "stream"),
    ({"out": np.zeros(3)}, TypeError, "out is a ndarray, but a QuantizedArray"),
])  # fmt: skip
def test_wrong_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        fb.quantize(np.ones((4, 32), np.float32), **kwargs)


@pytest.mark.parametrize("x, error, message", [
    (np.ones((2, 16), np.int32), fb.DTypeError, "x: has dtype int32.*astype"),
    (np.ones((2, 16), complex), fb.DTypeError, "complex128"),
    (np.float32(3), fb.ShapeError, "x has no axes"),
    ("text", TypeError, "x: is a builtins.str"),
])  # fmt: skip
def test_wrong_input(x, error, message):
    with pytest.raises(error, match=message):
        fb.quantize(x)


def test_dequantize_arguments(rng):
    xq = fb.quantize(rng.standard_normal((4, 5, 20)).astype(np.float32), axis=1)
    out = np.full((4, 5, 20), np.nan, np.float32)
    assert fb.dequantize(xq, out=out) is out
    np.testing.assert_array_equal(out, np.asarray(xq))
    assert fb.dequantize(xq, "float64").dtype == np.float64
    with pytest.raises(fb.ShapeError, match=r"out has shape \(2,\)"):
        fb.dequantize(xq, out=np.zeros(2, np.float32))
    with pytest.raises(fb.DTypeError, match="out has dtype float64"):
        fb.dequantize(xq, out=np.zeros((4, 5, 20)))
    with pytest.raises(fb.DTypeError, match="dtype is int32"):
        fb.dequantize(xq, "int32")
    with pytest.raises(TypeError, match="xq is a ndarray.*quantize it first"):
        fb.dequantize(out)
    with pytest.raises(ValueError, match="dequantize: stream is 1"):
        fb.dequantize(xq, stream=1)
    one = fb.quantize(np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match="out overlaps an input"):
        fb.dequantize(one, out=one.outer_scale)


def test_out(rng):
    x, y = rng.standard_normal((2, 6, 40)).astype(np.float32)
    for fmt in Q.BLOCK:
        out, want = fb.quantize(x, fmt), fb.quantize(y, fmt)
        packed = out.packed
        assert fb.quantize(y, fmt, out=out) is out and out.packed is packed
        np.testing.assert_array_equal(out.packed, want.packed)
        np.testing.assert_array_equal(fb.dequantize(out), fb.dequantize(want))
        assert out.stats.norm_sq == want.stats.norm_sq
    with pytest.raises(fb.ShapeError, match="out is nvfp4_exact of shape"):
        fb.quantize(x[:3], out=fb.quantize(y))
    frozen = fb.quantize(x)
    frozen.packed.flags.writeable = False
    with pytest.raises(ValueError, match="out.packed is read-only"):
        fb.quantize(x, out=frozen)


def test_compare(rng):
    x = rng.standard_normal((64, 256)).astype(np.float32)
    text = io.StringIO()
    rows = {r.name: r for r in fb.compare(x, file=text)}
    assert [line.split()[0] for line in text.getvalue().splitlines()[2:]] == [n.split()[0] for n in rows]
    assert rows["bf16"].bits == 16 and rows["bf16"].relative_error < 0.003
    for name, (xq, bits) in {
        "nvfp4_exact": (fb.quantize(x), 4.5 + 32 / 256), "mxfp4": (fb.quantize(x, "mxfp4"), 4.25),
        "fp8": (fb.quantize(x, "fp8"), 8 + 32 / 256),
    }.items():  # fmt: skip
        value = np.asarray(xq).astype(np.float64)
        error = np.linalg.norm(value - x) / np.linalg.norm(x.astype(np.float64))
        assert rows[name].relative_error == pytest.approx(error) and rows[name].bits == bits
        assert rows[name].sqnr_db == pytest.approx(-20 * np.log10(error))
        assert rows[name].underflowed == ((value == 0) & (x != 0)).mean()
    assert fb.compare(np.zeros((2, 16), np.float32), file=False)[0].relative_error == 0
    with pytest.raises(fb.NonFiniteError):
        fb.compare(np.full((2, 16), np.nan, np.float32), file=False)


# ---- frameworks --------------------------------------------------------------------------------------------
def test_torch(rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.from_numpy(rng.standard_normal((6, 40)).astype(np.float32))
    for tensor in (x, x.bfloat16(), x.double(), x.half(), x.t().contiguous().t(), x[::2], x.requires_grad_()):
        for fmt in Q.BLOCK:
            xq = fb.quantize(tensor, fmt)
            assert all(
                p is None or isinstance(p, torch.Tensor) for p in (xq.packed, xq.block_scale, xq.outer_scale)
            )
            want = fb.quantize(tensor.detach().float().numpy(), fmt)
            np.testing.assert_array_equal(xq.packed.numpy(), want.packed)
            value = fb.dequantize(xq, torch.bfloat16)
            assert value.dtype == torch.bfloat16 and value.shape == tensor.shape
            np.testing.assert_array_equal(
                value.float().numpy(), fb.dequantize(want, "bfloat16").astype(np.float32)
            )
    assert isinstance(fb.quantize(x.detach()).expanded, torch.Tensor)
    out = torch.empty(6, 40)
    assert fb.dequantize(fb.quantize(x.detach()), out=out) is out
    with pytest.raises(TypeError, match="numpy array but the operands are torch|operands are torch"):
        fb.dequantize(fb.quantize(x.detach()), out=np.empty((6, 40), np.float32))


def test_torch_bfloat16_is_not_copied():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from fp4bf16.interop import wrap

    x = torch.randn(4, 32).bfloat16()
    rows = cpu.as_rows(wrap(x, "x").array)
    assert rows.dtype == np.uint16 and rows.ctypes.data == x.data_ptr()
    packed = fb.quantize(x)
    alias = packed.packed.view(torch.float4_e2m1fn_x2)  # PyTorch's own name for two codes a byte
    scale = packed.block_scale.view(torch.float8_e4m3fn)
    again = fb.QuantizedArray(alias, scale, packed.outer_scale, packed.format, packed.shape, packed.order)
    assert torch.equal(fb.dequantize(again), fb.dequantize(packed))
