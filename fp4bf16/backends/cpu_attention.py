"""Softmax attention on the CPU: the scores of a block of queries are made, turned into weights and used at
once.

All arrays are (heads, seq, dim), heads counted over the whole batch, float32 (float64 for exact operands).

    forward    S = scale Q K^T,  P = exp(S - max S) rounded,  O = P V / sum P
    backward   P / sum P again;  dV = P^T G,  dS = P (G V^T - sum),  dQ = scale dS K,  dK = scale dS^T Q

A task is some whole heads while their scores fit the second-level cache, else one block of one head's queries
(in the backward pass always whole heads, whose blocks are added in order), so results do not depend on the
threads.
"""

from __future__ import annotations

import numpy as np

from .cpu_conv import least, round_in_place
from .jit import njit
from .threads import num_threads, parallel_chunks, scratch

_SCORE_BYTES = 1 << 20  # of the scores of one task
P_SCALE = np.float32(256)  # of P before E4M3: the largest power of two under 448


@njit(nogil=True, cache=True)
def _round_e4m3(p):
    """p in [0, 1] -> the E4M3 number nearest to 256 p, ties to even, over 256; in place."""
    for i in range(p.size):
        v = p[i] * np.float32(256)
        # From 2^-6 on three fraction bits are kept: adding 1.5 * 2^20 times the leading power of two rounds
        # the # rest away. Below it E4M3 has the fixed step 2^-9, that is the same with the power 2^-6.
        power = np.float32(max(v, np.float32(0.015625))).view(np.int32) & np.int32(0x7F800000)
        magic = np.int32(power).view(np.float32) * np.float32(1572864.0)
        p[i] = ((v + magic) - magic) * np.float32(0.00390625)


def _weights(s: np.ndarray, first: int, causal: bool, scale: float, rounding: str | None) -> np.ndarray:
    """s (heads, queries, keys) becomes exp(scale s - max), rounded, in place; its row sums are returned.

    `first` is the number of the first query. Every query sees a key, so the maximum is finite for finite
    scores.
    """
    s *= s.dtype.type(scale)
    if causal:
        np.copyto(s, -np.inf, where=~np.tri(s.shape[1], s.shape[2], k=first, dtype=bool))
    s -= s.max(-1, keepdims=True)
    np.exp(s, out=s)
    if rounding == "bf16":
        round_in_place(s)
    elif rounding == "e4m3":
        _round_e4m3(s.reshape(-1))
    return s.sum(-1, keepdims=True)


def _tasks(heads: int, queries: int, keys: int, itemsize: int) -> list[tuple[int, int, int, int]]:
    """(first head, last head, first query, last query) of each task."""
    rows = max(1, _SCORE_BYTES // max(1, keys * itemsize))  # of scores a task
    if queries <= rows:
        group = max(1, min(rows // max(1, queries), -(-heads // num_threads())))
        return [(h, min(heads, h + group), 0, queries) for h in range(0, heads, group)]
    return [(h, h + 1, q, min(queries, q + rows)) for h in range(heads) for q in range(0, queries, rows)]


def attention_forward(q, k, v, out, causal: bool, scale: float, rounding: str | None) -> None:
    """out (heads, queries, dim_v) = attention of q (heads, queries, d), k (heads, keys, d), v (heads, keys,
    dim_v).

    `rounding` of the weights P: None, "bf16" or "e4m3" (of 256 P).
    """
    (heads, queries, d), keys = q.shape, k.shape[1]
    tasks, k_t = _tasks(heads, queries, keys, q.itemsize), k.swapaxes(1, 2)

    def run(first: int, last: int) -> None:
        for h0, h1, q0, q1 in tasks[first:last]:
            seen = min(keys, q1) if causal else keys  # keys that some query of the block sees
            s = scratch("attention scores", (h1 - h0, q1 - q0, seen), q.dtype)
            np.matmul(q[h0:h1, q0:q1], k_t[h0:h1, :, :seen], out=s)
            total = _weights(s, q0, causal, scale, rounding)
            y = out[h0:h1, q0:q1]
            np.matmul(s, v[h0:h1, :seen], out=y)
            y /= total

    flops = 2 * heads * queries * keys * (d + v.shape[2])
    parallel_chunks(len(tasks), run, least(flops // max(1, len(tasks))))


def attention_backward(g, scores, used, causal: bool, scale: float, rounding: str | None):
    """(dq, dk, dv) for g (heads, queries, dim_v).

    scores = (q, k) whose product is S, used = (q, k, v) that the gradients are multiplied with; they differ
    where a track splits the product. With `rounding`, P and dS are rounded to BF16 before they are
    multiplied.
    """
    (qs, ks), (q, k, v) = scores, used
    (heads, queries, d), keys = q.shape, k.shape[1]
    dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    rows = max(1, _SCORE_BYTES // max(1, keys * q.itemsize))
    group = max(1, min(rows // max(1, queries), -(-heads // num_threads())))

    def run(first: int, last: int) -> None:
        for h0 in range(first, last, group):
            h = slice(h0, min(last, h0 + group))
            for q0 in range(0, queries, rows):
                block(h, q0, min(queries, q0 + rows))

    def block(h: slice, q0: int, q1: int) -> None:
        seen = min(keys, q1) if causal else keys
        rows_, keys_ = (h, slice(q0, q1)), (h, slice(0, seen))
        shape = (h.stop - h.start, q1 - q0, seen)
        p, dp = (scratch(name, shape, q.dtype) for name in ("attention scores", "attention gradient"))
        np.matmul(qs[rows_], ks[keys_].swapaxes(1, 2), out=p)
        p /= _weights(p, q0, causal, scale, rounding)
        np.matmul(g[rows_], v[keys_].swapaxes(1, 2), out=dp)
        dp -= np.einsum("hij,hij->hi", p, dp)[..., None]
        dp *= p
        if rounding is not None:
            round_in_place(p)
            round_in_place(dp)
        dv[keys_] += p.swapaxes(1, 2) @ g[rows_]
        dk[keys_] += dp.swapaxes(1, 2) @ q[rows_]
        np.matmul(dp, k[keys_], out=dq[rows_])

    parallel_chunks(heads, run, least(2 * queries * keys * (3 * d + 2 * v.shape[2])))
    dq *= q.dtype.type(scale)
    dk *= k.dtype.type(scale)
    return dq, dk, dv
