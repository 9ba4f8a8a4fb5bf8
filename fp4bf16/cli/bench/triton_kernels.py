"""The peer that Hopper has for FP4 today: Triton's ``tl.dot_scaled``, which decodes to BF16 there."""

from __future__ import annotations

import triton
import triton.language as tl

#: (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages), the best of which is used.
CONFIGS = ((128, 128, 128, 8, 3), (128, 256, 128, 8, 3), (128, 128, 64, 4, 4))


@triton.jit
def product(a, a_scale, b, b_scale, d, M, N, K: tl.constexpr, A_FP4: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """D (M, N) BF16 = A (M, K) * B (N, K)^T; B is MXFP4 (N, K / 2), A that too or BF16. M, N are multiples of
    the blocks, K of BLOCK_K."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    group = 8 * tl.cdiv(N, BLOCK_N)  # eight tile rows at a time share their columns in the L2 cache
    first = pid // group * 8
    rows = min(tiles_m - first, 8)
    m = first + pid % group % rows
    n = pid % group // rows
    offsets_m, offsets_n = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    scales, halves = tl.arange(0, BLOCK_K // 32), tl.arange(0, BLOCK_K // 2)
    b_at = b + offsets_n[:, None] * (K // 2) + halves[None, :]
    b_scale_at = b_scale + offsets_n[:, None] * (K // 32) + scales[None, :]
    a_scale_at = a_scale + offsets_m[:, None] * (K // 32) + scales[None, :]
    if A_FP4:
        a_at = a + offsets_m[:, None] * (K // 2) + halves[None, :]
    else:
        a_at = a + offsets_m[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(K // BLOCK_K):
        if A_FP4:
            sums = tl.dot_scaled(tl.load(a_at), tl.load(a_scale_at), "e2m1", tl.load(b_at).T,
                                 tl.load(b_scale_at), "e2m1", sums)  # fmt: skip
            a_at += BLOCK_K // 2
            a_scale_at += BLOCK_K // 32
        else:
            sums = tl.dot_scaled(tl.load(a_at), None, "bf16", tl.load(b_at).T, tl.load(b_scale_at), "e2m1",
                                 sums)  # fmt: skip
            a_at += BLOCK_K
        b_at += BLOCK_K // 2
        b_scale_at += BLOCK_K // 32
    d_at = d + offsets_m[:, None] * N + offsets_n[None, :]
    tl.store(d_at, sums.to(tl.bfloat16))


def launch(config, a, a_scale, b, b_scale, d):
    """One product by `config`; `a` is BF16 where `a_scale` is None."""
    block_m, block_n, block_k, warps, stages = config
    (m, n), k = d.shape, 2 * b.shape[1]
    if m % block_m or n % block_n or k % block_k:
        raise ValueError(f"{m} x {n} x {k} is no multiple of the tile {block_m} x {block_n} x {block_k}")
    grid = (m // block_m * (n // block_n),)
    product[grid](a, b_scale if a_scale is None else a_scale, b, b_scale, d, m, n, K=k,
                  A_FP4=a_scale is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
                  num_warps=warps, num_stages=stages)  # fmt: skip
