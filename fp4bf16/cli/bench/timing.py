"""How GPU work is timed: interleaved graph replays over operands that the L2 cache does not hold.

An arm is captured in a CUDA graph as `calls` calls in a row, each on the next of several operand sets. The
sets of an arm are so many that more than twice the L2 cache is touched before one comes again, so every call
reads its operands from memory. Events stand around a replay of REGION seconds, which makes their own cost and
the launch's under 1 %, and Python's nothing. Rounds take every arm once, from another one on each time, with
no gap between them: all arms see one clock and one temperature, and ratios are of one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

REGION = 1e-3  # seconds of one timed replay, at least
WARM_UP = 0.5  # seconds of work before the first reading: clocks settle
L2_FACTOR = 2.0


def sets_needed(nbytes: int, l2: int) -> int:
    """How many operand sets of `nbytes` each an arm needs so that a set comes back cold.

    >>> sets_needed(96 << 20, 60 << 20), sets_needed(1 << 20, 60 << 20), sets_needed(512 << 20, 60 << 20)
    (3, 121, 2)
    """
    return 1 + max(1, int(-(-L2_FACTOR * l2 // max(nbytes, 1))))


@dataclass
class Arm:
    """One thing to time: `run(i)` launches a call on operand set i; None where it cannot be had here.

    Attributes:
        name: what is printed as the track. nbytes: operands and result of a call, counted once. flops: of a
            call. check: error of what the last call left, as (against the unquantised product, against what
            the arm was given). note: what a reader should know, why it could not run for one.
    """

    name: str
    run: Callable[[int], Any] | None
    sets: int = 1
    flops: float = 0.0
    nbytes: int = 0
    check: Callable[[], tuple[float, float]] | None = None
    note: str = ""
    graph: Any = None
    calls: int = 1
    seconds: list[float] = field(default_factory=list)
    error: float | None = None
    kernel_error: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("nan")

    def share(self, fraction: float) -> float:
        """The reading that `fraction` of all readings lie under."""
        ordered = sorted(self.seconds)
        return ordered[min(int(len(ordered) * fraction), len(ordered) - 1)] if ordered else float("nan")


def refused(error: Exception) -> str:
    """An exception as one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def prepare(torch: Any, arm: Arm) -> None:
    """Run once, check the result, capture; an arm that cannot keeps the reason as its note and no graph."""
    if arm.run is None:
        return
    note, arm.note = arm.note, ""
    try:
        for i in range(min(arm.sets, 2)):  # the first call compiles or tunes
            arm.run(i)
        torch.cuda.synchronize()
        if arm.check is not None:
            arm.error, arm.kernel_error = arm.check()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(arm.sets):
            arm.run(i)
        end.record()
        end.synchronize()
        one = max(begin.elapsed_time(end) * 1e-3 / arm.sets, 1e-6)
        rounds = max(1, round(REGION / (one * arm.sets)))
        arm.calls = arm.sets * min(rounds, max(1, 400 // arm.sets))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(arm.calls):
                arm.run(i % arm.sets)
        graph.replay()
        torch.cuda.synchronize()
        arm.graph = graph
    except Exception as error:  # a peer that does not take this, a track that is not there
        arm.note, arm.graph = refused(error), None
        torch.cuda.synchronize()
    arm.note = "; ".join(filter(None, (note, arm.note)))


def measure(torch: Any, arms: list[Arm], rounds: int, warm_up: float = WARM_UP) -> None:
    """Fill `seconds` of every arm: `rounds` readings, each the mean of `calls` calls."""
    ready = [arm for arm in arms if arm.graph is not None]
    if not ready:
        return
    _warm(torch, ready, warm_up)
    readings: list[tuple[Arm, Any, Any]] = []
    for i in range(rounds):
        turn = i % len(ready)
        for arm in ready[turn:] + ready[:turn]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            arm.graph.replay()
            end.record()
            readings.append((arm, begin, end))
    torch.cuda.synchronize()
    for arm, begin, end in readings:
        arm.seconds.append(begin.elapsed_time(end) * 1e-3 / arm.calls)


def _warm(torch: Any, ready: list[Arm], seconds: float) -> None:
    spent = 0.0
    while spent < seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for arm in ready:
            arm.graph.replay()
        end.record()
        end.synchronize()
        spent += max(begin.elapsed_time(end) * 1e-3, 1e-4)


def host_seconds(torch: Any, calls: dict[str, Callable[[], Any]], batches: int = 30, run: int = 200):
    """Name -> median seconds that the host spends in one call, `run` at a time so that the launch queue never
    fills; batches of all calls are interleaved.
    """
    import time

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(batches):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(run):
                call()
            seconds[name].append((time.perf_counter() - begin) / run)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in seconds.items()}
