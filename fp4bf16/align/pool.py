"""The pool of an iteration: many seeds explored in chunks, of which rewards and seeds alone are kept.

Pictures of one chunk are held at a time, so that memory does not grow with the pool but by `BYTES` a
rollout. Its picture depends on its seed and prompt alone: the network makes one picture of a seed in any
batch. Its reward depends, in the last bits, also on the pictures that are judged with it, for a product of
few columns rounds otherwise in another batch: so rewards are asked for in groups of `GROUP` places of the
pool, which are the same however the pool is cut. Chunks, workers and a journal of what is done then change
nothing in the result, bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..diffusion.noise import subseed
from ..errors import ConfigError, ShapeError, nearest
from .notes import COUNTS, Journal, Notes
from .rewards import Reward, require_finite, reward_name, score

#: draw(seeds (n,), prompts (n,), steps, track) -> pictures (n, H, W, C) float32: one seed, one picture, in
#: any batch
Draw = Callable[[Sequence[int], Sequence[str], int, str], np.ndarray]

GROUP = 64  # places of the pool whose pictures a reward is asked about together
BYTES = 17  # kept of a rollout: its seed, its reward, and whether it was tried anew

SELECT = ("best_worst", "random", "mean_deviation", "extremes")
TRAIN_ON = ("bf16", "fp4")
TRACKS = ("fp4", "bf16")  # to explore on

_BROKEN = 8  # healthy pictures whose rewards are none of them finite are no accident


@dataclass(frozen=True)
class Settings:
    """What a rollout does; `Rollout` and the trainer's configuration use the same words.

    keep: K, pictures of a prompt that are trained on. explore_steps, explore_track: how the pool is made;
    steps: of the pictures made anew on the BF16 track. select: one of `SELECT` (`rollout.select`). retries:
    new seeds for a rollout that failed. train_on: "bf16", or "fp4" to train on the explored pictures with
    their explored rewards, which is known to end worse: a negative control. chunk: pictures held at a time,
    rounded up to whole groups of `GROUP`. Values that are not possible raise `ConfigError`.

    >>> Settings(keep=5)
    Traceback (most recent call last):
    fp4bf16.errors.ConfigError: keep: is 5, but 'best_worst' takes half from either end; give an even number
    """

    keep: int = 8
    explore_steps: int = 4
    steps: int = 10
    explore_track: str = "fp4"
    select: str = "best_worst"
    retries: int = 2
    train_on: str = "bf16"
    chunk: int = 256

    def __post_init__(self) -> None:
        for name, least in (("keep", 1), ("explore_steps", 1), ("steps", 1), ("chunk", 1), ("retries", 0)):
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole or value < least:
                raise ConfigError(f"{name}: is {value!r}, but it must be a whole number of at least {least}")
        for name, known in (("select", SELECT), ("train_on", TRAIN_ON), ("explore_track", TRACKS)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name}: {value!r} is not known{nearest(value, known)}")
        if self.keep % 2 and self.select in ("best_worst", "extremes"):
            raise ConfigError(
                f"keep: is {self.keep}, but {self.select!r} takes half from either end; give an even number"
            )


class Job(NamedTuple):
    """Pictures to be drawn together, in the order of a `Draw`'s arguments."""

    seeds: np.ndarray
    prompts: list[str]
    steps: int
    track: str


class Drawer(Protocol):
    """Draws the pictures of many jobs, as `workers.Explorer` does."""

    count: int

    def pictures(self, jobs: Iterable[Job], draw: Draw) -> Iterator[np.ndarray]: ...


@dataclass
class Pool:
    """What was explored in the end, (prompts, N) each: seeds uint64; rewards float64, NaN where a rollout
    was lost; retried bool, True where the first seed failed and the picture is of the BF16 track.

    counts: rollouts; unhealthy (first pictures not finite, or constant); nonfinite_rewards (of healthy first
    pictures); retried (new seeds drawn); lost (no seed of them was good), and lost_rewards, those of them
    whose last picture was healthy.
    """

    seeds: np.ndarray
    rewards: np.ndarray
    retried: np.ndarray
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0.0))


def healthy(pictures: np.ndarray, least_std: float = 1e-3) -> np.ndarray:
    """Whether each picture is finite and not constant: bool (n,).

    >>> healthy(np.zeros((1, 2, 2, 3), np.float32)).tolist()
    [False]
    """
    good = np.zeros(len(pictures), bool)
    for start in range(0, len(pictures), GROUP):  # what it is copied for does not grow with the pictures
        flat = pictures[start : start + GROUP].reshape(len(pictures[start : start + GROUP]), -1)
        finite = np.isfinite(flat).all(1)
        with np.errstate(over="ignore", invalid="ignore"):  # a spread beyond the largest number is one
            good[start : start + GROUP] = finite & (np.where(finite[:, None], flat, 0).std(1) > least_std)
    return good


def digest_of(arrays: Mapping[str, np.ndarray] | np.ndarray) -> str:
    """SHA-256 (16 hex digits) of the names, shapes, types and values of weights, for `explore`'s `digest`.

    >>> a = np.zeros(3, np.float32)
    >>> digest_of(a) == digest_of(a.copy()), digest_of(a) == digest_of(a + 1)
    (True, False)
    """
    named = arrays if isinstance(arrays, Mapping) else {"": arrays}
    digest = hashlib.sha256()
    for name in sorted(named):
        array = np.ascontiguousarray(named[name])
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------- drawing


def made(draw: Draw, jobs: Iterable[Job], explorer: Drawer | None = None) -> Iterator[np.ndarray]:
    """The pictures of one job after the other, by `draw` here or by the workers of `explorer`.

    Raises `ShapeError` where there is not one picture a seed.
    """
    sizes: list[int] = []  # of the jobs given out, the first still to come

    def seen() -> Iterator[Job]:
        for job in jobs:
            sizes.append(len(job.seeds))
            yield job

    found = map(lambda job: draw(*job), seen()) if explorer is None else explorer.pictures(seen(), draw)
    with contextlib.closing(found) if hasattr(found, "close") else contextlib.nullcontext(found):
        for pictures in found:
            size = sizes.pop(0)
            shape = np.shape(pictures)
            if len(shape) != 4 or shape[0] != size:
                raise ShapeError(
                    f"draw: returned shape {shape} for {size} seeds; it must return one picture (H, W, C) a "
                    f"seed"
                )
            yield pictures
            del pictures  # or it would live on while the next ones are drawn


def rewards_of(
    reward: Reward, pictures: np.ndarray, prompts: Sequence[str], strict: bool = True
) -> np.ndarray:
    """Rewards of the healthy ones of `pictures` (n, H, W, C), asked about in groups of `GROUP`: float64 (n,).

    NaN: the picture is not healthy; infinite: it is, but its reward is not finite. Raises `RewardError` as
    `score` does, and, where `strict`, for a reward that is not finite for any picture of a group.
    """
    values, good = np.full(len(pictures), np.nan), healthy(pictures)
    for start in range(0, len(pictures), GROUP):
        some = start + np.flatnonzero(good[start : start + GROUP])
        if some.size:
            asked = [prompts[i] for i in some]
            found = score(reward, pictures[some], asked, finite=False).astype(np.float64)
            bad = ~np.isfinite(found)
            if strict and len(bad) >= _BROKEN and bad.all():
                require_finite(reward_name(reward), found, asked)
            values[some] = np.where(bad, np.inf, found)
    return values


# ------------------------------------------------------------------------------------------------- exploring


def explore(
    draw: Draw,
    reward: Reward,
    seeds: np.ndarray,
    prompts: Sequence[str],
    settings: Settings,
    *,
    journal: Journal | None = None,
    explorer: Drawer | None = None,
    iteration: int = 0,
    digest: str = "",
) -> Pool:
    """Rewards of `seeds` (prompts, N; uint64) with settings.explore_steps on settings.explore_track.

    A rollout whose picture is not finite or constant, or whose reward is not finite, is tried anew with a
    new seed on the BF16 track, at most `settings.retries` times, and counted; its reward is NaN if none was
    good, and a warning says so where that was the reward's doing.

    journal: chunks that it holds of this very pool are not drawn again, and each one that is drawn is added;
    what it holds of another pool is dropped. Clear it once the iteration is saved. A pool is known by
    `iteration`, seeds, prompts, what of the settings it depends on, the reward's name, and `digest`, a text
    that stands for everything else: the weights of the model and of the reward (`digest_of`).

    >>> draw = lambda seeds, prompts, steps, track: np.stack([np.eye(4)[..., None] * int(s) for s in seeds])
    >>> pool = explore(draw, lambda x, p: x.mean((1, 2, 3)), np.array([[4, 8]]), ["a cat"], Settings(keep=2))
    >>> pool.rewards.tolist(), pool.counts["lost"]
    ([[1.0, 2.0]], 0.0)
    """
    seeds = np.asarray(seeds, np.uint64)
    pool = Pool(seeds.copy(), np.full(seeds.shape, np.nan), np.zeros(seeds.shape, bool))
    done = np.zeros(-(-seeds.size // GROUP), bool)  # groups
    notes = Notes(journal, _key(seeds, prompts, settings, iteration, reward_name(reward), digest), GROUP)
    for record in notes.read():
        _take(pool, done, record)
    row = seeds.shape[1]
    spans = _spans(done, seeds.size, _chunk(settings.chunk, seeds.size, explorer))
    jobs = (
        Job(seeds.reshape(-1)[start:stop], [prompts[i // row] for i in range(start, stop)],
            settings.explore_steps, settings.explore_track)
        for start, stop in spans
    )  # fmt: skip
    todo = iter(spans)
    with contextlib.closing(made(draw, jobs, explorer)) as found:
        for pictures in found:
            start, stop = next(todo)
            some = [prompts[i // row] for i in range(start, stop)]
            record = _chunk_record(draw, reward, seeds.reshape(-1)[start:stop], some, pictures, settings)
            del pictures
            record = {"iteration": int(iteration), "chunk": start // GROUP, "start": start} | record
            _take(pool, done, record)
            notes.append(record)
    _warn(pool.counts, settings, reward_name(reward))
    return pool


def _chunk(most: int, size: int, explorer: Drawer | None) -> int:
    """Places of a chunk: whole groups; with workers, so few that each has about two chunks at least."""
    if explorer is not None and explorer.count > 0:
        most = min(most, max(GROUP, size // (2 * explorer.count) // GROUP * GROUP))
    return -(-most // GROUP) * GROUP


def _spans(done: np.ndarray, size: int, chunk: int) -> list[tuple[int, int]]:
    """(start, stop) of the chunks that are still to be drawn: runs of groups, none longer than `chunk`."""
    found: list[tuple[int, int]] = []
    for group in np.flatnonzero(~done).tolist():
        start, stop = group * GROUP, min((group + 1) * GROUP, size)
        if found and found[-1][1] == start and stop - found[-1][0] <= chunk:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _chunk_record(
    draw: Draw,
    reward: Reward,
    seeds: np.ndarray,
    prompts: list[str],
    pictures: np.ndarray,
    settings: Settings,
) -> dict[str, Any]:
    """What is kept of a chunk, in JSON's own types: seeds and rewards (None: lost) in the end, the places
    that were tried anew, and the counts.
    """
    seeds, rewards, counts = seeds.copy(), np.empty(len(seeds)), dict.fromkeys(COUNTS, 0)
    retried = np.zeros(len(seeds), bool)
    for start in range(0, len(seeds), GROUP):
        part = slice(start, start + GROUP)
        values = rewards_of(reward, pictures[part], prompts[part])
        first = _retry(draw, reward, seeds[part], prompts[part], values, retried[part], settings)
        for name, count in first.items():
            counts[name] += count
        rewards[part] = values
    return {
        "seeds": seeds.tolist(),
        "rewards": [v if math.isfinite(v) else None for v in rewards.tolist()],
        "retried": np.flatnonzero(retried).tolist(),
        "counts": counts,
    }


def _retry(
    draw: Draw,
    reward: Reward,
    seeds: np.ndarray,
    prompts: list[str],
    values: np.ndarray,
    retried: np.ndarray,
    settings: Settings,
) -> dict[str, int]:
    """Try the failed ones of a group anew, writing into `seeds`, `values` and `retried`; the counts."""
    counts = {
        "rollouts": len(seeds),
        "unhealthy": int(np.isnan(values).sum()),
        "nonfinite_rewards": int(np.isinf(values).sum()),
        "retried": 0,
    }
    for attempt in range(settings.retries):
        bad = np.flatnonzero(~np.isfinite(values))
        if not bad.size:
            break
        counts["retried"] += int(bad.size)
        seeds[bad] = [subseed(int(s), "retry", attempt) for s in seeds[bad]]
        retried[bad] = True
        some = [prompts[i] for i in bad]
        (pictures,) = made(draw, [Job(seeds[bad], some, settings.explore_steps, "bf16")])
        values[bad] = rewards_of(reward, pictures, some, strict=False)
    return counts | {
        "lost": int((~np.isfinite(values)).sum()),
        "lost_rewards": int(np.isinf(values).sum()),
    }


def _take(pool: Pool, done: np.ndarray, record: Mapping[str, Any]) -> None:
    """Place a chunk's record."""
    start, stop = record["start"], record["start"] + len(record["seeds"])
    pool.seeds.reshape(-1)[start:stop] = record["seeds"]
    pool.rewards.reshape(-1)[start:stop] = [np.nan if v is None else v for v in record["rewards"]]
    pool.retried.reshape(-1)[start:stop][record["retried"]] = True
    done[start // GROUP : -(-stop // GROUP)] = True
    for name in COUNTS:
        pool.counts[name] += record["counts"][name]


def _warn(counts: Mapping[str, float], settings: Settings, name: str) -> None:
    if counts["lost_rewards"]:
        warnings.warn(
            f"rollout: reward {name} was not finite for {int(counts['lost_rewards'])} of "
            f"{int(counts['rollouts'])} rollouts whose pictures are good, also after {settings.retries} new "
            f"seeds for each; they are left out; the reward should return a finite number for any picture",
            RuntimeWarning,
            stacklevel=4,
        )


def _key(seeds, prompts, settings: Settings, iteration: int, name: str, digest: str) -> str:
    """What a pool depends on, as a checksum."""
    kept = {k: getattr(settings, k) for k in ("explore_steps", "explore_track", "retries")}
    text = json.dumps([1, GROUP, int(iteration), kept, list(prompts), list(seeds.shape), name, digest])
    return hashlib.sha256(text.encode() + np.ascontiguousarray(seeds).tobytes()).hexdigest()[:32]
