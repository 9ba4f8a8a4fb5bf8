"""Diffusion-DPO, rollouts and rank fidelity."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp4bf16 import tracks
from fp4bf16.align.dpo import dpo_backward, dpo_loss, phase_drift
from fp4bf16.align.fidelity import rank_fidelity, ranks, spearman
from fp4bf16.align.rollout import (
    Settings,
    choose_prompts,
    healthy,
    measure_fidelity,
    pair,
    rollout,
    select,
)
from fp4bf16.diffusion import cosine, normal
from fp4bf16.errors import ConfigError, NonFiniteError, RewardError, ShapeError
from fp4bf16.nn.tape import no_grad
from fp4bf16.nn.unet import UNet2D, UNetConfig


def _tiny(dtype=np.float32) -> UNet2D:
    config = UNetConfig.tiny(block_out_channels=(8, 16), norm_num_groups=4, caption_vocabulary=5)
    return UNet2D(config, seed=3).to(dtype)


def _batch(rng, pairs=4, dtype=np.float32):
    chosen, rejected, eps = rng.standard_normal((3, pairs, 8, 8, 12)).astype(dtype)
    bags = (rng.random((pairs, 5)) < 0.5).astype(dtype)
    return chosen, rejected, bags, rng.integers(0, 1000, pairs), eps


# ------------------------------------------------------------------------------------------------------ the
# loss


def test_loss_by_its_formula(rng):
    w, l, rw, rl = rng.random((4, 6))  # noqa: E741
    result = dpo_loss(w, l, rw, rl, beta=7.0)
    inside = [-7.0 / 2 * ((a - c) - (b - d)) for a, b, c, d in zip(w, l, rw, rl, strict=True)]
    assert result.loss == pytest.approx(sum(-math.log(1 / (1 + math.exp(-x))) for x in inside) / 6)
    assert result.stats["rewards/margins"] == pytest.approx(np.mean(inside))
    assert result.stats["rewards/accuracies"] == pytest.approx(np.mean(np.array(inside) > 0))
    assert result.stats["rewards/chosen"] - result.stats["rewards/rejected"] == pytest.approx(np.mean(inside))


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


# ---------------------------------------------------------------------------------------------------- the
# network


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
    before = model.flat.grad.copy()
    assert np.abs(before).max() > 0
    model.flat.data -= np.float32(2e-3 / np.abs(before).max()) * before  # well over BF16 rounding
    model.flat.touch()
    model.zero_grad()
    after = dpo_backward(policy, frozen, *batch, cosine(1000), "v", 4000.0)
    assert after.loss < result.loss and after.stats["rewards/margins"] > 0


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


# -------------------------------------------------------------------------------------------------------
# rollouts


def _draw(seeds, prompts, steps, track):
    """Pictures whose mean is the seed's own number; fewer steps and the FP4 track disturb it a little."""
    base = normal(np.asarray(seeds, np.uint64), 0, (4, 4, 3))
    error = {"fp4": 0.2, "bf16": 0.1}[track] / steps
    return base + np.float32(error) * normal(np.asarray(seeds, np.uint64), 1, (4, 4, 3))


def _reward(pictures, prompts):
    return pictures.mean((1, 2, 3))


def _seeds(rng, prompts=3, n=12):
    return rng.integers(0, 2**32, (prompts, n)).astype(np.uint64)


def test_rollout_labels_are_bf16_rewards_of_the_best_and_worst(rng):
    seeds, prompts = _seeds(rng), ["a", "b", "c"]
    calls = []

    def draw(s, p, steps, track):
        calls.append((len(s), steps, track))
        return _draw(s, p, steps, track)

    got = rollout(draw, _reward, seeds, prompts, Settings(keep=4, explore_steps=2, steps=9))
    assert calls == [(36, 2, "fp4"), (12, 9, "bf16")]
    assert len(got.chosen) == 6 and got.prompts == ["a", "a", "b", "b", "c", "c"]
    np.testing.assert_array_equal(
        got.chosen_reward, _reward(got.chosen, None)
    )  # labels: of the full pictures
    np.testing.assert_array_equal(got.rejected_reward, _reward(got.rejected, None))
    assert (got.chosen_reward > got.rejected_reward).all()
    for row, prompt in enumerate(prompts):  # the exploration's extremes are what was regenerated
        order = np.argsort(-got.explored[row])
        full = _draw(seeds[row][np.r_[order[:2], order[-2:]]], None, 9, "bf16")
        made = np.concatenate([got.chosen, got.rejected])[np.array(got.prompts * 2) == prompt]
        assert {p.tobytes() for p in full} == {p.tobytes() for p in made}


def test_random_selection_ignores_the_reward(rng):
    rewards = rng.standard_normal((200, 12))
    best = select(rewards, 4, "best_worst", 0)
    assert (np.take_along_axis(rewards, best[:, :2], 1).min(1) >= np.sort(rewards, 1)[:, -2]).all()
    blind = select(rewards, 4, "random", int(rng.integers(2**31)))
    assert all(len(set(row)) == 4 for row in blind)
    assert abs(np.take_along_axis(rewards, blind, 1).mean()) < 0.15  # not drawn to either end
    assert np.bincount(blind.ravel(), minlength=12).min() > 30  # nor to one place


def test_unhealthy_rollouts_are_retried_on_bf16_and_counted(rng):
    seeds = _seeds(rng, 2, 8)
    broken = {int(seeds[0, 3]): np.nan, int(seeds[1, 1]): 0.0}  # not finite; constant
    tracks_seen = []

    def draw(s, p, steps, track):
        tracks_seen.append((len(s), track))
        pictures = _draw(s, p, steps, track)
        for i, seed in enumerate(s):
            if int(seed) in broken:
                pictures[i] = broken[int(seed)]
        return pictures

    got = rollout(draw, _reward, seeds, ["a", "b"], Settings(keep=4))
    assert tracks_seen == [(16, "fp4"), (2, "bf16"), (8, "bf16")]
    assert got.stats["unhealthy"] == 2 and got.stats["retried"] == 2 and got.stats["lost"] == 0
    assert np.isfinite(got.explored).all() and np.isfinite(got.chosen).all()


def test_rollout_that_stays_broken_says_so(rng):
    def draw(s, p, steps, track):
        return np.full((len(s), 4, 4, 3), np.nan, np.float32)

    with pytest.raises(NonFiniteError, match="only 0 of the 12 pictures of prompt 0 .* but 4 are to be kept"):
        rollout(draw, _reward, _seeds(rng), ["a", "b", "c"], Settings(keep=4))


def test_health():
    x = np.zeros((4, 2, 2, 3), np.float32)
    x[1, 0, 0, 0], x[2, 0, 0, 0], x[3, 0, 0, 0] = 1, np.nan, np.inf
    assert healthy(x).tolist() == [False, True, False, False]


def test_reward_is_checked_in_a_rollout(rng):
    """Also in the middle of one: a short or a NaN answer is a sentence, not a label."""
    for bad, sentence in ((lambda x, p: x.mean((1, 2, 3))[1:], r"returned shape \(35,\) for 36 pictures"),
                          (lambda x, p: np.full(len(x), np.nan), "returned nan for picture 0 "
                                                                 "\\('a'\\)")):  # fmt: skip
        with pytest.raises(RewardError, match=sentence):
            rollout(_draw, bad, _seeds(rng), ["a", "b", "c"], Settings(keep=4))


def test_prompts_take_turns(rng):
    prompts, seed = [f"p{i}" for i in range(10)], int(rng.integers(2**31))
    seen = [choose_prompts(prompts, 3, seed, i) for i in range(6)]
    assert all(len(set(s)) == 3 for s in seen)
    assert len(set(sum(seen[:3], []))) == 9 and len(set(sum(seen[3:], []))) == 9  # no repeats within a pass
    assert seen == [choose_prompts(prompts, 3, seed, i) for i in range(6)]
    with pytest.raises(
        ConfigError, match="11 are asked for in an iteration but there are only 10; lower align.prompts"
    ):
        choose_prompts(prompts, 11, seed, 0)


def test_pairs_leave_out_ties_and_broken():
    chosen, rejected = pair(np.array([[1.0, 1.0, 1.0, 1.0], [3.0, np.nan, 1.0, 2.0]]))
    assert chosen.tolist() == [4] and rejected.tolist() == [6]


# ---------------------------------------------------------------------------------------------------- rank
# fidelity


def test_ranks_share_ties(rng):
    a, b = rng.integers(0, 5, (2, 30)).astype(float)
    slow = np.array([np.mean([sorted(a).index(v) + 1, 30 - sorted(a)[::-1].index(v)]) for v in a])
    np.testing.assert_array_equal(ranks(a), slow)
    assert spearman(a, b) == pytest.approx(np.corrcoef(ranks(a), ranks(b))[0, 1])
    assert np.isnan(spearman(a, np.ones(30)))


def test_rank_fidelity_of_perfect_random_and_reversed(rng):
    true = rng.standard_normal((400, 24))
    good = rank_fidelity(true * 3 + 1, true, 4)
    assert good["spearman"] == pytest.approx(1) and good["hit_best"] == good["hit_worst"] == 1.0
    assert (
        good["rank_best"] == good["perfect_best"] == 2.5
        and good["rank_worst"] == good["perfect_worst"] == 22.5
    )
    blind = rank_fidelity(rng.standard_normal(true.shape), true, 4)
    assert abs(blind["spearman"]) < 0.05 and blind["hit_best"] == pytest.approx(1 / 6, abs=0.05)
    assert blind["rank_best"] == pytest.approx(blind["random"], abs=0.8)
    assert rank_fidelity(-true, true, 4)["spearman"] == pytest.approx(-1)
    with pytest.raises(ShapeError, match="k is 25"):
        rank_fidelity(true, true, 25)


def test_fidelity_of_arms(rng):
    prompts, settings = list("abcdefgh"), Settings(keep=4, explore_steps=2, steps=50)
    made = rollout(_draw, _reward, _seeds(rng, 8, 16), prompts, settings)
    calls = []

    def draw(s, p, steps, track):
        calls.append((len(s), steps, track))
        return _draw(s, p, steps, track)

    found = measure_fidelity(draw, _reward, made, prompts, settings)
    assert calls == [(128, 2, "bf16"), (128, 50, "bf16")]  # the exploration itself is not repeated
    assert 0.5 < found["fidelity/fp4/spearman"] <= found["fidelity/bf16/spearman"] + 0.1
    assert found["fidelity/perfect_best"] == 1.5 and found["fidelity/random"] == 8.5
