"""Arms of bench/ablation_loop.py at equal wall-clock: how many steps and iterations an arm's seconds are.

A calibration is a short run of an arm: base steps until its graphs are warm, then for seconds, in whole
periods of its loop; three iterations of the alignment; no evaluation. From the stamps of its metrics follow
the times of each kind of step, and from these how much of them fills the seconds of a full run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BASE_PART = 0.7  # of an arm's seconds; the alignment takes the rest
ITERATIONS = 3  # of a calibration: the first warms up, the second is plain, the last measures the fidelity
_LEAST_WARM = 40  # steps that are not counted, at least: compilation, graphs, the first sampled step


def period(loop: Any) -> int:
    """Steps after which kinds of steps repeat, but for those that measure curvature."""
    if loop.forward == "bf16":
        return 1
    return loop.decide if loop.forward == "router" else loop.every


def warm(loop: Any) -> int:
    """Steps of a calibration that are not counted: whole periods."""
    return -(-_LEAST_WARM // period(loop)) * period(loop)


class Box:
    """When the base training of a calibration has lasted long enough: at the end of a period that another
    one would take beyond `seconds` after the warm steps, but not before the first one.

    >>> from types import SimpleNamespace
    >>> box = Box(SimpleNamespace(forward="fp4", every=20), seconds=1.0)
    >>> [step for step in range(1, 101) if box.full(step, now=0.02 * step)]
    [80, 100]
    """

    def __init__(self, loop: Any, seconds: float):
        self.period, self.warm, self.seconds = period(loop), warm(loop), seconds
        self._began = math.nan

    def full(self, step: int, now: float) -> bool:
        """Whether `step` (from 1), done at `now` seconds, was the last that is needed."""
        if step == self.warm:
            self._began = now
        count, rest = divmod(step - self.warm, self.period)
        if count < 1 or rest:
            return False
        return (now - self._began) * (count + 1) / count > self.seconds


def counts(lines: Sequence[Mapping[str, Any]], seconds: float, config: Any) -> dict[str, str]:
    """The settings that fill `seconds`, from the metrics of a calibration of an arm with `config`.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(
    ...     loop=SimpleNamespace(forward="bf16", every=20, curvature_every=500, sensitivity="outputs"),
    ...     align=SimpleNamespace(fidelity_every=5))
    >>> lines = [{"stage": "base", "seconds": 2 + 0.01 * i} for i in range(1, 301)]
    >>> lines += [{"stage": "align", "seconds": 5 + 1.5 * i} for i in (1, 2, 3)]
    >>> counts(lines, 40.0, config)
    {'base.steps': '2600', 'align.iterations': '8'}
    """
    base = [line["seconds"] for line in lines if line["stage"] == "base"]
    times = _Steps(np.diff(base, prepend=0.0), config.loop)
    align = [line for line in lines if line["stage"] == "align"]
    took = np.diff([line["seconds"] for line in align], prepend=_before(lines, "align"))
    updates = np.array([line.get("updates", 0) + line.get("skipped", 0) for line in align])
    done = (len(base) + np.cumsum([0, *updates])) // config.loop.every
    # Without its sampled steps, of which an iteration has none, or one, or two
    first, plain, measured = np.maximum(took - times.sampled * np.diff(done), 1e-3)
    measured, more = max(measured, plain), float(updates.mean()) * times.extra
    best, total = 1, first + more
    while True:  # as long as one more iteration, the last, which measures the fidelity, fits
        if total + measured + more > (1 - BASE_PART) * seconds + 1e-6:
            break
        total += (measured if best % config.align.fidelity_every == 0 else plain) + more
        best += 1
    steps = times.fill(BASE_PART * seconds)
    return {"base.steps": str(max(10, math.floor(steps + 1e-6))), "align.iterations": str(best)}


class _Steps:
    """The times of the base training's steps, seconds. took: of each step of a calibration.

    sampled: what a sampled step takes more than others; extra: the mean over steps of that and of what the
    curvature takes.
    """

    def __init__(self, took: np.ndarray, loop: Any):
        number, skip = np.arange(1, len(took) + 1), warm(loop)
        whole = (len(took) - skip) // period(loop) * period(loop)
        looks = (number % loop.every == 0) & (loop.forward != "bf16")
        curves = looks & (loop.forward == "router") & (loop.sensitivity in ("hutchinson", "hutch++"))
        curves &= (number == loop.every) | (number % loop.curvature_every == 0)
        # Curvature is rare: its time is counted by itself
        usual = took[looks & ~curves] if (looks & ~curves).any() else took[looks]
        curvature = max(0.0, float(took[curves][-1] - np.median(usual))) if curves.any() else 0.0
        took = np.where(curves, np.maximum(took - curvature, 0), took)
        self.step = max(float(took[skip : skip + whole].mean()), 1e-6)
        self.once = float(took[:skip].sum()) - skip * self.step + curvature
        self.sampled = max(0.0, float(np.median(usual) - np.median(took[~looks]))) if usual.size else 0.0
        self._rare = curvature / loop.curvature_every
        self.extra = self.sampled / loop.every + self._rare

    def fill(self, seconds: float) -> float:
        """How many steps take `seconds`."""
        return (seconds - self.once) / (self.step + self._rare)


def _before(lines: Sequence[Mapping[str, Any]], stage: str) -> float:
    """The stamp of the last line before a stage."""
    at = next(i for i, line in enumerate(lines) if line["stage"] == stage)
    return lines[at - 1]["seconds"]
