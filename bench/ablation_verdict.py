"""What the arms of bench/ablation_loop.py say: each in a line, differences seed by seed, goals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

CLOSED, YARDSTICK = "router", "all BF16"
SHARE = 0.8  # of the FLOPs that the closed loop is to run on FP4
#: Student's t, two-sided 5 %, by the number of seeds: what a mean difference of so few is held against.
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
#: Each part of the loop and the arm that has it, against the one that has not.
PARTS = {
    "FP4 everywhere, against BF16": ("all FP4", YARDSTICK),
    "the closed loop, against BF16": (CLOSED, YARDSTICK),
    "the router, against a static skip list": (CLOSED, "static skip list"),
    "outputs, against Fisher": (CLOSED, "router, Fisher"),
    "curvature, against Fisher": ("router, Hutchinson", "router, Fisher"),
    "consistency and constraint, against neither": (CLOSED, "without consistency"),
    "feedback, against a fixed budget": (CLOSED, "without feedback"),
}


def rows_of(found: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """The runs of an arm that got to their end, by seed."""
    return {seed: row for seed, row in found.get(name, {}).items() if "failed" not in row}


def column(found: Mapping[str, Any], name: str, key: str) -> list[float]:
    """A number of an arm, one a seed."""
    return [row[key] for row in rows_of(found, name).values() if row.get(key) is not None]


def paired(found: Mapping[str, Any], one: str, other: str, key: str) -> dict[str, Any] | None:
    """Mean over seeds of what `one` has more than `other`, with its standard error (None for one seed).

    >>> found = {"a": {"0": {"loss": 2.0}, "1": {"loss": 4.0}}, "b": {"0": {"loss": 1.0}, "1": {"loss": 2.0}}}
    >>> paired(found, "a", "b", "loss")
    {'change': 1.5, 'standard_error': 0.5, 'seeds': 2}
    """
    a, b = rows_of(found, one), rows_of(found, other)
    changes = [a[s][key] - b[s][key] for s in a if s in b and None not in (a[s].get(key), b[s].get(key))]
    if not changes:
        return None
    error = float(np.std(changes, ddof=1) / math.sqrt(len(changes))) if len(changes) > 1 else None
    return {"change": float(np.mean(changes)), "standard_error": error, "seeds": len(changes)}


def findings(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each part of the loop: what it changes, seed by seed."""
    keys = ("loss", "kernel_distance", "reward", "fp4_share", "steps")
    said = {what: {key: paired(found, *pair, key) for key in keys} for what, pair in PARTS.items()}
    return {what: {k: v for k, v in row.items() if v} for what, row in said.items() if any(row.values())}


def verdict(change: Mapping[str, Any] | None) -> str:
    """Whether a change is one, at the 5 % level of a paired t test.

    >>> verdict({"change": -0.5, "standard_error": 0.1, "seeds": 3})
    'lower'
    >>> verdict({"change": 0.4, "standard_error": 0.1, "seeds": 3})
    'no difference beyond that of seeds'
    """
    if change is None or change["standard_error"] is None:
        return "one seed tells nothing"
    if not math.isfinite(change["change"]):
        return "a run diverged"
    if abs(change["change"]) <= STUDENT.get(change["seeds"], 2.31) * change["standard_error"]:
        return "no difference beyond that of seeds"
    return "lower" if change["change"] < 0 else "higher"


def goals(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of the closed loop; none with fewer than two seeds of it and of the yardstick."""
    met = []
    for key, what in (("loss", "loss"), ("kernel_distance", "kernel distance")):
        ours, theirs = column(found, CLOSED, key), column(found, YARDSTICK, key)
        theirs = [v for v in theirs if math.isfinite(v)]  # a seed that diverged is no yardstick
        if min(len(ours), len(theirs)) > 1:
            met.append(
                (
                    f"closed loop: {what} within the seed spread of all-BF16 ({min(theirs):.4g} to "
                    f"{max(theirs):.4g}) or under it",
                    float(np.mean(ours)),
                    "<=",
                    max(theirs),
                )
            )
    if met:
        shares = column(found, CLOSED, "fp4_share")
        met.append(("closed loop: share of FLOPs on FP4", float(np.mean(shares)), ">=", SHARE))
        failed = sum("failed" in row for row in found[CLOSED].values())
        met.append(("closed loop: runs that failed", failed, "<=", 0))
    return [
        {"goal": goal, "measured": value, "must_be": f"{sign} {limit:.4g}",
         "met": bool(value <= limit if sign == "<=" else value >= limit)}
        for goal, value, sign, limit in met
    ]  # fmt: skip


#: Columns of the table: title, key, format, width.
COLUMNS = (
    ("steps", "steps", ".0f", 6),
    ("loss", "loss", ".5f", 8),
    ("kernel d.", "kernel_distance", ".4f", 9),
    ("reward", "reward", ".3f", 6),
    ("rank", "spearman_fp4", ".3f", 6),
    ("FP4", "fp4_share", ".2f", 5),
    ("cert. max", "certified_max", ".3g", 9),
    ("redone", "fallbacks", ".0f", 6),
    ("held", "held", ".0f", 5),
)


def table(found: Mapping[str, Any]) -> str:
    """Every arm in a line: means over seeds."""
    heads = " ".join(f"{title:>{width}s}" for title, _, _, width in COLUMNS)
    lines = [f"{'arm':20s} {'seeds':>5s} {'seconds':>7s} {heads}"]
    for name in found:
        rows = list(rows_of(found, name).values())
        if not rows:
            lines.append(f"{name:20s} failed: {next(iter(found[name].values()))['failed']}")
            continue
        cells = []
        for _, key, form, width in COLUMNS:
            values = column(found, name, key)
            cells.append(f"{format(float(np.mean(values)), form) if values else '-':>{width}s}")
        seconds = np.mean([row["seconds"]["base"] + row["seconds"]["align"] for row in rows])
        lines.append(f"{name:20s} {len(rows):5d} {seconds:7.1f} {' '.join(cells)}")
    return "\n".join(lines)


def uneven(found: Mapping[str, Any], asked: float | None) -> list[tuple[str, float, float]]:
    """(arm, seconds asked for, seconds taken) of the arms that took over a tenth more or less than asked."""
    if asked is None:
        return []
    means = {
        name: float(np.mean([row["seconds"]["base"] + row["seconds"]["align"] for row in rows.values()]))
        for name in found if (rows := rows_of(found, name))
    }  # fmt: skip
    return [(name, asked, took) for name, took in means.items() if abs(took - asked) > 0.1 * asked]


def say(result: Mapping[str, Any]) -> None:
    print(table(result["arms"]))
    for name, asked, took in uneven(result["arms"], result["settings"]["seconds"]):
        print(f"note: {name} took {took:.1f} s of training instead of {asked:g}: not at equal wall-clock")
    for what, row in result["findings"].items():
        for key in ("loss", "kernel_distance"):
            if change := row.get(key):
                error = "" if change["standard_error"] is None else f" +- {change['standard_error']:.2g}"
                print(f"{what}: {key.replace('_', ' ')} {change['change']:+.3g}{error}, {verdict(change)}")
    for goal in result["goals"]:
        said = "met   " if goal["met"] else "MISSED"
        print(f"{said}  {goal['goal']}: {goal['measured']:.4g} ({goal['must_be']})")
