"""The stages of a run, in order: base, judges, evaluation of the base, alignment, evaluation, report."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from ..align.dpo import dpo_backward
from ..align.rollout import Rollout, Settings, choose_prompts, measure_fidelity, rollout
from ..diffusion.losses import squared_error
from ..diffusion.noise import integers, normal, permutation, uniform
from ..errors import NonFiniteError
from ..nn.optim import AdamW, clip_norm
from . import finish
from .evaluate import evaluate, probe
from .judging import train_judges
from .run import Run

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
    c, model, flat = run.config.base, run.model, run.parameters
    pictures = model.fold(np.concatenate([run.train_pairs.style("noto"), run.train_pairs.style("twemoji")]))
    captions = np.concatenate([model.encode(run.train_pairs.captions)] * 2)
    seed = {name: run.seed(f"base/{name}") for name in ("row", "t", "noise", "drop")}
    skips = _Skips("base")
    run.progress.stage(
        "base", c.steps, run.step, f"{flat.data.size / 1e6:.2f} M parameters, {len(pictures)} pictures"
    )
    for step in range(run.step, c.steps):
        began = time.perf_counter()
        row = integers(seed["row"], step, c.batch, 0, len(pictures))
        t = integers(seed["t"], step, c.batch, 0, len(model.schedule))
        x0, eps = pictures[row], normal(seed["noise"], step, (c.batch, *model.shape))
        bag = captions[row] * (uniform(seed["drop"], step, (c.batch, 1)) >= c.drop_caption)
        output = model.policy(model.schedule.add_noise(x0, eps, t), t, bag)
        loss, gradient = squared_error(output.data, model.schedule.target(x0, eps, t, model.prediction))
        model.unet.zero_grad()
        output.backward(gradient)
        norm = clip_norm(flat.grad, c.clip)
        lr = learning_rate(step, c.steps, c.lr, c.decay)
        if skips.finite(loss, norm):
            run.optimizer.step(flat.grad, lr)
            flat.touch()
            run.ema.update(flat.data, step)
        rate = c.batch / (time.perf_counter() - began)
        run.log(step=step + 1, loss=loss, grad_norm=norm, lr=lr, images_per_second=round(rate, 1))
        run.progress.step(loss=loss, **{"images/s": rate})
        last = step + 1 == c.steps
        run.done(step + 1, save=not last and (step + 1) % c.checkpoint_every == 0)
    # What is aligned, and what DPO stays near, is the average of the weights; the optimizer starts anew.
    flat.data[...] = run.ema.average
    flat.touch()
    run.optimizer = AdamW(flat.data, run.config.align.lr)
    run.enter("judges")


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
        run.log(step=iteration + 1, **stats)
        run.log(stage="probe", step=iteration + 1, **seen)
        run.progress.step(
            loss=stats["loss"],
            reward=seen["reward"],
            heldout=seen["heldout"],
            **{"images/s": stats["images_per_second"]},
        )
        run.done(iteration + 1, save=iteration + 1 < c.iterations)
    run.enter("evaluate")


def _rollout(run: Run, iteration: int) -> tuple[dict[str, float], Rollout]:
    c = run.config.align
    prompts = choose_prompts(run.train_pairs.captions, c.prompts, run.seed("prompts"), iteration)
    seeds = integers(run.seed("rollout"), iteration, (c.prompts, c.seeds), 0, 2**32).astype(np.uint64)
    settings = Settings(c.keep, c.explore_steps, c.steps, c.explore_track, c.select, c.retries)
    reward = run.judges["reward"]
    pairs = rollout(run.model.draw, reward, seeds, prompts, settings, run.seed(f"select/{iteration}"))
    stats = dict(pairs.stats)
    if iteration % c.fidelity_every == 0 or iteration + 1 == c.iterations:
        found = measure_fidelity(run.model.draw, reward, pairs, prompts, settings)
        stats |= found
        run.results.setdefault("fidelity", []).append(found)
    return stats, pairs


def _optimize(run: Run, iteration: int, pairs: Rollout) -> dict[str, float]:
    """DPO on the pairs of one iteration, each at `timesteps` of the noise levels of the sampler."""
    c, model, flat = run.config.align, run.model, run.parameters
    if not len(pairs.prompts):
        return {"loss": float("nan"), "updates": 0.0}
    chosen, rejected = model.fold(pairs.chosen), model.fold(pairs.rejected)
    captions = model.encode(pairs.prompts)
    total = len(captions) * c.timesteps
    order = permutation(run.seed("dpo/order"), iteration, total)
    # Steps of the sampler, as the pictures met them, from the noisy end, where a style is decided.
    levels = model.schedule.timesteps(c.steps)[: max(1, math.ceil(c.timestep_fraction * c.steps))]
    share = (order % c.timesteps + uniform(run.seed("dpo/t"), iteration, total)) / c.timesteps
    t = levels[np.minimum((share * len(levels)).astype(np.int64), len(levels) - 1)]
    eps = normal(run.seed("dpo/noise"), iteration, (total, *model.shape))
    reference, skips = model.reference(run.ema.average), _Skips("align")
    lr = learning_rate(iteration, c.iterations, c.lr, c.decay)
    losses, sums, weights = [], {}, []
    for start in range(0, total, c.batch):
        some = slice(start, min(start + c.batch, total))
        row = order[some] // c.timesteps
        model.unet.zero_grad()
        result = dpo_backward(
            model.policy,
            reference,
            chosen[row],
            rejected[row],
            captions[row],
            t[some],
            eps[some],
            model.schedule,
            model.prediction,
            c.beta,
            c.hold,
            run.config.model.unshuffle**2,
        )
        norm = clip_norm(flat.grad, c.clip)
        if skips.finite(result.loss, norm):
            run.optimizer.step(flat.grad, lr)
            flat.touch()
        losses.append(result.loss)
        weights.append(len(row))
        for k, v in (result.stats | {"grad_norm": norm}).items():
            sums[k] = sums.get(k, 0.0) + v * len(row)
    stats = {k: v / total for k, v in sums.items()}
    return stats | {
        "loss": float(np.average(losses, weights=weights)),
        "first_loss": losses[0],
        "updates": float(len(losses) - skips.count),
        "skipped": float(skips.count),
    }


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
