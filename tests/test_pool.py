"""The pool of an iteration: chunks, memory, failures and retries, counts, and the journal."""

from __future__ import annotations

import json
import os
import tracemalloc
import warnings

import numpy as np
import pytest

from fp4bf16.align.notes import Forgiving
from fp4bf16.align.pool import (
    BYTES,
    GROUP,
    SELECT,
    Settings,
    digest_of,
    explore,
    healthy,
)
from fp4bf16.align.shares import rates
from fp4bf16.diffusion import normal, subseed
from fp4bf16.errors import ConfigError, RewardError, ShapeError
from fp4bf16.train.journal import Journal

SIDE = 4


def draw(seeds, prompts, steps, track):
    """Pictures whose mean is the seed's own number; fewer steps and the FP4 track disturb it a little."""
    seeds = np.asarray(seeds, np.uint64)
    error = np.float32({"fp4": 0.2, "bf16": 0.1}[track] / steps)
    return normal(seeds, 0, (SIDE, SIDE, 3)) + error * normal(seeds, 1, (SIDE, SIDE, 3))


def reward(pictures, prompts):
    return pictures.mean((1, 2, 3))


def seeds_of(rng, prompts=3, n=100):
    return rng.integers(0, 2**64, (prompts, n), dtype=np.uint64)


def names(n):
    return [f"a picture of {i}" for i in range(n)]


def same(a, b):
    np.testing.assert_array_equal(a.seeds, b.seeds)
    np.testing.assert_array_equal(a.rewards, b.rewards)
    np.testing.assert_array_equal(a.retried, b.retried)
    assert a.counts == b.counts


class Notes:
    """A journal in memory that keeps lines of JSON, as a file would."""

    def __init__(self):
        self.lines, self.cleared = [], 0

    def read(self):
        return [json.loads(line) for line in self.lines]

    def append(self, record):
        self.lines.append(json.dumps(record, allow_nan=False))

    def clear(self):
        self.lines, self.cleared = [], self.cleared + 1


# ----------------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("prompts, n", [(1, 1), (3, 100), (7, 37), (1, 300)])
def test_chunks_change_nothing(prompts, n, rng):
    """Bit for bit, also under a reward that answers otherwise in another batch, as BLAS products do."""
    seeds = seeds_of(rng, prompts, n)
    broken = set(seeds.reshape(-1)[:: max(5, n // 20)].tolist())

    def failing(s, p, steps, track):
        pictures = draw(s, p, steps, track)
        pictures[[int(x) in broken for x in s]] = np.nan
        return pictures

    def among_others(pictures, prompts):
        return pictures.mean((1, 2, 3)) + np.float32(1e-3) * len(pictures) + pictures[0].mean()

    sizes, pools = (1, 64, 100, 192, 10_000), []
    for chunk in sizes:
        calls = []

        def counted(s, p, steps, track, calls=calls):
            calls.append(len(s))
            return failing(s, p, steps, track)

        pools.append(explore(counted, among_others, seeds, names(prompts), Settings(chunk=chunk)))
        assert max(calls) <= -(-chunk // GROUP) * GROUP
    assert pools[0].counts["rollouts"] == seeds.size and pools[0].counts["unhealthy"] == len(broken)
    for pool in pools[1:]:
        same(pools[0], pool)
    unbroken = ~np.isin(seeds, list(broken))
    np.testing.assert_array_equal(pools[0].seeds[unbroken], seeds[unbroken])
    np.testing.assert_array_equal(pools[0].retried, ~unbroken)


def test_memory_does_not_grow_with_the_pool_but_by_its_numbers(rng):
    """Ten times the pool takes no more memory than its seeds and rewards, and what sorting them takes."""

    def peak(n):
        seeds = seeds_of(rng, 5, n)
        tracemalloc.start()
        explore(draw, reward, seeds, names(5), Settings(chunk=128))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(128)  # what is made once
    small, large = peak(400), peak(4000)
    rollouts, picture = 5 * (4000 - 400), SIDE * SIDE * 3 * 4
    assert large - small < 2 * BYTES * rollouts + 100_000 < picture * rollouts / 2


def test_one_picture_a_seed_or_a_sentence(rng):
    for bad, shape in ((lambda s, *a: draw(s, *a)[1:], r"\(149, 4, 4, 3\)"),
                       (lambda s, *a: np.zeros(len(s)), r"\(150,\)")):  # fmt: skip
        with pytest.raises(ShapeError, match=f"draw: returned shape {shape} for 150 seeds"):
            explore(bad, reward, seeds_of(rng, 3, 50), names(3), Settings())


# ------------------------------------------------------------------------------------------ failures, retries


def test_health():
    x = np.zeros((5, 2, 2, 3), np.float32)
    x[1, 0, 0, 0], x[2, 0, 0, 0], x[3, 0, 0, 0] = 1, np.nan, np.inf
    x[4, 0] = 3e38
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert healthy(x).tolist() == [False, True, False, False, True]
        assert healthy(x[:0]).tolist() == []


def test_every_kind_of_failure_is_retried_on_bf16_with_a_new_seed(rng):
    seeds = seeds_of(rng, 2, 60)
    nan, constant, unscored = seeds[0, 3], seeds[1, 58], seeds[1, 0]
    tries = []

    def failing(s, p, steps, track):
        tries.append((s.tolist(), list(p), steps, track))
        pictures = draw(s, p, steps, track)
        pictures[np.isin(s, [nan])], pictures[np.isin(s, [constant])] = np.nan, 0.25
        return pictures

    bad = draw([unscored], None, 3, "fp4")[0]

    def partial(pictures, prompts):
        values = reward(pictures, prompts)
        values[(pictures == bad).all((1, 2, 3))] = -np.inf
        return values

    pool = explore(failing, partial, seeds, ["a", "b"], Settings(explore_steps=3))
    assert pool.counts == {"rollouts": 120, "unhealthy": 2, "nonfinite_rewards": 1, "retried": 3, "lost": 0,
                           "lost_rewards": 0}  # fmt: skip
    expected = {(0, 3): nan, (1, 58): constant, (1, 0): unscored}
    for place in np.ndindex(seeds.shape):
        fresh = subseed(int(seeds[place]), "retry", 0) if place in expected else seeds[place]
        assert pool.seeds[place] == fresh and pool.retried[place] == (place in expected)
        track = "bf16" if place in expected else "fp4"
        assert pool.rewards[place] == reward(draw([fresh], None, 3, track), None)[0]
    retries = [t for t in tries if t[3] == "bf16"]
    assert sorted(sum((t[1] for t in retries), [])) == ["a", "b", "b"] and {t[2] for t in retries} == {3}


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_what_stays_broken_is_lost_and_counted(retries, rng):
    seeds = seeds_of(rng, 2, 40)
    seen = []

    def failing(s, p, steps, track):
        pictures = draw(s, p, steps, track)
        for i, prompt in enumerate(p):
            if prompt == "b" and (track == "bf16" or int(s[i]) == int(seeds[1, 7])):
                seen.append(int(s[i]))
                pictures[i] = np.inf
        return pictures

    pool = explore(failing, reward, seeds, ["a", "b"], Settings(retries=retries))
    assert np.isnan(pool.rewards[1, 7]) and np.isfinite(np.delete(pool.rewards.reshape(-1), 47)).all()
    assert pool.counts["retried"] == retries and pool.counts["lost"] == 1
    assert pool.counts["lost_rewards"] == 0 and len(set(seen)) == 1 + retries  # a new seed each time
    found = rates(pool.counts)
    assert found["success_rate"] == found["first_try_rate"] == 79 / 80


def test_a_reward_that_stays_without_a_number_loses_the_rollout_and_warns(rng):
    seeds = seeds_of(rng, 4, 40)

    def undecided(pictures, prompts):
        values = reward(pictures, prompts)
        values[[p.endswith("2") for p in prompts]] = np.nan
        return values

    sentence = "reward undecided was not finite for 40 of 160 rollouts .* 1 new seeds"
    with pytest.warns(RuntimeWarning, match=sentence):
        pool = explore(draw, undecided, seeds, names(4), Settings(retries=1))
    assert np.isnan(pool.rewards[2]).all() and np.isfinite(np.delete(pool.rewards, 2, 0)).all()
    assert pool.counts["lost"] == pool.counts["lost_rewards"] == pool.counts["nonfinite_rewards"] == 40
    assert pool.counts["unhealthy"] == 0
    assert rates(pool.counts)["success_rate"] == 0.75


def test_a_reward_without_any_number_is_refused_at_once(rng):
    calls = []

    def counted(*a):
        calls.append(len(a[0]))
        return draw(*a)

    for bad, sentence in ((lambda x, p: np.full(len(x), np.nan), "returned nan for picture 0"),
                          (lambda x, p: x.mean((1, 2, 3))[1:], r"returned shape \(63,\) for 64 pictures"),
                          (lambda x, p: "no", "returned str, no numbers")):  # fmt: skip
        calls.clear()
        with pytest.raises(RewardError, match=sentence):
            explore(counted, bad, seeds_of(rng, 3, 100), names(3), Settings(chunk=64))
        assert calls == [64]  # not the whole pool, and no retries


# --------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("values, sentence", [
    ({"keep": 0}, "keep: is 0, but it must be a whole number of at least 1"),
    ({"keep": 5}, "keep: is 5, but 'best_worst' takes half from either end"),
    ({"keep": 3, "select": "extremes"}, "keep: is 3, but 'extremes'"),
    ({"keep": 2.5}, "keep: is 2.5"),
    ({"keep": True}, "keep: is True"),
    ({"explore_steps": 0}, "explore_steps: is 0"),
    ({"steps": -1}, "steps: is -1"),
    ({"chunk": 0}, "chunk: is 0"),
    ({"retries": -1}, "retries: is -1, but it must be a whole number of at least 0"),
    ({"select": "best_wurst"}, "select: 'best_wurst' is not known; did you mean 'best_worst'"),
    ({"train_on": "fp8"}, "train_on: 'fp8' is not known"),
    ({"explore_track": "bf61"}, "explore_track: 'bf61' is not known"),
])  # fmt: skip
def test_impossible_settings(values, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Settings(**values)


def test_odd_numbers_may_be_kept_where_nothing_is_halved():
    assert [Settings(keep=3, select=s).keep for s in SELECT if s in ("random", "mean_deviation")] == [3, 3]


# ------------------------------------------------------------------------------------------------ the journal


class Killed(Exception):
    pass


def killing(after, calls):
    """A draw function that fails at call number `after`, and notes the seeds of all calls."""

    def killed(s, p, steps, track):
        if len(calls) == after:
            raise Killed
        calls.append(np.asarray(s).tolist())
        return draw(s, p, steps, track)

    return killed


@pytest.mark.parametrize("chunk_then", [64, 256])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_killed_pool_goes_on_with_the_rest(after, chunk_then, rng):
    seeds, notes, first, second = seeds_of(rng, 3, 100), Notes(), [], []
    whole = explore(draw, reward, seeds, names(3), Settings(chunk=64))
    options = {"journal": notes, "iteration": 7, "digest": "w7"}
    with pytest.raises(Killed):
        explore(killing(after, first), reward, seeds, names(3), Settings(chunk=64), **options)
    assert len(notes.lines) == after
    rest = killing(99, second)
    same(whole, explore(rest, reward, seeds, names(3), Settings(chunk=chunk_then), **options))
    drawn = sum(first + second, [])
    assert drawn == seeds.reshape(-1).tolist()  # every one once
    nothing = killing(0, [])  # that is drawn
    same(whole, explore(nothing, reward, seeds, names(3), Settings(), **options))


def test_retries_and_losses_come_back_from_the_journal(rng):
    seeds, notes = seeds_of(rng, 3, 60), Notes()
    broken = set(seeds[0, :9].tolist())

    def failing(s, p, steps, track):
        pictures = draw(s, p, steps, track)
        pictures[[x == names(3)[1] and int(y) % 3 == 0 for x, y in zip(p, s, strict=True)]] = np.nan
        pictures[[int(x) in broken for x in s]] = 0
        return pictures

    pool = explore(failing, reward, seeds, names(3), Settings(retries=1), journal=notes)
    assert pool.counts["lost"] > 0 and pool.retried.sum() > pool.counts["lost"]
    same(pool, explore(killing(0, []), reward, seeds, names(3), Settings(retries=1), journal=notes))


def test_a_journal_of_another_pool_is_dropped(rng):
    seeds = seeds_of(rng, 3, 30)
    first = {"journal": None, "iteration": 1, "digest": "weights"}
    changes = [
        ({"iteration": 2}, seeds, names(3), Settings(), reward),
        ({"digest": "others"}, seeds, names(3), Settings(), reward),
        ({}, seeds + np.uint64(1), names(3), Settings(), reward),
        ({}, seeds, names(4)[1:], Settings(), reward),
        ({}, seeds, names(3), Settings(explore_steps=5), reward),
        ({}, seeds, names(3), Settings(explore_track="bf16"), reward),
        ({}, seeds, names(3), Settings(retries=1), reward),
        ({}, seeds, names(3), Settings(), lambda x, p: -x.mean((1, 2, 3))),
    ]
    for more, s, prompts, settings, judge in changes:
        notes = Notes()
        explore(draw, reward, seeds, names(3), Settings(), **first | {"journal": notes})
        assert len(notes.lines) == 1
        calls = []
        options = first | {"journal": notes} | more
        got = explore(killing(99, calls), judge, s, prompts, settings, **options)
        same(got, explore(draw, judge, s, prompts, settings))
        assert sum(map(len, calls)) == s.size and notes.cleared == 1 and len(notes.lines) == 1
    for more in ({"keep": 2}, {"steps": 3}, {"select": "random"}, {"train_on": "fp4"}, {"chunk": 64}):
        notes.clear()
        explore(draw, reward, seeds, names(3), Settings(), **first | {"journal": notes})
        explore(killing(0, []), reward, seeds, names(3), Settings(**more), **first | {"journal": notes})


@pytest.mark.parametrize("damage", [
    lambda r: r.pop("rewards"),
    lambda r: r["rewards"].pop(),
    lambda r: r["rewards"].__setitem__(3, r["rewards"][3] + 1e-7),
    lambda r: r["seeds"].__setitem__(0, 5),
    lambda r: r.update(start=GROUP),
    lambda r: r.update(counts=3),
    lambda r: r["counts"].update(lost=1),
    lambda r: r.pop("check"),
])  # fmt: skip
def test_a_damaged_record_is_drawn_anew(damage, rng):
    seeds, notes, calls = seeds_of(rng, 2, 64), Notes(), []
    whole = explore(draw, reward, seeds, names(2), Settings(chunk=64), journal=notes)
    record = json.loads(notes.lines[0])
    damage(record)
    notes.lines[0] = json.dumps(record)
    notes.lines += ["3", "null", "[]", notes.lines[1]]  # strays, and one twice
    got = explore(killing(99, calls), reward, seeds, names(2), Settings(chunk=64), journal=notes)
    same(whole, got)
    assert [len(c) for c in calls] == [64]


@pytest.mark.parametrize(
    "failing", [("append",), ("read",), ("clear", "append"), ("read", "append", "clear")]
)
def test_a_full_disk_ends_the_journal_and_not_the_iteration(failing, rng):
    class Full(Notes):
        pass

    def fails(*_):
        raise OSError(28, "No space left on device")

    for name in failing:
        setattr(Full, name, fails)
    seeds, notes = seeds_of(rng, 3, 100), Full()
    notes.lines = ['{"pool": "another"}']
    with pytest.warns(
        RuntimeWarning, match="journal cannot be used .*No space left.* free some space"
    ) as seen:
        got = explore(draw, reward, seeds, names(3), Settings(chunk=64), journal=notes)
    assert len(seen) == 1  # said once
    same(got, explore(draw, reward, seeds, names(3), Settings()))


def test_a_journal_that_failed_is_used_again_when_it_is_begun_anew(tmp_path, monkeypatch):
    """With the trainer's own, whose `begin` and `clear` write too."""
    full, real, said = [], os.write, []

    def write(*a):
        if full:
            raise OSError(28, "No space left on device")
        return real(*a)

    own = Journal(tmp_path / "rollout.jsonl")
    journal = Forgiving(own, said.append)
    assert journal.path == own.path and not journal.begin(iteration=1)
    journal.append({"chunk": 0})
    monkeypatch.setattr(os, "write", write)
    full.append(True)
    journal.append({"chunk": 1})
    full.clear()
    journal.append({"chunk": 2})  # not used until it is begun: no gap in what it holds
    assert len(said) == 1 and journal.read() == [] and own.read() == [{"chunk": 0}]
    assert journal.begin(iteration=1) and journal.read() == [{"chunk": 0}]
    full.append(True)
    assert not journal.begin(iteration=2) and journal.read() == []  # what is there is of another pool
    journal.append({"chunk": 3})
    journal.clear()
    assert len(said) == 1  # the disk has been full all the time
    full.clear()
    assert not journal.begin(iteration=2)
    journal.append({"chunk": 4})
    assert journal.read() == own.read() == [{"chunk": 4}]
    full.append(True)
    journal.clear()
    assert len(said) == 2
    journal.close()


def test_digest_is_of_names_types_shapes_and_values(rng):
    a = rng.standard_normal((3, 4)).astype(np.float32)
    alike = [a.copy(), np.asfortranarray(a)]
    other = [a.reshape(4, 3), a.astype(np.float64), {"x": a}, {"y": a}, a + 0.5, a[:0]]
    assert {digest_of(x) for x in alike} == {digest_of(a)}
    assert len({digest_of(x) for x in [a, *other]}) == 1 + len(other)
    assert digest_of({"x": a, "y": a + 1}) == digest_of({"y": a + 1, "x": a})
