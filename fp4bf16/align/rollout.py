"""Rollouts: explore many seeds cheaply, keep the best and the worst, make those again in full, label them
anew.

explore      FP4 track, few steps, every seed of every prompt -> reward (only used to choose seeds)
select       best K/2 and worst K/2 seeds of a prompt
regenerate   the same seeds on the BF16 track with all steps -> reward again: the label
pair         best with worst of the same prompt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..diffusion.noise import permutation, subseed
from ..errors import ConfigError, NonFiniteError, ShapeError, nearest
from .fidelity import rank_fidelity
from .rewards import Reward, score

# #: draw(seeds (n,), prompts (n,), steps, track) -> pictures (n, H, W, C) float32: one seed, one picture,
# in any batch
Draw = Callable[[Sequence[int], Sequence[str], int, str], np.ndarray]

SELECT = ("best_worst", "random")


@dataclass(frozen=True)
class Settings:
    """What a rollout does; `Rollout` and the trainer's configuration use the same words."""

    keep: int = 8
    explore_steps: int = 4
    steps: int = 10
    explore_track: str = "fp4"
    select: str = "best_worst"
    retries: int = 2


@dataclass
class Rollout:
    """Pairs of one iteration, with what happened on the way.

    chosen, rejected: pictures (pairs, H, W, C) made on the BF16 track; prompts: one a pair; rewards of both
    (pairs,); seeds: what was explored in the end (prompts, seeds); explored: their rewards, NaN where a
    rollout stayed unhealthy; stats: counts and means.
    """

    chosen: np.ndarray
    rejected: np.ndarray
    prompts: list[str]
    chosen_reward: np.ndarray
    rejected_reward: np.ndarray
    seeds: np.ndarray
    explored: np.ndarray
    stats: dict[str, float] = field(default_factory=dict)


def healthy(pictures: np.ndarray, least_std: float = 1e-3) -> np.ndarray:
    """Whether each picture is finite and not constant: bool (n,).

    >>> healthy(np.zeros((1, 2, 2, 3), np.float32)).tolist()
    [False]
    """
    flat = pictures.reshape(len(pictures), -1)
    finite = np.isfinite(flat).all(1)
    return finite & (np.where(finite[:, None], flat, 0).std(1) > least_std)


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


def select(rewards: np.ndarray, keep: int, how: str, seed: int) -> np.ndarray:
    """Columns kept of `rewards` (prompts, seeds), NaN = not available: int64 (prompts, keep).

    "best_worst": the keep/2 best, then the keep/2 worst. "random": any `keep`, whatever their reward.
    Raises `NonFiniteError` when a prompt has fewer than `keep` rewards.
    """
    if how not in SELECT:
        raise ConfigError(f"select: {how!r} is not known{nearest(how, SELECT)}")
    chosen = np.empty((len(rewards), keep), np.int64)
    for row, values in enumerate(rewards):
        good = np.flatnonzero(np.isfinite(values))
        if len(good) < keep:
            raise NonFiniteError(
                f"rollout: only {len(good)} of the {len(values)} pictures of prompt {row} are finite and "
                f"not constant, but {keep} are to be kept; the model has diverged, lower its "
                f"learning rate"
            )
        if how == "random":
            chosen[row] = good[permutation(seed, row, len(good))[:keep]]
        else:
            order = good[np.argsort(-values[good], kind="stable")]
            chosen[row] = np.concatenate([order[: keep // 2], order[-(keep // 2) :]])
    return chosen


def explore(
    draw: Draw, reward: Reward, seeds: np.ndarray, prompts: Sequence[str], settings: Settings
) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """(rewards, seeds, counts) of the exploration of `seeds` (prompts, N), whatever its steps and track.

    A picture that is not healthy is made again from a new seed on the BF16 track, at most
    `settings.retries` times, and counted; its reward is NaN if none was healthy.
    """
    rows = [p for p in prompts for _ in range(seeds.shape[1])]
    seeds = seeds.copy().reshape(-1)
    pictures = draw(seeds, rows, settings.explore_steps, settings.explore_track)
    good = healthy(pictures)
    counts = {"rollouts": float(len(seeds)), "unhealthy": float((~good).sum()), "retried": 0.0}
    for attempt in range(settings.retries):
        bad = np.flatnonzero(~good)
        if not bad.size:
            break
        counts["retried"] += float(bad.size)
        seeds[bad] = [subseed(int(s), "retry", attempt) for s in seeds[bad]]
        pictures[bad] = draw(seeds[bad], [rows[i] for i in bad], settings.explore_steps, "bf16")
        good[bad] = healthy(pictures[bad])
    counts["lost"] = float((~good).sum())
    rewards = np.full(len(seeds), np.nan)
    rewards[good] = score(reward, pictures[good], [rows[i] for i in np.flatnonzero(good)])
    shape = (len(prompts), -1)
    return rewards.reshape(shape), seeds.reshape(shape), counts


def rollout(
    draw: Draw,
    reward: Reward,
    seeds: np.ndarray,
    prompts: Sequence[str],
    settings: Settings,
    selection_seed: int = 0,
) -> Rollout:
    """Explore `seeds` (prompts, N; uint64), select, regenerate, label, and pair: see the module.

    The rewards of the exploration choose seeds and are never labels. Pairs whose two rewards are equal are
    left out.
    """
    seeds = np.asarray(seeds, np.uint64)
    if seeds.ndim != 2 or len(seeds) != len(prompts):
        raise ShapeError(
            f"rollout: seeds have shape {seeds.shape} but there are {len(prompts)} prompts; give one row "
            f"of seeds a prompt"
        )
    explored, seeds, stats = explore(draw, reward, seeds, prompts, settings)
    columns = select(explored, settings.keep, settings.select, selection_seed)
    kept = np.take_along_axis(seeds, columns, 1)
    rows = [p for p in prompts for _ in range(settings.keep)]
    pictures = draw(kept.reshape(-1), rows, settings.steps, "bf16")
    good = healthy(pictures)
    labels = np.full(len(rows), np.nan)
    labels[good] = score(reward, pictures[good], [rows[i] for i in np.flatnonzero(good)])
    labels = labels.reshape(len(prompts), settings.keep)
    chosen, rejected = pair(labels)
    flat = labels.reshape(-1)
    stats |= {
        "lost": stats["lost"] + float((~good).sum()),
        "pairs": float(len(chosen)),
        "reward/explored": float(np.nanmean(explored)),
        "reward/best": float(flat[chosen].mean()) if len(chosen) else float("nan"),
        "reward/worst": float(flat[rejected].mean()) if len(rejected) else float("nan"),
    }
    return Rollout(
        pictures[chosen],
        pictures[rejected],
        [rows[i] for i in chosen],
        flat[chosen],
        flat[rejected],
        seeds,
        explored,
        stats,
    )


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


def measure_fidelity(
    draw: Draw, reward: Reward, made: Rollout, prompts: Sequence[str], settings: Settings
) -> dict[str, float]:
    """Rank fidelity of the exploration of `made`, and of BF16 with as few steps, against BF16 with all steps.

    Every seed is made again in full, so this costs more than the rollout: measure it on some iterations.
    Keys are ``fidelity/<track>/<measure>`` of `rank_fidelity`. A seed that is not healthy in an arm has the
    lowest rank there.
    """
    rows = [p for p in prompts for _ in range(made.seeds.shape[1])]

    def rewards(steps: int) -> np.ndarray:
        pictures = draw(made.seeds.reshape(-1), rows, steps, "bf16")
        good = healthy(pictures)
        values = np.full(len(rows), -np.inf)
        values[good] = score(reward, pictures[good], [rows[i] for i in np.flatnonzero(good)])
        return values.reshape(made.seeds.shape)

    arms = {settings.explore_track: np.where(np.isfinite(made.explored), made.explored, -np.inf)}
    if "bf16" not in arms:
        arms["bf16"] = rewards(settings.explore_steps)
    true, result = rewards(settings.steps), {}
    for track, proxy in arms.items():
        found = rank_fidelity(proxy, true, settings.keep // 2)
        shared = {f"fidelity/{k}": found.pop(k) for k in ("perfect_best", "perfect_worst", "random")}
        result |= shared | {f"fidelity/{track}/{k}": v for k, v in found.items()}
    return result
