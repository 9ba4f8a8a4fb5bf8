"""The end of a run: its headline numbers, as the last line of the metrics, and the report."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..files import write_atomic
from .evaluate import by_probability, cases, unit
from .intervals import difference_interval, paired_gain, share_interval
from .pictures import grid
from .report import build_report
from .state import Run, peak_rss_mb

GALLERY = 24  # pairs of pictures shown
COLLAPSED = "pictures that are finite and not constant"  # the guard before all others


def _stage_seconds(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Wall time of each stage, from the stamps of the metrics."""
    ends: dict[str, float] = {}
    for line in lines:
        if line["stage"] == "router":  # between the lines of others
            continue
        ends["align" if line["stage"] == "probe" else line["stage"]] = line["seconds"]
    previous, took = 0.0, {}
    for stage, end in ends.items():
        took[stage] = round(end - previous, 2)
        previous = end
    return took


def summarize(run: Run) -> dict[str, Any]:
    """The headline numbers."""
    base, aligned = run.results["base"], run.results["aligned"]
    rows = [
        {
            "name": name,
            "base": base["guards"][name]["value"],
            "aligned": g["value"],
            "low": g["low"],
            "high": g["high"],
            "holds": g["ok"],
        }
        for name, g in aligned["guards"].items()
    ]
    broken = [row["name"] for row in rows if not row["holds"]] if rows else [COLLAPSED]
    lines = run.folder.metrics()
    return {
        "objective": run.config.align.objective,
        "rewards": run.panel.name,
        "pictures": len(run.arrays["base.heldout"]),
        **_gain(run),
        "reward_base": base["reward"],
        "reward": aligned["reward"],
        "judge_accuracy": run.results.get("judge_accuracy", {}),
        **_fidelity(run),
        **_success(run.counters),
        "taken_back": int(run.counters.get("taken_back", 0)),
        "guards": rows,
        "guards_broken": broken,
        "unhealthy": sum(int(line.get("unhealthy") or 0) for line in lines),
        "stage_seconds": _stage_seconds(lines),
        "peak_rss_mb": max([peak_rss_mb(), *(line.get("peak_rss_mb") or 0 for line in lines)]),
    }


def _gain(run: Run) -> dict[str, Any]:
    """What the held-out judge says: points of its share of wins, or the mean change in its own unit."""
    base, aligned = run.results["base"], run.results["aligned"]
    scores, captions = (run.arrays["base.heldout"], run.arrays["aligned.heldout"]), cases(run)[0]
    found = {"heldout_base": base["heldout"], "heldout": aligned["heldout"]}
    if by_probability(run.panel):
        gain, kind = paired_gain(*scores, captions), "points"
        for name, results in (("_base", base), ("", aligned)):
            found[f"heldout_probability{name}"] = results["heldout_probability"]
    else:
        change = difference_interval(*scores, captions)
        gain, kind = (change.value, change.low, change.high), unit(run.panel)
    names = ("heldout_gain", "heldout_gain_low", "heldout_gain_high")
    return found | dict(zip(names, gain, strict=True)) | {"heldout_unit": kind}


def _fidelity(run: Run) -> dict[str, float | None]:
    """Means over the iterations in which it was measured; None where it was not."""
    measured = run.results.get("fidelity", [])

    def mean(key: str) -> float | None:
        values = [f[key] for f in measured if f.get(key) is not None and math.isfinite(f[key])]
        return sum(values) / len(values) if values else None

    return {
        f"{short}_{track}": mean(f"fidelity/{track}/{short}")
        for short in ("spearman", "hit_best")
        for track in ("fp4", "bf16")
    }


def _success(counters: dict[str, float]) -> dict[str, Any]:
    """Share of all rollouts that gave a good picture in the end, with Wilson's interval."""
    total = int(counters.get("rollouts", 0))
    if not total:
        return {}
    share = share_interval(total - int(counters["lost"]), total)
    return {
        "rollouts": total,
        "retried": int(counters["retried"]),
        "success_rate": share.value,
        "success_low": share.low,
        "success_high": share.high,
    }


def summary(run: Run) -> dict[str, Any]:
    """The last line of the metrics of a finished run. Its report is made again where it is gone."""
    last = run.folder.metrics()[-1]
    if last["stage"] != "summary":
        raise CheckpointError(
            f"{run.folder.metrics_file}: its last line is of stage {last['stage']!r}, but that of a finished "
            f"run is its summary; restore the file or name another folder"
        )
    if not run.folder.report_file.exists():
        write_report(run)
    return last


def finish(run: Run) -> None:
    """Write the summary and the report."""
    run.stage = "summary"
    run.log(**summarize(run))
    run.stage = "evaluate"
    write_report(run)


def write_report(run: Run) -> None:
    """``report.html`` and a grid of pairs, from what the run holds."""
    captions, _ = cases(run)
    base, aligned = run.arrays["base.pictures"], run.arrays["aligned.pictures"]
    shown = np.linspace(0, len(set(captions)) - 1, min(GALLERY, len(set(captions)))).astype(int)
    pairs = [
        {
            "caption": captions[i],
            "base": base[i],
            "aligned": aligned[i],
            "base_score": float(run.arrays["base.heldout"][i]),
            "aligned_score": float(run.arrays["aligned.heldout"][i]),
        }
        for i in shown
    ]
    white = np.full((len(shown), base.shape[1], 1, 3), 255, np.uint8)
    both = np.concatenate([base[shown], white, aligned[shown]], 2)  # a pair stands closer than its neighbours
    run.folder.picture("pairs", grid(both, columns=6, gap=4), scale=4)
    page = build_report(json.dumps(run.config.to_dict(), indent=2), run.folder.metrics(), pairs, _facts(run))
    write_atomic(run.folder.report_file, page.encode())


_RULE = {
    "dpo": "paired for Diffusion-DPO",
    "nft": "weighed against each other by DiffusionNFT",
    "ppo": "whose steps PPO makes more or less likely (DDPO)",
}


def _facts(run: Run) -> list[str]:
    """What the run did, in two paragraphs."""
    config, a = run.config, run.config.align
    learns = "learns" if run.start is None else f"begins with trained weights (--from {run.start.source}):"
    where = "On a CPU the FP4 track is emulated: the numerics of FP4, not its speed."
    if run.engine.device != "cpu":
        gpu = run.engine.device.removeprefix("cuda: ")
        where = f"The network ran on a GPU ({gpu}), the judges on the CPU."
    toward = f"{config.winner.capitalize()} by preferences that a judge gives to its own pictures"
    if run.panel.name != "style":
        toward = f"more of the reward {run.panel.name!r}"
    first = (
        f"Preset {config.preset}, seed {config.seed}: a diffusion model of {config.size} x {config.size} "
        f"pixels {learns} {run.task.facts}. Then it moves towards {toward}."
    )
    if a.pairs == "data":
        return [first, f"In each of {a.iterations} iterations it learns from pairs that others judged, by "
                f"Diffusion-DPO. {where}"]  # fmt: skip
    again = (
        f"{a.keep} of {a.seeds} are made again in {a.steps} steps on the BF16 track, scored anew and "
        f"{_RULE[a.objective]}"
        if a.train_on == "bf16"
        else f"{a.keep} of {a.seeds} are themselves what it learns from, {_RULE[a.objective]}"
    )
    return [
        first,
        f"In each of {a.iterations} iterations, {a.prompts} prompts x {a.seeds} seeds are explored in "
        f"{a.explore_steps} steps on the {a.explore_track.upper()} track; {again}. {where}",
    ]
