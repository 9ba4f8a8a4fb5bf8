"""What Hopper's tensor cores add up: short sums with one common exponent, truncated, and how far that drifts.

One matrix instruction of depth D forms D products exactly and adds them and the accumulator in fixed point:
every term is cut to a multiple of 2^(e - fraction), e the exponent of the largest, the cut terms are summed
without further loss, and the sum is cut to the accumulator's own significand. A long sum is a chain of such
steps, each fed with the result of the one before. Promotion ends a chain after some products, adds its result
to an FP32 total (nearest, ties to even) on the ordinary cores and starts the next chain from zero.

The rules below were measured on an H200 by bench/probe_accumulator.py: they give every result of the device
bit for bit, single instructions with chosen operands, products of E2M1 operands up to K = 16384 (E4M3 and
E5M2), products of BF16 numbers, and cuBLAS's FP8 product with and without its fast accumulation. "13 fraction
bits, cut toward zero" is often all that is said of the FP8 sums. Two things go beyond it: the exponent of a
product is the sum of its factors' exponents, so that 1.5 * 1.5 = 2.25 counts with 2^0 and not with 2^1, and
the accumulator between two steps has 13 fraction bits of its own. Without the two, 78 % of the results
agree, though the errors of long products are nearly the same. That a subnormal factor counts with the
smallest normal exponent agrees with all of these results, as its own exponent would: the probe's operands
"subnormal beside c" tell the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Rule:
    """How one step adds.

    Attributes:
        fraction: bits kept below the leading bit of the largest term.
        depth: products a step.
        rounding: where a term goes that is cut: "zero" or "floor".
        exponent: of a product: "sum", that of its factors added, one less than its own where the significands
            multiply to 2 or more; "sum_subnormal": the same, and subnormal factors count with the smallest
            normal exponent; "value": its own.
        output: fraction bits of a step's result, cut toward zero; 23 is FP32's own.
    """

    fraction: int = 13
    depth: int = 32
    rounding: str = "zero"
    exponent: str = "sum_subnormal"
    output: int = 13


#: FP8 operands (QGMMA, k32) and BF16 operands (HGMMA, k16).
FP8, BF16 = Rule(), Rule(fraction=25, depth=16, output=23)
_NONE = -2000  # the exponent of a zero: under any other
_SMALLEST_NORMAL = {"e4m3": -6, "e5m2": -14, "bfloat16": -126}
_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip


def values(x, dtype="e4m3"):
    """Operand as float64: bytes (uint8, or uint16 for "bfloat16") are decoded, floats taken as they are."""
    x = np.asarray(x)
    return (x.view(_DTYPES[dtype]) if x.dtype in (np.uint8, np.uint16) else x).astype(np.float64)


def exponents(x):
    """floor(log2 |x|), int32; zeros count as far below everything."""
    return np.where(x == 0, _NONE, np.frexp(x)[1] - 1)


def cut(x, fraction):
    """float64 `x` with its significand cut toward zero to `fraction` bits after the first."""
    mask = ~np.int64((1 << (52 - fraction)) - 1)
    return (np.ascontiguousarray(x).view(np.int64) & mask).view(np.float64)


def step(c, a, b, rule=FP8, smallest=-6):
    """c + a b^T by one instruction: c (M, N), a (M, D), b (N, D), float64; `smallest` normal exponent."""
    products = a[:, None, :] * b[None, :, :]  # (M, N, D)
    if rule.exponent == "value":
        top = exponents(np.abs(products).max(axis=-1))
    else:
        ea, eb = exponents(a), exponents(b)
        if rule.exponent == "sum_subnormal":
            ea, eb = (np.where(e > _NONE, np.maximum(e, smallest), e) for e in (ea, eb))
        top = (ea[:, None, :] + eb[None, :, :]).max(axis=-1)
    top = np.maximum(top, exponents(c))  # (M, N)
    top = np.where(top <= _NONE // 2, 0, top)  # a zero's, and that of a zero times anything
    scale = np.ldexp(1.0, rule.fraction - top)
    round_ = np.trunc if rule.rounding == "zero" else np.floor
    products *= scale[:, :, None]
    total = round_(products, out=products).sum(axis=-1) + round_(c * scale)
    return cut(total / scale, rule.output)


def matmul(a, b, promote=None, rule=FP8, c=None, smallest=-6):
    """float32 (M, N): c + a b^T of values a (M, K), b (N, K), promoted every `promote` products or never."""
    (m, k), n = a.shape, b.shape[0]
    total = np.zeros((m, n), np.float32) if c is None else np.array(c, np.float32)
    chain = total.astype(np.float64) if promote is None else np.zeros((m, n))
    for start in range(0, k, rule.depth):
        here = slice(start, start + rule.depth)
        chain = step(chain, a[:, here], b[:, here], rule, smallest)
        if promote is not None and ((start + rule.depth) % promote == 0 or start + rule.depth >= k):
            total += chain.astype(np.float32)
            chain = np.zeros((m, n))
    return chain.astype(np.float32) if promote is None else total


def fp8_matmul(a, b, promote=128, dtype="e4m3", rule=FP8, c=None):
    """The FP8 tensor cores' c + a b^T, float32 (M, N), of finite operands.

    Args:
        a: (M, K), b: (N, K): bytes of `dtype` ("e4m3" or "e5m2"), or their values in a float dtype.
        promote: products between two additions to the FP32 total, a multiple of the depth; None: never.
        c: what the sum starts from, (M, N); zeros by default.

    >>> x = np.full((1, 4096), 1.5)
    >>> float(fp8_matmul(x, x)[0, 0]), float(fp8_matmul(x, x, promote=None)[0, 0])
    (9216.0, 8648.0)
    """
    if promote is not None and promote % rule.depth:
        raise ValueError(
            f"fp8_matmul: promote is {promote}, but a multiple of the depth {rule.depth} is needed"
        )
    return matmul(values(a, dtype), values(b, dtype), promote, rule, c, _SMALLEST_NORMAL[dtype])


def bf16_matmul(a, b, rule=BF16, c=None):
    """The BF16 tensor cores' c + a b^T, float32 (M, N), in one chain; a (M, K), b (N, K) bits or values."""
    return matmul(values(a, "bfloat16"), values(b, "bfloat16"), None, rule, c, _SMALLEST_NORMAL["bfloat16"])


#: Block scales of `operands`: two octaves to each side of 1.
_OCTAVES = 2.0 ** np.arange(-2, 3)
SCALES = {"one": [1.0], "power_of_two": _OCTAVES, "nvfp4_exact": np.outer(_OCTAVES, [1, 1.25, 1.5]).ravel()}


def operands(rng, shape, scales="one", positive=False, block=16):
    """E2M1 values times block scales, float64 `shape` (rows, K): each magnitude but 0 and each scale of
    `SCALES` equally likely, signs by coin or none. Exact in E4M3; exact in E5M2 but for "nvfp4_exact"."""
    code = np.array([0.5, 1, 1.5, 2, 3, 4, 6])[rng.integers(0, 7, shape)]
    scale = np.repeat(rng.choice(SCALES[scales], (shape[0], shape[1] // block)), block, axis=1)
    return code * scale if positive else code * scale * rng.choice([-1.0, 1.0], shape)


def relative_error(y, exact):
    """|y - exact|_F / |exact|_F in float64."""
    return float(np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact))
