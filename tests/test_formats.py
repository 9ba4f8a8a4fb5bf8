"""Number formats, bit for bit: every byte, every bfloat16, the peers' answers, and what nvfp4_exact promises.
"""

from __future__ import annotations

import importlib.util
import json

import ml_dtypes
import numpy as np
import pytest

from fp4bf16.backends import cpu_quantize as cpu
from fp4bf16.python_ref import formats as F
from fp4bf16.python_ref import quantize as Q

E2M1, E4M3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
BYTES = np.arange(256, dtype=np.uint8)
BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
FINITE = BF16[np.isfinite(BF16)]


def _same(a, b):
    """Bit-equal, NaN equal to NaN."""
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# ---- elements ----------------------------------------------------------------------------------------------
def test_decode_tables():
    _same(F.decode_e2m1(BYTES[:16]), BYTES[:16].view(E2M1).astype(np.float32))
    assert np.signbit(F.decode_e2m1(8)) and not np.signbit(F.decode_e2m1(0))
    _same(F.decode_e4m3(BYTES), BYTES.view(E4M3).astype(np.float32))
    _same(F.decode_e8m0(BYTES), BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def test_encode_every_bfloat16():
    _same(F.encode_e2m1(FINITE), FINITE.astype(E2M1).view(np.uint8))
    inside = FINITE[np.abs(FINITE) <= 464]
    _same(F.encode_e4m3(inside), inside.astype(E4M3).view(np.uint8))
    beyond = FINITE[np.abs(FINITE) > 464]
    _same(F.encode_e4m3(beyond), np.where(beyond > 0, 0x7E, 0xFE))
    # Subnormals left out: ml_dtypes rounds 1.02 * 2^-127 to 2^-126.
    positive = FINITE[(FINITE >= np.finfo(np.float32).tiny) & (FINITE < 1.5 * 2.0**127)]
    _same(F.encode_e8m0(positive), positive.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))


def test_encoders_decide_on_nan_and_inf():
    with pytest.raises(ValueError, match="NaN, which E2M1 cannot"):
        F.encode_e2m1(np.float32([1, np.nan]))
    _same(F.encode_e2m1(np.float32([np.inf, -np.inf])), [7, 15])
    _same(F.encode_e4m3(np.float32([np.inf, -np.inf, np.nan])), [0x7E, 0xFE, 0x7F])
    _same(F.encode_e8m0(np.float32([0, np.inf, np.nan, -1])), [0, 254, 255, 255])
    _same(F.encode_e8m0(np.float32([1, 1.25, 1.5, 1.75]), "up"), [127, 128, 128, 128])
    _same(F.encode_e8m0(np.float32([1, 1.25, 1.5, 1.75]), "down"), [127, 127, 127, 127])
    with pytest.raises(ValueError, match="round_mode is 'odd'"):
        F.encode_e8m0(np.float32(1), "odd")


def test_elements_against_peers(shared):
    z = np.load(shared / "conformance/elements/element_casts.npz")
    _same(F.decode_e2m1(BYTES[:16]), z["decode.e2m1"])
    _same(F.decode_e2m1(F.unpack(BYTES[:, None])), z["decode.e2m1_packed_byte"])
    _same(F.decode_e4m3(BYTES), z["decode.e4m3fn"])
    _same(F.decode_e8m0(BYTES), z["decode.e8m0"])
    for x, suffix in ((z["bf16_patterns_as_f32"], "bf16"), (z["f32_probes"], "f32")):
        finite = np.isfinite(x)
        _same(F.encode_e2m1(x[finite]), z[f"e2m1.{suffix}.ml_dtypes"][finite])
        numbers = ~np.isnan(x)
        _same(F.encode_e4m3(x[numbers]), z[f"e4m3fn.{suffix}.torch"][numbers])
    x = z["bf16_patterns_as_f32"]
    normal = np.isfinite(x) & (x >= np.finfo(np.float32).tiny)
    for mode in ("nearest", "up", "down"):
        _same(F.encode_e8m0(x[normal], mode), z[f"e8m0.bf16.onnx_{mode}"][normal])
    _same(
        F.round_bf16(z["f32_probes"]),
        z["bf16_from_f32.ml_dtypes"].view(ml_dtypes.bfloat16).astype(np.float32),
    )


def test_pack(shared):
    codes = F.encode_e2m1(np.float32([0.5, 6, -1, 0]))
    assert F.pack(codes).tolist() == [0x71, 0x0A]
    assert F.pack(codes, "high_first").tolist() == [0x17, 0xA0]
    for order in ("low_first", "high_first"):
        _same(F.pack(F.unpack(BYTES, order), order), BYTES)
        _same(F.unpack(F.pack(codes, order), order), codes)
    with pytest.raises(ValueError, match="must be even"):
        F.pack(codes[:3])
    with pytest.raises(ValueError, match="nibble_order is 'middle'"):
        F.unpack(BYTES, "middle")


def test_reads_a_file_with_high_nibbles_first(shared):
    """ComfyUI's NVFP4: the even k in the high nibble, scales in 128 x 4 tiles; the wrong order gives another
    tensor.
    """
    z = np.load(shared / "conformance/layouts/comfy_kitchen_nvfp4.npz")
    for case in ("128x64", "256x128"):
        weight, want = z[f"{case}.weight"], z[f"{case}.dequant"]
        n, k = want.shape
        r, c = np.mgrid[:n, : k // 16]
        at = ((r // 128) * (k // 64) + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
        scale = z[f"{case}.weight_scale"].reshape(-1)[at]
        for order in ("high_first", "low_first"):
            packed = F.pack(F.unpack(weight, order))
            value = cpu.dequantize_rows(packed, scale, z[f"{case}.weight_scale_2"], "nvfp4", k)
            assert np.allclose(value, want, rtol=1e-6) == (order == "high_first")


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_exact", "mxfp4", "fp8"])
def test_kernels_decode_every_byte(name):
    """All codes under all scale bytes, and all E4M3 bytes, decoded by the kernel."""
    if name == "fp8":
        _same(cpu.dequantize_rows(BYTES[None], None, None, name, 256)[0], F.decode_e4m3(BYTES))
        return
    block = Q.BLOCK[name]
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, block // 16))
    value = cpu.dequantize_rows(F.pack(codes), BYTES[:, None].copy(), None, name, block)
    table = F.E8M0 if name == "mxfp4" else F.E4M3
    with np.errstate(over="ignore"):
        want = F.E2M1[codes] * table[:, None]
    _same(value, want)
    _same(np.signbit(value), np.signbit(want))


def test_kernels_encode_every_bfloat16():
    """Every finite bfloat16 through the kernels' roundings: E4M3 at scale 1, E2M1 under a block scale of 1.
    """
    pad = np.append(FINITE, np.zeros(-FINITE.size % 16, np.float32)).reshape(-1, 16)
    q = cpu.quantize_rows(pad, "fp8", outer_rows=np.float32(1))
    _same(q.packed, F.encode_e4m3(pad))
    small = FINITE[np.abs(FINITE) < 8]
    rest = np.append(small, np.zeros(-small.size % 31, np.float32)).reshape(-1, 31)
    block = np.insert(rest, 0, 6, axis=1)  # amax is 4 to 8: the floor rule's scale is 1
    q = cpu.quantize_rows(block, "mxfp4", scale_rule="floor")
    assert (q.block_scale == 127).all()
    _same(F.unpack(q.packed), F.encode_e2m1(block))


# ---- peers -------------------------------------------------------------------------------------------------
DENORMAL = ("denormal", "tiny_min_normal")
OVERFLOWING = ("flt_max",)  # the peers' own arithmetic differs at the end of the range
GATES = [  # file, format, rule, outer, cases left out because the peer is known to be wrong or alone there
    ("nvfp4/te_1x16", "nvfp4", "te", "tensor", ()),
    ("nvfp4/te_row_scaled", "nvfp4", "te", "row", ()),
    ("nvfp4/te_4over6_mae_256", "nvfp4", "four_over_six_mae", "tensor", ()),
    ("nvfp4/te_4over6_mse_256", "nvfp4", "four_over_six", "tensor", ()),
    ("nvfp4/te_4over6_mae_448", "nvfp4", "four_over_six_mae_448", "tensor", ()),
    ("mxfp4/gfloat_floor", "mxfp4", "floor", None, ()),
    ("mxfp4/torchao_floor", "mxfp4", "floor", None, DENORMAL),
    ("mxfp4/quark_even", "mxfp4", "even", None, OVERFLOWING),
    ("mxfp4/torchao_even", "mxfp4", "even", None, DENORMAL),
    ("mxfp4/compressed_tensors", "mxfp4", "even", None, OVERFLOWING),
    ("mxfp4/torchao_rceil", "mxfp4", "rceil", None, (*DENORMAL, "mx_amax_mantissa_sweep")),
    ("mxfp4/torchao_ceil", "mxfp4", "ceil", None, DENORMAL),
]


def _cases(shared, path, left_out):
    z, answers = np.load(shared / "conformance/inputs.npz"), np.load(shared / f"conformance/{path}.npz")
    for case in json.loads(bytes(z["__meta__"]))["cases"]:
        if f"{case}.packed" in answers.files and np.isfinite(z[case]).all() and not case.startswith(left_out):
            yield case, z[case], answers[f"{case}.packed"], answers[f"{case}.scales"]


def _positive_zero(codes):
    return np.where(codes == 8, 0, codes)


@pytest.mark.parametrize("path, fmt, rule, outer, left_out", GATES, ids=[g[0] for g in GATES])
def test_bytes_of_peers(shared, path, fmt, rule, outer, left_out):
    cases = 0
    for case, x, packed, scales in _cases(shared, path, left_out):
        q = Q.quantize(x, fmt, outer=outer, scale_rule=rule)
        k = x.shape[-1]
        ours, theirs = (_positive_zero(F.unpack(p))[..., :k] for p in (q.packed, packed))
        np.testing.assert_array_equal(ours, theirs, err_msg=case)
        np.testing.assert_array_equal(q.block_scale.reshape(scales.shape), scales, err_msg=case)
        cases += 1
    assert cases >= 30


def test_rceil_sweep_of_a_peer_that_is_right(shared):
    """At amax = 6 * 2^k + 1 ulp, where float32 log2 puts other peers one exponent too low."""
    for case, x, packed, scales in _cases(shared, "mxfp4/fouroversix_static_6", ()):
        if case == "mx_amax_mantissa_sweep_f32":
            q = Q.quantize(x, "mxfp4", scale_rule="rceil")
            _same(q.block_scale, scales)
            _same(_positive_zero(F.unpack(q.packed)), _positive_zero(F.unpack(packed)))
            return
    pytest.fail("the case is missing")


def test_decode_scale_of_te(shared):
    """Our outer scale is 1/S: amax / 2688 up to rounding wherever S is a finite number."""
    z = np.load(shared / "conformance/nvfp4/te_1x16.npz")
    x = np.load(shared / "conformance/inputs.npz")
    for case in ("normal_f32", "student_t2_f32", "normal_1e3_bf16"):
        q = Q.quantize(x[case], "nvfp4")
        want = float(z[f"{case}.global_amax"].reshape(-1)[0]) / 2688
        assert abs(float(q.outer_scale.reshape(-1)[0]) / want - 1) < 2**-22
        np.testing.assert_allclose(Q.dequantize(q), z[f"{case}.dequant"], rtol=3e-7)


def test_mxfp4_reads_gpt_oss(shared):
    z = np.load(shared / "conformance/layouts/gpt_oss_mxfp4.npz")
    e, n, g, b = z["blocks"].shape
    value = cpu.dequantize_rows(
        z["blocks"].reshape(e * n, g * b), z["scales"].reshape(e * n, g), None, "mxfp4", 32 * g
    )
    value, want = (
        a.reshape(e, g, 32, n) for a in (value.reshape(e, n, -1).transpose(0, 2, 1), z["dequant_f32"])
    )
    number = z["scales"].transpose(0, 2, 1) != 255  # 0xFF is NaN in OCP MX 5.4.1, 2^128 there
    _same(np.moveaxis(value, 2, -1)[number], np.moveaxis(want, 2, -1)[number])
    assert np.isnan(np.moveaxis(value, 2, -1)[~number]).all() and number.sum() > 40


# ---- nvfp4_exact -------------------------------------------------------------------------------------------
def test_code_times_scale_is_exact():
    """37 scales x 16 codes in E4M3; times every outer scale in bfloat16 and float32, with no subnormal
    number.
    """
    assert Q.SCALE.tolist() == sorted({m * 2.0**k for k in range(-6, 6) for m in (1, 1.25, 1.5)} | {64.0})
    product = np.multiply.outer(Q.SCALE, F.E2M1)
    _same(product.astype(E4M3).astype(np.float32), product)
    for e in range(Q.MIN_EXPONENT, Q.MAX_EXPONENT + 1):
        exact = product.astype(np.float64) * 2.0**e
        exact = exact[np.abs(exact) < 2.0**127 * 1.99]
        _same(exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64), exact)
        assert np.abs(exact[exact != 0]).min() >= np.finfo(np.float32).tiny


def test_pair_edges_are_exact_numbers():
    """The fast search compares with numbers that float32 holds exactly."""
    below = np.append(0.75 * 2.0**-6, Q.SCALE[:-1].astype(np.float64))
    part = np.array([0.5, 0.5, 0.625] * 12 + [0.5])
    _same(Q.PAIR_EDGE.astype(np.float64), 6 * (below + part * (Q.SCALE.astype(np.float64) - below)))


def _draws(rng):
    shape = (48, 128)
    yield "gauss", rng.standard_normal(shape)
    yield "t2", rng.standard_t(2, shape) * 1e-20
    yield "octaves", rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, shape))
    yield "grid", rng.choice(np.append(F.E2M1, 5), shape) * np.exp2(rng.integers(-4, 4, (48, 1)))
    yield "underflow", rng.standard_normal(shape) * np.where(rng.random(shape) < 0.02, 1.0, 1e-5)


def test_rule_script(shared, rng):
    spec = importlib.util.spec_from_file_location("rule", shared / "research/nvfp4_exact_rule.py")
    rule = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rule)
    for name, x in _draws(rng):
        x = x.astype(np.float32)
        value, scale, _, _ = rule.quantise(x)
        q = Q.quantize(x)
        np.testing.assert_array_equal(Q.dequantize(q).astype(np.float64), value, err_msg=name)
        np.testing.assert_array_equal(q.block_scale.reshape(-1), scale, err_msg=name)


def test_second_pass_changes_nothing(rng):
    for name, x in _draws(rng):
        once = Q.dequantize(Q.quantize(x.astype(np.float32), search="full"))
        np.testing.assert_array_equal(Q.dequantize(Q.quantize(once, search="full")), once, err_msg=name)


def test_search_finds_the_least_squared_error(rng):
    """The integer search against float64 errors of the scales in its window; all 37 are at most 1 % better in
    sum.
    """
    x = rng.standard_normal((64, 256)).astype(np.float32)
    q = Q.quantize(x)
    t = (x / q.outer_scale).reshape(-1, 16).astype(np.float64)
    scales = Q.SCALE.astype(np.float64)
    grid = np.array([F.E2M1[F.encode_e2m1((t / s).astype(np.float32))] * s for s in scales])
    errors = ((grid - t) ** 2).sum(-1)  # (37, blocks)
    g = np.searchsorted(6 * scales, np.abs(t).max(-1))
    window = np.clip(g + np.arange(-1, 3)[:, None], 0, 36)  # (4, blocks)
    blocks = np.arange(len(t))
    best = errors[window, blocks].min(0)
    chosen = errors[np.searchsorted(Q.SCALE_BYTE, q.block_scale.reshape(-1)), blocks]
    slack = scales[window].max(0) / 4  # T moves each of 16 elements by s / 32 at most, on both sides
    assert (np.sqrt(chosen) <= np.sqrt(best) + slack).all() and (chosen == best).mean() > 0.9
    assert chosen.sum() <= 1.006 * best.sum() and chosen.sum() <= 1.01 * errors.min(0).sum()


def test_published_errors(rng):
    """Relative RMS error on Gaussian data: 9.06 % full, 9.14 % fast; 9.52 % nvfp4, 8.71 % four-over-six, 11.2
    % mxfp4.
    """
    x = rng.standard_normal((512, 1024)).astype(np.float32)

    def error(**kwargs):
        return 100 * np.linalg.norm(Q.dequantize(Q.quantize(x, **kwargs)) - x) / np.linalg.norm(x)

    assert abs(error() - 9.03) < 0.06
    assert abs(error(search="fast") - 9.14) < 0.06
    assert abs(error(fmt="nvfp4") - 9.52) < 0.06
    assert abs(error(fmt="nvfp4", scale_rule="four_over_six") - 8.71) < 0.06
    assert abs(error(fmt="mxfp4") - 11.2) < 0.1


@pytest.mark.parametrize("amax, e", [
    (288, 0), (np.nextafter(np.float32(288), np.float32(999)), 1), (144, -1), (0, 0), (1e-45, -119),
    (np.finfo(np.float32).max, 120), (2.0**-100, -108), (np.nextafter(np.float32(144), np.float32(0)), -1),
])  # fmt: skip
def test_outer_exponent(amax, e):
    assert Q.outer_exponent(np.float32(amax)) == e
    x = np.full((1, 16), amax, np.float32)
    assert cpu.quantize_rows(x, "nvfp4_exact").outer[0] == np.ldexp(np.float32(1), e)
