"""Upsampling convolutions by phases beside those of upsampled pictures: the UNet ddpm-cifar10-32 on a GPU.

    python bench/phases.py [--part agreement|layers|forward|train ...] [--batches 1024 256 64] [--rounds 8]
                           [--json FILE]

Both ways alternate in one run, on both tracks, as replayed CUDA graphs of the same weights
(`UNet2D.upsample_by_phases`); "layers" times the launches of one forward alone. "agreement" is the distance
of the prediction from diffusers' in FP32: by phases it must stay within a tenth of the other way's, and under
the limits of bench/network.py, or the exit status is 1. Needs the extras `cuda` and `peers`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import network  # noqa: E402
import roofline  # noqa: E402
from network import BF16, FLOPS, ROUTE, WRONG, Ours, alternate, operands, peer, record, report  # noqa: E402

from fp4bf16 import nn  # noqa: E402

ARMS = (("fp4", ROUTE, False), ("fp4 by phases", ROUTE, True), ("bf16", BF16, False),
        ("bf16 by phases", BF16, True))  # fmt: skip


def agreement(args):
    """Relative L2 distance of each arm's prediction from diffusers' in FP32, on shared weights."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found, want = {}, None
    for name, route, phases in ARMS:
        model = network.network(route, phases=phases)
        x, t = operands(16)
        with nn.no_grad():
            y = torch.as_tensor(model(x, t).data).permute(0, 3, 1, 2)
        if want is None:
            other = peer(model.flat.to_host())
            with torch.no_grad():
                want = other(torch.as_tensor(x).permute(0, 3, 1, 2).contiguous(), torch.as_tensor(t)).sample
        found[name] = float((y - want).norm() / want.norm())
    print("distance of the prediction from diffusers FP32:",
          {name: float(f"{value:.3g}") for name, value in found.items()}, flush=True)  # fmt: skip
    return [{"part": "agreement", "arm": name, "distance": value} for name, value in found.items()]


def layers(args):
    """The launches that differ, one by one: upsampling, quantisation and convolution of one forward."""
    rows = []
    for name, route, phases in ARMS:
        arm = Ours(name, max(args.batches), route, phases=phases)
        rows += roofline.breakdown(lambda arm=arm: arm._forward(0), f"forward {name}", 12)
        del arm
    for name, _, _ in ARMS:
        own = [r for r in rows if r["part"] == f"forward {name}"]
        up = [r for r in own if r["kernel"] == "upsample" or "4 of 2x2" in r["shape"]]
        print(f"{name:16s} all launches {sum(r['ms'] for r in own):7.3f} ms; upsample and by phases: "
              + ", ".join(f"{r['kernel']} {r['shape']} x{r['launches']} {r['ms']:.3f}" for r in up),
              flush=True)  # fmt: skip
    return rows


def forward(args):
    rows = []
    for batch in args.batches:
        arms = [Ours(name, batch, route, phases=phases) for name, route, phases in ARMS]
        rows += report("forward", batch, alternate(arms, args.rounds), FLOPS)
        gained(rows, "forward", batch)
    return rows


def train(args):
    arms = [Ours(name, 256, route, train=True, phases=phases) for name, route, phases in ARMS]
    rows = report("train", 256, alternate(arms, args.rounds), 3 * FLOPS)
    gained(rows, "train", 256)
    return rows


def gained(rows, part, batch):
    ms = {r["arm"]: r["ms"] for r in rows if (r["part"], r["batch"]) == (part, batch)}
    for name in ("fp4", "bf16"):
        less = ms[name] - ms[f"{name} by phases"]
        print(f"{part:8s} B={batch:5d} {name}: {less:+.3f} ms less by phases, {100 * less / ms[name]:+.2f} %",
              flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"agreement": agreement, "forward": forward, "train": train, "layers": layers}
    parser.add_argument("--part", nargs="*", choices=parts, default=list(parts))
    parser.add_argument("--batches", nargs="*", type=int, default=[1024, 256, 64])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json")
    args = parser.parse_args()
    import torch

    rows = []
    for part in args.part:
        rows += parts[part](args)
        if args.json:  # after each part: the time may be up before the last
            out = {"benchmark": "phases", "about": record.gpu(torch), "route": ROUTE, "rows": rows}
            pathlib.Path(args.json).write_text(json.dumps(out, indent=1) + "\n")
    distance = {r["arm"]: r["distance"] for r in rows if r["part"] == "agreement"}
    bad = []
    for name, value in distance.items():
        track = name.split(" ")[0]
        if not (value < WRONG[track] and value <= 1.1 * distance[track]):  # nor is NaN
            bad.append(name)
            print(f"MISS {name}: {value:.3g} from diffusers FP32", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
