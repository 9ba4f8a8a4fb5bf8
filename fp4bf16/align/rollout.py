"""Rollouts: explore many seeds cheaply, keep the best and the worst, make those again in full, label them
anew.

explore      FP4 track, few steps, every seed of every prompt -> reward (only used to choose seeds)
select       K seeds of a prompt: the best and the worst, or others (`select`)
regenerate   the same seeds on the BF16 track with all steps -> reward again: the label
pair         best with worst of the same prompt
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..diffusion.noise import permutation, subseed
from ..errors import ConfigError, NonFiniteError, RewardError, ShapeError, nearest
from .fidelity import rank_fidelity
from .pool import (
    GROUP,
    SELECT,
    TRAIN_ON,
    Draw,
    Drawer,
    Job,
    Journal,
    Pool,
    Settings,
    explore,
    healthy,
    made,
    rewards_of,
)
from .rewards import Reward, reward_name
from .shares import rates

__all__ = [
    "SELECT", "TRAIN_ON", "Draw", "Journal", "Pairs", "Pool", "Rollout", "Settings", "choose_prompts",
    "explore", "healthy", "measure_fidelity", "pair", "rollout", "select",
]  # fmt: skip


class Pairs(NamedTuple):
    """Comparisons: chosen and rejected (pairs, H, W, C), the prompt of each, and both rewards (pairs,)."""

    chosen: np.ndarray
    rejected: np.ndarray
    prompts: list[str]
    chosen_reward: np.ndarray
    rejected_reward: np.ndarray


@dataclass
class Rollout:
    """The kept pictures of one iteration with their labels, and what happened on the way.

    pictures: float32 (prompts, keep, H, W, C), what is trained on; labels: their rewards, float64 (prompts,
    keep), NaN where a picture is not healthy or has no finite reward; kept: their seeds, uint64; prompts:
    one a row. seeds: what was explored in the end, uint64 (prompts, N); explored: its rewards, NaN where a
    rollout was lost; columns: which of them were kept, (prompts, keep); stats: counts, rates and means;
    retried: which were tried anew on the BF16 track, bool (prompts, N), None: none.

    Of a prompt that was left out, because too few of its pictures are good, pictures and labels are NaN, kept
    is 0 and columns are -1.
    """

    pictures: np.ndarray
    labels: np.ndarray
    kept: np.ndarray
    prompts: list[str]
    seeds: np.ndarray
    explored: np.ndarray
    columns: np.ndarray
    stats: dict[str, float] = field(default_factory=dict)
    retried: np.ndarray | None = None

    def pairs(self) -> Pairs:
        """In each prompt the best with the worst, and so on inwards (`pair`)."""
        chosen, rejected = pair(self.labels)
        pictures = self.pictures.reshape(-1, *self.pictures.shape[2:])
        labels, keep = self.labels.reshape(-1), self.labels.shape[1]
        prompts = [self.prompts[i // keep] for i in chosen]
        return Pairs(pictures[chosen], pictures[rejected], prompts, labels[chosen], labels[rejected])


def choose_prompts(prompts: Sequence[str], count: int, seed: int, iteration: int) -> list[str]:
    """`count` different prompts for one iteration; passes over the list before any comes again.

    Raises `ConfigError` when there are fewer prompts than asked for.
    """
    n = len(prompts)
    if count > n:
        raise ConfigError(
            f"prompts: {count} are asked for in an iteration but there are only {n}; lower align.prompts "
            f"to {n} or less"
        )
    per_pass = n // count
    order = permutation(subseed(seed, "prompts"), iteration // per_pass, n)
    first = (iteration % per_pass) * count
    return [prompts[i] for i in order[first : first + count]]


# ------------------------------------------------------------------------------------------------ selection


def _best_worst(values: np.ndarray, keep: int, draw: Callable[[int, int], np.ndarray]) -> np.ndarray:
    order = np.argsort(-values, kind="stable")
    return np.concatenate([order[: keep // 2], order[len(order) - keep // 2 :]])


def _random(values: np.ndarray, keep: int, draw: Callable[[int, int], np.ndarray]) -> np.ndarray:
    return draw(0, len(values))[:keep]


def _mean_deviation(values: np.ndarray, keep: int, draw: Callable[[int, int], np.ndarray]) -> np.ndarray:
    return np.argsort(-np.abs(values - values.mean()), kind="stable")[:keep]


def _extremes(values: np.ndarray, keep: int, draw: Callable[[int, int], np.ndarray]) -> np.ndarray:
    order, half = np.argsort(-values, kind="stable"), keep // 2
    width = max(len(order) // 4, half)  # a quarter, or as many as are taken of it
    top, bottom = order[:width], order[len(order) - width :]
    return np.concatenate([top[draw(0, width)[:half]], bottom[draw(1, width)[:half]]])


_RULES = dict(zip(SELECT, (_best_worst, _random, _mean_deviation, _extremes), strict=True))


def select(rewards: np.ndarray, keep: int, how: str, seed: int) -> np.ndarray:
    """Columns kept of `rewards` (prompts, seeds), NaN = not available: int64 (prompts, keep).

    "best_worst": the keep/2 best, then the keep/2 worst. "random": any `keep`, whatever their reward.
    "mean_deviation": the `keep` whose reward lies farthest from the prompt's mean. "extremes": any keep/2 of
    the best quarter, then any keep/2 of the worst. A prompt with fewer than `keep` rewards is left out: its
    columns are -1. Raises `NonFiniteError` when there is no other, `ConfigError` for a `keep` or `how` that
    is not possible.

    >>> rewards = np.array([[0.0, 5.0, 1.0, 2.0, np.nan, -9.0]])
    >>> select(rewards, 2, "best_worst", 0).tolist(), select(rewards, 2, "mean_deviation", 0).tolist()
    ([[1, 5]], [[5, 1]])
    """
    if how not in SELECT:
        raise ConfigError(f"select: {how!r} is not known{nearest(how, SELECT)}")
    Settings(keep=keep, select=how)  # raises for a number that cannot be kept
    chosen = np.full((len(rewards), keep), -1, np.int64)
    for row, values in enumerate(rewards):
        good = np.flatnonzero(np.isfinite(values))
        if len(good) < keep:
            continue

        def draw(which: int, n: int, row: int = row) -> np.ndarray:
            return permutation(seed if which == 0 else subseed(seed, "worst"), row, n)

        chosen[row] = good[_RULES[how](values[good], keep, draw)]
    if len(chosen) and (chosen < 0).all():
        most, explored = int(np.isfinite(rewards).sum(1).max()), rewards.shape[1]
        raise NonFiniteError(
            f"rollout: of none of the {len(rewards)} prompts are {keep} pictures of {explored} finite and "
            f"not constant, as are to be kept, but {most} at most; the model has diverged, lower its "
            f"learning rate"
        )
    return chosen


def pair(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flat indices (chosen, rejected) into `labels` (prompts, keep): in each prompt the best with the
    worst, the second best with the second worst, and so on; NaN (not healthy) and ties are left out.

    >>> [i.tolist() for i in pair(np.array([[0.1, 0.9, 0.5, 0.2]]))]
    [[1, 2], [0, 3]]
    """
    chosen, rejected = [], []
    for row, values in enumerate(labels):
        good = np.flatnonzero(np.isfinite(values))
        order = good[np.argsort(-values[good], kind="stable")]
        for best, worst in zip(order[: len(order) // 2], order[::-1], strict=False):
            if values[best] > values[worst]:
                chosen.append(row * labels.shape[1] + best)
                rejected.append(row * labels.shape[1] + worst)
    return np.array(chosen, np.int64), np.array(rejected, np.int64)


# -------------------------------------------------------------------------------------------------- rollouts


def rollout(
    draw: Draw,
    reward: Reward,
    seeds: np.ndarray,
    prompts: Sequence[str],
    settings: Settings,
    selection_seed: int = 0,
    journal: Journal | None = None,
    explorer: Drawer | None = None,
    *,
    iteration: int = 0,
    digest: str = "",
) -> Rollout:
    """Explore `seeds` (prompts, N; uint64), select, regenerate and label: see the module.

    The rewards of the exploration choose seeds and are never labels, but with ``train_on="fp4"``, the
    negative control: then the kept pictures are those of the exploration, bit for bit, with its rewards, and
    nothing is made anew.

    journal, iteration, digest: as in `explore`; a rollout that was interrupted goes on with what is missing.
    explorer: workers that draw (`workers.Explorer`). Neither changes the result.

    A prompt with fewer good pictures than are to be kept is left out of what is trained on, counted in
    ``stats["prompts_left_out"]``, and a warning says so. Raises `ShapeError` for seeds that do not fit
    the prompts, `ConfigError` where more are to be kept than are explored, `RewardError` for a reward that
    gives no numbers, and where no prompt is left `RewardError` if its numbers were not finite, else
    `NonFiniteError`.

    >>> draw = lambda seeds, prompts, steps, track: np.stack([np.eye(4)[..., None] * int(s) for s in seeds])
    >>> seeds, settings = np.arange(1, 9).reshape(1, 8), Settings(keep=2)
    >>> got = rollout(draw, lambda x, p: x.mean((1, 2, 3)), seeds, ["a cat"], settings)
    >>> got.kept.tolist(), got.labels.tolist(), got.pairs().chosen_reward.tolist()
    ([[8, 1]], [[2.0, 0.25]], [2.0])
    """
    seeds = _seeds(seeds, prompts, settings)
    pool = explore(draw, reward, seeds, prompts, settings, journal=journal, explorer=explorer,
                   iteration=iteration, digest=digest)  # fmt: skip
    _enough(pool, settings, prompts, reward_name(reward))
    columns = select(pool.rewards, settings.keep, settings.select, selection_seed)
    left = columns[:, 0] >= 0
    _warn_left_out(pool, settings, prompts, left)
    kept = np.take_along_axis(pool.seeds[left], some := columns[left], 1)
    rows = [p for p, good in zip(prompts, left, strict=True) if good for _ in range(settings.keep)]
    if settings.train_on == "fp4":
        of_pool = pool.rewards, pool.retried
        labels, retried = (np.take_along_axis(a[left], some, 1).reshape(-1) for a in of_pool)
        pictures = _as_explored(draw, kept.reshape(-1), rows, retried, settings, explorer)
    else:
        pictures = _drawn(draw, kept.reshape(-1), rows, settings.steps, "bf16", settings, explorer)
        labels = rewards_of(reward, pictures, rows)
        labels[~np.isfinite(labels)] = np.nan
    shape = (-1, settings.keep)
    result = Rollout(
        _placed(pictures.reshape(*shape, *pictures.shape[1:]), left, np.nan),
        _placed(labels.reshape(shape), left, np.nan), _placed(kept, left, 0), list(prompts),
        pool.seeds, pool.rewards, columns, retried=pool.retried,
    )  # fmt: skip
    result.stats = _stats(pool, result)
    return result


def _placed(values: np.ndarray, left: np.ndarray, other: float) -> np.ndarray:
    """`values` (prompts left, ...) in the places of `left`, and `other` for each prompt that was left out."""
    if left.all():
        return values
    whole = np.full((len(left), *values.shape[1:]), other, values.dtype)
    whole[left] = values
    return whole


def _seeds(seeds: np.ndarray, prompts: Sequence[str], settings: Settings) -> np.ndarray:
    seeds = np.asarray(seeds, np.uint64)
    if isinstance(prompts, str) or seeds.ndim != 2 or len(seeds) != len(prompts):
        given = "one string" if isinstance(prompts, str) else f"{len(prompts)} prompts"
        raise ShapeError(
            f"rollout: seeds have shape {seeds.shape} but there are {given}; give one row of seeds a prompt"
        )
    if not seeds.size:
        raise ShapeError(
            f"rollout: seeds have shape {seeds.shape}, so there is nothing to explore; give at least one "
            f"prompt and {settings.keep} seeds for it"
        )
    if settings.keep > seeds.shape[1]:
        raise ConfigError(
            f"keep: is {settings.keep}, but only {seeds.shape[1]} seeds of a prompt are explored; keep at "
            f"most as many"
        )
    return seeds


def _enough(pool: Pool, settings: Settings, prompts: Sequence[str], name: str) -> None:
    """Where rewards were lost though the pictures are good, no prompt with enough is the reward's doing."""
    good = np.isfinite(pool.rewards).sum(1)
    row = int(good.argmax())
    if good[row] < settings.keep and pool.counts["lost_rewards"]:
        raise RewardError(
            f"reward {name}: was not finite for {int(pool.counts['lost_rewards'])} of {pool.rewards.size} "
            f"pictures, also after {settings.retries} new seeds for each, so that no prompt has the "
            f"{settings.keep} rewards that are to be kept ({prompts[row]!r} has {good[row]}); it must "
            f"return a finite number for each picture"
        )


def _warn_left_out(pool: Pool, settings: Settings, prompts: Sequence[str], left: np.ndarray) -> None:
    if not left.all():
        row = int(np.flatnonzero(~left)[0])
        warnings.warn(
            f"rollout: {int((~left).sum())} of {len(left)} prompts have fewer good pictures than the "
            f"{settings.keep} that are to be kept, such as {prompts[row]!r} with "
            f"{int(np.isfinite(pool.rewards[row]).sum())} of {pool.rewards.shape[1]}; nothing is learnt of "
            f"them in this iteration; explore more seeds or keep fewer, and where it goes on lower the "
            f"learning rate",
            RuntimeWarning,
            stacklevel=3,
        )


def _drawn(
    draw: Draw, seeds: np.ndarray, prompts: list[str], steps: int, track: str, settings: Settings,
    explorer: Drawer | None,
) -> np.ndarray:  # fmt: skip
    """The pictures of `seeds` (n,), n > 0, drawn a chunk at a time."""
    chunk = -(-settings.chunk // GROUP) * GROUP
    if explorer is not None and explorer.count > 0:
        chunk = min(chunk, max(1, -(-len(seeds) // explorer.count)))
    starts = range(0, len(seeds), chunk)
    jobs = (Job(seeds[i : i + chunk], prompts[i : i + chunk], steps, track) for i in starts)
    pictures: np.ndarray | None = None
    with contextlib.closing(made(draw, jobs, explorer)) as parts:
        for start, part in zip(starts, parts, strict=True):
            if pictures is None:
                pictures = np.empty((len(seeds), *part.shape[1:]), part.dtype)
            pictures[start : start + len(part)] = part
    return pictures


def _as_explored(draw, seeds, prompts, retried, settings: Settings, explorer) -> np.ndarray:
    """The very pictures that the exploration saw: its steps, on its track, or on BF16 where it tried anew."""
    pictures: np.ndarray | None = None
    for where, track in ((~retried, settings.explore_track), (retried, "bf16")):
        rows = np.flatnonzero(where)
        if not rows.size:
            continue
        some = [prompts[i] for i in rows]
        part = _drawn(draw, seeds[rows], some, settings.explore_steps, track, settings, explorer)
        if pictures is None:
            pictures = np.empty((len(seeds), *part.shape[1:]), part.dtype)
        pictures[rows] = part
    return pictures


def _stats(pool: Pool, result: Rollout) -> dict[str, float]:
    """Counts of the exploration and of what was made anew, rates with intervals, and mean rewards."""
    found = result.pairs()
    kept = result.columns >= 0
    missing = float(np.isnan(result.labels[kept]).sum())

    def mean(values: np.ndarray) -> float:
        return float(np.mean(values)) if len(values) else math.nan

    return {k: float(v) for k, v in pool.counts.items()} | rates(pool.counts) | {
        "prompts_left_out": float((~kept[:, 0]).sum()),
        "kept": float(kept.sum()),
        "kept_lost": missing,  # made anew, and not healthy or without a finite reward
        "pairs": float(len(found.prompts)),
        "reward/explored": mean(pool.rewards[np.isfinite(pool.rewards)]),
        "reward/best": mean(found.chosen_reward),
        "reward/worst": mean(found.rejected_reward),
    }  # fmt: skip


def measure_fidelity(
    draw: Draw,
    reward: Reward,
    made: Rollout,
    prompts: Sequence[str],
    settings: Settings,
    explorer: Drawer | None = None,
) -> dict[str, float]:
    """Rank fidelity of the exploration of `made`, and of BF16 with as few steps, against BF16 with all steps.

    Every seed is made again in full, so this costs more than the rollout: measure it on some iterations.
    Keys are ``fidelity/<track>/<measure>`` of `rank_fidelity`. A seed that has no reward in an arm is left
    out of its comparison; one that FP4 failed at, whose picture was tried anew on BF16, is left out of all,
    for it is no ranking of FP4's, and the arms are to be compared on the same seeds.
    """

    def rewards(steps: int) -> np.ndarray:
        plain = dataclasses.replace(settings, explore_steps=steps, explore_track="bf16", retries=0)
        return explore(draw, reward, made.seeds, prompts, plain, explorer=explorer).rewards

    arms = {settings.explore_track: made.explored}
    if "bf16" not in arms:
        arms["bf16"] = rewards(settings.explore_steps)
        if made.retried is not None:
            arms = {track: np.where(made.retried, np.nan, values) for track, values in arms.items()}
    true, result = rewards(settings.steps), {}
    for track, proxy in arms.items():
        found = rank_fidelity(proxy, true, max(1, settings.keep // 2))
        shared = {f"fidelity/{k}": found.pop(k) for k in ("perfect_best", "perfect_worst", "random")}
        result |= shared | {f"fidelity/{track}/{k}": v for k, v in found.items()}
    return result
