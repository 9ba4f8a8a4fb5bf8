"""DDPO: log-probabilities against the Gaussian's formula, the clipped ratio, gradients, the sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp4bf16 import tracks
from fp4bf16.align.drift import phase_drift
from fp4bf16.align.ppo import (
    COLUMNS,
    PPO_STATS,
    log_probability,
    ppo_backward,
    ppo_loss,
    step_mean,
    step_table,
)
from fp4bf16.diffusion import PREDICTIONS, generate, get_schedule, normal
from fp4bf16.errors import ConfigError, ShapeError
from fp4bf16.nn.tape import no_grad
from fp4bf16.nn.unet import UNet2D, UNetConfig

SCHEDULES = ("cosine", "linear", "ve")


def _rows(rng, n, bound=np.inf):
    """Steps with any coefficients."""
    rows = rng.uniform(0.3, 1.2, (n, len(COLUMNS)))
    rows[:, 1], rows[:, 5] = -rows[:, 1], bound
    return rows


def _batch(rng, n=4, shape=(2, 3, 2), bound=1.0):
    """(output, reference, x, following, rows, advantage, old): a policy near the one that drew the steps."""
    x, z = rng.standard_normal((2, n, *shape))
    rows = _rows(rng, n, bound)
    drawn_by = rng.standard_normal(x.shape)
    mean, _ = step_mean(drawn_by, x, rows)
    following = mean + rows[:, 4].reshape(-1, *(1,) * len(shape)) * z
    old, _ = log_probability(drawn_by, x, following, rows)
    output, reference = (drawn_by + 0.2 * rng.standard_normal(x.shape) for _ in range(2))
    return output, reference, x, following, rows, rng.uniform(-3, 3, n), old


def _density(output, x, following, row):
    """log N(following; mu, s²) of one step, averaged, an element at a time."""
    a, b, p, q, s, bound = (float(v) for v in row)
    total = 0.0
    for o, at, to in zip(output.ravel(), x.ravel(), following.ravel(), strict=True):
        mu = p * min(bound, max(-bound, a * at + b * o)) + q * at
        total += math.log(math.exp(-((to - mu) ** 2) / (2 * s * s)) / (s * math.sqrt(2 * math.pi)))
    return total / output.size


@pytest.mark.parametrize("bound", [np.inf, 0.5])
def test_log_probability_is_the_gaussians(bound, rng):
    output, _, x, following, rows, _, _ = _batch(rng, bound=bound)
    found, _ = log_probability(output, x, following, rows)
    assert found.dtype == np.float64
    want = [_density(*one) for one in zip(output, x, following, rows, strict=True)]
    np.testing.assert_allclose(found, want, rtol=1e-12)


def test_log_probability_is_of_noise_what_noise_has(rng):
    """Of a step that was drawn, the mean over many elements is -s's entropy."""
    x, z = rng.standard_normal((2, 1, 400, 400, 1))
    rows = _rows(rng, 1)
    mean, _ = step_mean(np.zeros_like(x), x, rows)
    found, _ = log_probability(np.zeros_like(x), x, mean + rows[0, 4] * z, rows)
    assert found[0] == pytest.approx(-0.5 * math.log(2 * math.pi * math.e * rows[0, 4] ** 2), abs=0.01)


@pytest.mark.parametrize("bound", [np.inf, 0.5])
def test_slope_is_finite_differences(bound, rng):
    output, _, x, following, rows, _, _ = _batch(rng, n=2, bound=bound)
    _, slope = log_probability(output, x, following, rows)
    a, b = (rows[:, i].reshape(-1, 1, 1, 1) for i in (0, 1))
    clipped = np.abs(a * x + b * output) > bound
    assert clipped.any() == np.isfinite(bound) and not slope[clipped].any() and slope[~clipped].all()
    h = 1e-6
    for at in np.ndindex(output.shape):
        ends = []
        for step in (h, -h):
            moved = output.copy()
            moved[at] += step
            ends.append(log_probability(moved, x, following, rows)[0][at[0]])
        assert slope[at] == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("clip", [1e-4, 0.1, 0.9])
def test_loss_in_plain_python(clip, rng):
    batch = _batch(rng, n=9)
    output, reference, x, following, rows, advantage, old = batch
    stats = dict(zip(PPO_STATS, ppo_loss(*batch, clip).values, strict=True))
    total = kl = outside = ratios = gone = 0.0
    for i in range(9):
        change = _density(output[i], x[i], following[i], rows[i]) - old[i]
        rho, gone = math.exp(change), gone + 0.5 * change**2 / 9
        total += max(-advantage[i] * rho, -advantage[i] * min(1 + clip, max(1 - clip, rho))) / 9
        outside, ratios = outside + (abs(rho - 1) > clip) / 9, ratios + rho / 9
        mu, mu_ref = (step_mean(o[i : i + 1], x[i : i + 1], rows[i : i + 1])[0] for o in (output, reference))
        kl += np.mean((mu - mu_ref) ** 2) / (2 * rows[i, 4] ** 2) / 9
    assert stats["loss"] == pytest.approx(total) and stats["ratio"] == pytest.approx(ratios)
    assert stats["clipfrac"] == pytest.approx(outside) and stats["kl"] == pytest.approx(kl)
    assert stats["advantage"] == pytest.approx(advantage.mean())
    assert stats["approx_kl"] == pytest.approx(gone) and gone > 1e-6


@pytest.mark.parametrize("advantage, loss, slope", [(3.0, -3.0003, 0.0), (-3.0, 3.03, 0.37875)])
def test_published_values_by_hand(advantage, loss, slope):
    """clip 1e-4 and no hold: DDPO's clipped loss of a step that has become likelier by 1 in 100.

    mu = 0, x' = 1, s = 2: d log p / d output = (1 / 4) / 2 elements. A = 3: max(-3.03, -3 (1 + 1e-4)), and no
    gradient; A = -3: max(3.03, 3 (1 + 1e-4)), and 3.03 / 8. 0.5 (log 1.01)² = 4.95042e-5.
    """
    rows = np.array([[0.0, 1.0, 1.0, 0.0, 2.0, np.inf]])  # mu is the output
    zero, following = np.zeros((1, 1, 1, 2)), np.ones((1, 1, 1, 2))
    old = np.array([-1 / 8 - math.log(2) - 0.5 * math.log(2 * math.pi) - math.log(1.01)])

    class Output:
        data = zero

        def backward(self, gradient):
            self.gradient = gradient

    output = Output()
    found, stats = ppo_backward(lambda *a: output, lambda *a: zero + 0.2, zero, following, None,
                                np.zeros(1, int), rows, np.array([advantage]), old, 1e-4)  # fmt: skip
    assert found == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(output.gradient, np.full((1, 1, 1, 2), slope), rtol=1e-12)
    assert stats["ratio"] == pytest.approx(1.01) and stats["clipfrac"] == 1
    assert stats["approx_kl"] == pytest.approx(4.95042e-5, rel=1e-5)
    assert stats["kl"] == pytest.approx(0.04 / 8)  # (mu - mu_ref)² / (2 s²)


@pytest.mark.parametrize("clip", [1e-4, 0.05, 0.9])
@pytest.mark.parametrize("filled", [False, True])
def test_gradient_is_finite_differences(clip, filled, rng):
    batch = _batch(rng, n=5, shape=(1, 2, 2))
    live = np.array([1.0, 1.0, 1.0, 0.0, 0.0]) if filled else None
    found, h = ppo_loss(*batch, clip, live), 1e-6
    assert found.gradient.shape == batch[0].shape
    for at in np.ndindex(batch[0].shape):
        ends = []
        for step in (h, -h):
            output = batch[0].copy()
            output[at] += step
            ends.append(ppo_loss(output, *batch[1:], clip, live).values[0])
        assert found.gradient[at] == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-4, abs=1e-9)
    if filled:
        assert not found.gradient[3:].any()
        alone = ppo_loss(*(b[:3] for b in batch), clip)
        np.testing.assert_allclose(found.values, alone.values, rtol=1e-12)
        np.testing.assert_allclose(found.gradient[:3], alone.gradient, rtol=1e-12)


def test_the_clip_stops_what_goes_too_far(rng):
    """A good step that has become likelier, and a bad one that has become less likely, move no further; the
    other way round they come back."""
    rows = _rows(rng, 1)
    x, following = rng.standard_normal((2, 1, 2, 2, 1))
    output = rng.standard_normal(x.shape)
    logp, slope = log_probability(output, x, following, rows)
    for drift, advantage, moves in ((0.5, 1, False), (-0.5, -1, False), (0.5, -1, True), (-0.5, 1, True)):
        old = logp - drift  # the ratio is exp(drift)
        loss = ppo_loss(output, output, x, following, rows, np.array([float(advantage)]), old, 0.2)
        assert loss.gradient.any() == moves
        if moves:
            np.testing.assert_allclose(loss.gradient, -advantage * math.exp(drift) * slope, rtol=1e-12)


def test_ratio_is_one_of_the_same_output(rng):
    """Exactly, in float32 as in float64."""
    output, reference, x, following, rows, advantage, _ = _batch(rng, n=7)
    for dtype in (np.float64, np.float32):
        o, r, at, to = (a.astype(dtype) for a in (output, reference, x, following))
        old, _ = log_probability(o, at, to, rows)
        stats = dict(zip(PPO_STATS, ppo_loss(o, r, at, to, rows, advantage, old, 1e-4).values, strict=True))
        assert stats["ratio"] == 1.0 and stats["ratio_spread"] == 0.0 and stats["clipfrac"] == 0.0
        assert stats["approx_kl"] == 0.0
        assert stats["loss"] == pytest.approx(-advantage.mean())


# ---- the sampler


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_table_is_the_ancestral_sampler(schedule, prediction, rng):
    """Every step of the sampler is mean + s z with the noise that it drew; the last one is the mean."""
    s, steps, seeds, seen = get_schedule(schedule, 60), 6, [3, 4, 5], []

    def model(x, t, condition):
        seen.append(x.copy())
        return np.tanh(s.scale_input(x, t)) * np.float32(0.8)

    shape = (2, 2, 3)
    last = generate(model, seeds, None, shape, s, steps, sampler="ancestral", prediction=prediction, chunk=3)
    timesteps, table = step_table(s, steps, prediction)
    latents = [*seen, last]
    for i, t in enumerate(timesteps):
        x, batch_t = latents[i], np.full(3, t)
        rows = np.repeat(table[i : i + 1], 3, 0)
        with no_grad():
            mean, _ = step_mean(np.tanh(s.scale_input(x, batch_t)) * np.float32(0.8), x, rows)
        z = normal(np.array(seeds, np.uint64), int(t) + 1, shape) if i + 1 < steps else 0
        want = mean + table[i, 4] * z
        np.testing.assert_allclose(latents[i + 1], want, rtol=1e-4, atol=2e-5 * np.abs(want).max())
    assert (table[:-1, 4] > 0).all() and table[-1, 4] == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_table_is_the_posterior(schedule):
    """The posterior of any alpha and sigma, which DDPM's eq. 6 and 7 are for VP."""
    s = get_schedule(schedule, 60)
    timesteps, table = step_table(s, 5, "v")
    for row, t, then in zip(table, timesteps, timesteps[1:], strict=False):
        shrink, back = s.alpha[t] / s.alpha[then], (s.sigma[then] / s.sigma[t]) ** 2
        fresh = 1 - shrink**2 * back
        want = [s.alpha[then] * fresh, shrink * back, s.sigma[then] * math.sqrt(fresh)]
        np.testing.assert_allclose(row[2:5], want, rtol=1e-9)
    assert np.isinf(step_table(s, 5, "v", clip=None)[1][:, 5]).all()


def _tiny(dtype) -> UNet2D:
    config = UNetConfig.tiny(block_out_channels=(8, 16), norm_num_groups=4, caption_vocabulary=5)
    return UNet2D(config, seed=3).to(dtype)


@pytest.mark.parametrize("hold", [0.0, 5.0])
def test_network_gradient_is_finite_differences(hold, rng):
    """Whole chain in float64 on the unrounded track, with steps that fill the batch up."""
    model, s, n = _tiny(np.float64), get_schedule("cosine", 100), 4
    reference = model.flat.data + 0.02 * rng.standard_normal(model.flat.data.shape)
    timesteps, table = step_table(s, 6, "v")
    which, live = np.array([0, 2, 4, 4]), np.array([1.0, 1.0, 1.0, 0.0])
    x, following = rng.standard_normal((2, n, 8, 8, 12))
    bags = (rng.random((n, 5)) < 0.5).astype(np.float64)
    t, rows, advantage = timesteps[which], table[which], rng.uniform(-3, 3, n)
    seen = {}

    def frozen(x, t, c):
        with model.using(reference), no_grad():
            return model(x, t, captions=c).data

    def policy(x, t, c):
        seen["output"] = model(x, t, captions=c)
        return seen["output"]

    with tracks("reference"):
        anchor, here = frozen(x, t, bags), policy(x, t, bags).data
        old = log_probability(here, x, following, rows)[0] + np.array([0.01, -0.02, 0.0, 0.0])
        model.zero_grad()
        loss, stats = ppo_backward(
            policy, frozen, x, following, bags, t, rows, advantage, old, 0.5, live, hold, phases=4
        )

        def value() -> float:
            model.flat.touch()
            with no_grad():
                output = policy(x, t, bags).data
            d = phase_drift(output[:3], anchor[:3], 4)
            values = ppo_loss(output, anchor, x, following, rows, advantage, old, 0.5, live).values
            return values[0] + hold * np.mean(d**2)

        assert stats["drift"] == pytest.approx(np.sqrt(np.mean(phase_drift(here[:3], anchor[:3], 4) ** 2)))
        gradient, direction = model.flat.grad.copy(), rng.standard_normal(model.flat.data.shape)
        direction[gradient == 0] = 0
        h, start = 1e-6, model.flat.data.copy()
        model.flat.data[...] = start + h * direction
        up = value()
        model.flat.data[...] = start - h * direction
        numeric = (up - value()) / (2 * h)
    assert gradient @ direction == pytest.approx(numeric, rel=1e-5)


# ---- bad input


@pytest.mark.parametrize("clip", [0.0, 1.0, -0.1, np.nan])
def test_clip_that_cannot_be(clip):
    with pytest.raises(ConfigError, match="ppo.clip: is"):
        ppo_backward(None, lambda *a: None, *[None] * 7, clip)


def test_shapes_that_do_not_belong_together(rng):
    batch = _batch(rng)
    for at, name in ((1, "reference"), (2, "x"), (3, "following")):
        with pytest.raises(
            ShapeError, match=rf"ppo_loss: {name} has shape \(2, 2, 3, 2\) but output has shape"
        ):
            ppo_loss(*(b[:2] if i == at else b for i, b in enumerate(batch)), 0.1)
    for at, name in ((4, "rows"), (5, "advantage"), (6, "old")):
        with pytest.raises(ShapeError, match=rf"ppo_loss: {name} has shape \(3.* but there are 4 steps"):
            ppo_loss(*(b[:3] if i == at else b for i, b in enumerate(batch)), 0.1)
    with pytest.raises(ShapeError, match=r"ppo_loss: live has shape \(3,\) but there are 4 steps"):
        ppo_loss(*batch, 0.1, np.ones(3))
    with pytest.raises(ShapeError, match="holds no step"):
        ppo_loss(*(b[:0] for b in batch), 0.1)
