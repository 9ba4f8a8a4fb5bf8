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

from ..align.guards import Guard, GuardReport
from ..align.pool import digest_of
from ..align.rollout import Rollout, Settings, choose_prompts, measure_fidelity, rollout
from ..align.workers import Explorer
from ..diffusion.noise import integers
from ..errors import NonFiniteError
from .evaluate import probe
from .exploring import MakeDraw, encode_routes, weights_of
from .policy import Data, batches, make_data, pair_data
from .schedule import learning_rate
from .state import Run

_SKIPS = 10  # updates in a row whose gradient is not finite, before the run gives up
MARGIN = 0.05  # of a guard's range, that a probe must stay away from its end
SLOWER, FASTER, SLOWEST = 0.5, 2**0.25, 2.0**-6  # of the rate, after an iteration that was taken back or held


class Skips:
    """Updates whose gradient is not finite are left out and counted; many in a row end the run. The row goes
    on over iterations and resumes, in the run's counters.
    """

    def __init__(self, stage: str, counters: dict[str, float]):
        self.stage, self.counters, self.count = stage, counters, 0

    def finite(self, loss: float, norm: float) -> bool:
        key = f"{self.stage}/skipped_in_a_row"
        if math.isfinite(loss) and math.isfinite(norm):
            self.counters[key] = 0
            return True
        self.count += 1
        self.counters[key] = self.counters.get(key, 0) + 1
        if self.counters[key] >= _SKIPS:
            raise NonFiniteError(
                f"{self.stage}: the gradient was not finite in {int(self.counters[key])} updates in a row "
                f"(loss {loss}, norm {norm}); lower {self.stage}.lr and start a new run"
            )
        return False


def align(run: Run) -> None:
    """All iterations; one checkpoint an iteration."""
    c = run.config.align
    run.progress.stage("align", c.iterations, run.step, describe(run))
    if run.step == 0 and "probe" not in run.results:
        run.results["probe"], report = probe(run)
        if report is None:
            raise NonFiniteError(
                "align: the base model's pictures are not finite, or constant; train it longer (base.steps), "
                "with a lower rate (base.lr), or begin with other weights (--from)"
            )
        run.results["edges"] = {guard.name: edge(guard) for guard in report.guards}
        for sentence in report.broken:
            run.progress.say(f"note: the base model breaks a guard, which holds no worse than so: {sentence}")
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
    if not stats["updates"]:
        run.progress.say(
            f"warning: iteration {iteration + 1} changed nothing: {len(data)} entries to learn from, "
            f"{int(stats['skipped'])} updates left out that were not finite"
        )
    seen, report = probe(run)
    broken = _broken(run, report)
    taken = bool(broken) and before is not None
    if taken:
        run.engine.take_back(before)
        run.counters["taken_back"] = run.counters.get("taken_back", 0) + 1
        run.progress.say(f"note: iteration {iteration + 1} is taken back: {broken[0]}")
    else:
        if broken:
            run.progress.say(f"warning: iteration {iteration + 1}: {broken[0]}")
        run.engine.end_iteration(iteration)
    _trust(run, taken)
    if kept is not None:
        run.panel.observe(*kept)
    took = time.perf_counter() - began
    stats["images_per_second"] = round(stats.get("rollouts", len(data)) / took, 1)
    memory = run.engine.memory()
    run.log(
        step=iteration + 1, **stats, taken_back=taken, broken=broken,
        trust=run.counters["trust"], **memory, **run.loop_line(),
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


def _broken(run: Run, report: GuardReport | None) -> list[str]:
    """A sentence for each guard that does not hold: nearer than `MARGIN` to the end of its range, for a probe
    sees few pictures; or, where the base is no farther away, a tenth of the range beyond the base.
    """
    if report is None:
        return ["the pictures of the probe are not finite, or constant"]
    found = []
    for guard in report.guards:
        base = run.results["edges"][guard.name]
        if edge(guard) > (base + 0.1 if base > -MARGIN else -MARGIN):
            range_ = f"{guard.low:.3g} to {guard.high:.3g}"
            near = f"{guard.name}: {guard.value:.3g} is close to the end of its range, {range_}"
            found.append(guard.sentence or near)
    return found


def edge(guard: Guard) -> float:
    """How far a guard's value lies beyond the nearer end of its range, in widths of the range; negative
    inside. Of a range that begins at 0 only the upper end counts.

    >>> edge(Guard("contrast", 0.5, 0.2, 0.4, "contrast: ..."))
    0.5
    >>> edge(Guard("pattern_2x2", 0.01, 0.0, 0.04, ""))
    -0.75
    """
    below = guard.low - guard.value if guard.low else -math.inf
    return round(max(below, guard.value - guard.high) / (guard.high - guard.low), 6)


def _trust(run: Run, taken_back: bool) -> None:
    """What the learning rate is multiplied with from now on."""
    now = run.counters.get("trust", 1.0)
    run.counters["trust"] = max(SLOWEST, now * SLOWER) if taken_back else min(1.0, now * FASTER)


# -------------------------------------------------------------------------------------------------- exploring


def _explorer(run: Run) -> Explorer:
    """The processes that explore, none of them where this one is to do it alone."""
    c = run.config
    alone = c.align.pairs == "data" or run.engine.device != "cpu"
    if c.align.objective == "ppo":  # as `engine.collect`
        c = dataclasses.replace(
            c, diffusion=dataclasses.replace(c.diffusion, sampler="ancestral", guidance=1.0)
        )
    make = MakeDraw(c, run.model.vocabulary.words, run.model.by_phases)
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
    if run.loop is not None:
        engine.model.routes = run.loop.routes()
    digest = f"{engine.updates} updates"
    if engine.device == "cpu":
        weights = weights_of(engine)
        explorer.refresh(weights)
        digest = digest_of(weights)
    elif engine.model.routes is not None:
        digest += digest_of({"routes": encode_routes(engine.model.routes)})
    digest += digest_of(run.panel.state_dict())
    made = rollout(
        engine.collect, run.panel, seeds, prompts, settings_of(run), run.seed(f"select/{iteration}"),
        journal=run.journal(iteration), explorer=explorer, iteration=iteration, digest=digest,
    )  # fmt: skip
    stats: dict[str, Any] = dict(made.stats)
    found = [row[np.isfinite(row)] for row in made.explored]
    stats["reward/prompts"] = [float(row.mean()) if row.size else math.nan for row in found]
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
    skips = Skips("align", run.counters)
    engine.begin(data)
    lr = learning_rate(iteration, c.iterations, c.lr, c.decay) * run.counters.get("trust", 1.0)
    sums, weight, done, first = {}, 0, 0, {}
    for some in batches(run.config, data):
        loss, norm, stats = engine.policy_step(data, some, lr)
        run.log_loop()
        if not first:  # before the first update: users check that it is ln 2, or the ratio 1
            first = {"first_loss": loss} | ({"first_ratio": stats["ratio"]} if "ratio" in stats else {})
        if not skips.finite(loss, norm):
            continue
        done, weight = done + 1, weight + some.stop - some.start
        for k, v in (stats | {"loss": loss, "grad_norm": norm}).items():
            sums[k] = sums.get(k, 0.0) + v * (some.stop - some.start)
    means = {k: v / weight for k, v in sums.items()} if weight else {"loss": math.nan}
    return means | {"lr": lr, "updates": float(done), "skipped": float(skips.count), **first}
