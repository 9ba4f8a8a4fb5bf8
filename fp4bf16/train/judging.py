"""The two judges: one gives the reward, the other only watches."""

from __future__ import annotations

import time

from ..align.judges import Judge, train_judge
from .data import STYLES
from .state import Run, peak_rss_mb

JUDGES = ("reward", "heldout")


def train_judges(run: Run) -> None:
    """Train both judges, each on captions of its own that the policy never sees; a checkpoint after each.

    A judge's training is short and begins anew when it is interrupted.
    """
    c = run.config.judge
    run.progress.stage(
        "judges", len(JUDGES) * c.steps, run.step * c.steps, f"2 x {c.steps} steps of {c.batch} pictures"
    )
    for number in range(run.step, len(JUDGES)):
        name, began = JUDGES[number], time.perf_counter()
        pairs = run.pairs.select(role=name, without=run.config.word or None)
        winners, losers = (pairs.style(s) for s in _winner_first(run.config.winner))
        judge = Judge(name, c.width, seed=run.config.seed)
        loss = train_judge(
            judge,
            winners,
            losers,
            steps=c.steps,
            batch=c.batch,
            seed=run.seed(f"judge/{name}"),
            on_step=lambda step, loss: run.progress.step(loss=loss),
        )
        judge.calibrate(*(run.train_pairs.style(s) for s in _winner_first(run.config.winner)))
        run.judges[name] = judge
        faces = run.pairs.select(word=run.config.word or None, role=None if run.config.word else "evaluation")
        accuracy = judge.accuracy(*(faces.style(s) for s in _winner_first(run.config.winner)))
        run.results.setdefault("judge_accuracy", {})[name] = accuracy
        rate = c.steps * c.batch / (time.perf_counter() - began)
        run.log(
            step=number + 1,
            judge=name,
            loss=loss,
            accuracy=accuracy,
            images_per_second=round(rate, 1),
            peak_rss_mb=peak_rss_mb(),
        )
        run.done(number + 1, save=number + 1 < len(JUDGES))
    run.enter("evaluate_base")


def _winner_first(winner: str) -> tuple[str, str]:
    return winner, next(s for s in STYLES if s != winner)
