"""The stages of a run, in order: base, judges, evaluation of the base, alignment, evaluation, report."""

from __future__ import annotations

import time
from typing import Any

from . import finish
from .alignment import Skips, align
from .evaluate import evaluate
from .judging import train_judges
from .schedule import learning_rate
from .state import Run


def execute(run: Run) -> dict[str, Any]:
    """Every stage that is still to do, then the summary."""
    while run.stage != "finished":
        STAGES[run.stage](run)
    return finish.summary(run)


def train_base(run: Run) -> None:
    """The base model, captions dropped now and then, the average of the weights kept."""
    c, engine = run.config.base, run.engine
    feed, skips = run.task.base(run), Skips("base", run.counters)
    run.progress.stage(
        "base", c.steps, run.step, f"{engine.size / 1e6:.2f} M parameters, {run.task.facts.split(',')[0]}"
    )
    for step in range(run.step, c.steps):
        began = time.perf_counter()
        lr = learning_rate(step, c.steps, c.lr, c.decay)
        loss, norm, _ = engine.base_step(feed.at(step), step, lr)
        skips.finite(loss, norm)
        rate, memory = c.batch / (time.perf_counter() - began), engine.memory()
        run.log(
            step=step + 1, loss=loss, grad_norm=norm, lr=lr, images_per_second=round(rate, 1), **memory,
            **run.loop_line(),
        )  # fmt: skip
        run.log_loop()
        run.progress.step(loss=loss, **{"images/s": rate}, **memory)
        last = step + 1 == c.steps
        run.done(step + 1, save=not last and (step + 1) % c.checkpoint_every == 0)
    if counts := getattr(feed, "counts", None):
        run.progress.say(f"base: {counts.summary(run.task.noun)}")
    engine.begin_alignment()
    run.enter("judges")


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
