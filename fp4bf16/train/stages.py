"""The stages of a run, in order: base, judges, evaluation of the base, alignment, evaluation, report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..align.rollout import Rollout, Settings, choose_prompts, measure_fidelity, rollout
from ..diffusion.noise import integers, permutation, uniform
from ..errors import NonFiniteError
from . import finish
from .data import Pairs
from .denoiser import Denoiser
from .engine import BaseData, PairData
from .evaluate import evaluate, probe
from .judging import train_judges
from .state import Run

_SKIPS = 10  # updates in a row whose gradient is not finite, before the run gives up


def execute(run: Run) -> dict[str, Any]:
    """Every stage that is still to do, then the summary."""
    while run.stage != "finished":
        STAGES[run.stage](run)
    return finish.summary(run)


def learning_rate(step: int, steps: int, lr: float, decay: float) -> float:
    """Constant, then falling linearly to 0 over the last `decay` share of the steps.

    >>> [learning_rate(s, 10, 1.0, 0.4) for s in (0, 5, 6, 8)]
    [1.0, 1.0, 1.0, 0.5]
    """
    left = steps * decay
    return lr * min(1.0, (steps - step) / left) if left else lr


class _Skips:
    """Updates whose gradient is not finite are left out and counted; many in a row end the run."""

    def __init__(self, stage: str):
        self.stage, self.count, self.row = stage, 0, 0

    def finite(self, loss: float, norm: float) -> bool:
        if math.isfinite(loss) and math.isfinite(norm):
            self.row = 0
            return True
        self.count, self.row = self.count + 1, self.row + 1
        if self.row >= _SKIPS:
            raise NonFiniteError(
                f"{self.stage}: the gradient was not finite in {self.row} updates in a row (loss {loss}, "
                f"norm {norm}); lower {self.stage}.lr and start a new run"
            )
        return False


def train_base(run: Run) -> None:
    """The base model: both styles, captions dropped now and then, the average of the weights kept."""
    c, engine = run.config.base, run.engine
    data = base_data(run.train_pairs, run.model, run.seed)
    skips = _Skips("base")
    run.progress.stage(
        "base", c.steps, run.step, f"{engine.size / 1e6:.2f} M parameters, {len(data.pictures)} pictures"
    )
    for step in range(run.step, c.steps):
        began = time.perf_counter()
        lr = learning_rate(step, c.steps, c.lr, c.decay)
        loss, norm, _ = engine.base_step(data, step, lr)
        skips.finite(loss, norm)
        rate, memory = c.batch / (time.perf_counter() - began), engine.memory()
        run.log(step=step + 1, loss=loss, grad_norm=norm, lr=lr, images_per_second=round(rate, 1), **memory)
        run.progress.step(loss=loss, **{"images/s": rate}, **memory)
        last = step + 1 == c.steps
        run.done(step + 1, save=not last and (step + 1) % c.checkpoint_every == 0)
    engine.begin_alignment()
    run.enter("judges")


def base_data(pairs: Pairs, model: Denoiser, seed: Callable[[str], int]) -> BaseData:
    """The pictures of both styles, one after the other, with their captions; `seed` of a purpose."""
    pictures = model.fold(np.concatenate([pairs.style("noto"), pairs.style("twemoji")]))
    captions = np.concatenate([model.encode(pairs.captions)] * 2)
    seeds = {name: seed(f"base/{name}") for name in ("row", "t", "noise", "drop")}
    return BaseData(pictures, captions, seeds, len(model.schedule))


def align(run: Run) -> None:
    """Explore, regenerate, DPO: one checkpoint an iteration."""
    c = run.config.align
    run.progress.stage(
        "align",
        c.iterations,
        run.step,
        f"{c.prompts} prompts x {c.seeds} seeds x {c.explore_steps} "
        f"steps on {c.explore_track.upper()}, {c.keep} of {c.seeds} again in BF16",
    )
    if run.step == 0 and "probe" not in run.results:
        run.results["probe"] = probe(run)
        run.log(stage="probe", step=0, **run.results["probe"])
    for iteration in range(run.step, c.iterations):
        began = time.perf_counter()
        stats, pairs = _rollout(run, iteration)
        stats |= _optimize(run, iteration, pairs)
        seen = probe(run)
        took = time.perf_counter() - began
        stats["images_per_second"] = round(stats["rollouts"] / took, 1)
        memory = run.engine.memory()
        run.log(step=iteration + 1, **stats, **memory)
        run.log(stage="probe", step=iteration + 1, **seen)
        run.progress.step(
            loss=stats["loss"],
            reward=seen["reward"],
            heldout=seen["heldout"],
            **{"images/s": stats["images_per_second"]},
            **memory,
        )
        run.done(iteration + 1, save=iteration + 1 < c.iterations)
    run.enter("evaluate")


def _rollout(run: Run, iteration: int) -> tuple[dict[str, float], Rollout]:
    c = run.config.align
    prompts = choose_prompts(run.train_pairs.captions, c.prompts, run.seed("prompts"), iteration)
    seeds = integers(run.seed("rollout"), iteration, (c.prompts, c.seeds), 0, 2**32).astype(np.uint64)
    settings = Settings(c.keep, c.explore_steps, c.steps, c.explore_track, c.select, c.retries)
    reward = run.judges["reward"]
    pairs = rollout(run.engine.draw, reward, seeds, prompts, settings, run.seed(f"select/{iteration}"))
    stats = dict(pairs.stats)
    if iteration % c.fidelity_every == 0 or iteration + 1 == c.iterations:
        found = measure_fidelity(run.engine.draw, reward, pairs, prompts, settings)
        stats |= found
        run.results.setdefault("fidelity", []).append(found)
    return stats, pairs


def _optimize(run: Run, iteration: int, pairs: Rollout) -> dict[str, float]:
    """DPO on the pairs of one iteration, each at `timesteps` of the noise levels of the sampler."""
    c, engine = run.config.align, run.engine
    if not len(pairs.prompts):
        return {"loss": float("nan"), "updates": 0.0}
    data, skips = _comparisons(run, iteration, pairs), _Skips("align")
    engine.begin_pairs(data)
    lr = learning_rate(iteration, c.iterations, c.lr, c.decay)
    losses, sums, weights = [], {}, []
    for start in range(0, len(data), c.batch):
        some = slice(start, min(start + c.batch, len(data)))
        loss, norm, stats = engine.dpo_step(data, some, lr)
        skips.finite(loss, norm)
        losses.append(loss)
        weights.append(some.stop - start)
        for k, v in (stats | {"grad_norm": norm}).items():
            sums[k] = sums.get(k, 0.0) + v * weights[-1]
    return {k: v / len(data) for k, v in sums.items()} | {
        "loss": float(np.average(losses, weights=weights)),
        "first_loss": losses[0],
        "updates": float(len(losses) - skips.count),
        "skipped": float(skips.count),
    }


def _comparisons(run: Run, iteration: int, pairs: Rollout) -> PairData:
    """Every pair at `timesteps` noise levels, in a random order."""
    c, model = run.config.align, run.model
    total = len(pairs.prompts) * c.timesteps
    order = permutation(run.seed("dpo/order"), iteration, total)
    # Steps of the sampler, as the pictures met them, from the noisy end, where a style is decided.
    levels = model.schedule.timesteps(c.steps)[: max(1, math.ceil(c.timestep_fraction * c.steps))]
    share = (order % c.timesteps + uniform(run.seed("dpo/t"), iteration, total)) / c.timesteps
    return PairData(
        model.fold(pairs.chosen),
        model.fold(pairs.rejected),
        model.encode(pairs.prompts),
        order // c.timesteps,
        levels[np.minimum((share * len(levels)).astype(np.int64), len(levels) - 1)],
        (run.seed("dpo/noise"), iteration),
    )


def evaluate_base(run: Run) -> None:
    """The base model's pictures and scores."""
    evaluate(run, "base")
    run.enter("align")


def evaluate_final(run: Run) -> None:
    """The aligned model's, from the same noise; then the run is complete and its report is written."""
    evaluate(run, "aligned")
    finish.finish(run)
    run.enter("finished")


STAGES = {
    "base": train_base,
    "judges": train_judges,
    "evaluate_base": evaluate_base,
    "align": align,
    "evaluate": evaluate_final,
}
