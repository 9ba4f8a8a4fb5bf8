"""10,000 policy steps of faces16: does anything break when alignment goes on far beyond its use?

    python bench/policy_steps.py

Two arms from one base model, each of at least 10,000 updates: guards that take an iteration back, and guards
that only warn. Goals (exit status 1 where one is missed) are the first arm's: nothing that is not finite, all
guards hold on the evaluation pictures, and the reward of the last probe within 5 % of the best. The rewards
are the probabilities that the reward judge gives to the probe pictures; its held-out twin stands beside it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import arms

RESULTS = Path(__file__).parent / "results" / "cpu" / "policy_steps.json"
GUARDS = {"guarded": "hold", "unguarded": "warn"}
WITHIN = 0.05
SMALL = ["align.batch=8", "align.fidelity_every=50"]  # comparisons in an update: 32 updates an iteration


def summed_up(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One arm's numbers, from its metrics."""
    align = [line for line in lines if line["stage"] == "align"]
    probes = [line for line in lines if line["stage"] == "probe"]
    rewards, last = [line["reward"] for line in probes if line["reward"] is not None], lines[-1]
    return {
        "updates": int(sum(line["updates"] for line in align)),
        "kept_updates": int(sum(line["updates"] for line in align if not line["taken_back"])),
        "probes_unhealthy": sum(line["reward"] is None for line in probes),
        "skipped": int(sum(line["skipped"] for line in align)),
        "losses_not_finite": sum(line["loss"] is None for line in align),
        "rollouts": last.get("rollouts"),
        "success_rate": last.get("success_rate"),
        "success_low": last.get("success_low"),
        "taken_back": last["taken_back"],
        "reward_first": rewards[0],
        "reward_best": max(rewards),
        "reward_last": rewards[-1],
        "within_of_best": 1 - rewards[-1] / max(rewards),
        "heldout_first": probes[0]["heldout"],
        "heldout_last": probes[-1]["heldout"],
        "heldout_gain": [last[f"heldout_gain{part}"] for part in ("", "_low", "_high")],
        "guards": last["guards"],
        "guards_broken": last["guards_broken"],
        "seconds": last["seconds"],
        "curve": [
            {k: line.get(k) for k in ("step", "reward", "heldout", "pixel_distance", "pattern", "slope")}
            for line in probes[:: max(1, len(probes) // 64)]
        ],
    }


def goals(found: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """The guarded arm's."""
    rows = [
        ("policy steps", found["updates"] + found["skipped"], ">=", steps),
        ("updates left out, losses and probes that are not finite",
         found["skipped"] + found["losses_not_finite"] + found["probes_unhealthy"], "<=", 0),
        ("broken guards at the end", len(found["guards_broken"]), "<=", 0),
        ("the last reward below the best, share", found["within_of_best"], "<=", WITHIN),
    ]  # fmt: skip
    return [
        {"goal": name, "measured": value, "must_be": f"{sign} {limit:g}",
         "met": bool(value >= limit if sign == ">=" else value <= limit)}
        for name, value, sign, limit in rows
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--base", type=Path, help="a finished run whose base model is aligned")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file for the results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arms", nargs="*", default=list(GUARDS))
    parser.add_argument("more", nargs="*", help="further arguments of train, after --")
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="fp4bf16-policy-steps-"))
    common = ["--preset", "faces16", "--device", arguments.device, *arguments.more]
    base = arguments.base or folder / "base"
    if arguments.base is None:
        arms.train(base, [*common, "--set", "align.iterations=0"])
    settings = [*SMALL, f"align.iterations={-(-arguments.steps // 31)}"]  # a pair may fall out: ties
    sets = [part for setting in settings for part in ("--set", setting)]
    found: dict[str, Any] = {}
    for name in arguments.arms:
        guard = ["--set", f"align.guard={GUARDS[name]}"]
        lines = arms.train(folder / name, [*common, "--from", str(base), *sets, *guard])
        found[name] = summed_up(lines)
        met = goals(found["guarded"], arguments.steps) if "guarded" in found else []
        arms.write(arguments.json, arms.machine(arguments.device) | {
            "command": "python bench/policy_steps.py", "what": __doc__, "settings": settings, "goals": met,
            "arms": found,
        })  # fmt: skip
    for goal in met:
        print(f"{'met   ' if goal['met'] else 'MISSED'}  {goal['goal']}: {goal['measured']:.4g} "
              f"({goal['must_be']})")  # fmt: skip
    return 0 if all(goal["met"] for goal in met) else 1


if __name__ == "__main__":
    sys.exit(main())
