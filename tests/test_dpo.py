"""Diffusion-DPO: its loss, its gradients, its first step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp4bf16 import tracks
from fp4bf16.align.dpo import dpo_backward, dpo_loss, phase_drift
from fp4bf16.diffusion import cosine
from fp4bf16.errors import ShapeError
from fp4bf16.nn.tape import no_grad
from fp4bf16.nn.unet import UNet2D, UNetConfig


def _tiny(dtype=np.float32) -> UNet2D:
    config = UNetConfig.tiny(block_out_channels=(8, 16), norm_num_groups=4, caption_vocabulary=5)
    return UNet2D(config, seed=3).to(dtype)


def _batch(rng, pairs=4, dtype=np.float32):
    chosen, rejected, eps = rng.standard_normal((3, pairs, 8, 8, 12)).astype(dtype)
    bags = (rng.random((pairs, 5)) < 0.5).astype(dtype)
    return chosen, rejected, bags, rng.integers(0, 1000, pairs), eps


# ---- the loss


def test_loss_by_its_formula(rng):
    w, l, rw, rl = rng.random((4, 6))  # noqa: E741
    result = dpo_loss(w, l, rw, rl, beta=7.0)
    inside = [-7.0 / 2 * ((a - c) - (b - d)) for a, b, c, d in zip(w, l, rw, rl, strict=True)]
    assert result.loss == pytest.approx(sum(-math.log(1 / (1 + math.exp(-x))) for x in inside) / 6)
    assert result.stats["rewards/margins"] == pytest.approx(np.mean(inside))
    assert result.stats["rewards/accuracies"] == pytest.approx(np.mean(np.array(inside) > 0))
    assert result.stats["rewards/chosen"] - result.stats["rewards/rejected"] == pytest.approx(np.mean(inside))


def test_published_values_by_hand():
    """beta 5000 and no hold, of one pair of pictures of two elements, with eps the target.

    Errors: the policy's 0.1² and 0.12², the reference's 0.11² twice: -(5000 / 2) [(0.01 - 0.0121) - (0.0144 -
    0.0121)] = 11, L = log(1 + e^-11). dL/de = -+2500 / (1 + e^11), de/d output = its error.
    """
    eps, ones = np.array([0.3, -0.7]).reshape(1, 1, 1, 2), np.ones((2, 1, 1, 2))
    both = np.concatenate([eps, eps])

    class Output:
        data = both + np.array([0.1, 0.12]).reshape(2, 1, 1, 1) * ones

        def backward(self, gradient):
            self.gradient = gradient

    policy = Output()
    result = dpo_backward(lambda *a: policy, lambda *a: both + 0.11, eps + 1, eps - 1, np.zeros((1, 3)),
                          np.array([40]), eps, cosine(100), "eps", 5000.0)  # fmt: skip
    assert result.loss == pytest.approx(math.log1p(math.exp(-11)), rel=1e-9)
    assert result.stats["rewards/margins"] == pytest.approx(11)
    slope = 2500 / (1 + math.exp(11))
    want = slope * np.array([0.1, 0.1, -0.12, -0.12])
    np.testing.assert_allclose(policy.gradient.ravel(), want, rtol=1e-9)


def test_loss_gradients_are_finite_differences(rng):
    e, h = rng.random((4, 5)), 1e-6
    result = dpo_loss(*e, beta=30.0)
    for which, gradient in ((0, result.chosen_gradient), (1, result.rejected_gradient)):
        for i in range(5):
            up, down = e.copy(), e.copy()
            up[which, i] += h
            down[which, i] -= h
            numeric = (dpo_loss(*up, beta=30.0).loss - dpo_loss(*down, beta=30.0).loss) / (2 * h)
            assert gradient[i] == pytest.approx(numeric, rel=1e-5, abs=1e-8)


def test_loss_is_finite_at_any_margin():
    e = np.array([1.0, 0.0])
    result = dpo_loss(e, e[::-1], np.zeros(2), np.zeros(2), beta=1e6)
    assert result.loss == pytest.approx(2.5e5) and np.isfinite(result.chosen_gradient).all()


def test_shapes_of_the_loss():
    with pytest.raises(ShapeError, match=r"chosen \(2,\), rejected \(3,\)"):
        dpo_loss(np.zeros(2), np.zeros(3), np.zeros(2), np.zeros(2), 1.0)


# ---- the network


def test_before_the_first_update_loss_is_ln2_and_every_margin_zero(rng):
    """Exactly: the taped policy and the tape-free reference give the same bits."""
    model = _tiny()
    reference = model.flat.data.copy()

    def frozen(x, t, c):
        with model.using(reference), tracks("bf16"), no_grad():
            return model(x, t, captions=c).data

    def policy(x, t, c):
        with tracks("bf16"):
            return model(x, t, captions=c)

    batch = _batch(rng)
    result = dpo_backward(policy, frozen, *batch, cosine(1000), "v", 4000.0)
    assert result.loss == math.log(2)
    for name in ("margins", "chosen", "rejected"):
        assert result.stats[f"rewards/{name}"] == 0.0
    assert result.stats["rewards/accuracies"] == 0.5
    assert result.stats["kl"] == result.stats["drift"] == 0.0
    before = model.flat.grad.copy()
    assert np.abs(before).max() > 0
    model.flat.data -= np.float32(2e-3 / np.abs(before).max()) * before  # well over BF16 rounding
    model.flat.touch()
    model.zero_grad()
    after = dpo_backward(policy, frozen, *batch, cosine(1000), "v", 4000.0)
    assert after.loss < result.loss and after.stats["rewards/margins"] > 0 and after.stats["kl"] > 0


@pytest.mark.parametrize("hold", [0.0, 30.0])
def test_network_gradient_is_finite_differences(hold, rng):
    """Whole chain in float64 on the unrounded track: d loss / d parameters along a random direction."""
    model = _tiny(np.float64)
    reference = model.flat.data + 0.01 * rng.standard_normal(model.flat.data.shape)
    batch, beta, seen = _batch(rng, dtype=np.float64), 10.0, {}

    def frozen(x, t, c):
        with model.using(reference), no_grad():
            seen["frozen"] = model(x, t, captions=c).data
        return seen["frozen"]

    def policy(x, t, c):
        seen["output"] = model(x, t, captions=c)
        return seen["output"]

    def loss() -> float:
        model.flat.touch()
        model.zero_grad()
        value = dpo_backward(policy, frozen, *batch, cosine(1000), "v", beta, hold, phases=4).loss
        return value + beta * hold * np.mean(phase_drift(seen["output"].data, seen["frozen"], 4) ** 2)

    with tracks("reference"):
        loss()
        gradient, direction = model.flat.grad.copy(), rng.standard_normal(model.flat.data.shape)
        direction[model.flat.grad == 0] = 0
        h, start = 1e-6, model.flat.data.copy()
        model.flat.data[...] = start + h * direction
        up = loss()
        model.flat.data[...] = start - h * direction
        numeric = (up - loss()) / (2 * h)
    assert gradient @ direction == pytest.approx(numeric, rel=1e-5)


def test_drift_is_the_grid_alone(rng):
    """Folded pixels that move apart are a drift; a change of colour, or of single pictures, is none."""
    frozen = rng.standard_normal((4, 8, 8, 12))
    assert np.abs(phase_drift(frozen + np.repeat([0.1, -0.2, 0.3], 4), frozen, 4)).max() < 1e-12
    swing = np.zeros((4, 1, 1, 12))
    swing[0, ..., 5], swing[1, ..., 5] = 0.4, -0.4
    assert np.abs(phase_drift(frozen + swing, frozen, 4)).max() < 1e-12
    grid = np.tile([0.3, -0.1, -0.1, -0.1], 3)  # a dot in every 2x2 pixels
    np.testing.assert_allclose(phase_drift(frozen + grid, frozen, 4), grid, atol=1e-12)


def test_kl_is_the_distance_from_the_reference(rng):
    """The mean squared difference of the two outputs over both pictures of all pairs."""
    model, seen = _tiny(), {}
    reference = model.flat.data + np.float32(0.01) * rng.standard_normal(model.flat.data.shape).astype(
        np.float32
    )

    def frozen(x, t, c):
        with model.using(reference), no_grad():
            seen["frozen"] = model(x, t, captions=c).data
        return seen["frozen"]

    def policy(x, t, c):
        seen["output"] = model(x, t, captions=c)
        return seen["output"]

    stats = dpo_backward(policy, frozen, *_batch(rng), cosine(1000), "v", 10.0).stats
    difference = seen["output"].data.astype(np.float64) - seen["frozen"]
    assert len(difference) == 8 and stats["kl"] == pytest.approx(np.mean(difference**2), rel=1e-6)
