"""The end of a run: its headline numbers, as the last line of the metrics, and the report."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .pictures import grid, png
from .report import build_report
from .state import Run, peak_rss_mb

GALLERY = 24  # pairs of pictures shown


def paired_gain(base: np.ndarray, aligned: np.ndarray, captions: list[str]) -> tuple[float, float, float]:
    """Gain of the share of wins (probability > 0.5), in percentage points, with its 95 % interval.

    Pictures are paired by their noise. Pictures of one caption are not independent, so the interval is the
    normal one of the means by caption (cluster-robust).

    >>> paired_gain(np.zeros(4), np.array([0.0, 0.0, 1.0, 1.0]), ["a", "b", "a", "b"])
    (50.0, 50.0, 50.0)
    """
    difference = (aligned > 0.5).astype(float) - (base > 0.5)
    _, index = np.unique(np.array(captions), return_inverse=True)
    means = np.bincount(index, difference) / np.bincount(index)
    gain = 100 * float(difference.mean())
    half = 196 * float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else float("nan")
    return gain, gain - half, gain + half


def _stage_seconds(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Wall time of each stage, from the stamps of the metrics."""
    ends: dict[str, float] = {}
    for line in lines:
        ends["align" if line["stage"] == "probe" else line["stage"]] = line["seconds"]
    previous, took = 0.0, {}
    for stage, end in ends.items():
        took[stage] = round(end - previous, 2)
        previous = end
    return took


def summarize(run: Run) -> dict[str, Any]:
    """The headline numbers."""
    from .evaluate import cases

    base, aligned, captions = run.results["base"], run.results["aligned"], cases(run)[0]
    gain, low, high = paired_gain(run.arrays["base.heldout"], run.arrays["aligned.heldout"], captions)
    fidelity = run.results.get("fidelity", [])

    def mean(key: str) -> float | None:
        values = [f[key] for f in fidelity if f.get(key) is not None and math.isfinite(f[key])]
        return sum(values) / len(values) if values else None

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
    lines = run.folder.metrics()
    return {
        "pictures": len(captions),
        "heldout_base": base["heldout"],
        "heldout": aligned["heldout"],
        "heldout_gain": gain,
        "heldout_gain_low": low,
        "heldout_gain_high": high,
        "heldout_probability_base": base["heldout_probability"],
        "heldout_probability": aligned["heldout_probability"],
        "reward_base": base["reward"],
        "reward": aligned["reward"],
        "judge_accuracy": run.results.get("judge_accuracy", {}),
        "spearman_fp4": mean("fidelity/fp4/spearman"),
        "spearman_bf16": mean("fidelity/bf16/spearman"),
        "hit_best_fp4": mean("fidelity/fp4/hit_best"),
        "hit_best_bf16": mean("fidelity/bf16/hit_best"),
        "guards": rows,
        "guards_broken": [row["name"] for row in rows if not row["holds"]],
        "unhealthy": sum(int(line.get("unhealthy") or 0) for line in lines),
        "stage_seconds": _stage_seconds(lines),
        "peak_rss_mb": max([peak_rss_mb(), *(line.get("peak_rss_mb") or 0 for line in lines)]),
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
    from .evaluate import cases

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
    (run.folder.samples / "pairs.png").write_bytes(png(grid(both, columns=6, gap=4), scale=4))
    page = build_report(
        json.dumps(run.config.to_dict(), indent=2), run.folder.metrics(), pairs, _facts(run)
    )
    run.folder.report_file.write_text(page, encoding="utf-8")


def _facts(run: Run) -> list[str]:
    """What the run did, in two paragraphs."""
    config, a = run.config, run.config.align
    learns = "learns" if run.start is None else f"begins with trained weights (--from {run.start.source}):"
    where = "On a CPU the FP4 track is emulated: the numerics of FP4, not its speed."
    if run.engine.device != "cpu":
        gpu = run.engine.device.removeprefix("cuda: ")
        where = f"The network ran on a GPU ({gpu}), the judges on the CPU."
    return [
        f"Preset {config.preset}, seed {config.seed}: a diffusion model of {config.size} x {config.size} "
        f"pixels {learns} {len(run.train_pairs)} captions in the drawing styles of two emoji sets, Noto and "
        f"Twemoji, without being told which is which. Then it moves towards {config.winner.capitalize()} by "
        f"preferences that a judge gives to its own pictures.",
        f"In each of {a.iterations} iterations, {a.prompts} prompts x {a.seeds} seeds are explored in "
        f"{a.explore_steps} steps on the {a.explore_track.upper()} track; {a.keep} of {a.seeds} are made "
        f"again in {a.steps} steps on the BF16 track, scored anew and paired for Diffusion-DPO. {where}",
    ]
