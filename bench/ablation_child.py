"""An arm of bench/ablation_loop.py, in a process of its own: the trainer, with what the arms share."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import arms
from ablation_clock import Box


class Enough(Exception):
    """A calibration has what it needs."""


def run_arm(judges: Path, arguments: Sequence[str], box: float = 0.0) -> int:
    """Run ``python -m fp4bf16`` with `arguments`; returns its exit status.

    judges: file of the judges, which the first arm trains for all of them, whatever their seeds. box: the
    run is a calibration, with so many seconds of base training once it is warm and no final evaluation.
    """
    from fp4bf16.__main__ import main
    from fp4bf16.train import stages

    before = dict(stages.STAGES)
    stages.STAGES["judges"] = lambda run: _judges(run, judges, before["judges"])
    if box:
        stages.STAGES |= {"base": lambda run: _boxed(run, box, before["base"]), "evaluate": _enough}
    try:
        return main(list(arguments))
    except Enough:
        return 0
    finally:
        stages.STAGES.update(before)


def _judges(run: Any, path: Path, train: Any) -> None:
    """Those of the file, if they are of the same settings and data; else they are trained and kept there."""
    settings = {"judge": dataclasses.asdict(run.config.judge), "reward": run.panel.name}
    made_of = json.loads(json.dumps(settings | {"data": run.task.identity}))
    if path.exists():
        arrays, meta = arms.checkpoint.load(path)
        if meta.get("made_of") == made_of:
            run.panel.load_state_dict(arrays)
            run.results["judge_accuracy"] = meta["accuracy"]
            run.enter("evaluate_base")
            return
    train(run)
    accuracy = run.results.get("judge_accuracy", {})
    arms.checkpoint.save(path, run.panel.state_dict(), {"accuracy": accuracy, "made_of": made_of})


def _boxed(run: Any, seconds: float, train: Any) -> None:
    """Base training until the box is full; nothing of it is taken up again, so that nothing is saved."""
    box, done = Box(run.config.loop, seconds), run.done

    def counted(step: int, save: bool = False) -> None:
        done(step)
        if run.stage == "base" and box.full(step, time.monotonic()):
            raise Enough

    run.done = counted
    try:
        train(run)
    except Enough:
        run.engine.begin_alignment()
        run.enter("judges")
    finally:
        del run.done


def _enough(run: Any) -> None:
    raise Enough
