"""What one iteration of policy training learns from: pairs, samples or trajectories, made from a rollout.

Each is a list of entries in the order in which they are taken, over a smaller set of pictures: an entry is a
pair at a noise level, a picture at a noise level, or one step of a trajectory. An engine is handed the whole
(`begin`) and then takes a slice of entries at a time (`policy_step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..align.advantages import advantages
from ..diffusion.noise import permutation, uniform
from ..diffusion.samplers import plan
from ..errors import ConfigError, ShapeError
from .config import AlignConfig, Config
from .denoiser import Denoiser

#: run.seed: the seed of a purpose.
Seed = Callable[[str], int]


class StepResult(NamedTuple):
    """Loss, norm of the gradient before clipping (one not finite: nothing was updated), further numbers."""

    loss: float
    norm: float
    stats: dict[str, float]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True, eq=False)
class PairData:
    """The comparisons of one iteration of DPO, in the order in which they are taken.

    chosen, rejected: folded pictures, one a pair; captions: bags, one a pair; row, t: pair and noise level of
    each comparison; noise: (seed, step) of all their noise.
    """

    chosen: np.ndarray
    rejected: np.ndarray
    captions: np.ndarray
    row: np.ndarray
    t: np.ndarray
    noise: tuple[int, int]

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, eq=False)
class SampleData:
    """What one iteration of DiffusionNFT learns from, in the order in which it is taken.

    pictures: folded, one a sample; captions: bags, one a sample; advantage: float32, one a sample; row, t:
    sample and noise level of each entry; noise: (seed, step) of all their noise.
    """

    pictures: np.ndarray
    captions: np.ndarray
    advantage: np.ndarray
    row: np.ndarray
    t: np.ndarray
    noise: tuple[int, int]

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, eq=False)
class TrajectoryData:
    """The steps of the sampler that one pass of PPO learns from, in the order in which they are taken.

    latents: float32 (steps + 1, n, ...) of `align.ppo.Trajectories`, timesteps its (steps,); captions: bags,
    one a trajectory; advantage: float32, one a trajectory; row, step: trajectory and number of the step of
    each entry.
    """

    latents: np.ndarray
    timesteps: np.ndarray
    captions: np.ndarray
    advantage: np.ndarray
    row: np.ndarray
    step: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    def check(self, timesteps: np.ndarray) -> None:
        """`ConfigError` unless the steps are those of a sampler that asks at `timesteps`."""
        if not np.array_equal(timesteps, self.timesteps):
            raise ConfigError(
                f"ppo: the trajectories have timesteps {self.timesteps.tolist()}, but a sampler of "
                f"{len(timesteps)} steps has {timesteps.tolist()}; make them with engine.trajectories"
            )


Data = PairData | SampleData | TrajectoryData


# ---------------------------------------------------------------------------------------------------- batches


def batches(config: Config, data: Data, passes: int | None = None) -> list[slice]:
    """The slices that `policy_step` is called with, in order: `align.batch` entries each, the last perhaps
    fewer. PPO passes over its steps `ppo.epochs` times, in the same batches (`passes`: another number).

    >>> from fp4bf16.train.config import get_preset
    >>> [(s.start, s.stop) for s in batches(get_preset("ci"), range(11))]
    [(0, 8), (8, 11)]
    """
    size, total = config.align.batch, len(data)
    one = [slice(start, min(start + size, total)) for start in range(0, total, size)]
    if passes is None:
        passes = config.ppo.epochs if isinstance(data, TrajectoryData) else 1
    return one * passes


def updates(config: Config) -> int:
    """Updates of one iteration whose rollouts are all healthy.

    >>> from fp4bf16.train.config import get_preset
    >>> updates(get_preset("ci")), updates(get_preset("emoji32"))
    (2, 8)
    """
    a = config.align
    if a.objective == "dpo":
        entries = max(1, a.prompts * a.keep // 2) * a.timesteps
    elif a.objective == "nft":
        entries = a.prompts * a.keep * a.timesteps
    else:
        entries = a.prompts * a.keep * _trained(a)
    return -(-entries // a.batch) * (config.ppo.epochs if a.objective == "ppo" else 1)


def filled(some: slice, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """(entries int64, live float64) of a slice, filled up to `batch` with its last entry, which is not live
    there: the network always sees the same shapes, so that a step has the same bits in a last, short batch.

    >>> index, live = filled(slice(8, 10), 4)
    >>> index.tolist(), live.tolist()
    ([8, 9, 9, 9], [1.0, 1.0, 0.0, 0.0])
    """
    count = some.stop - some.start
    place = np.arange(max(batch, count))
    return some.start + np.minimum(place, count - 1), (place < count).astype(np.float64)


def stacked(seen: Sequence[np.ndarray], last: np.ndarray, steps: int) -> np.ndarray:
    """Latents (steps + 1, n, ...) from what a sampler gave the network, chunk after chunk, the last chunk
    filled up, and what it ended on (n, ...).

    >>> seen = [np.full((2, 1), i, np.float32) for i in range(4)]      # two chunks of two, two steps
    >>> stacked(seen, np.full((3, 1), 9, np.float32), 2)[..., 0].tolist()
    [[0.0, 0.0, 2.0], [1.0, 1.0, 3.0], [9.0, 9.0, 9.0]]
    """
    latents = np.empty((steps + 1, *last.shape), np.float32)
    latents[-1] = last
    for i, x in enumerate(seen):
        start = i // steps * len(x)
        latents[i % steps, start : start + len(x)] = x[: len(last) - start]
    return latents


# -------------------------------------------------------------------------------------------- from a rollout


def make_data(config: Config, engine: Any, seed: Seed, made: Any, iteration: int) -> Data:
    """What the engine's objective learns from a `Rollout`: `engine.begin` takes it. May be empty.

    `seed` gives the seed of a purpose (`Run.seed`). Unhealthy pictures (a label that is not finite) are left
    out. PPO makes the kept seeds once more, to see the latents on the way.
    """
    objective = config.align.objective
    if objective == "dpo":
        chosen, rejected, captions = made.pairs()[:3]
        return pair_data(config, engine.model, seed, chosen, rejected, captions, iteration)
    labels = np.asarray(made.labels, np.float64)
    prompts = [p for p in made.prompts for _ in range(labels.shape[1])]
    healthy = np.flatnonzero(np.isfinite(labels.reshape(-1)))
    pictures = made.pictures.reshape(-1, *made.pictures.shape[2:])[healthy]
    captions = [prompts[i] for i in healthy]
    clip = (config.nft if objective == "nft" else config.ppo).advantage_clip
    advantage = advantages(labels, clip).reshape(-1)[healthy]
    if objective == "nft":
        return sample_data(config, engine.model, seed, pictures, captions, advantage, iteration)
    kept = np.asarray(made.kept, np.uint64).reshape(-1)[healthy]
    return trajectory_data(config, engine, seed, kept, captions, pictures, advantage, iteration)


def pair_data(
    config: Config,
    model: Denoiser,
    seed: Seed,
    chosen: np.ndarray,
    rejected: np.ndarray,
    captions: Sequence[str],
    iteration: int,
) -> PairData:
    """Every pair at `align.timesteps` noise levels, in a random order: of a rollout, or of a source of pairs.

    `chosen`, `rejected` (pairs, H, W, 3) float32 in [-1, 1], a caption a pair.
    """
    if not len(chosen) == len(rejected) == len(captions):
        raise ShapeError(
            f"pairs: there are {len(chosen)} chosen and {len(rejected)} rejected pictures and "
            f"{len(captions)} captions; give one of each a pair"
        )
    row, t = _entries(config, model, seed, "dpo", len(captions), iteration)
    folded = model.fold(chosen), model.fold(rejected)
    return PairData(*folded, model.encode(captions), row, t, (seed("dpo/noise"), iteration))


def sample_data(
    config: Config,
    model: Denoiser,
    seed: Seed,
    pictures: np.ndarray,
    captions: Sequence[str],
    advantage: np.ndarray,
    iteration: int,
) -> SampleData:
    """Every picture at `align.timesteps` noise levels, in a random order."""
    row, t = _entries(config, model, seed, "nft", len(captions), iteration)
    noise = seed("nft/noise"), iteration
    return SampleData(model.fold(pictures), model.encode(captions), advantage, row, t, noise)


def _entries(
    config: Config, model: Denoiser, seed: Seed, name: str, count: int, iteration: int
) -> tuple[np.ndarray, np.ndarray]:
    """(row, t) of `count` pictures or pairs at `align.timesteps` levels each."""
    c = config.align
    total = count * c.timesteps
    order = permutation(seed(f"{name}/order"), iteration, total)
    # The levels at which the run's sampler asks the network, from the noisy end, where a style is decided.
    # Heun's method asks at some of them twice, so that they are fewer than its steps.
    asked = {step.t for step in plan(config.diffusion.sampler, model.schedule, c.steps)}
    levels = np.array(sorted(asked, reverse=True), np.int64)[: _share(c.timestep_fraction, len(asked))]
    share = (order % c.timesteps + uniform(seed(f"{name}/t"), iteration, total)) / c.timesteps
    return order // c.timesteps, levels[np.minimum((share * len(levels)).astype(np.int64), len(levels) - 1)]


def _share(fraction: float, steps: int) -> int:
    """How many of a sampler's steps are trained, from the noisy end: the whole part, as in the released code
    of DDPO and DiffusionNFT, at least 1. A product that is whole but for its rounding counts as whole.

    >>> _share(0.6, 4), _share(0.55, 20), _share(0.29, 100), _share(0.1, 4)
    (2, 11, 29, 1)
    """
    return max(1, math.floor(fraction * steps + 1e-9))


def _trained(align: AlignConfig) -> int:
    """The steps of a trajectory that PPO learns from: not the last, which draws nothing."""
    return min(_share(align.timestep_fraction, align.steps), align.steps - 1)


def trajectory_data(
    config: Config,
    engine: Any,
    seed: Seed,
    kept: np.ndarray,
    captions: Sequence[str],
    pictures: np.ndarray,
    advantage: np.ndarray,
    iteration: int,
) -> TrajectoryData:
    """The steps of the trajectories of `kept` seeds: the share `align.timestep_fraction` of them, from the
    noisy end, without the last, which draws nothing; in a random order.

    Raises `ConfigError` for a sampler of one step, and where the trajectories do not end on `pictures`, which
    are those that the advantages belong to.
    """
    c = config.align
    if c.steps < 2:
        raise ConfigError(
            f"align.steps: is {c.steps}, but ppo trains the sampler's steps without the last, which draws "
            f"nothing; give 2 or more"
        )
    # The rollout has made these pictures before, and their latents could be kept there: but there workers in
    # other processes may draw, `engine.collect` is not told which of its many calls (new tries, the measure
    # of fidelity) make what is kept, and no label is known by then, so that latents of unhealthy pictures
    # would stay too. Once more is `steps` evaluations a picture; learning takes about five times that (the
    # old policy, the reference, forward and backward). And the comparison below proves the two the same.
    found = engine.trajectories(kept, captions, c.steps)
    if not np.array_equal(found.pictures, pictures):
        raise ConfigError(
            "ppo: the pictures that were judged are not those of the trajectories, which the ancestral "
            "sampler makes; make rollouts with engine.collect"
        )
    trained = _trained(c)
    order = permutation(seed("ppo/order"), iteration, len(captions) * trained)
    return TrajectoryData(
        found.latents,
        found.timesteps,
        engine.model.encode(captions),
        advantage,
        order // trained,
        order % trained,
    )
