"""Device arrays handed over in ways nobody should: the result is right or one sentence says what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from host_cuda import FakeArray, host_cuda, put  # noqa: F401  (fixtures)
from test_gemm_device import close, draw, gpu  # noqa: F401

import fp4bf16 as fb


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
