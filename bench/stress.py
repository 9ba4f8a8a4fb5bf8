"""Alignment under stress: noisy labels, few pairs, late rewards, rewards that oppose one another.

    python bench/stress.py

Every stress is run with the exploring network's FP4 routes on, and off (all BF16), from one base model.
Reported: the win rate (share of evaluation pictures that the held-out judge, or judges, like better than the
base's from the same noise), and the cosine of what the alignment changed in the weights with what it changed
with the routes off, and with what the undisturbed run with the routes off changed.

Labels are noisy: chosen and rejected of a pair change places with that probability. Few pairs: a tenth of
each iteration's. Late rewards: an iteration learns from the pairs of 1 or 5 iterations before, the first ones
from none. Opposing rewards: colourful pictures, and small JPEG files, which they are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arms
import numpy as np

RESULTS = Path(__file__).parent / "results" / "cpu" / "stress.json"
ROUTES = {"on": [], "off": ["--set", "align.explore_track=bf16"]}
OPPOSING = ["--reward", "colourfulness + jpeg"]
STRESSES: dict[str, list[str]] = {
    "none": [],
    "label noise 10 %": [],
    "label noise 30 %": [],
    "a tenth of the pairs": [],
    "reward late by 1 iteration": [],
    "reward late by 5 iterations": [],
    "two opposing rewards": OPPOSING,
}


def swapped(data: Any, seed: int, share: float) -> Any:
    """Pairs whose chosen and rejected picture have changed places with probability `share`."""
    from fp4bf16.diffusion.noise import uniform

    swap = (uniform(seed, 0, len(data.chosen)) < share)[:, None, None, None]
    chosen, rejected = np.where(swap, data.rejected, data.chosen), np.where(swap, data.chosen, data.rejected)
    return dataclasses.replace(data, chosen=chosen, rejected=rejected)


def few(data: Any, seed: int, share: float) -> Any:
    """The comparisons of a random `share` of the pairs."""
    from fp4bf16.diffusion.noise import permutation

    total = len(data.chosen)
    keep = (permutation(seed, 0, total) < max(1, round(share * total)))[data.row]
    return dataclasses.replace(data, row=data.row[keep], t=data.t[keep])


def disturbance(name: str) -> Callable[[Any, int, int], Any]:
    """A function (pairs of an iteration, seed, number of the iteration) -> pairs to learn from."""
    if name.startswith("label noise"):
        share = float(name.split()[2]) / 100
        return lambda data, seed, iteration: swapped(data, seed, share)
    if name == "a tenth of the pairs":
        return lambda data, seed, iteration: few(data, seed, 0.1)
    if name.startswith("reward late"):
        late, waiting = int(name.split()[3]), []

        def delayed(data: Any, seed: int, iteration: int) -> Any:
            waiting.append(data)
            return waiting.pop(0) if len(waiting) > late else _none(data)

        return delayed
    return lambda data, seed, iteration: data


def _none(data: Any) -> Any:
    return dataclasses.replace(data, row=data.row[:0], t=data.t[:0])


def run_arm(name: str, arguments: list[str]) -> int:
    """In a process of its own: the trainer, with the disturbance between rollout and learning."""
    from fp4bf16.__main__ import main
    from fp4bf16.diffusion.noise import subseed
    from fp4bf16.train import alignment

    make, disturbed = alignment.make_data, disturbance(name)

    def patched(config: Any, engine: Any, seed: Any, made: Any, iteration: int) -> Any:
        data = make(config, engine, seed, made, iteration)
        return disturbed(data, subseed(config.seed, "stress", iteration), iteration)

    alignment.make_data = patched
    return main(arguments)


def wins(out: Path) -> float:
    """Share of evaluation pictures that the held-out judges like better than the base's; ties count half."""
    arrays, _ = arms.checkpoint.load(out / "checkpoint.safetensors")
    base, aligned = arrays["result.base.heldout"], arrays["result.aligned.heldout"]
    return float(((aligned > base) + 0.5 * (aligned == base)).mean())


def measure(folder: Path, common: list[str], base: Path, name: str) -> dict[str, Any]:
    """Both arms of one stress."""
    found, updates = {}, {}
    for route, more in ROUTES.items():
        out = folder / f"{name.replace(' ', '-').replace('%', 'percent')}-{route}"
        command = ["train", "--out", str(out), *common, "--from", str(base), *STRESSES[name], *more]
        # No resuming in the middle: what waits for a late reward is in no checkpoint.
        script = [sys.executable, __file__, "--arm", name, "--", *command]
        subprocess.run(script, check=True, cwd=arms.ROOT)
        last = arms.metrics(out)[-1]
        updates[route] = arms.update(out)
        found[f"routes {route}"] = {
            "win_rate": wins(out),
            "update_norm": float(np.linalg.norm(updates[route])),
            **{k: last[k] for k in ("heldout_gain", "heldout_gain_low", "heldout_gain_high", "heldout_unit",
                                    "reward_base", "reward", "taken_back", "guards_broken")},
        }  # fmt: skip
    found["cosine_of_updates"] = arms.cosine(updates["on"], updates["off"])
    undisturbed = folder / "none-off"
    if name != "two opposing rewards" and undisturbed.exists():
        clean = arms.update(undisturbed)
        for route in ROUTES:
            found[f"routes {route}"]["cosine_with_undisturbed_bf16"] = arms.cosine(updates[route], clean)
    return found


def table(found: dict[str, Any]) -> str:
    """What was found, in lines."""
    lines = [f"{'stress':28} {'win rate: FP4':>14} {'BF16':>6} {'cosine':>7}"]
    for name, f in found.items():
        rates = [f[f"routes {route}"]["win_rate"] for route in ROUTES]
        lines.append(f"{name:28} {rates[0]:14.3f} {rates[1]:6.3f} {f['cosine_of_updates']:7.3f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--base", type=Path, help="a finished run whose base model is aligned")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file for the results")
    parser.add_argument("--preset", default="faces16")
    parser.add_argument("--stress", nargs="*", default=list(STRESSES), help=", ".join(STRESSES))
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help="further arguments of train, after --")
    arguments = parser.parse_args()
    if arguments.arm:
        return run_arm(arguments.arm, arguments.more)
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="fp4bf16-stress-"))
    common = ["--preset", arguments.preset, *arguments.more]
    base = arguments.base or folder / "base"
    if arguments.base is None:
        arms.train(base, [*common, "--set", "align.iterations=0"])
    found: dict[str, Any] = {}
    for name in arguments.stress:
        found[name] = measure(folder, common, base, name)
        arms.write(arguments.json, arms.machine() | {
            "command": "python bench/stress.py", "what": __doc__, "stresses": found,
        })  # fmt: skip
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
