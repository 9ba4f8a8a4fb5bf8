"""What each part of the closed loop earns: runs that share everything but how their tracks are chosen.

    python bench/ablation_loop.py [--device cuda --preset emoji32 --seconds 40 --seeds 3]

Arms, each of which trains a base model and aligns it:

    all BF16             every product on BF16, the yardstick
    all FP4              every product on FP4, nothing watched
    static skip list     FP4 but for the first and the last convolution and the embeddings
    router               the closed loop as it is by default: sensitivity from what FP4 changes in outputs
    router, Fisher       sensitivity from the optimizer's second moments, and from inputs
    router, Hutchinson   sensitivity from curvature, and from inputs
    without consistency  router, with neither the consistency term nor the constraint
    without feedback     router, with a budget that nothing moves

On a CPU all arms take the same number of steps. With ``--seconds`` they take the same time: how many steps
that are is measured by a calibration of each arm (ablation_clock.py). Seed s fixes initial weights, order,
noise levels and noise for all arms alike, so that arms are compared seed by seed. The judges are trained once
for all of them and kept in ``--out``.

Reported of each: the loss of the base model (its averaged weights, on BF16, on noise that is the same for
all arms), the kernel distance of its pictures to real ones by their pixel statistics, reward and held-out
judge after the alignment, rank fidelity of the exploration, seconds, the share of FLOPs on FP4, the certified
ratio, layers for which a step was made again ("redone"), layers held on BF16, summed over steps ("held").

Goals of the closed loop (router), judged where there are two seeds or more, exit status 1 where one
is missed: loss and kernel distance within the seed spread of all-BF16 or under it, 80 % of the FLOPs on FP4.
Whether all-FP4 is worse, and whether each part earns its place, is said with its standard error.

Every run is written as soon as it is done, with a chart of all (ablation_chart.py), and found again by the
next call, which does what is missing. A line says what each part of it took. Nothing is evaluated while
another arm trains: the pictures are drawn on the same GPU, and the other's seconds would not be its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ablation_chart
import arms
import numpy as np
from ablation_child import run_arm
from ablation_clock import BASE_PART, ITERATIONS, counts
from ablation_verdict import CLOSED, YARDSTICK, findings, goals, say

PART = {"cpu": 256, "cuda": 2048}  # pictures that distances are taken of
PROBED = 64  # pictures of a calibration's base
JUDGES = "judges.safetensors"  # in --out
LOSS_ON = 512  # pictures that the loss is measured on
BOX = 4.0  # seconds of a calibration's base training once it is warm
EVERYWHERE = {"*": "fp4"}  # to the router: it decides about every layer, and nothing is pinned
SKIPPED = {"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"}
_UNWATCHED = {"loop.limit": "0", "loop.jump": "0", "loop.consistency": "0"}
_ROUTER = {"loop.forward": "router", "loop.consistency": "0.1", "route": EVERYWHERE}
#: Settings of each arm; "route" is written to a file.
ARMS: dict[str, dict[str, Any]] = {
    YARDSTICK: {"loop.forward": "bf16"},
    "all FP4": {"loop.forward": "fp4", **_UNWATCHED, "route": EVERYWHERE},
    "static skip list": {"loop.forward": "fp4", **_UNWATCHED, "route": SKIPPED},
    CLOSED: _ROUTER,
    "router, Fisher": _ROUTER | {"loop.sensitivity": "fisher"},
    "router, Hutchinson": _ROUTER | {"loop.sensitivity": "hutchinson"},
    "without consistency": _ROUTER | _UNWATCHED,
    "without feedback": _ROUTER | {"loop.feedback": "false"},
}
#: What a shorter run needs, so that the router decides as often as in a full one.
SHORT = {"loop.every": "10", "loop.decide": "20", "loop.curvature_every": "40", "base.steps": "200",
         "align.iterations": "2"}  # fmt: skip
#: The network of a GPU's run: of emoji32's own, so narrow, few layers gain from FP4 by the latency model.
WIDE = {"model.block_out_channels": "[128,256,256]", "base.lr": "1e-3"}
KEPT = ("reward_base", "reward", "heldout_base", "heldout", "heldout_gain", "heldout_gain_low",
        "heldout_gain_high", "heldout_unit", "spearman_fp4", "spearman_bf16", "hit_best_fp4", "taken_back",
        "guards_broken", "success_rate", "peak_rss_mb", "stage_seconds")  # fmt: skip


# ------------------------------------------------------------------------------------------------ one run


def slug(name: str) -> str:
    """An arm as a part of a file's name."""
    return name.replace(", ", "-").replace(" ", "-").lower()


def command(name: str, seed: int, settings: Mapping[str, str], out: Path, args: Any) -> list[str]:
    """Arguments of ``python -m fp4bf16`` for one run, `settings` last; its route is written beside its
    folder.
    """
    chosen = dict(ARMS[name])
    found = [
        "train",
        "--preset",
        args.preset,
        "--device",
        args.device,
        "--seed",
        str(seed),
        "--out",
        str(out),
    ]
    if (route := chosen.pop("route", None)) is not None:
        path = out.with_suffix(".route.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(route))
        found += ["--route", str(path)]
    own, last = ([p for k, v in of.items() for p in ("--set", f"{k}={v}")] for of in (chosen, settings))
    return found + own + args.more + last


def launch(judges: Path, arguments: Sequence[str], box: float = 0.0) -> str:
    """Run an arm (`run_arm`); "" or, where it did not get to its end, what it said last."""
    script = [sys.executable, __file__, "--child", str(judges), "--box", str(box), "--", *arguments]
    done = subprocess.run(script, cwd=arms.ROOT, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return ""
    said = [line for line in done.stderr.splitlines() if line.strip()]
    print("\n".join(said[-20:]), file=sys.stderr)
    if done.returncode < 0 or done.returncode >= 128:  # stopped from outside: no result of the arm's
        raise SystemExit(f"ablation_loop: {' '.join(arguments[:8])} ... was stopped ({done.returncode})")
    return said[-1] if said else f"exit status {done.returncode}"


def measure(name: str, seed: int, settings: Mapping[str, str], args: Any) -> dict[str, Any]:
    """One run of one arm and everything that is reported of it."""
    out = args.out / f"{slug(name)}-{seed}"
    if args.again and out.exists():
        shutil.rmtree(out)
    began = time.monotonic()
    failed = launch(args.out / JUDGES, command(name, seed, settings, out, args))
    trained = time.monotonic()
    if f"--out {out}" in failed:  # its folder holds another run, or the disk is full: nothing of the arm's
        raise SystemExit(f"ablation_loop: {failed}")
    if failed:
        return {"failed": failed}
    row = summed_up(arms.metrics(out)) | judged(out, args)
    row["seconds"] |= {"start": round(trained - began - row["seconds"]["all"], 1),
                       "judged": round(time.monotonic() - trained, 1)}  # fmt: skip
    print(f"{name}, seed {seed}: {parts(row)}", flush=True)
    return row


def parts(row: Mapping[str, Any]) -> str:
    """What each part of an arm took; "start" is that of its process and the report.

    >>> parts({"seconds": {"start": 3.0, "judged": 2.25}, "stage_seconds": {"base": 28.0, "align": 12.0}})
    '45.2 s: start 3.0, base 28.0, align 12.0, loss and distance 2.2'
    """
    took = {"start": row["seconds"]["start"], **row["stage_seconds"],
            "loss and distance": row["seconds"]["judged"]}  # fmt: skip
    return f"{sum(took.values()):.1f} s: " + ", ".join(f"{k} {v:.1f}" for k, v in took.items())


def summed_up(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the metrics of a finished run say."""
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_stage.setdefault(line["stage"], []).append(line)
    base, align, router = (by_stage.get(stage, []) for stage in ("base", "align", "router"))
    losses = [line["loss"] for line in base if line.get("loss") is not None]
    last = losses[-max(1, len(losses) // 10) :]
    summary = lines[-1]
    return {
        "steps": len(base), "iterations": len(align),
        "seconds": {"base": stamp(base), "align": _between(lines, "align"), "all": summary["seconds"]},
        "train_loss": float(np.mean(last)) if last else None,
        "align_loss": align[-1].get("loss") if align else None,
        "losses_not_finite": len(base) - len(losses),
        **of_the_loop([line["loop"] for line in [*base, *align] if line.get("loop")]),
        "decisions": sum("routes" in line for line in router),
        "events": sum("routes" not in line for line in router),
        "curve": [float(np.mean(part)) for part in np.array_split(losses, 40) if len(part)],
        **{key: summary[key] for key in KEPT if key in summary},
    }  # fmt: skip


def stamp(lines: Sequence[Mapping[str, Any]]) -> float:
    """Seconds into the run of the last of some lines."""
    return lines[-1]["seconds"] if lines else 0.0


def _between(lines: Sequence[Mapping[str, Any]], stage: str) -> float:
    """Seconds from the last line before a stage to its last line."""
    at = [i for i, line in enumerate(lines) if line["stage"] == stage]
    return round(lines[at[-1]]["seconds"] - stamp(lines[: at[0]]), 3) if at else 0.0


def of_the_loop(loops: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means, peaks and counts of the numbers that every training line has; an all-BF16 run has none."""

    def values(key: str) -> list[float]:
        return [float(loop[key]) for loop in loops if loop.get(key) is not None]

    shares, held = values("fp4_share"), [loop.get("held") or () for loop in loops]
    return {
        "fp4_share": float(np.mean(shares)) if shares else 0.0,
        "fp4_share_last": shares[-1] if shares else 0.0,
        "certified_max": max(values("certified_max"), default=None),
        "certified_mean": float(np.mean(values("certified_mean"))) if values("certified_mean") else None,
        "consistency": float(np.mean(values("consistency"))) if values("consistency") else None,
        "budget_factor_last": values("budget_factor")[-1] if values("budget_factor") else None,
        "fallbacks": int(sum(values("fallbacks"))),
        "held": sum(h if isinstance(h, int) else len(h) for h in held),
    }


def judged(out: Path, args: Any) -> dict[str, Any]:
    """Loss and kernel distance of a finished run's models."""
    from fp4bf16.train.distances import kernel_distance
    from fp4bf16.train.engine import make_sampler
    from fp4bf16.train.evaluation_sets import cases, load_weights, real_pictures
    from fp4bf16.train.extractors import featurise, pixels

    weights = load_weights(out)
    real = real_pictures(weights.config)
    everything, wanted = list(real.references.values())[0], list(real.references.values())[-1]
    see = pixels(everything)
    n = args.pictures or PART[args.device]
    captions, seeds = cases(weights, real.captions, n, weights.config.seed, "ablation")
    found: dict[str, Any] = {
        "loss": loss_of(weights.model("base", merged=args.device != "cpu"), real, args.device)
    }
    for which, reference in (("base", everything), ("aligned", wanted)):
        draw = make_sampler(args.device, weights.model(which, merged=args.device != "cpu"))
        pictures = draw(seeds, captions, weights.config.eval.steps, "bf16")
        good = np.isfinite(pictures).all((1, 2, 3))
        key = "kernel_distance" + ("" if which == "base" else "_aligned")
        found[key] = None  # of fewer than two pictures there is none
        if good.sum() > 1:
            distance = kernel_distance(featurise(see, pictures[good]), featurise(see, reference), 0)
            found[key] = float(distance.value)
        found[f"unhealthy_{which}"] = int((~good).sum())
    return found


def loss_of(model: Any, real: Any, device: str = "cpu", n: int | None = None) -> float:
    """Mean squared error of the prediction on BF16, on `n` training pictures with noise that is the same for
    every model; the noise levels are spread evenly.
    """
    from fp4bf16.diffusion.losses import squared_error
    from fp4bf16.diffusion.noise import integers, normal, subseed

    n = LOSS_ON if n is None else n
    rows = integers(subseed(0, "ablation/rows"), 0, n, 0, len(real.train))
    levels = (np.arange(n) * len(model.schedule)) // n
    total, predict = 0.0, predictor(model, device)
    for start in range(0, n, 64):
        some, t = rows[start : start + 64], levels[start : start + 64]
        x0 = model.fold(real.train[some])
        bag = model.encode([real.train_captions[i] for i in some])
        eps = normal(subseed(0, "ablation/noise"), start, x0.shape)
        output = predict(model.schedule.add_noise(x0, eps, t), t, bag)
        total += squared_error(output, model.schedule.target(x0, eps, t, model.prediction))[0] * len(some)
    return total / n


def predictor(model: Any, device: str) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """(x_t, t, captions) -> the network's output on BF16, host arrays on either device."""
    from fp4bf16.tracks import tracks

    if device == "cpu":

        def on_host(x: np.ndarray, t: np.ndarray, bag: np.ndarray) -> np.ndarray:
            with tracks("bf16"):
                return model.evaluate(x, t, bag)

        return on_host
    from fp4bf16 import device as gpu
    from fp4bf16.nn.tape import no_grad
    from fp4bf16.train.device_sampler import CudaSampler

    memory = CudaSampler(model).memory_of

    def on_gpu(x: np.ndarray, t: np.ndarray, bag: np.ndarray) -> np.ndarray:
        there = []
        for name, array in (("x", model.schedule.scale_input(x, t)), ("t", t), ("bag", bag)):
            there.append(memory(f"loss {name}", array.shape, array.dtype.name))
            gpu.write(there[-1], array)
        with no_grad(), tracks("bf16"):
            output = model.unet(there[0].owner, there[1].owner, captions=there[2].owner)
        return gpu.to_host(gpu.operand(output.data, "output"))

    return on_gpu


# -------------------------------------------------------------------------------------------- equal seconds


def calibrated(name: str, args: Any) -> dict[str, str]:
    """base.steps and align.iterations with which an arm takes ``--seconds``, from a calibration of it."""
    config, began = configured(name, args), time.monotonic()
    # More steps than the box holds; of the base's pictures no more than a probe looks at
    settings = {"base.steps": "1000000", "align.iterations": str(ITERATIONS), "eval.captions": str(PROBED)}
    out = args.out / f"calibration-{slug(name)}"
    if out.exists():  # of a call that was interrupted: what it has is no beginning of another one
        shutil.rmtree(out)
    box = min(BOX, BASE_PART * args.seconds)
    failed = launch(args.out / JUDGES, command(name, 0, settings, out, args), box)
    if failed:
        raise SystemExit(f"ablation_loop: the calibration of {name} failed: {failed}")
    found = counts(arms.metrics(out), args.seconds, config)
    took = ", ".join(f"{key}={value}" for key, value in found.items())
    calibration = time.monotonic() - began
    print(f"{name}: {took} in {args.seconds:g} s, by {calibration:.1f} s of calibration", flush=True)
    return found


def configured(name: str, args: Any) -> Any:
    """The configuration of an arm."""
    from fp4bf16.train.config import get_preset, override

    settings = {k: v for k, v in ARMS[name].items() if k != "route"}
    more = [value for flag, value in zip(args.more, args.more[1:], strict=False) if flag == "--set"]
    return override(get_preset(args.preset), [f"{k}={v}" for k, v in settings.items()] + more)


# ------------------------------------------------------------------------------------------------------ main


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", help="default: faces16; on a GPU a wider emoji32")
    parser.add_argument("--device", default="cpu", choices=tuple(PART))
    parser.add_argument("--seconds", type=float, help="of an arm, base training and alignment together")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help=", ".join(ARMS))
    parser.add_argument("--pictures", type=int, help="of the kernel distance (default: 256, 2048 on a GPU)")
    parser.add_argument("--out", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--again", action="store_true", help="measure anew what is already there")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--box", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help="further arguments of train, after --")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.arms if name not in ARMS]:
        parser.error(f"--arms {unknown[0]!r}: there is no such arm; there are {', '.join(ARMS)}")
    if not args.arms:
        parser.error("--arms: names none; leave it out for all of them")
    if args.seeds < 1 or (args.seconds is not None and not args.seconds > 0):
        parser.error(
            f"--seeds {args.seeds} --seconds {args.seconds}: give one seed or more, and more than 0 s"
        )
    wide = WIDE if args.preset is None and args.device == "cuda" else {}
    args.preset = args.preset or {"cpu": "faces16", "cuda": "emoji32"}[args.device]
    if args.child is None:
        own = wide | (SHORT if args.seconds is None else {})
        args.more = [part for key, value in own.items() for part in ("--set", f"{key}={value}")] + args.more
    return args


def place(args: argparse.Namespace) -> Path:
    """The file of the results."""
    if args.json is not None:
        return args.json
    if args.device == "cpu":
        return arms.ROOT / "bench" / "results" / "cpu" / "ablation_loop.json"
    from fp4bf16.backends import cuda
    from fp4bf16.cli.bench.record import default_json

    return Path(default_json("ablation_loop", cuda.load().device(0).name))


def before(path: Path, settings: Mapping[str, Any], again: bool) -> dict[str, Any]:
    """What an earlier call measured with the same settings."""
    if again or not path.exists():
        return {"arms": {}, "calibration": {}}
    try:
        found = json.loads(path.read_text())
        kept, _, _ = found["settings"], found["arms"], found["calibration"]
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"ablation_loop: {path} holds no results of this bench ({error!r}); name another file with "
            "--json, or replace it with --again"
        ) from None
    if kept != settings:
        raise SystemExit(
            f"ablation_loop: {path} holds results of the settings {kept}, and this call has "
            f"{dict(settings)}; name another file with --json, or replace them with --again"
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.child is not None:
        return run_arm(args.child, args.more, args.box)
    args.out = args.out or Path(tempfile.mkdtemp(prefix="fp4bf16-ablation-"))
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.arms:
        configured(name, args)  # a setting that does not fit is said at once, and is no result of an arm
    settings = {"preset": args.preset, "device": args.device, "seconds": args.seconds, "more": args.more,
                "pictures": args.pictures or PART[args.device]}  # fmt: skip
    path = place(args)
    result = before(path, settings, args.again)
    found, times = result["arms"], result["calibration"]
    for seed in range(args.seeds):
        for name in args.arms:
            if str(seed) in found.get(name, {}):
                continue
            if args.seconds is not None and name not in times:
                times[name] = calibrated(name, args)
            found.setdefault(name, {})[str(seed)] = measure(name, seed, times.get(name, {}), args)
            result = arms.machine(args.device) | {
                "command": "python bench/ablation_loop.py", "what": __doc__, "settings": settings,
                "routes": {n: ARMS[n] for n in ARMS}, "calibration": times, "goals": goals(found),
                "findings": findings(found), "arms": found,
            }  # fmt: skip
            arms.write(path, result)
            path.with_suffix(".svg").write_text(ablation_chart.chart(found), encoding="utf-8")
    say(result)
    return 0 if all(goal["met"] for goal in result["goals"]) else 1


if __name__ == "__main__":
    sys.exit(main())
