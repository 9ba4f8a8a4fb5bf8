"""Rollouts: selection, labels, training on explored pictures, rank fidelity, one seed one picture."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from fp4bf16.align.advantages import advantages
from fp4bf16.align.fidelity import rank_fidelity
from fp4bf16.align.rollout import (
    SELECT,
    Settings,
    choose_prompts,
    measure_fidelity,
    pair,
    rollout,
    select,
)
from fp4bf16.diffusion import normal, subseed
from fp4bf16.errors import ConfigError, NonFiniteError, RewardError, ShapeError
from fp4bf16.train.config import get_preset
from fp4bf16.train.exploring import MakeDraw
from fp4bf16.train.journal import Journal


def draw(seeds, prompts, steps, track):
    """Pictures whose mean is the seed's own number; fewer steps and the FP4 track disturb it a little."""
    seeds = np.asarray(seeds, np.uint64)
    error = np.float32({"fp4": 0.2, "bf16": 0.1}[track] / steps)
    return normal(seeds, 0, (4, 4, 3)) + error * normal(seeds, 1, (4, 4, 3))


def reward(pictures, prompts):
    return pictures.mean((1, 2, 3))


def seeds_of(rng, prompts=3, n=12):
    return rng.integers(0, 2**64, (prompts, n), dtype=np.uint64)


def noting(calls):
    def noted(s, p, steps, track):
        calls.append((len(s), steps, track))
        return draw(s, p, steps, track)

    return noted


# --------------------------------------------------------------------------------------------------- rollouts


def test_labels_are_bf16_rewards_of_the_best_and_worst(rng):
    seeds, prompts, calls = seeds_of(rng), ["a", "b", "c"], []
    got = rollout(noting(calls), reward, seeds, prompts, Settings(keep=4, explore_steps=2, steps=9))
    assert calls == [(36, 2, "fp4"), (12, 9, "bf16")]
    assert got.pictures.shape == (3, 4, 4, 4, 3) and got.prompts == prompts
    assert got.labels.shape == got.kept.shape == got.columns.shape == (3, 4)
    assert got.labels.dtype == np.float64 and got.kept.dtype == np.uint64
    for row in range(3):  # the exploration's extremes are what was made anew
        np.testing.assert_array_equal(got.explored[row], reward(draw(seeds[row], None, 2, "fp4"), None))
        order = np.argsort(-got.explored[row])
        np.testing.assert_array_equal(got.columns[row], np.r_[order[:2], order[-2:]])
        np.testing.assert_array_equal(got.kept[row], seeds[row][got.columns[row]])
        full = draw(got.kept[row], None, 9, "bf16")
        np.testing.assert_array_equal(got.pictures[row], full)
        np.testing.assert_array_equal(got.labels[row], reward(full, None))


def test_pairs_of_a_rollout(rng):
    prompts = ["a", "b", "c"]
    got = rollout(draw, reward, seeds_of(rng), prompts, Settings(keep=6))
    found = got.pairs()
    assert found.prompts == [p for p in prompts for _ in range(3)] and got.stats["pairs"] == 9
    np.testing.assert_array_equal(found.chosen_reward, reward(found.chosen, None))
    np.testing.assert_array_equal(found.rejected_reward, reward(found.rejected, None))
    assert (found.chosen_reward > found.rejected_reward).all()
    for row in range(3):
        part, order = slice(3 * row, 3 * row + 3), np.sort(got.labels[row])
        np.testing.assert_array_equal(found.chosen_reward[part], order[:2:-1])
        np.testing.assert_array_equal(found.rejected_reward[part], order[:3])
    assert got.stats["reward/best"] == pytest.approx(found.chosen_reward.mean())


def test_a_label_that_fails_is_left_out(rng):
    seeds = seeds_of(rng, 2, 8)

    def failing(s, p, steps, track):
        pictures = draw(s, p, steps, track)
        if steps == 10:
            pictures[1] = np.nan
        return pictures

    def undecided(pictures, prompts):
        values = reward(pictures, prompts)
        if len(pictures) == 7:  # of those made anew that are good
            values[-1] = np.inf
        return values

    got = rollout(failing, undecided, seeds, ["a", "b"], Settings(keep=4))
    assert np.isnan(got.labels[0, 1]) and np.isnan(got.labels[1, 3]) and np.isnan(got.labels).sum() == 2
    assert got.stats["kept_lost"] == 2 and got.stats["lost"] == 0 and got.stats["pairs"] == 2
    assert np.isfinite(got.pairs().chosen).all()


def test_everything_is_the_same_for_any_chunk(rng):
    seeds, prompts = seeds_of(rng, 20, 12), [f"p{i}" for i in range(20)]

    def among_others(pictures, prompts):
        return pictures.mean((1, 2, 3)) + np.float32(1e-3) * len(pictures) + pictures[-1].mean()

    for train_on in ("bf16", "fp4"):
        results = [
            rollout(draw, among_others, seeds, prompts, Settings(keep=6, chunk=c, train_on=train_on))
            for c in (1, 64, 1000)
        ]
        for name, other in itertools.product(("pictures", "labels", "kept", "explored"), results[1:]):
            np.testing.assert_array_equal(getattr(results[0], name), getattr(other, name))
        assert results[0].stats == results[1].stats == results[2].stats


@pytest.mark.parametrize("how", SELECT)
def test_training_on_explored_pictures(how, rng):
    """The negative control: the explored pictures themselves with their rewards, also those tried anew."""
    seeds, prompts, calls = seeds_of(rng, 3, 16), ["a", "b", "c"], []
    broken = set(seeds[:, :6].reshape(-1).tolist())

    def failing(s, p, steps, track):
        calls.append((steps, track))
        pictures = draw(s, p, steps, track)
        pictures[[int(x) in broken for x in s]] = np.nan
        return pictures

    settings = Settings(keep=8, select=how, explore_steps=3, train_on="fp4", steps=11)
    got = rollout(failing, reward, seeds, prompts, settings)
    assert {steps for steps, _ in calls} == {3}  # nothing is made in full
    np.testing.assert_array_equal(got.labels, np.take_along_axis(got.explored, got.columns, 1))
    np.testing.assert_array_equal(reward(got.pictures.reshape(-1, 4, 4, 3), None), got.labels.reshape(-1))
    anew = {subseed(s, "retry", 0) for s in broken}
    for place in np.ndindex(got.kept.shape):
        track = "bf16" if int(got.kept[place]) in anew else "fp4"
        np.testing.assert_array_equal(got.pictures[place], draw([got.kept[place]], None, 3, track)[0])
    assert any(int(s) in anew for s in got.kept.reshape(-1))


def test_a_killed_rollout_ends_as_if_it_had_not_been(tmp_path, rng):
    """With the trainer's own journal, opened anew as by another process; killed at each draw in turn."""

    class Killed(Exception):
        pass

    seeds, prompts, settings = seeds_of(rng, 8, 50), [f"p{i}" for i in range(8)], Settings(keep=4, chunk=64)
    whole, total = rollout(draw, reward, seeds, prompts, settings, 3), 0
    for at in range(8):  # seven chunks, then the pictures made anew
        path, calls = tmp_path / f"{at}.jsonl", []

        def killed(s, p, steps, track, at=at, calls=calls):
            if len(calls) == at:
                raise Killed
            calls.append(track)
            return draw(s, p, steps, track)

        with pytest.raises(Killed):
            rollout(killed, reward, seeds, prompts, settings, 3, Journal(path), iteration=2, digest="w")
        more, again = [], Journal(path)
        got = rollout(noting(more), reward, seeds, prompts, settings, 3, again, iteration=2, digest="w")
        for name in ("pictures", "labels", "kept", "seeds", "explored", "columns"):
            np.testing.assert_array_equal(getattr(whole, name), getattr(got, name))
        assert whole.stats == got.stats
        total += len(more)
        assert len(more) == 8 - at
    assert total == 36


def test_rollout_that_stays_broken_says_so(rng):
    def failing(s, p, steps, track):
        pictures = draw(s, p, steps, track)
        pictures[2:] = np.nan
        return pictures

    sentence = (
        "of none of the 3 prompts are 4 pictures of 12 finite and not constant.* but 2 at most; the model"
    )
    with pytest.raises(NonFiniteError, match=sentence):
        rollout(failing, reward, seeds_of(rng), ["a", "b", "c"], Settings(keep=4, retries=0))


@pytest.mark.parametrize("how, train_on", [("best_worst", "bf16"), ("random", "fp4"), ("extremes", "bf16")])
def test_a_prompt_with_too_few_good_pictures_is_left_out_and_the_others_go_on(how, train_on, rng):
    """The others get what they would get without it; nothing of it can be learnt."""
    seeds, prompts, settings = seeds_of(rng, 4), list("abcd"), Settings(keep=4, select=how, train_on=train_on)
    settings = dataclasses.replace(settings, retries=0)

    def failing(s, p, steps, track):
        pictures = draw(s, p, steps, track)
        pictures[[x == "b" and int(y) not in seeds[1, :3].tolist() for x, y in zip(p, s, strict=True)]] = (
            np.inf
        )
        return pictures

    sentence = (
        "rollout: 1 of 4 prompts have fewer good pictures than the 4 .* such as 'b' with 3 of 12; .* lower"
    )
    with pytest.warns(RuntimeWarning, match=sentence) as seen:
        got = rollout(failing, reward, seeds, prompts, settings, 5)
    assert len(seen) == 1 and got.stats["prompts_left_out"] == 1
    assert np.isnan(got.labels[1]).all() and np.isnan(got.pictures[1]).all()
    assert not got.kept[1].any() and (got.columns[1] == -1).all()
    whole = rollout(draw, reward, seeds, prompts, settings, 5)
    others = np.array([0, 2, 3])
    for name in ("pictures", "labels", "kept", "columns"):
        value, expected = getattr(got, name), getattr(whole, name)
        assert value.shape == expected.shape and value.dtype == expected.dtype
        np.testing.assert_array_equal(value[others], expected[others])
    assert got.prompts == prompts and got.explored.shape == (4, 12)
    pairs = got.pairs()
    assert pairs.prompts == [p for p in "acd" for _ in range(2)] and np.isfinite(pairs.chosen).all()
    assert got.stats["kept"] == 12 and got.stats["kept_lost"] == 0 and got.stats["pairs"] == 6
    assert whole.stats["kept"] == 16 and whole.stats["prompts_left_out"] == 0
    told = advantages(got.labels)
    assert not told[1].any() and (told[others] != 0).any(1).all()
    np.testing.assert_array_equal(told[others], advantages(got.labels[others]))
    for key in ("best", "worst"):
        assert np.isfinite(got.stats[f"reward/{key}"])


def test_a_prompt_without_rewards_is_left_out_and_none_is_the_rewards_doing(rng):
    def undecided(without):
        def undecided(pictures, prompts):
            values = reward(pictures, prompts)
            values[[p in without for p in prompts]] = np.nan
            return values

        return undecided

    with pytest.warns(RuntimeWarning) as seen:
        got = rollout(draw, undecided("b"), seeds_of(rng), ["a", "b", "c"], Settings(keep=4))
    assert (
        len(seen) == 2 and got.stats["prompts_left_out"] == 1 and got.pairs().prompts == ["a"] * 2 + ["c"] * 2
    )

    def sparse(pictures, prompts):
        values = reward(pictures, prompts)
        values[np.arange(len(values)) % 12 > 1] = np.nan
        return values

    sentence = r"reward sparse: was not finite for 30 of 36 .* after 0 .* no prompt has the 4 .*'a' has 2\)"
    with pytest.warns(RuntimeWarning), pytest.raises(RewardError, match=sentence):
        rollout(draw, sparse, seeds_of(rng), ["a", "b", "c"], Settings(keep=4, retries=0))


def test_reward_is_checked_in_a_rollout(rng):
    for bad, sentence in ((lambda x, p: x.mean((1, 2, 3))[1:], r"returned shape \(35,\) for 36 pictures"),
                          (lambda x, p: np.full(len(x), np.nan), "returned nan for picture 0 "
                                                                 "\\('a'\\)")):  # fmt: skip
        with pytest.raises(RewardError, match=sentence):
            rollout(draw, bad, seeds_of(rng), ["a", "b", "c"], Settings(keep=4))


def test_bad_seeds(rng):
    seeds = seeds_of(rng, 2, 6)
    for bad, prompts, kind, sentence in (
        (seeds, ["a"], ShapeError, r"seeds have shape \(2, 6\) but there are 1 prompts"),
        (seeds[0], ["a"] * 6, ShapeError, r"seeds have shape \(6,\)"),
        (seeds, "ab", ShapeError, "there are one string; give one row"),
        (seeds[:0], [], ShapeError, r"shape \(0, 6\), so there is nothing to explore"),
        (seeds[:, :0], ["a", "b"], ShapeError, "nothing to explore"),
        (seeds, ["a", "b"], ConfigError, "keep: is 8, but only 6 seeds of a prompt are explored"),
    ):
        with pytest.raises(kind, match=sentence):
            rollout(draw, reward, bad, prompts, Settings(keep=8))


def test_one_prompt_and_as_many_kept_as_explored(rng):
    got = rollout(draw, reward, seeds_of(rng, 1, 2), ["a"], Settings(keep=2))
    assert got.stats["pairs"] == 1 and sorted(got.columns[0]) == [0, 1]
    got = rollout(draw, reward, seeds_of(rng, 1, 1), ["a"], Settings(keep=1, select="random"))
    assert got.stats["pairs"] == 0 and np.isnan(got.stats["reward/best"]) and got.pairs().chosen.shape[0] == 0


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


# -------------------------------------------------------------------------------------------------- selection


def test_best_and_worst(rng):
    rewards = rng.standard_normal((200, 12))
    best = select(rewards, 4, "best_worst", 0)
    picked = np.take_along_axis(rewards, best, 1)
    np.testing.assert_array_equal(picked, np.sort(rewards, 1)[:, [11, 10, 1, 0]])


def test_random_selection_ignores_the_reward(rng):
    rewards = rng.standard_normal((200, 12))
    blind = select(rewards, 4, "random", int(rng.integers(2**31)))
    assert all(len(set(row)) == 4 for row in blind)
    assert abs(np.take_along_axis(rewards, blind, 1).mean()) < 0.15  # not drawn to either end
    assert np.bincount(blind.ravel(), minlength=12).min() > 30  # nor to one place


def test_mean_deviation_takes_what_is_farthest_from_the_mean(rng):
    rewards = rng.exponential(size=(50, 11))  # skewed: mostly one end
    for keep in (1, 3, 8, 11):
        chosen = select(rewards, keep, "mean_deviation", 0)
        away = np.abs(rewards - rewards.mean(1, keepdims=True))
        assert all(len(set(row)) == keep for row in chosen)
        farthest = np.sort(away, 1)[:, ::-1][:, :keep]
        np.testing.assert_array_equal(np.take_along_axis(away, chosen, 1), farthest)
    chosen = select(np.array([[0.0, 0.0, 0.0, 10.0, 9.0, np.nan]]), 2, "mean_deviation", 0)
    assert sorted(chosen[0]) == [3, 4]  # the mean is that of what there is: 3.8


def test_extremes_are_random_within_the_quarters(rng):
    rewards, n, keep = rng.standard_normal((400, 24)), 24, 4
    chosen = select(rewards, keep, "extremes", int(rng.integers(2**31)))
    place = np.take_along_axis(np.argsort(np.argsort(-rewards, 1), 1), chosen, 1)  # 0 = best
    assert (place[:, :2] < n // 4).all() and (place[:, 2:] >= n - n // 4).all()
    assert all(len(set(row)) == keep for row in chosen)
    assert np.bincount(place[:, :2].ravel(), minlength=6)[:6].min() > 80  # of 133 expected: all of a quarter
    assert np.bincount(place[:, 2:].ravel() - 18, minlength=6)[:6].min() > 80
    assert abs(np.corrcoef(place[:, 0], place[:, 2])[0, 1]) < 0.25  # either end by itself
    few = select(rewards[:, :5], 4, "extremes", 0)  # quarters that are too small are filled up
    order = np.argsort(-rewards[:, :5], 1)
    assert (np.sort(few[:, :2], 1) == np.sort(order[:, :2], 1)).all()
    assert (np.sort(few[:, 2:], 1) == np.sort(order[:, 3:], 1)).all()


@pytest.mark.parametrize("how", SELECT)
def test_selection_never_takes_what_was_lost(how, rng):
    rewards = rng.standard_normal((60, 10))
    rewards[rng.random((60, 10)) < 0.4] = np.nan
    rewards[:, :4] = rng.standard_normal((60, 4))
    chosen = select(rewards, 4, how, 5)
    assert np.isfinite(np.take_along_axis(rewards, chosen, 1)).all()
    assert all(len(set(row)) == 4 for row in chosen)
    np.testing.assert_array_equal(chosen, select(rewards, 4, how, 5))
    ties = select(np.ones((3, 8)), 4, how, 1)
    assert all(len(set(row)) == 4 for row in ties)
    rewards[7, 1:] = np.inf
    left = select(rewards, 4, how, 5)
    assert (left[7] == -1).all()
    np.testing.assert_array_equal(np.delete(left, 7, 0), np.delete(chosen, 7, 0))
    with pytest.raises(
        NonFiniteError, match="of none of the 1 prompts are 4 pictures of 10 .* but 1 at most"
    ):
        select(rewards[7:8], 4, how, 5)
    assert select(rewards[:0], 4, how, 5).shape == (0, 4)


def test_selection_that_is_not_possible():
    with pytest.raises(ConfigError, match="did you mean 'extremes'"):
        select(np.ones((1, 4)), 2, "extreme", 0)
    with pytest.raises(ConfigError, match="keep: is 3, but 'best_worst'"):
        select(np.ones((1, 4)), 3, "best_worst", 0)
    with pytest.raises(ConfigError, match="keep: is 0"):
        select(np.ones((1, 4)), 0, "random", 0)


def test_pairs_leave_out_ties_and_broken():
    chosen, rejected = pair(np.array([[1.0, 1.0, 1.0, 1.0], [3.0, np.nan, 1.0, 2.0]]))
    assert chosen.tolist() == [4] and rejected.tolist() == [6]


# ---------------------------------------------------------------------------------------------- rank fidelity


def test_fidelity_of_arms(rng):
    prompts, settings, calls = list("abcdefgh"), Settings(keep=4, explore_steps=2, steps=50), []
    made = rollout(draw, reward, seeds_of(rng, 8, 16), prompts, settings)
    found = measure_fidelity(noting(calls), reward, made, prompts, settings)
    assert calls == [(128, 2, "bf16"), (128, 50, "bf16")]  # the exploration itself is not repeated
    assert 0.5 < found["fidelity/fp4/spearman"] <= found["fidelity/bf16/spearman"] + 0.1
    assert found["fidelity/perfect_best"] == 1.5 and found["fidelity/random"] == 8.5
    own = dataclasses.replace(settings, explore_track="bf16")
    made = rollout(draw, reward, made.seeds, prompts, own)
    alone = measure_fidelity(draw, reward, made, prompts, own)
    assert alone["fidelity/bf16/spearman"] == found["fidelity/bf16/spearman"]
    assert not any("fp4" in k for k in alone)


def test_what_was_tried_anew_on_bf16_is_no_ranking_of_fp4(rng):
    """FP4 fails at a tenth of the seeds; their BF16 pictures would rank almost as they should."""
    seeds, prompts, settings = seeds_of(rng, 6, 40), list("abcdef"), Settings(keep=4, steps=50)
    broken = set(seeds[:, ::10].reshape(-1).tolist())

    def failing(s, p, steps, track):
        pictures = draw(s, p, steps, track)
        if track == "fp4":
            pictures[[int(x) in broken for x in s]] = np.nan
        return pictures

    made = rollout(failing, reward, seeds, prompts, settings)
    assert made.retried.sum() == 24 and np.isfinite(made.explored).all()
    np.testing.assert_array_equal(made.retried, made.seeds != seeds)
    found = measure_fidelity(failing, reward, made, prompts, settings)
    assert found["fidelity/fp4/left_out"] == found["fidelity/bf16/left_out"] == 24
    true = reward(draw(made.seeds.reshape(-1), None, 50, "bf16"), None).reshape(6, 40)
    proxy = np.where(made.retried, np.nan, made.explored)
    expected = rank_fidelity(proxy, true, 2)
    for name in ("spearman", "hit_best", "hit_worst", "rank_best", "rank_worst"):
        assert found[f"fidelity/fp4/{name}"] == expected[name]
    assert found["fidelity/random"] == expected["random"] == 18.5
    own = dataclasses.replace(settings, explore_track="bf16")  # whose ranking they are
    made.explored = reward(draw(made.seeds.reshape(-1), None, 4, "bf16"), None).reshape(6, 40)
    assert measure_fidelity(draw, reward, made, prompts, own)["fidelity/bf16/left_out"] == 0


# ------------------------------------------------------------------------------------- one seed, one picture


@pytest.mark.parametrize("track", ["fp4", "bf16"])
def test_one_seed_one_picture_in_any_batch_chunk_and_order(track, rng):
    """The network itself, bit for bit: alone, in any batch, in any order of the pool, in any chunk."""
    config = get_preset("ci")
    config = dataclasses.replace(config, diffusion=dataclasses.replace(config.diffusion, chunk=8))
    make, load = MakeDraw(config, ("cat", "dog", "face", "red"))()
    captions = ["cat face", "red dog face", "dog", ""]
    seeds = rng.integers(0, 2**64, (4, 9), dtype=np.uint64)
    rows = [c for c in captions for _ in range(9)]
    together = make(seeds.reshape(-1), rows, 2, track)
    assert len({p.tobytes() for p in together}) == 36
    for some in ([7], [35], [3, 20], rng.permutation(36)[:11], rng.permutation(36)):
        some = np.array(some)
        alone = make(seeds.reshape(-1)[some], [rows[i] for i in some], 2, track)
        np.testing.assert_array_equal(alone, together[some])
    settings = Settings(keep=4, explore_steps=2, explore_track=track, chunk=64)
    pool = rollout(make, reward, seeds, captions, settings)
    np.testing.assert_array_equal(pool.explored.reshape(-1), reward(together, None))
    order = rng.permutation(4)
    other = rollout(make, reward, seeds[order], [captions[i] for i in order], settings)
    np.testing.assert_array_equal(other.kept, pool.kept[order])
    np.testing.assert_array_equal(other.pictures, pool.pictures[order])
