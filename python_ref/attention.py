"""Softmax attention, its gradient, and what each track makes of it.

q, k are (batch, seq, heads, dim), v and the result (batch, seq, heads, dim_v); queries and keys may differ in
number.

    S = scale * q k^T,   P = softmax(S) along the keys,   o = P v            (Vaswani et al.,
    arXiv:1706.03762, eq. 1)

Causal: query i sees the keys 0..i (aligned at the first key). What is rounded where, by track:

    bf16   q, k, v to BF16. exp(S - max S), in (0, 1], to BF16 as the left operand of the second product; its
           row sum is taken of the rounded numbers, so that the weights of a row sum to one.
    fp4    k loses its mean over the sequence: that shifts a row of S by a constant, which the softmax
           ignores. q loses the mean m of its block of 128 queries, and m k^T, a BF16 product, is added to S
           (SageAttention3, arXiv:2505.11594, section 3). The rest of q is quantised along dim with one outer
           scale a row, of k along dim and v along the tokens with one a head. P is two-level: the row is
           scaled to a maximum of 1 and then 256 exp(S - max S) is rounded to E4M3.
    dual   fp4, but the `outliers` channels of largest max|q| * max|k| in each head (after smoothing) leave
           the FP4 operands and are multiplied in BF16 into the same S.

Products are float64 here; the kernels accumulate them in FP32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .formats import decode_e4m3, encode_e4m3
from .gemm import round_bf16
from .quantize import dequantize, quantize

QUERY_BLOCK = 128  # queries that share one mean
P_SCALE = 256.0  # of P before E4M3: the largest power of two under 448


class Operands(NamedTuple):
    """What a track multiplies, (batch, heads, seq, dim): q, k, v as products see them; S before `scale`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scores: np.ndarray


def heads_first(x) -> np.ndarray:
    """(batch, seq, heads, dim) <-> (batch, heads, seq, dim)."""
    return np.swapaxes(np.asarray(x), 1, 2)


def _mean(x: np.ndarray) -> np.ndarray:
    """Mean over the sequence, summed in float64 and rounded to float32."""
    return x.mean(2, dtype=np.float64, keepdims=True).astype(np.float32)


def smooth(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q - m, m, k - mean k) in float32, m the mean of each block of 128 queries, all (batch, heads, seq,
    dim)."""
    q, k = np.asarray(q, np.float32), np.asarray(k, np.float32)
    means = np.empty_like(q)
    for start in range(0, q.shape[2], QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        means[:, :, block] = _mean(q[:, :, block])
    return q - means, means, k - _mean(k)


def outlier_channels(q: np.ndarray, k: np.ndarray, count: int) -> np.ndarray:
    """Mask (batch, heads, 1, dim) of the `count` channels of largest max|q| * max|k|, the lower one on
    ties."""
    weight = np.abs(q).max(2, initial=0) * np.abs(k).max(2)
    rank = np.argsort(np.argsort(-weight, axis=-1, kind="stable"), axis=-1, kind="stable")
    return (rank < count)[:, :, None]


def _fake(x: np.ndarray, fmt: str, axis: int, outer: str) -> np.ndarray:
    """Quantised and decoded, x as (batch, seq, heads, dim)."""
    q = quantize(x, fmt, axis=axis, outer=None if fmt == "mxfp4" else outer, search="fast")
    return heads_first(dequantize(q)).astype(np.float64)


def operands(q, k, v, track: str = "bf16", fmt: str = "nvfp4_exact", outliers: int = 16) -> Operands:
    """The operands of `track` for q, k, v (batch, seq, heads, dim)."""
    if track in ("reference", "bf16"):
        low = np.asarray if track == "reference" else round_bf16
        q, k, v = (heads_first(low(x)).astype(np.float64) for x in (q, k, v))
        return Operands(q, k, v, q @ np.swapaxes(k, 2, 3))
    qs, means, ks = smooth(heads_first(q), heads_first(k))
    special = outlier_channels(qs, ks, outliers if track == "dual" else 0)
    q4 = _fake(heads_first(np.where(special, 0, qs)), fmt, 3, "row")
    k4 = _fake(heads_first(np.where(special, 0, ks)), fmt, 3, "head")
    q16, k16, m16 = (round_bf16(x).astype(np.float64) for x in (qs * special, ks, means))
    scores = q4 @ np.swapaxes(k4, 2, 3) + (q16 + m16) @ np.swapaxes(k16, 2, 3)
    whole = np.where(special, q16, q4) + m16
    return Operands(round_bf16(whole).astype(np.float64), np.where(special, k16, k4),
                    _fake(np.asarray(v, np.float32), fmt, 1, "head"), scores)  # fmt: skip


def probabilities(scores: np.ndarray, track: str, causal: bool, scale: float) -> np.ndarray:
    """softmax(scale * scores) of weights rounded as `track` rounds them."""
    s = scale * scores
    if causal:
        s = np.where(np.tri(*s.shape[2:], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    if track == "bf16":
        p = round_bf16(p).astype(np.float64)
    elif track != "reference":
        p = decode_e4m3(encode_e4m3((P_SCALE * p).astype(np.float32))).astype(np.float64)
    return p / p.sum(-1, keepdims=True)


def _scale(q, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def attention(q, k, v, track: str = "reference", causal: bool = False, scale: float | None = None,
              fmt: str = "nvfp4_exact", outliers: int = 16) -> np.ndarray:  # fmt: skip
    """o (batch, seq, heads, dim_v), float64; `scale` is 1/sqrt(dim) by default.

    >>> q = np.zeros((1, 2, 1, 4))
    >>> attention(q, q, np.arange(8.0).reshape(1, 2, 1, 4))[0, :, 0]
    array([[2., 3., 4., 5.],
           [2., 3., 4., 5.]])
    """
    used = operands(q, k, v, track, fmt, outliers)
    return heads_first(probabilities(used.scores, track, causal, _scale(q, scale)) @ used.v)


def attention_vjp(g, q, k, v, track: str = "reference", causal: bool = False, scale: float | None = None,
                  fmt: str = "nvfp4_exact", outliers: int = 16):  # fmt: skip
    """(dq, dk, dv) of sum(g * attention(q, k, v)), with S and P computed again as the track computes them.

    dV = P^T g, dP = g V^T, dS = P * (dP - sum_j P dP), dQ = scale dS K, dK = scale dS^T Q (FlashAttention,
    arXiv:2205.14135, appendix B.2), straight through the quantiser. g, P and dS are rounded to BF16 where
    they enter a product, except on the "reference" track. The rows of dS sum to zero, so the mean that k lost
    needs no term.
    """
    used, scale = operands(q, k, v, track, fmt, outliers), _scale(q, scale)
    low = (lambda x: x) if track == "reference" else (lambda x: round_bf16(x).astype(np.float64))
    g = low(heads_first(np.asarray(g, np.float64)))
    p = probabilities(used.scores, track, causal, scale)
    dp = g @ np.swapaxes(used.v, 2, 3)
    ds = low(p * (dp - (p * dp).sum(-1, keepdims=True)))
    dq, dk = scale * (ds @ used.k), scale * (np.swapaxes(ds, 2, 3) @ used.q)
    return heads_first(dq), heads_first(dk), heads_first(np.swapaxes(low(p), 2, 3) @ g)
