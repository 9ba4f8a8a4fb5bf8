"""The alignment: explore, select, regenerate, learn, and see whether the guards still hold.

An iteration that breaks a guard is taken back (``align.guard = "hold"``): weights and moments are again those
of the iteration before, and the next ones learn more slowly, until the guards have held for a while. So a
reward that can only be raised by worse pictures stops rising.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np

from ..align.guards import GuardReport
from ..align.pool import digest_of
from ..align.rollout import Rollout, Settings, choose_prompts, measure_fidelity, rollout
from ..align.workers import Explorer
from ..diffusion.noise import integers
from ..errors import NonFiniteError
from .evaluate import probe
from .exploring import MakeDraw, weights_of
from .policy import Data, batches, make_data, pair_data
from .schedule import learning_rate
from .state import Run

_SKIPS = 10  # updates in a row whose gradient is not finite, before the run gives up
SLOWER, FASTER, SLOWEST = 0.5, 2**0.25, 2.0**-6  # of the rate, after an iteration that was taken back or held


class Skips:
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


def align(run: Run) -> None:
    """All iterations; one checkpoint an iteration."""
    c = run.config.align
    run.progress.stage("align", c.iterations, run.step, describe(run))
    if run.step == 0 and "probe" not in run.results:
        run.results["probe"], report = probe(run)
        run.results["held"] = [] if report is None else [g.name for g in report.guards if g.ok]
        run.log(stage="probe", step=0, **run.results["probe"])
    with _explorer(run) as explorer:
        for iteration in range(run.step, c.iterations):
            _iteration(run, iteration, explorer)
    run.enter("evaluate")


def describe(run: Run) -> str:
    """What an iteration does, in a line."""
    c = run.config.align
    trains = "" if c.parameters == "full" else f", LoRA of rank {run.config.lora.rank}"
    if c.pairs == "data":
        return f"{c.objective} on {_pairs(run)} pairs of the data an iteration{trains}"
    made = "" if c.train_on == "fp4" else f", {c.keep} of {c.seeds} again in BF16"
    return (
        f"{c.objective} on {c.prompts} prompts x {c.seeds} seeds x {c.explore_steps} steps on "
        f"{c.explore_track.upper()}{made}{trains}"
    )


def _pairs(run: Run) -> int:
    c = run.config.align
    return max(1, c.prompts * c.keep // 2)


def _iteration(run: Run, iteration: int, explorer: Explorer) -> None:
    c, began = run.config.align, time.perf_counter()
    before = run.engine.snapshot() if c.guard == "hold" else None
    stats, data, kept = _gather(run, iteration, explorer)
    stats |= optimize(run, iteration, data)
    seen, report = probe(run)
    broken = _newly_broken(run, report)
    if broken and before is not None:
        run.engine.take_back(before)
        run.counters["taken_back"] = run.counters.get("taken_back", 0) + 1
        run.progress.say(f"note: iteration {iteration + 1} is taken back: {broken[0]}")
    else:
        run.engine.end_iteration(iteration)
    _trust(run, bool(broken))
    if kept is not None:
        run.panel.observe(*kept)
    took = time.perf_counter() - began
    stats["images_per_second"] = round(stats.get("rollouts", len(data)) / took, 1)
    memory = run.engine.memory()
    run.log(
        step=iteration + 1, **stats, taken_back=bool(broken) and before is not None, broken=broken,
        trust=run.counters["trust"], **memory,
    )  # fmt: skip
    run.log(stage="probe", step=iteration + 1, **seen)
    run.progress.step(
        loss=stats["loss"],
        reward=seen["reward"],
        heldout=seen["heldout"],
        **{"images/s": stats["images_per_second"]},
        **memory,
    )
    run.done(iteration + 1, save=iteration + 1 < c.iterations)
    run.folder.journal.clear()


def _newly_broken(run: Run, report: GuardReport | None) -> list[str]:
    """Sentences of the guards that held for the base and do not hold now."""
    if report is None:
        return ["the pictures of the probe are not finite, or constant"]
    held = run.results.get("held", [])
    return [guard.sentence for guard in report.guards if not guard.ok and guard.name in held]


def _trust(run: Run, broken: bool) -> None:
    """What the learning rate is multiplied with from now on."""
    now = run.counters.get("trust", 1.0)
    run.counters["trust"] = max(SLOWEST, now * SLOWER) if broken else min(1.0, now * FASTER)


# -------------------------------------------------------------------------------------------------- exploring


def _explorer(run: Run) -> Explorer:
    """The processes that explore, none of them where this one is to do it alone."""
    c = run.config
    alone = c.align.pairs == "data" or run.engine.device != "cpu"
    if c.align.objective == "ppo":  # as `engine.collect`
        c = dataclasses.replace(
            c, diffusion=dataclasses.replace(c.diffusion, sampler="ancestral", guidance=1.0)
        )
    make = MakeDraw(c, run.model.vocabulary.words)
    return Explorer(make, 0 if alone else c.align.workers, say=run.progress.say, folder=run.folder.path)


def settings_of(run: Run) -> Settings:
    """The rollouts of a run's configuration."""
    c = run.config.align
    return Settings(
        keep=c.keep, explore_steps=c.explore_steps, steps=c.steps, explore_track=c.explore_track,
        select=c.select, retries=c.retries, train_on=c.train_on,
    )  # fmt: skip


def _gather(
    run: Run, iteration: int, explorer: Explorer
) -> tuple[dict[str, Any], Data, tuple[np.ndarray, list[str]] | None]:
    """(statistics, what is learnt from, the kept pictures with their prompts) of an iteration."""
    config = run.config
    if config.align.pairs == "data":
        chosen, rejected, captions = run.task.offline(run, _pairs(run))
        data = pair_data(config, run.model, run.seed, chosen, rejected, captions, iteration)
        return {"pairs": float(len(chosen))}, data, None
    stats, made = explore(run, iteration, explorer)
    data = make_data(config, run.engine, run.seed, made, iteration)
    healthy = np.isfinite(made.labels).reshape(-1)
    rows = [p for p in made.prompts for _ in range(made.labels.shape[1])]
    pictures = made.pictures.reshape(-1, *made.pictures.shape[2:])[healthy]
    return stats, data, (pictures, [rows[i] for i in np.flatnonzero(healthy)])


def explore(run: Run, iteration: int, explorer: Explorer) -> tuple[dict[str, Any], Rollout]:
    """The rollout of one iteration; now and then with its rank fidelity."""
    c, engine = run.config.align, run.engine
    prompts = choose_prompts(run.task.prompts, c.prompts, run.seed("prompts"), iteration)
    seeds = integers(run.seed("rollout"), iteration, (c.prompts, c.seeds), 0, 2**32).astype(np.uint64)
    digest = f"{engine.updates} updates"
    if engine.device == "cpu":
        weights = weights_of(engine)
        explorer.refresh(weights)
        digest = digest_of(weights)
    digest += digest_of(run.panel.state_dict())
    made = rollout(
        engine.collect, run.panel, seeds, prompts, settings_of(run), run.seed(f"select/{iteration}"),
        journal=run.journal(iteration), explorer=explorer, iteration=iteration, digest=digest,
    )  # fmt: skip
    stats: dict[str, Any] = dict(made.stats)
    stats["reward/prompts"] = [float(np.nanmean(row)) for row in made.explored]
    for name in ("rollouts", "unhealthy", "retried", "lost"):
        run.counters[name] = run.counters.get(name, 0.0) + made.stats[name]
    if iteration % c.fidelity_every == 0 or iteration + 1 == c.iterations:
        found = measure_fidelity(engine.collect, run.panel, made, prompts, settings_of(run), explorer)
        stats |= found
        run.results.setdefault("fidelity", []).append(found)
    return stats, made


# --------------------------------------------------------------------------------------------------- learning


def optimize(run: Run, iteration: int, data: Data) -> dict[str, Any]:
    """One iteration's updates; statistics as means over the entries."""
    c, engine = run.config.align, run.engine
    if not len(data):
        return {"loss": math.nan, "updates": 0.0, "skipped": 0.0}
    skips = Skips("align")
    engine.begin(data)
    lr = learning_rate(iteration, c.iterations, c.lr, c.decay) * run.counters.get("trust", 1.0)
    losses, sums, weights, first = [], {}, [], {}
    for some in batches(run.config, data):
        loss, norm, stats = engine.policy_step(data, some, lr)
        skips.finite(loss, norm)
        if not losses:  # before the first update: users check that it is ln 2, or the ratio 1
            first = {"first_loss": loss} | ({"first_ratio": stats["ratio"]} if "ratio" in stats else {})
        losses.append(loss)
        weights.append(some.stop - some.start)
        for k, v in (stats | {"grad_norm": norm}).items():
            sums[k] = sums.get(k, 0.0) + v * weights[-1]
    total = sum(weights)
    return {k: v / total for k, v in sums.items()} | {
        "loss": float(np.average(losses, weights=weights)),
        "lr": lr,
        "updates": float(len(losses) - skips.count),
        "skipped": float(skips.count),
        **first,
    }
