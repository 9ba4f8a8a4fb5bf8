"""What the GPU kernels must reach on an H200, read off the rows of one run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .arms import COPY, QUANTISERS, WITH_T, YARDSTICK

CUBE4, CUBE8 = (4096, 4096, 4096), (8192, 8192, 8192)
WIDE, TALL = (16384, 4608, 1152), (32768, 3072, 768)
SHAPES = (CUBE4, CUBE8, WIDE, TALL)
SQUARE, SQUARE4 = (8192, 8192), (4096, 4096)  # what is quantised

Rows = dict[tuple[str, tuple[int, ...], str], dict[str, Any]]


@dataclass(frozen=True)
class Goal:
    """One promise: `read` gives the measured number, NaN where it was not measured."""

    key: str
    goal: float
    read: Callable[[Rows], float]
    most: bool = False  # the number must not be above, instead of not under

    def result(self, rows: Rows) -> dict[str, Any]:
        value = self.read(rows)
        held = value <= self.goal if self.most else value >= self.goal  # NaN is not held
        measured = None if math.isnan(value) else round(value, 4)
        return {"goal": f"{'<=' if self.most else '>='} {self.goal:g}", "measured": measured, "held": held}


def microseconds(rows: Rows, op: str, shape: tuple[int, ...], track: str) -> float:
    value = rows.get((op, shape, track), {}).get("us")
    return math.nan if value is None else value


def times(shape: tuple[int, ...], track: str, peers: tuple[str, ...]) -> Callable[[Rows], float]:
    """How many times as fast as the fastest of `peers` the track is."""

    def read(rows: Rows) -> float:
        known = [us for peer in peers if not math.isnan(us := microseconds(rows, "matmul", shape, peer))]
        return min(known, default=math.nan) / microseconds(rows, "matmul", shape, track)

    return read


def ratio(op: str, shape: tuple[int, ...], track: str, to: str) -> Callable[[Rows], float]:
    return lambda rows: microseconds(rows, op, shape, track) / microseconds(rows, op, shape, to)


def copy_share(name: str) -> Callable[[Rows], float]:
    def read(rows: Rows) -> float:
        rates = [rows.get(("quantize", SQUARE, track), {}).get("gb_s") for track in (name, COPY)]
        return math.nan if None in rates else rates[0] / rates[1]

    return read


def overhead(call: str, launch: str) -> Callable[[Rows], float]:
    return lambda rows: (microseconds(rows, "host", (128, 128, 128), call)
                         - microseconds(rows, "host", (128, 128, 128), launch))  # fmt: skip


def name(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _all() -> list[Goal]:
    goals = [Goal(f"bf16 {name(s)}: x cuBLAS BF16", 0.97, times(s, "bf16", (YARDSTICK,)))
             for s in (CUBE4, CUBE8, WIDE)]  # fmt: skip
    least = {"fp4": {CUBE4: 1.85, CUBE8: 1.9, WIDE: 1.65, TALL: 1.65},
             "fp4 fast": {CUBE4: 2.0, CUBE8: 2.0, WIDE: 1.75, TALL: 1.75}}  # fmt: skip
    for track, shapes in least.items():
        mode = " fast" if track == "fp4 fast" else ""
        peers = (f"cublas fp8 row{mode}", f"cublas fp8 tensor{mode}")
        for s, goal in shapes.items():
            goals.append(Goal(f"{track} {name(s)}: x cuBLAS BF16", goal, times(s, track, (YARDSTICK,))))
            goals.append(Goal(f"{track} {name(s)}: x cuBLAS FP8{mode}", 1.0, times(s, track, peers)))
    goals.append(Goal(f"fp4 of bf16 a {name(CUBE8)}: x cuBLAS BF16", 1.6,
                      times(CUBE8, "fp4 of bf16 a", (YARDSTICK,))))  # fmt: skip
    goals.append(Goal(f"dual r64 {name(CUBE4)}: x fp4", 1.06,
                      ratio("matmul", CUBE4, "dual r64", "fp4"), True))  # fmt: skip
    goals.append(Goal(f"separate bf16 gemm and add {name(CUBE4)}: x fp4", 1.3,
                      ratio("matmul", CUBE4, "fp4, matmul, add", "fp4")))  # fmt: skip
    plain = "nvfp4_exact fast expanded"
    goals.append(Goal(f"quantize with T {name(SQUARE4)}: x plain", 1.25,
                      ratio("quantize", SQUARE4, WITH_T, plain), True))  # fmt: skip
    for q in QUANTISERS:
        share = 0.4 if "full" in q else 0.7
        goals.append(Goal(f"quantize {q} {name(SQUARE)}: x copy rate", share, copy_share(q)))
    for track, launch in (("fp4 prepared", "raw launch"), ("bf16", "raw launch bf16")):
        goals.append(Goal(f"python overhead {track}, us", 10, overhead(f"matmul {track}", launch), True))
    return goals


def results(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Key -> goal, measured and held."""
    right = [r for r in rows if not r.get("wrong")]  # a wrong result has no speed
    table: Rows = {(r["op"], tuple(r["shape"]), r["track"]): r for r in right}
    return {goal.key: goal.result(table) for goal in _all()}
