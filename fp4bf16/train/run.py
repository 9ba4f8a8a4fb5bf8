"""One run from its first step to its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .config import Config
from .folder import RunFolder
from .loggers import check_loggers
from .progress import Progress
from .stages import execute
from .state import Run, Stop, Stopped
from .weights import Start

__all__ = ["Stopped", "train"]


def train(
    config: Config,
    out: Path,
    progress: Progress | None = None,
    device: str = "cpu",
    start: Start | None = None,
    log: Sequence[str] = (),
) -> dict[str, Any]:
    """Run `config` in the folder `out`, from its start or from where it was left. Returns the summary.

    device: "cpu" or "cuda". start: weights to begin with, in place of a base model of the run's own. log:
    further loggers, "tensorboard" and "wandb" (`loggers`).

    Raises `Stopped` after Ctrl-C or SIGTERM (the state is saved), `ConfigError`, `CheckpointError` and
    `ImportError` (an extra that is missing) before anything is changed.
    """
    check_loggers(log)
    progress, run = progress or Progress(), None
    folder = RunFolder(out)
    try:
        with Stop(progress.say) as stop:
            run = Run(config, folder, progress, stop, device, start)  # it may refuse: nothing is touched yet
            resumed = folder.open(config, run.engine.device, start.identity() if start else None)
            folder.log_to(log, progress.say)
            if resumed is not None:
                run.restore(*resumed)
            for note in folder.notes(run.engine.device):
                progress.say(f"note: {note}")
            if resumed is not None:
                where = f"stage {run.stage}, step {run.step}"
                progress.say(
                    f"already finished: {out}" if run.stage == "finished" else f"going on with {out}: {where}"
                )
            if run.stage != "finished":
                for warning in run.warnings:
                    progress.say(f"warning: {warning}")
            if resumed is None and start is not None:
                run.begin_with(start)
            return execute(run)
    finally:
        progress.end()
        if run is not None:
            run.close()
        folder.close()
