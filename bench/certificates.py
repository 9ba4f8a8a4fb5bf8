"""What certificates cost on a GPU: the FP4 forward of the UNet ddpm-cifar10-32 with and without them.

    python bench/certificates.py [--batches 1024 256] [--rounds 8] [--json FILE] [--goals]

In one run alternate, as replayed CUDA graphs: the forward as it is; with the proven bound of every FP4
product; with a threshold that none reaches (the BF16 form follows each product, and its kernels return at
once) and with one that all do. As calls, which copies from the host need: with a Gaussian sketch of one
product in 20, and without; the difference is its cost. Per cent are of the plain graph. Printed first: the
certified ratios, and that the bounds change no bit of the prediction, or the exit status is 1; with --goals
it is where bounds and sketches together cost over 3 %. Needs the extras `cuda` and `torch`, whose events are
the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from network import ROUTE, Ours, alternate, network, operands, operations, record, report  # noqa: E402

from fp4bf16 import nn  # noqa: E402
from fp4bf16.consistency import Sketcher  # noqa: E402
from fp4bf16.nn.cuda.certificates import Certificates  # noqa: E402
from fp4bf16.nn.cuda.sketches import Sketches  # noqa: E402
from fp4bf16.nn.cuda.watch import watching  # noqa: E402
from fp4bf16.routing import flops  # noqa: E402

GOAL = 3.0  # per cent of the forward, bounds and sketches together
#: The arm of a graph, and its threshold; False: without certificates.
GRAPHS = (("plain", False), ("bounds", None), ("threshold never met", 1e30), ("threshold always met", 0.0))
CALLS = (("calls", False), ("calls with sketches", True))


class Certified(Ours):
    """The forward as a graph, with what `threshold` says of certificates."""

    def __init__(self, name, batch, threshold, **how):
        self.threshold, self.certificates = threshold, None
        super().__init__(name, batch, ROUTE, **how)
        self.result = self.graph.capture(self._forward)  # the first warm-up made the weights' norms, too

    def _forward(self, stream):
        if self.threshold is False:
            return super()._forward(stream)
        if self.certificates is None:
            self.certificates = Certificates(self.model, self.threshold)
        with watching(self.certificates):
            return super()._forward(stream)


class Called:
    """The forward as calls, with sketches of one product in 20 or without."""

    def __init__(self, name, batch, sketched):
        self.name, self.model, self.steps = name, network(ROUTE), 0
        self.x, self.t = operands(batch)
        self.flops = math.fsum(flops(self.model).values())
        self.sketcher = Sketcher(every=20) if sketched else None

    def __call__(self):
        if self.sketcher is None:
            with nn.no_grad():
                return self.model(self.x, self.t).data
        self.sketcher.begin(self.steps)
        self.steps += 1
        sketches = Sketches(self.sketcher, recorded=False)
        with watching(sketches), nn.no_grad():
            return self.model(self.x, self.t).data


def proven(batch, accumulate):
    """Certified ratios of the products, and whether certificates left the prediction as it was."""
    model = network(ROUTE, accumulate=accumulate)
    x, t = operands(batch)
    with nn.no_grad():
        plain = model(x, t).data
        certificates = Certificates(model)
        certificates.begin()
        with watching(certificates):
            y = model(x, t).data
    found = certificates.read()
    ratios = sorted(f.ratio for f in found.values())
    alone = sorted(f.bound / f.product for f in found.values())
    row = {
        "part": "proven", "batch": batch, "accumulate": accumulate, "products": len(ratios),
        "ratio": {"median": statistics.median(ratios), "largest": ratios[-1]},
        "without sums": {"median": statistics.median(alone), "largest": alone[-1]},
        "same": bool((plain == y).all()), "finite": bool(np.isfinite(ratios).all()),
    }  # fmt: skip
    print(f"proven   B={batch:5d} {accumulate}: {len(ratios)} layers, certified ratio {row['ratio']}, of the "
          f"bound alone {row['without sums']}; prediction {'the same' if row['same'] else 'CHANGED'}",
          flush=True)  # fmt: skip
    return row


def costs(rows, batch):
    """Per cent of the plain forward by what is added."""
    ms = {r["arm"]: r["ms"] for r in rows if r["batch"] == batch and "ms" in r}
    plain = ms["plain"]
    found = {name: 100 * (ms[name] - plain) / plain for name, _ in GRAPHS[1:]}
    found["sketches"] = 100 * (ms["calls with sketches"] - ms["calls"]) / plain
    found["bounds and sketches"] = found["bounds"] + found["sketches"]
    for name, value in found.items():
        print(f"cost     B={batch:5d} {name:22s} {value:+6.2f} %", flush=True)
    return {"part": "cost", "batch": batch, "per cent": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", nargs="*", type=int, default=[1024, 256])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json")
    parser.add_argument("--goals", action="store_true")
    args = parser.parse_args()
    import torch

    rows = [proven(64, accumulate) for accumulate in ("fast", "promoted")]
    bad = [f"{r['accumulate']}: the prediction" for r in rows if not (r["same"] and r["finite"])]
    for batch in args.batches:
        arms = [Certified(name, batch, threshold) for name, threshold in GRAPHS]
        arms += [Called(name, batch, sketched) for name, sketched in CALLS]
        rows += report("forward", batch, alternate(arms, args.rounds), operations(arms))
        del arms
        rows.append(costs(rows, batch))
        if args.json:
            out = {"benchmark": "certificates", "about": record.gpu(torch), "route": ROUTE, "rows": rows}
            pathlib.Path(args.json).write_text(json.dumps(out, indent=1) + "\n")
    for row in rows:
        if args.goals and row["part"] == "cost":
            value = row["per cent"]["bounds and sketches"]
            what = f"B={row['batch']} bounds and sketches"
            print(f"{'ok  ' if value <= GOAL else 'MISS'} {what}: {value:.2f} % (goal at most {GOAL:g} %)")
            bad += [] if value <= GOAL else [what]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
