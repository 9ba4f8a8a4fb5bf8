"""The quickstart, measured: held-out gain, selection against chance, guards, rank fidelity, time and memory.

    python bench/quickstart.py --seeds 3

Runs ``python -m fp4bf16 train`` twice for every seed, each in a process of its own: as it is, and with the
explored seeds selected at random. Both arms train the same base model, bit for bit (checked), so that they
differ in the selection alone. Writes bench/results/cpu/quickstart.json; exit status 1 where a goal is
missed. The goals are those of the main job, preset faces16; another preset is measured beside them, and
misses nothing:

    python bench/quickstart.py --seeds 1 --json emoji32.json -- --preset emoji32 --from base
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp4bf16._version import __version__  # noqa: E402
from fp4bf16.backends.threads import num_threads  # noqa: E402
from fp4bf16.train import checkpoint  # noqa: E402
from fp4bf16.train.config import from_dict  # noqa: E402
from fp4bf16.train.data import load_pairs  # noqa: E402
from fp4bf16.train.finish import paired_gain  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "cpu" / "quickstart.json"
GOALS_OF = "faces16"  # the preset that the goals are set for
KEPT = (
    "pictures",
    "heldout_base",
    "heldout",
    "heldout_gain",
    "heldout_gain_low",
    "heldout_gain_high",
    "reward_base",
    "reward",
    "judge_accuracy",
    "spearman_fp4",
    "spearman_bf16",
    "hit_best_fp4",
    "hit_best_bf16",
    "guards",
    "guards_broken",
    "unhealthy",
    "seconds",
    "stage_seconds",
    "peak_rss_mb",
)


def run(seed: int, select: str, out: Path, more: list[str]) -> dict:
    """One run of the command line; its summary."""
    command = [
        sys.executable,
        "-m",
        "fp4bf16",
        "train",
        "--seed",
        str(seed),
        "--select",
        select,
        "--out",
        str(out),
    ]
    subprocess.run([*command, *more], check=True, cwd=ROOT)
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])


def compare(selected: Path, chance: Path) -> tuple[float, float, float]:
    """Points by which the selecting arm's held-out share exceeds the random arm's, with the 95 % interval."""
    (a, meta), (b, _) = (checkpoint.load(out / "checkpoint.safetensors") for out in (selected, chance))
    if not np.array_equal(a["result.base.pictures"], b["result.base.pictures"]):
        sys.exit("quickstart: the two arms have different base models, so they cannot be compared")
    config = from_dict(meta["config"])
    pairs = load_pairs(config.size).select(word=config.word or None)
    drawn = [c for c, r in zip(pairs.captions, pairs.roles, strict=True) if r in ("policy", "evaluation")]
    captions = drawn[: config.eval.captions or None] * config.eval.seeds
    return paired_gain(b["result.aligned.heldout"], a["result.aligned.heldout"], captions)


def preset_of(out: Path) -> str:
    """The preset that the run in `out` was of."""
    _, meta = checkpoint.load(out / "checkpoint.safetensors")
    return from_dict(meta["config"]).preset


def goals(seeds: list[dict]) -> list[dict]:
    """Every goal of the main job with the worst value that was measured for it."""

    def of(key: str) -> list[float]:
        return [s["selected"][key] for s in seeds]

    over_random = [s["over_random"][0] for s in seeds]
    rows = [
        ("held-out gain in points, every seed", min(of("heldout_gain")), ">=", 15.0),
        ("selected over random in points, mean of the seeds", float(np.mean(over_random)), ">=", 5.0),
        ("broken guards, every seed", max(len(b) for b in of("guards_broken")), "<=", 0),
        ("Spearman of FP4 with few steps, every seed", min(of("spearman_fp4")), ">=", 0.85),
        ("seconds, every seed", max(of("seconds")), "<=", 300.0),
        ("seconds, fastest seed", min(of("seconds")), "<=", 200.0),
        ("peak memory in MB, every seed", max(of("peak_rss_mb")), "<=", 1024.0),
    ]
    return [
        {
            "goal": name,
            "measured": value,
            "must_be": f"{sign} {limit}",
            "met": bool(value >= limit if sign == ">=" else value <= limit),
        }
        for name, value, sign, limit in rows
    ]


def verdict(preset: str, found: list[dict]) -> int:
    """Print what was found; the exit status."""
    binding = preset == GOALS_OF
    if not binding:
        print(f"preset {preset}, beside the goals of {GOALS_OF}, which are not set for it:")
    for row in found:
        said = ("met   ", "MISSED") if binding else ("within", "beyond")
        print(f"{said[not row['met']]}  {row['goal']}: {row['measured']:.4g} ({row['must_be']})")
    return 1 if binding and not all(row["met"] for row in found) else 0


def commit() -> str:
    """The commit that was measured, with a mark if files differ from it."""
    try:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--out", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file for the results")
    parser.add_argument("more", nargs="*", help="further arguments of train, after --")
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="fp4bf16-quickstart-"))
    seeds = []
    for seed in range(arguments.seeds):
        arms = {select: folder / f"seed{seed}-{select}" for select in ("best_worst", "random")}
        summaries = {select: run(seed, select, out, arguments.more) for select, out in arms.items()}
        seeds.append(
            {
                "seed": seed,
                "selected": {k: summaries["best_worst"][k] for k in KEPT},
                "random": {k: summaries["random"][k] for k in KEPT},
                "over_random": compare(*arms.values()),
            }
        )
    found, preset = goals(seeds), preset_of(folder / "seed0-best_worst")
    more = ["--", *arguments.more] if arguments.more else []
    result = {
        "commit": commit(),
        "version": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": num_threads(),
        "load": os.getloadavg()[0],
        "command": " ".join(["python bench/quickstart.py --seeds", str(arguments.seeds), *more]),
        "preset": preset,
        "goals_are_set_for": GOALS_OF,
        "goals": found,
        "seeds": seeds,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.json}")
    return verdict(preset, found)


if __name__ == "__main__":
    sys.exit(main())
