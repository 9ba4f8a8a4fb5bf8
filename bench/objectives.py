"""Does each objective raise its reward, and the held-out judge with it?

    python bench/objectives.py

Runs the preset faces16 once for its base model, then aligns that base with each objective, and with the two
controls of DPO: seeds selected at random, and training on the explored FP4 pictures themselves. A goal is
missed (exit status 1) where an objective's reward does not rise from the first to the last quarter of the
iterations by more than 3 standard errors, where the held-out judge's interval touches 0, where a guard is
broken, or where the alignment takes longer than 90 s. The controls have no goals.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import arms

RESULTS = Path(__file__).parent / "results" / "cpu" / "objectives.json"
SECONDS, ERRORS = 90.0, 3.0
OBJECTIVES = ("dpo", "nft", "ppo")
ARMS = {
    **{name: ["--objective", name] for name in OBJECTIVES},
    "dpo, LoRA": ["--set", "align.parameters=lora", "--set", "align.lr=1e-3"],
    "dpo, random seeds": ["--select", "random"],
    "dpo, trained on FP4 pictures": ["--set", "align.train_on=fp4"],
}
KEPT = (
    "objective", "pictures", "heldout_base", "heldout", "heldout_gain", "heldout_gain_low",
    "heldout_gain_high", "heldout_unit", "reward_base", "reward", "spearman_fp4", "spearman_bf16",
    "success_rate", "success_low", "taken_back", "guards", "guards_broken", "seconds", "stage_seconds",
)  # fmt: skip


def row(out: Path, arguments: list[str]) -> dict[str, Any]:
    """One arm, run to its end and summed up."""
    lines = arms.train(out, arguments)
    return {"arguments": arguments, "explored": arms.rise(lines)} | {
        k: lines[-1][k] for k in KEPT if k in lines[-1]
    }


def goals(name: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals of one objective."""
    rows = [
        (f"{name}: rise of the explored reward, standard errors", found["explored"]["errors"], ">", ERRORS),
        (f"{name}: held-out gain, lower end of its interval", found["heldout_gain_low"], ">", 0.0),
        (f"{name}: broken guards", len(found["guards_broken"]), "<=", 0),
        (f"{name}: seconds of the alignment", found["stage_seconds"]["align"], "<=", SECONDS),
    ]
    return [
        {"goal": goal, "measured": value, "must_be": f"{sign} {limit:g}",
         "met": bool(value > limit if sign == ">" else value <= limit)}
        for goal, value, sign, limit in rows
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file for the results")
    parser.add_argument("--preset", default="faces16")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help=", ".join(ARMS))
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="fp4bf16-objectives-"))
    common = ["--preset", arguments.preset, "--seed", arguments.seed]
    base = folder / "base"
    arms.train(base, [*common, "--set", "align.iterations=0"])
    found, met = {}, []
    for name in arguments.arms:
        out = folder / name.replace(", ", "-").replace(" ", "-")
        found[name] = row(out, [*common, "--from", str(base), *ARMS[name]])
        if name in OBJECTIVES:
            met += goals(name, found[name])
        arms.write(arguments.json, arms.machine() | {
            "command": "python bench/objectives.py", "goals": met, "arms": found,
        })  # fmt: skip
    for goal in met:
        said = "met   " if goal["met"] else "MISSED"
        print(f"{said}  {goal['goal']}: {goal['measured']:.4g} ({goal['must_be']})")
    return 0 if all(goal["met"] for goal in met) else 1


if __name__ == "__main__":
    sys.exit(main())
