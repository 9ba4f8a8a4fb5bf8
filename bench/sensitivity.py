"""Does the predicted sensitivity rank the layers as switching each one to FP4 does?

    python bench/sensitivity.py [--preset emoji32 --from base] [--steps 400] [--json FILE]

A model (trained here for `--steps` steps, or `--from` weights) runs on BF16; then every product alone is
moved to FP4. Its damage is the rise of the loss on `--batches` batches of `--batch` pictures, the same
pictures, noise levels and noise for every layer, with its standard error. Predicted is the damage by

    quantisation error     |Q(W) - W|^2 of the weight, which knows nothing of the loss
    Fisher                 1/2 sum E[g^2] (Q(w) - w)^2, of Adam's second moments over `--moments` steps
    Hutchinson, Hutch++    1/2 (trace / n) |Q(W) - W|^2, from `--probes` Hessian-vector products
    outputs                1/2 sum E[(dL/dy)^2 (y_fp4 - y_bf16)^2] of the products themselves
    ... + activations      each of those of weights plus the same of the products, in which the activations
                           alone are on FP4: of the whole product, the weights' error would count twice

Reported of each: Spearman's rank correlation with the measured damage over all layers, with the 95 %
interval of resampled layers; which share of the damage lies in the quarter of the layers that it ranks
highest; the sum of the predicted damages over that of the measured ones; and what it took. No prediction can
do better than the damage measured on other pictures, which stands beside it ("measured again").
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arms
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp4bf16.align.fidelity import spearman  # noqa: E402
from fp4bf16.diffusion.noise import integers, normal, subseed  # noqa: E402
from fp4bf16.nn import ops as F  # noqa: E402
from fp4bf16.nn.tape import no_grad  # noqa: E402
from fp4bf16.nn.watch import watching  # noqa: E402
from fp4bf16.routing.curvature import layer_traces  # noqa: E402
from fp4bf16.routing.pins import layers_of  # noqa: E402
from fp4bf16.routing.sensitivity import (  # noqa: E402
    ActivationProbe,
    curvature_omega,
    fisher_omega,
    quantisation_error,
    squared_error_scale,
)
from fp4bf16.train.config import get_preset, override  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402
from fp4bf16.train.engine import BaseData, HostEngine  # noqa: E402
from fp4bf16.train.schedule import learning_rate  # noqa: E402
from fp4bf16.train.task import base_seeds, make_task  # noqa: E402
from fp4bf16.train.weights import load_start  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "cpu" / "sensitivity.json"
BF16 = {"*": "bf16"}
TOP = 0.25  # of the layers
REPLICATES = 2000
SUMS = ("Fisher", "Hutchinson", "Hutch++")  # of weights: each is shown with the activations' term


@dataclass(frozen=True)
class Batch:
    """What one loss is made of: noisy pictures, their noise levels, captions, and what is to be predicted."""

    x: np.ndarray
    t: np.ndarray
    bag: np.ndarray
    target: np.ndarray


class Bench:
    """A model with its data; every loss is a mean squared error on the track of the layers."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.config = args, override(get_preset(args.preset), args.set)
        task = make_task(self.config)
        self.model = Denoiser(self.config, task.words)
        trained = task.trained
        pictures = self.model.fold(np.concatenate(list(trained.images)))
        captions = np.concatenate([self.model.encode(trained.captions)] * len(trained.images))
        seeds, levels = base_seeds(self.config), len(self.model.schedule)
        self.data = BaseData(pictures, captions, seeds, levels)
        self.engine = HostEngine(self.model, self.config)
        self._weights()
        self.model.unet.apply_route(BF16)
        known = self.model.unet.named_parameters()
        self.layers = {n: known[n] for n, info in layers_of(self.model.unet).items() if info.certified}

    def _weights(self) -> None:
        """Those that are asked for, or the average of a short training."""
        if self.args.start:
            start = load_start(self.args.start, self.args.preset)
            start.check(self.config, self.model)
            self.engine.begin_alignment(start.arrays)
            return
        c, steps = self.config.base, self.args.steps
        for step in range(steps):
            self.engine.base_step(self.data, step, learning_rate(step, steps, c.lr, c.decay))
        self.engine.begin_alignment()

    def batch(self, number: int, purpose: str = "measured") -> Batch:
        """Batch number `number` of a purpose: other pictures, noise and levels for each."""
        n, model, seed = self.args.batch, self.model, subseed(self.config.seed, "sensitivity", purpose)
        row = integers(subseed(seed, "row"), number, n, 0, len(self.data.pictures))
        levels = (np.arange(n) * self.data.levels) // n  # spread evenly, each time from another start
        t = (levels + integers(subseed(seed, "t"), number, 1, 0, self.data.levels)) % self.data.levels
        x0, eps = self.data.pictures[row], normal(subseed(seed, "noise"), number, (n, *model.shape))
        target = model.schedule.target(x0, eps, t, model.prediction)
        x = model.schedule.scale_input(model.schedule.add_noise(x0, eps, t), t)
        return Batch(x, t, self.data.captions[row], target)

    def loss(self, batch: Batch) -> Any:
        """On the tape, one element."""
        return F.mean_squared_error(self.model.unet(batch.x, batch.t, captions=batch.bag), batch.target)


# ------------------------------------------------------------------------------------------------- measured


def damages(bench: Bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(loss on BF16, rise by each layer alone, rise by all of them), float64 (batches,), (batches, layers),
    (batches,).
    """
    batches, names = bench.args.batches, list(bench.layers)
    base, every = np.empty(batches), np.empty(batches)
    single = np.empty((batches, len(names)))
    unet = bench.model.unet
    with no_grad():
        for b in range(batches):
            batch = bench.batch(b)

            def on(route: Mapping[str, str], batch: Batch = batch) -> float:
                unet.apply_route(route)
                output = unet(batch.x, batch.t, captions=batch.bag).data
                return float(np.mean(np.square(output - batch.target, dtype=np.float64)))

            base[b] = on(BF16)
            single[b] = [on({name: "fp4", **BF16}) - base[b] for name in names]
            every[b] = on(dict.fromkeys(names, "fp4") | BF16) - base[b]
    unet.apply_route(BF16)
    return base, single, every


# ------------------------------------------------------------------------------------------------ predicted


def by_fisher(bench: Bench, loss: float) -> dict[str, float]:
    """From the optimizer's second moments, as they are after `--moments` steps that change no weight."""
    engine, batch = bench.engine, bench.config.base.batch
    for step in range(bench.args.moments):
        engine.base_step(bench.data, step, 0.0)
    views = bench.model.unet.flat.views
    moments = views(engine.optimizer.state()["second"])
    correction = 1 - engine.optimizer.betas[1] ** engine.optimizer.count
    scale = squared_error_scale(loss, int(np.prod(bench.model.shape)))
    return {n: fisher_omega(moments[n] / correction, p, batch, scale) for n, p in bench.layers.items()}


def by_curvature(bench: Bench, method: str) -> dict[str, float]:
    """From the traces of the Hessian's blocks on one batch."""
    batch = bench.batch(0, "curvature")
    traces = layer_traces(
        lambda: bench.loss(batch), bench.layers, bench.args.probes, bench.config.seed, method
    )
    return {name: curvature_omega(traces[name], p) for name, p in bench.layers.items()}


def by_products(bench: Bench, loss: float, operands: str) -> dict[str, float]:
    """From the products and their gradients on a few batches, with `operands` of them on FP4."""
    scale = squared_error_scale(loss, int(np.prod(bench.model.shape)))
    probe = ActivationProbe(set(bench.layers), scale, operands)
    probe.begin(bench.args.passes)
    for number in range(bench.args.passes):
        bench.model.unet.zero_grad()
        with watching(probe):
            bench.loss(bench.batch(number, "activations")).backward()
    return {name: probe.omega[name] for name in bench.layers}


def predictions(bench: Bench, loss: float) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """(name -> predicted damage of each layer, name -> seconds)."""
    makers: dict[str, Callable[[], dict[str, float]]] = {
        "quantisation error": lambda: {n: quantisation_error(p) for n, p in bench.layers.items()},
        "Fisher": lambda: by_fisher(bench, loss),
        "Hutchinson": lambda: by_curvature(bench, "hutchinson"),
        "Hutch++": lambda: by_curvature(bench, "hutch++"),
        "outputs": lambda: by_products(bench, loss, "both"),
        "activations": lambda: by_products(bench, loss, "activations"),
    }
    found, seconds = {}, {}
    for name, make in makers.items():
        began = time.perf_counter()
        values = make()
        seconds[name] = round(time.perf_counter() - began, 3)
        found[name] = np.array([values[layer] for layer in bench.layers])
    for name in SUMS:
        both = f"{name} + activations"
        found[both] = found[name] + found["activations"]
        seconds[both] = round(seconds[name] + seconds["activations"], 3)
    del found["activations"], seconds["activations"]  # a part of those sums alone
    return found, seconds


# ---------------------------------------------------------------------------------------------- how they fit


def agreement(
    predicted: np.ndarray, measured: np.ndarray, seed: int = 0
) -> dict[str, float | list[float] | None]:
    """How a prediction ranks layers, both float64 (layers,): Spearman's correlation with the 95 % interval of
    resampled layers, and the share of all damage in the quarter of the layers that it puts first, beside that
    of the best quarter there is.

    >>> found = agreement(np.array([1.0, 2.0, 3.0, 9.0]), np.array([0.1, 0.1, 0.2, 0.6]))
    >>> round(found["spearman"], 3), found["top_share"], found["top_share_best"]
    (0.949, 0.6, 0.6)
    """
    n = len(measured)
    rows = integers(subseed(seed, "resampled"), 0, (REPLICATES, n), 0, n)
    again = spearman(predicted[rows], measured[rows])
    again = again[np.isfinite(again)]  # a draw of few different layers may rank nothing
    harm, top = np.maximum(measured, 0), max(1, round(TOP * n))
    total = harm.sum()
    first = [harm[np.argsort(-by, kind="stable")[:top]].sum() for by in (predicted, measured)]
    return {
        "spearman": _number(spearman(predicted, measured)),
        "interval": [float(q) for q in np.quantile(again, (0.025, 0.975))] if len(again) else [],
        "top_share": float(first[0] / total) if total else None,
        "top_share_best": float(first[1] / total) if total else None,
    }


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def halves(single: np.ndarray) -> float | None:
    """Spearman's correlation of the damages measured on the even and on the odd batches, stepped up to all of
    them (Spearman 1910, Brown 1910): what another measurement of the same size would agree by.
    """
    if len(single) < 2:
        return None
    half = float(spearman(single[::2].mean(0), single[1::2].mean(0)))
    return _number(2 * half / (1 + half)) if half > -1 else None


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is reported."""
    began = time.perf_counter()
    bench = Bench(args)
    ready = time.perf_counter()
    base, single, every = damages(bench)
    measured_in = time.perf_counter() - ready
    predicted, seconds = predictions(bench, float(base.mean()))
    damage, count = single.mean(0), len(single)
    error = single.std(0, ddof=1) / math.sqrt(count) if count > 1 else None
    flops = layers_of(bench.model.unet)
    fits = {
        name: agreement(values, damage) | {
            "ratio": _number(values.sum() / damage.sum()) if name != "quantisation error" else None,
            "seconds": seconds[name],
        }
        for name, values in predicted.items()
    }  # fmt: skip
    return {
        "loss": float(base.mean()), "layers": len(bench.layers), "methods": fits,
        "measured_again": halves(single), "damage_of_all": float(every.mean()),
        "sum_of_damages": float(damage.sum()), "seconds_measured": round(measured_in, 1),
        "by_layer": [
            {"name": name, "flops": flops[name].flops, "damage": float(damage[i]),
             "standard_error": None if error is None else float(error[i]),
             **{method: float(values[i]) for method, values in predicted.items()}}
            for i, name in enumerate(bench.layers)
        ],
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def table(found: Mapping[str, Any]) -> str:
    """The fits in lines, the worst and the most harmless layers under them."""
    heads = f"{'Spearman':>8s} {'95 % interval':>15s} {'top quarter':>11s} {'ratio':>7s} {'s':>7s}"
    lines = [f"{'prediction':26s} {heads}"]

    def show(value: float | None, form: str, width: int) -> str:
        return f"{'-' if value is None else format(value, form):>{width}s}"

    for name, fit in found["methods"].items():
        interval = "{:.2f} to {:.2f}".format(*fit["interval"]) if fit["interval"] else "-"
        lines.append(f"{name:26s} {show(fit['spearman'], '.3f', 8)} {interval:>15s} "
                     f"{show(fit['top_share'], '.2f', 11)} {show(fit['ratio'], '.2f', 7)} "
                     f"{fit['seconds']:7.2f}")  # fmt: skip
    best = next(iter(found["methods"].values()))["top_share_best"]
    again = show(found["measured_again"], ".3f", 8)
    lines.append(f"{'measured again':26s} {again} {'':15s} {show(best, '.2f', 11)}")
    lines.append(f"loss {found['loss']:.5f}; all {found['layers']} products on FP4: "
                 f"{found['damage_of_all']:+.3g}; each alone, added up: "
                 f"{found['sum_of_damages']:+.3g}")  # fmt: skip
    order = sorted(found["by_layer"], key=lambda row: -row["damage"])
    lines += [f"  {row['damage']:+.2e}  {row['name']}" for row in [*order[:5], *order[-3:]]]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="faces16")
    parser.add_argument("--from", dest="start", help="weights: base, a checkpoint or the folder of a run")
    parser.add_argument("--steps", type=int, default=400, help="of training, without --from (default: 400)")
    parser.add_argument("--batches", type=int, default=12, help="for the measured damage (default: 12)")
    parser.add_argument("--batch", type=int, default=64, help="pictures in a batch (default: 64)")
    parser.add_argument("--moments", type=int, default=60, help="steps of Adam's moments (default: 60)")
    parser.add_argument("--probes", type=int, default=12, help="Hessian-vector products (default: 12)")
    parser.add_argument("--passes", type=int, default=4, help="batches of the products' terms (default: 4)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for train")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file for the results")
    args = parser.parse_args(arguments)
    if min(args.batches, args.batch, args.moments, args.passes) < 1 or args.steps < 0 or args.probes < 3:
        parser.error("--batches, --batch, --moments and --passes are at least 1, --probes 3, --steps 0")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    found = measure(args)
    settings = {k: v for k, v in vars(args).items() if k != "json"}
    arms.write(args.json, arms.machine() | {
        "command": "python bench/sensitivity.py", "what": __doc__, "settings": settings, **found,
    })  # fmt: skip
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
