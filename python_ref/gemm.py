"""Matrix products on the three tracks, their low-rank form and their gradients, in plain NumPy.

The BF16 track rounds both operands to bfloat16 (nearest, ties to even) and accumulates in FP32. The FP4 track
quantises both operands along the contraction, and every product of two decoded codes is exact before it is
summed. The dual track computes the bulk of X W on the FP4 track and corrects it by a low-rank BF16 branch
that goes into the same accumulators (Li et al., "SVDQuant", arXiv:2411.05007, equation 5: X W = X L1 L2 +
Q(X) Q(R)).
"""

from __future__ import annotations

import math

import numpy as np

from .formats import round_bf16
from .quantize import dequantize, quantize

_erfc = np.frompyfunc(math.erfc, 1, 1)


def fake_quantize(x, fmt="nvfp4_exact", axis=-1, search="full"):
    """dequantize(quantize(x)) along `axis`, float32: what the FP4 track multiplies."""
    return dequantize(quantize(x, fmt, axis, search=search))


def operands(a, b, track="bf16", fmt="nvfp4_exact"):
    """The two float arrays that `track` multiplies: rounded, quantised, or as they are ("reference")."""
    a, b = np.asarray(a), np.asarray(b)
    if track == "reference":
        return a, b
    if track == "bf16":
        return round_bf16(a), round_bf16(b)
    # a is blocked along its last axis, b along its second last: both along K
    return fake_quantize(a, fmt, -1, search="fast"), fake_quantize(b, fmt, -2 if b.ndim > 1 else 0)


def silu(x):
    """x / (1 + exp(-x)) (Elfwing et al., arXiv:1702.03118)."""
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def gelu(x):
    """x Phi(x) with the exact normal distribution function, not its tanh form (Hendrycks,
    arXiv:1606.08415)."""
    return (0.5 * x * _erfc(-np.asarray(x, np.float64) / math.sqrt(2)).astype(np.float64)).astype(x.dtype)


def epilogue(y, bias=None, activation=None, residual=None):
    """activation(y + bias) + residual, in that order."""
    if bias is not None:
        y = y + bias
    if activation is not None:
        y = {"silu": silu, "gelu": gelu}[activation](y)
    return y if residual is None else y + residual


def matmul(a, b, track="bf16", fmt="nvfp4_exact", accumulate=np.float32, **epilogue_args):
    """`a` (..., M, K) @ `b` (..., K, N) on `track`, summed in `accumulate` (float64 for an oracle)."""
    a, b = operands(a, b, track, fmt)
    return epilogue(a.astype(accumulate) @ b.astype(accumulate), **epilogue_args)


def linear(x, weight, bias=None, **kwargs):
    """`x` (..., K) @ `weight` (N, K).T + `bias` (N,)."""
    return matmul(x, np.asarray(weight).T, bias=bias, **kwargs)


def low_rank(w, rank):
    """BF16 factors (K, r) and (r, N) of the truncated SVD of `w` (K, N): the best rank-r approximation.

    The singular values are shared evenly between the factors (Eckart and Young, 1936).
    """
    u, s, vt = np.linalg.svd(np.asarray(w, np.float64), full_matrices=False)
    root = np.sqrt(s[:rank])
    return round_bf16(u[:, :rank] * root), round_bf16(root[:, None] * vt[:rank])


def dual_operands(w, rank=32, fmt="nvfp4_exact"):
    """(down (K, r), up (r, N), twin (K, N)): BF16 low-rank branch and the decoded FP4 twin of what it leaves.

    The residual is taken from the *rounded* factors, so that their rounding is quantised with it.
    """
    w = round_bf16(w)
    down, up = low_rank(w, rank)
    residual = w - down @ up
    return down, up, fake_quantize(residual, fmt, 0)


def dual_matmul(a, down, up, twin, fmt="nvfp4_exact", accumulate=np.float32, **epilogue_args):
    """Q(a) @ twin + bf16(bf16(a) @ down) @ up: FP4 products first, the BF16 branch into the same sum."""
    bulk = fake_quantize(a, fmt, -1, search="fast").astype(accumulate) @ twin.astype(accumulate)
    hidden = round_bf16(round_bf16(a).astype(accumulate) @ down.astype(accumulate))
    return epilogue(bulk + hidden.astype(accumulate) @ up.astype(accumulate), **epilogue_args)


def unbroadcast(gradient, shape):
    """Sum `gradient` over the axes that broadcasting added to or stretched in an operand of `shape`."""
    extra = gradient.ndim - len(shape)
    gradient = gradient.sum(tuple(range(extra))) if extra else gradient
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and gradient.shape[i] != 1)
    return gradient.sum(stretched, keepdims=True) if stretched else gradient


def matmul_vjp(g, a, b, track="bf16", fmt="nvfp4_exact", accumulate=np.float32):
    """Gradients (da, db) of matmul(a, b) for `g` (..., M, N), operands with two or more axes.

    dA = g B^T and dB = A^T g with the operands that the forward pass multiplied (straight-through over the
    quantiser, Bengio et al., arXiv:1308.3432), g rounded to bfloat16 except on the "reference" track.
    """
    a_used, b_used = (x.astype(accumulate) for x in operands(a, b, track, fmt))
    g = (g if track == "reference" else round_bf16(g)).astype(accumulate)
    da = g @ np.swapaxes(b_used, -1, -2)
    db = np.swapaxes(a_used, -1, -2) @ g
    return unbroadcast(da, np.shape(a)), unbroadcast(db, np.shape(b))


def linear_vjp(g, x, weight, **kwargs):
    """Gradients (dx, dweight (N, K), dbias (N,)) of linear(x, weight, bias) for `g` (..., N)."""
    rows = np.reshape(g, (-1, g.shape[-1]))
    dx, dw = matmul_vjp(rows, np.reshape(x, (-1, x.shape[-1])), np.asarray(weight).T, **kwargs)
    dbias = rows.sum(0) if kwargs.get("track") == "reference" else round_bf16(rows).sum(0)
    return dx.reshape(x.shape), dw.T, dbias


def dual_matmul_vjp(g, a, down, up, twin, fmt="nvfp4_exact", save="fp4", accumulate=np.float32):
    """Gradients (da, dw, ddown, dup) of dual_matmul for `g` (M, N) and `a` (M, K).

    da = g twin^T + bf16(g up^T) down^T. dw, the gradient of the master, is X^T g; X is the decoded FP4 input
    that the forward pass keeps, or the BF16 input with ``save="bf16"``. T = bf16(bf16(a) down) is kept in
    BF16.
    """
    g = round_bf16(g).astype(accumulate)
    down, up, twin = (m.astype(accumulate) for m in (down, up, twin))
    hidden = round_bf16(round_bf16(a).astype(accumulate) @ down).astype(accumulate)
    kept = (round_bf16(a) if save == "bf16" else fake_quantize(a, fmt, -1, search="fast")).astype(accumulate)
    through = round_bf16(g @ up.T).astype(accumulate)  # (M, r), the left operand of a BF16 product itself
    return g @ twin.T + through @ down.T, kept.T @ g, kept.T @ through, hidden.T @ g
