"""The loop that trains small networks: what a step does, the rate, and what ends it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp4bf16.align.fit import fit
from fp4bf16.errors import NonFiniteError
from fp4bf16.nn import AdamW, Linear, clip_norm
from fp4bf16.tracks import tracks


def _loss(network, x):
    return lambda step: (network(x[step % len(x)]) * network(x[step % len(x)])).sum()


@pytest.mark.parametrize("steps, warmup, clip", [(1, 0, 1.0), (7, 0, 0.5), (60, 5, 100.0)])
def test_it_is_the_loop_written_out(steps, warmup, clip, rng):
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    one, two, seen = Linear(5, 2, seed=1), Linear(5, 2, seed=1), []
    recent = fit(one, _loss(one, x), steps, lr=0.02, weight_decay=0.1, clip=clip, warmup=warmup,
                 on_step=lambda step, loss: seen.append((step, loss)))  # fmt: skip
    optimizer, losses = AdamW(two.flat.data, 0.02, weight_decay=0.1), []
    for step in range(steps):
        two.zero_grad()
        with tracks("bf16"):
            loss = _loss(two, x)(step)
            loss.backward()
        clip_norm(two.flat.grad, clip)
        share = min(1, step / warmup) if warmup else 1
        optimizer.step(two.flat.grad, share * 0.02 * (1 + math.cos(math.pi * step / steps)) / 2)
        two.flat.touch()
        losses.append((step, loss.item()))
    assert seen == losses
    np.testing.assert_allclose(one.flat.data, two.flat.data, rtol=1e-6)
    if steps < 50:
        assert recent == pytest.approx(np.mean([v for _, v in losses]))
    else:
        assert min(v for _, v in losses) < recent < max(v for _, v in losses)


def test_nothing_is_changed_in_no_step():
    network = Linear(2, 1, seed=0)
    before = network.flat.data.copy()
    assert fit(network, lambda step: 1 / 0, 0, lr=1.0, weight_decay=1.0) == 0.0
    np.testing.assert_array_equal(network.flat.data, before)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_loss_that_is_not_finite_ends_it_before_the_update(rng):
    network = Linear(2, 1, seed=0)
    x = np.ones((3, 4, 2), np.float32)
    x[2] = np.nan
    seen = []
    with pytest.raises(NonFiniteError, match="the line: loss is nan at step 2; lower its lr of 0.1"):
        fit(network, _loss(network, x), 9, lr=0.1, weight_decay=0.0, name="the line",
            on_step=lambda step, loss: seen.append(step))  # fmt: skip
    assert seen == [0, 1] and np.isfinite(network.flat.data).all()
