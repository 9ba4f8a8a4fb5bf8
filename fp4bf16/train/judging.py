"""The rewards' own training: what gives the reward, and the judges that only watch."""

from __future__ import annotations

import math
import time

from ..align.measures import Learning
from .state import Run, Stopped, peak_rss_mb


def train_judges(run: Run) -> None:
    """Train what the rewards need, each part on captions that the policy never sees; a checkpoint after each.

    Each training is short and begins anew when it is interrupted. Rewards that need none are passed over.
    """
    c = run.config.judge
    learning = Learning(c.steps, c.batch, c.width, run.config.seed)
    trainers = run.panel.trainers(run.task.panel_data(), learning)
    total = sum(trainer.steps for trainer in trainers)
    done = sum(trainer.steps for trainer in trainers[: run.step])
    note = f"reward {run.panel.name}" + (f", {total} steps of {c.batch} pictures" if total else "")
    run.progress.stage("judges", total, done, note)

    def on_step(step: int, loss: float) -> None:
        run.progress.step(**({"loss": loss} if math.isfinite(loss) else {}))
        if run.stop.asked:  # nothing of it needs saving: it begins anew
            raise Stopped(int(run.stop.asked))

    for number in range(run.step, len(trainers)):
        trainer, began = trainers[number], time.perf_counter()
        found = trainer(on_step)
        if "accuracy" in found:
            run.results.setdefault("judge_accuracy", {})[trainer.name] = found["accuracy"]
        rate = trainer.steps * c.batch / (time.perf_counter() - began)
        run.log(
            step=number + 1,
            judge=trainer.name,
            **found,
            images_per_second=round(rate, 1),
            peak_rss_mb=peak_rss_mb(),
        )
        run.done(number + 1, save=number + 1 < len(trainers))
    run.enter("evaluate_base")
