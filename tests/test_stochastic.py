"""Stochastic rounding: the CPU has the bits of the reference, the mean of many draws is the input, and only
the two neighbours of a value ever occur.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fp4bf16 as fb
from fp4bf16.backends import cpu_quantize as cpu
from fp4bf16.backends import threads
from fp4bf16.errors import NonFiniteError, ShapeError
from fp4bf16.python_ref import quantize as Q
from fp4bf16.python_ref import stochastic as S
from fp4bf16.python_ref.random import seed_words

BF16 = ml_dtypes.bfloat16
ARMS = [(f, r) for f in Q.BLOCK for r in S.SCALE_RULES[f]]
SHAPES = [(64, 320), (3, 17), (5, 40), (1, 1), (7, 33), (2, 31), (1, 512), (3, 2500), (400, 7), (0, 5),
          (4, 0)]  # fmt: skip
WORDS = np.uint32([0, 2**32 - 1])  # the words that round up, and down, whatever can be


def _reference(x, fmt, **kwargs):
    return Q.quantize(np.asarray(x, np.float32), fmt, rounding="stochastic", **kwargs)


def _cpu(x, fmt, axis=-1, outer="row", **kwargs):
    """`quantize_rows` of an array of any shape, its scales as `outer` has them, bytes in the stored shape."""
    stored = np.moveaxis(x, axis, -1)
    lead, after = stored.shape[:-1], int(np.prod(x.shape[axis % x.ndim + 1 :]))
    rows = np.ascontiguousarray(stored).reshape(int(np.prod(lead)), x.shape[axis])
    if isinstance(outer, int):
        kwargs["outer_rows"] = np.float32(2.0**outer)
    elif outer not in (None, "row"):
        keep = Q._group_amax(stored.astype(np.float32)[..., None], axis % x.ndim, outer)
        kwargs["amax"] = np.ascontiguousarray(np.broadcast_to(keep, (*lead, 1))).reshape(-1)
    q = cpu.quantize_rows(rows, fmt, rounding="stochastic", after=after, **kwargs)
    fake = cpu.fake_quantize_rows(rows, fmt, rounding="stochastic", after=after, **kwargs)
    return q, fake


def _check(q, fake, want: Q.Quantized, dtype) -> None:
    np.testing.assert_array_equal(q.packed, want.packed.reshape(q.packed.shape), err_msg="packed")
    if want.block_scale is not None:
        np.testing.assert_array_equal(q.block_scale, want.block_scale.reshape(q.block_scale.shape))
    if want.outer_scale is not None and want.outer_scale.size == len(q.packed):
        np.testing.assert_array_equal(q.outer, want.outer_scale.reshape(-1))
    value = np.moveaxis(Q.dequantize(want), want.axis, -1).reshape(fake.shape)
    np.testing.assert_array_equal(fake, value.astype(dtype))


def _values(rng, shape, kind):
    if kind == "octaves":
        return rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, shape))
    if kind == "rows":  # zero rows, rows many decades apart, float32 subnormals
        far = 10.0 ** rng.choice([-44, -36, -3, 0, 25], (shape[0], 1))
        return rng.standard_t(2, shape) * far * (rng.random((shape[0], 1)) < 0.8)
    if kind == "grid":
        return rng.integers(-12, 13, shape) / 2
    return rng.standard_normal(shape)


def _draw(rng) -> tuple[int, int, int]:
    return int(rng.integers(2**64, dtype=np.uint64)), int(rng.integers(2**32)), int(rng.integers(2**32))


# ---- bit equality ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt, rule", ARMS)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
def test_rows_equal_reference(rng, fmt, rule, dtype):
    for shape in SHAPES:
        for kind in ("gauss", "octaves", "rows", "grid"):
            x, seed = _values(rng, shape, kind).astype(dtype), _draw(rng)
            outer = None if fmt == "mxfp4" else "row"
            want = _reference(x, fmt, outer=outer, scale_rule=rule, seed=seed)
            _check(*_cpu(x, fmt, scale_rule=rule, seed=seed), want, dtype)


@pytest.mark.parametrize("fmt", Q.BLOCK)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("outer", ["row", "image", "head", "tensor", 3, -2, None])
def test_axes_and_outers(rng, fmt, axis, outer):
    if (
        (fmt == "mxfp4") != (outer is None)
        or (outer == "image" and axis == 0)
        or (outer == "head" and axis not in (1, 3))
    ):
        return
    x = rng.standard_normal((3, 18, 2, 33)) * 10.0 ** rng.integers(-3, 4, (3, 1, 2, 1))
    x, seed = x.astype(np.float32), _draw(rng)
    want = _reference(x, fmt, axis=axis, outer=outer, seed=seed)
    _check(*_cpu(x, fmt, axis, outer, seed=seed), want, np.float32)


@pytest.mark.parametrize("shape", [(1100, 6), (2050, 3), (40, 1), (33, 257), (2, 1030, 5)])
def test_long_first_and_middle_axes(rng, shape):
    """Columns longer than the kernels' window of words, at steps that share Philox blocks and that do not."""
    x, axis = rng.standard_normal(shape).astype(np.float32), len(shape) - 2
    for fmt in Q.BLOCK:
        want = _reference(x, fmt, axis=axis, outer=None if fmt == "mxfp4" else "row", seed=5)
        _check(*_cpu(x, fmt, axis, seed=5), want, np.float32)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_floats_are_rounded_to_float32_first(rng, dtype):
    x = rng.standard_normal((5, 50)).astype(dtype)
    for fmt in Q.BLOCK:
        want = _reference(x, fmt, outer=None if fmt == "mxfp4" else "row", seed=1)
        _check(*_cpu(x, fmt, seed=1), want, np.float32)


@given(bits=hnp.arrays(np.uint32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=70)),
       fmt=st.sampled_from(sorted(Q.BLOCK)), seed=st.integers(0, 2**64 - 1))  # fmt: skip
def test_any_bits(bits, fmt, seed):
    """Every pattern of 32 bits, NaN, Inf and subnormals among them, under nan="propagate"."""
    x = bits.view(np.float32)
    want = _reference(x, fmt, outer=None if fmt == "mxfp4" else "row", nan="propagate", seed=seed)
    _check(*_cpu(x, fmt, nan="propagate", seed=seed), want, np.float32)


def test_zero_and_non_finite_blocks():
    x = np.ones((2, 64), np.float32)
    x[0, :32], x[1, 40] = 0, np.nan
    for fmt in Q.BLOCK:
        with pytest.raises(NonFiniteError, match="row 1 at k = 40"):
            cpu.quantize_rows(x, fmt, rounding="stochastic")
        value = cpu.fake_quantize_rows(x, fmt, rounding="stochastic", nan="propagate")
        assert (value[0, :32] == 0).all() and np.isnan(value[1, 40]) and np.isfinite(value[1, :32]).all()


# ---- the public call ---------------------------------------------------------------------------------------
def _same(xq: fb.QuantizedArray, want: Q.Quantized) -> None:
    for name in ("packed", "block_scale", "outer_scale"):
        ours, theirs = getattr(xq, name), getattr(want, name)
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            np.testing.assert_array_equal(np.asarray(ours), theirs, err_msg=name)
    np.testing.assert_array_equal(np.asarray(fb.dequantize(xq)), Q.dequantize(want))


@pytest.mark.parametrize("fmt", Q.BLOCK)
@pytest.mark.parametrize("axis", [0, 1, 2, 3, -2])
@pytest.mark.parametrize("outer", ["default", "image", "tensor", 3])
def test_public_axes(rng, fmt, axis, outer):
    if (outer == "image" and axis == 0) or (fmt == "mxfp4" and outer != "default"):
        return
    x, seed = rng.standard_normal((3, 18, 2, 33)).astype(np.float32), _draw(rng)
    options = {"axis": axis, "outer": outer, "rounding": "stochastic", "seed": seed}
    want = Q.quantize(x, fmt, **options)
    xq = fb.quantize(x, fmt, **options)
    _same(xq, want)
    view = fb.quantize(np.ascontiguousarray(x.transpose(2, 0, 3, 1)).transpose(1, 3, 0, 2), fmt, **options)
    _same(view, want)  # the logical index counts, not the memory's
    other = fb.quantize(x, fmt, **options | {"seed": 1})
    _same(fb.quantize(x, fmt, **options, out=other), want)


@pytest.mark.parametrize("shape, axis", [((300, 257), 0), ((4096, 20), 0), ((0, 5), 0), ((5, 0), 0),
    ((5, 0), 1), ((3, 4, 0), 1), ((2, 0, 3), 1), ((17,), 0)])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, np.float64])
def test_public_shapes(rng, shape, axis, dtype):
    x = rng.standard_normal(shape).astype(dtype)
    for fmt in Q.BLOCK:
        options = {"axis": axis, "rounding": "stochastic", "seed": 3}
        _same(fb.quantize(x, fmt, **options), Q.quantize(np.asarray(x, np.float32), fmt, **options))


def test_public_refusals():
    x = np.ones((4, 32), np.float32)
    for options, words in (
        ({"format": "mxfp4", "scale_rule": "even"}, "scale_rule='rceil'"),
        ({"format": "nvfp4", "scale_rule": "four_over_six"}, "scale_rule='te'"),
        ({"seed": -1}, "seed: -1 is neither"),
        ({"rounding": "stochastc"}, "'stochastc'.*'stochastic'"),
    ):
        with pytest.raises(ValueError, match=words):
            fb.quantize(x, **{"rounding": "stochastic", **options})


# ---- what the words depend on ------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", Q.BLOCK)
@pytest.mark.parametrize("after", [1, 3, 700])
def test_threads_change_no_byte(rng, fmt, after):
    x = rng.standard_normal((2100, 331)).astype(np.float32)
    before, results = threads.num_threads(), []
    try:
        for n in (1, 2, 3, 7):
            threads.set_num_threads(n)
            results.append(cpu.quantize_rows(x, fmt, rounding="stochastic", seed=(3, 1, 4), after=after))
    finally:
        threads.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("fmt", Q.BLOCK)
@pytest.mark.parametrize("axis", [1, 2])
def test_batch_changes_no_byte(rng, fmt, axis):
    """The first images of a batch get the bytes that they get alone: their logical indices are the same."""
    x = rng.standard_normal((7, 50, 19)).astype(np.float32)
    (whole, _), (part, _) = (_cpu(a, fmt, axis, seed=8) for a in (x, x[:3]))
    for a, b in zip(whole[:2], part[:2], strict=True):
        if a is not None:
            np.testing.assert_array_equal(a[: len(b)], b)


def test_seed_stream_and_call(rng):
    x = rng.standard_normal((8, 64)).astype(np.float32)
    for fmt in Q.BLOCK:
        packed = [
            _cpu(x, fmt, seed=s)[0].packed.tobytes()
            for s in (7, (7, 0, 0), [7, 0, 0], np.uint64(7), 8, 7 + 2**32, (7, 1, 0), (7, 0, 1))
        ]
        assert len(set(packed[:4])) == 1 and len(set(packed)) == 5
        assert packed[0] != cpu.quantize_rows(x, fmt, seed=7).packed.tobytes()
        nearest = [cpu.quantize_rows(x, fmt, rounding="nearest", seed=s).packed.tobytes() for s in (0, 1)]
        assert nearest[0] == nearest[1]


# ---- known answers -----------------------------------------------------------------------------------------
def test_by_hand():
    """The first words of seed 0, 6627e8d5 e169c58d bc57ac4c 9b00dbd8, are 0.399, 0.881, 0.736, 0.606 of 2^32.
    """
    x = np.zeros((1, 16), np.float32)
    x[0, :5] = 2.41, 2.87, -2.75, -2.6, 6
    want = [3, 2, -3, -2, 6]
    for fmt in ("nvfp4_exact", "nvfp4"):
        assert cpu.fake_quantize_rows(x, fmt, np.float32(1), rounding="stochastic")[0, :5].tolist() == want
    assert cpu.fake_quantize_rows(x, "mxfp4", rounding="stochastic")[0, :5].tolist() == want
    x /= 8  # E4M3 steps by 1/32 from 1/4 on; 2.87 / 8 = 11.48 / 32
    want = np.array([10, 11, -11, -10, 24]) / 32
    assert (cpu.fake_quantize_rows(x, "fp8", np.float32(1), rounding="stochastic")[0, :5] == want).all()


# of arange(-16, 16) / 3, seed (2026, 3, 5): codes, block scales
KNOWN = {
    "nvfp4_exact": ("efefdeddddccab991021325454656666", "6060"),
    "nvfp4": ("ffffeededdccab991031435455656677", "7e7e"),
    "mxfp4": ("efefdeddddccab991021325454656666", "7f"),
    "fp8": ("fefdfcfcfbf9f9f8f6f5f2f1eeebe6de005f676b6f7173757778797b7b7c7d7e", ""),
}


@pytest.mark.parametrize("fmt", Q.BLOCK)
def test_known_bytes(fmt):
    x = np.arange(-16, 16, dtype=np.float32).reshape((1, 32) if fmt == "mxfp4" else (2, 16)) / np.float32(3)
    for q in (_reference(x, fmt, seed=(2026, 3, 5), outer=None if fmt == "mxfp4" else "default"),
              _cpu(x, fmt, outer="tensor" if fmt == "nvfp4" else "row", seed=(2026, 3, 5))[0]):  # fmt: skip
        scale = b"" if q.block_scale is None else q.block_scale.tobytes()
        assert (q.packed.tobytes().hex(), scale.hex()) == KNOWN[fmt]


# ---- the mean ----------------------------------------------------------------------------------------------
def _slope(x, draw, draws: int) -> tuple[float, float]:
    """<mean of the draws, x> / <x, x> and its standard error, from the spread of the draws."""
    x = x.astype(np.float64)
    slopes = [float((draw(i).astype(np.float64) * x).sum() / (x * x).sum()) for i in range(draws)]
    return float(np.mean(slopes)), float(np.std(slopes, ddof=1) / np.sqrt(draws))


def _heavy(rng, shape, kind):
    """Normal, or t with 3 degrees of freedom up to 30, so that no single element decides the slope."""
    x = rng.standard_normal(shape) if kind == "normal" else np.clip(rng.standard_t(3, shape), -30, 30)
    return x.astype(np.float32)


@pytest.mark.parametrize("fmt, rule", ARMS)
@pytest.mark.parametrize("kind", ["normal", "t3"])
def test_slope_is_one(rng, fmt, rule, kind):
    """17 million roundings: the standard error is under 4e-4, the bias looked for 3e-3 to 6e-3."""
    x = _heavy(rng, (512, 512), kind)
    slope, error = _slope(
        x, lambda i: cpu.fake_quantize_rows(x, fmt, scale_rule=rule, rounding="stochastic", seed=i), 64
    )
    assert error < 4e-4
    assert abs(slope - 1) < 5 * error, (slope, error)


@pytest.mark.parametrize("kind", ["normal", "t3"])
@pytest.mark.parametrize("fault", ["nearest scale", "even rule"])
def test_slope_sees_a_scale_that_clips(rng, monkeypatch, kind, fault):
    """What the test above is for: a block scale rounded to nearest clips and pulls the slope under one."""
    fmt = "nvfp4" if fault == "nearest scale" else "mxfp4"
    if fmt == "nvfp4":
        monkeypatch.setattr(S, "encode_e4m3_up", Q.encode_e4m3)
    else:
        monkeypatch.setitem(S.SCALE_RULES, "mxfp4", ("even",))
    x = _heavy(rng, (128, 256), kind)
    slope, error = _slope(x, lambda i: Q.dequantize(_reference(x, fmt, seed=i)), 40)
    assert error < 1e-3 and slope < 1 - 5 * error, (slope, error)


# ---- the rounding ------------------------------------------------------------------------------------------
def _scaled(x, q: cpu.QuantizedRows, fmt):
    """(|x| in the element's units, its quantised value there), float64."""
    outer = np.float64(1) if q.outer is None else q.outer.astype(np.float64)[:, None]
    if fmt == "fp8":
        return np.abs(x) / outer, np.abs(Q.E4M3[q.packed])
    table = Q.E8M0 if fmt == "mxfp4" else Q.E4M3
    scale = np.repeat(table[q.block_scale].astype(np.float64), Q.BLOCK[fmt], 1) * outer
    return np.abs(x) / scale, np.abs(Q.E2M1[Q.unpack(q.packed)])


@pytest.mark.parametrize("fmt", Q.BLOCK)
@pytest.mark.parametrize("kind", ["normal", "t3"])
def test_only_the_neighbours_each_with_its_probability(rng, fmt, kind):
    """Elements go up in a share f of the draws, by Bernstein's inequality with 1e-9 for all of them."""
    grid = (Q.E4M3[:127] if fmt == "fp8" else Q.E2M1[:8]).astype(np.float64)
    x, draws, ups = _heavy(rng, (16, 256), kind), 2000, 0
    for i in range(draws):
        q = cpu.quantize_rows(x, fmt, rounding="stochastic", seed=(1, 2, i))
        v, value = _scaled(x, q, fmt)
        low = np.minimum(np.searchsorted(grid, v, side="right") - 1, len(grid) - 2)
        f = (v - grid[low]) / (grid[low + 1] - grid[low])
        near = np.minimum(f, 1 - f) < 1e-5  # float32 may see these on the other side of a grid point
        up = value == grid[low + 1]
        assert (near | up | (value == grid[low])).all()
        assert v.max() <= grid[-1] * (1 + 2**-20) and q.counts[0] == 0  # nothing is clipped
        ups = ups + up
    f, level = np.minimum(f, 1), np.log(2 * x.size / 1e-9)
    assert (np.abs(ups / draws - f) <= np.sqrt(2 * f * (1 - f) * level / draws) + level / draws).all()


@pytest.mark.parametrize("fmt", Q.BLOCK)
def test_frequency_is_the_fraction(rng, fmt):
    """40,000 rows of one block whose scale is one: upwards as often as f, within five standard deviations."""
    f = np.array([1 / 1024, 0.1, 0.25, 0.5, 0.71875, 0.9, 1 - 1 / 1024])
    rows = 40_000
    grid = Q.E4M3[:127] if fmt == "fp8" else Q.E2M1[:8]
    for low in rng.choice(126, 12, replace=False) if fmt == "fp8" else range(7):
        width = 32 if fmt == "mxfp4" else 16
        x = np.zeros((rows, width), np.float32)
        x[:, :7], x[:, 8] = grid[low] + f * (grid[low + 1] - grid[low]), grid[-1]
        outer = None if fmt == "mxfp4" else np.float32(1)
        value = cpu.fake_quantize_rows(x, fmt, outer, rounding="stochastic", seed=_draw(rng))
        up = value[:, :7] == grid[low + 1]
        assert (up | (value[:, :7] == grid[low])).all() and (value[:, 8] == grid[-1]).all()
        limit = 5 * np.sqrt(f * (1 - f) / rows)
        assert (np.abs(up.mean(0) - f) <= limit).all(), (low, up.mean(0))


def test_bits_of_the_threshold():
    """Upwards iff the upper 24 bits are under f * 2^24, to the last bit."""
    for low, high, encode in ((2, 3, S.encode_e2m1), (4, 6, S.encode_e2m1), (16, 18, S.encode_e4m3)):
        for n in (1, 2, 3, 2**19 + 1, 2**20 - 1):
            v = np.full(4, low + (high - low) * (n / 2**20), np.float32)  # f = n / 2^20, exact
            words = np.uint32([(16 * n - 1) << 8, ((16 * n - 1) << 8) + 255, 16 * n << 8, 2**32 - 1])
            first = encode(np.float32([low]), WORDS[:1])[0]
            assert encode(v, words).tolist() == [first + 1, first + 1, first, first]


def test_values_of_the_format_never_move(rng):
    for grid, encode in ((Q.E2M1[:8], S.encode_e2m1), (Q.E4M3[:127], S.encode_e4m3)):
        for word in WORDS:
            for sign in (1, -1):
                code = encode(sign * grid, np.full(grid.shape, word))
                assert ((Q.E2M1 if len(grid) == 8 else Q.E4M3)[code] == sign * grid).all()
    for scale in Q.SCALE:  # RN(code * s * RN(1 / s)) is the code
        assert (Q.E2M1[:8] * scale * (np.float32(1) / scale) == Q.E2M1[:8]).all()
    codes = rng.choice(Q.E2M1, (37 * 8, 16))
    codes[:, 5] = 6
    for fmt, size in (("nvfp4_exact", 1), ("mxfp4", 2)):
        table = Q.SCALE if size == 1 else np.exp2(np.arange(-18, 19))
        x = (codes.reshape(37, -1, 16) * table[:, None, None]).astype(np.float32).reshape(-1, 16 * size)
        for i in range(20):
            given = {} if fmt == "mxfp4" else {"outer_rows": np.float32(1)}
            value = cpu.fake_quantize_rows(x, fmt, rounding="stochastic", seed=i, **given)
            np.testing.assert_array_equal(value, x)
    x = np.broadcast_to(Q.E4M3[:127], (50, 127)).astype(np.float32)
    for e in (-20, 0, 20):
        y = x * np.float32(2.0**e)
        np.testing.assert_array_equal(cpu.fake_quantize_rows(y, "fp8", rounding="stochastic"), y)


def test_scale_is_the_least_that_does_not_clip(rng):
    y = np.abs(_values(rng, (20_000, 1), "octaves")[:, 0]).astype(np.float32)
    y = np.concatenate([y, Q.E4M3[:127], np.nextafter(Q.E4M3[:127], np.float32(np.inf))]).clip(0, 448)
    byte = S.encode_e4m3_up(y)
    assert (Q.E4M3[byte] >= y).all() and (Q.E4M3[np.maximum(byte, 1) - 1] < y)[byte > 0].all()
    assert (byte[y == 0] == 0).all()


def test_statistics(rng):
    x = _heavy(rng, (33, 200), "t3")
    for fmt in Q.BLOCK:
        q, fake = _cpu(x, fmt, seed=4)
        a, b = x.astype(np.float64), fake.astype(np.float64)
        want = [(a * a).sum(1), (b * b).sum(1), ((a - b) ** 2).sum(1)]
        np.testing.assert_allclose(q.sums.T, want, rtol=1e-12)
        assert q.counts.tolist() == [0, 0, 0, 0, 0]
        if fmt != "mxfp4":  # given scales that are too small
            counts = cpu.quantize_rows(100 * x, fmt, np.float32(2.0**-9), rounding="stochastic").counts
            assert counts[0] > 0 and (counts[3] > 0) == (fmt != "fp8")


# ---- what is refused ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt, rule, instead", [
    ("mxfp4", "even", "rceil"), ("mxfp4", "floor", "rceil"), ("nvfp4", "four_over_six", "te"),
    ("nvfp4", "four_over_six_mae_448", "te"),
])  # fmt: skip
def test_rules_that_clip_are_refused(fmt, rule, instead):
    x = np.ones((2, 32), np.float32)
    for call in (cpu.quantize_rows, cpu.fake_quantize_rows, Q.quantize):
        with pytest.raises(ValueError, match=f"{rule}.* clips nothing.*scale_rule='{instead}'"):
            call(x, fmt, scale_rule=rule, rounding="stochastic")


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, None, "7", (1, 2), (1, 2, 2**32), (1, -2, 3),
                                  (2**64, 0, 0)])  # fmt: skip
def test_bad_seeds(seed):
    x = np.ones((2, 32), np.float32)
    for call in (cpu.quantize_rows, cpu.fake_quantize_rows, Q.quantize):
        with pytest.raises(ValueError, match=r"seed: .* pass e\.g\. seed=0"):
            call(x, rounding="stochastic", seed=seed)
    with pytest.raises(ValueError, match="seed: "):
        seed_words(seed)


def test_bad_words():
    x = np.ones((4, 32), np.float32)
    for call in (cpu.quantize_rows, cpu.fake_quantize_rows, Q.quantize):
        with pytest.raises(ValueError, match="'stochastc'.*'stochastic'"):
            call(x, rounding="stochastc")
    for after in (0, -1, 3):
        with pytest.raises(ShapeError, match=f"after is {after}, but a divisor of the 4 rows"):
            cpu.quantize_rows(x, rounding="stochastic", after=after)
    with pytest.raises(ValueError, match="scale_rule: 'rceill' is not a rule of mxfp4.*rceil"):
        cpu.quantize_rows(x, "mxfp4", scale_rule="rceill", rounding="stochastic")
