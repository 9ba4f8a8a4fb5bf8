"""Upsampling convolutions by phases beside those of upsampled pictures: the UNet ddpm-cifar10-32 on a GPU.

    python bench/phases.py [--part agreement|forward|train|configs|layers ...] [--batches 1024 256 64]
                           [--rounds 8] [--json FILE]

Both ways alternate in one run, on both tracks, as replayed CUDA graphs of the same weights
(`UNet2D.upsample_by_phases`); "layers" times the launches of one forward alone, "configs" each configuration
of the kernel on the three upsamplings of the largest batch, FP4 with sums. "agreement" is the distance
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
import numpy as np  # noqa: E402
import roofline  # noqa: E402
from network import (  # noqa: E402
    BF16,
    ROUTE,
    WRONG,
    Ours,
    alternate,
    operands,
    operations,
    peer,
    record,
    report,
)

from fp4bf16 import device, nn  # noqa: E402
from fp4bf16.backends import cuda_conv  # noqa: E402

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


def configs(args):
    """Milliseconds of each configuration, by phases and on the upsampled pictures, each result checked
    against the first: the sums for the norm as in the network, products summed fast.
    """
    import cupy

    n, c, rows, rng = max(args.batches), 256, [], np.random.default_rng(0)
    for side in (16, 8, 4):
        for phases in (True, False):
            shape = (n, side, side, c) if phases else (n, 2 * side, 2 * side, c)
            kernel = (4, 4) if phases else (3, 3)
            of_kernel = (2, 2) if phases else (3, 3)
            some = codes(rng, (min(n, 16), *shape[1:]))  # pictures that repeat
            x = cupy.asarray(np.tile(some, (-(-n // len(some)), 1, 1, 1))[:n])
            w = cupy.asarray(codes(rng, (c, *kernel, c)))
            scale = cupy.full(c * (4 if phases else 1), 2.0**-6, cupy.float32)
            d = cupy.empty((n, 2 * side, 2 * side, c), cupy.uint16)
            operands = {name: device.operand(array, name) for name, array in
                        (("x8", x), ("w8", w), ("col_scale", scale))}  # fmt: skip
            out = as_bfloat16(device.operand(d, "d"))
            geometry = cuda_conv.Geometry(*shape[:3], 2 * side, 2 * side, c, *of_kernel, 1, 1, 1)
            how = dict(operands, accumulate="fast", phases=phases)
            first = None
            for config in range(20):
                try:
                    ms, got = once(geometry, out, d, config, how)
                except ValueError:  # none of that number, or for other operands
                    continue
                first = got if first is None else first
                right = bool((np.abs(got - first) <= 0.02 * np.abs(first).max()).all())
                rows.append({"part": "configs", "side": side, "phases": phases, "config": config, "ms": ms,
                             "right": right})  # fmt: skip
                print(f"configs  {side:2d} to {2 * side:2d} {'phases' if phases else 'plain ':6s} "
                      f"config {config:2d} {ms:7.4f} ms{'' if right else '  WRONG'}", flush=True)  # fmt: skip
            del x, w, d, operands, out, how
    return rows


def codes(rng, shape):
    """E4M3 bytes of eight numbers of either sign."""
    some = np.array([0x30, 0x38, 0x3C, 0x40, 0xB0, 0xB8, 0xBC, 0x00], np.uint8)
    return some[rng.integers(0, 8, shape, np.uint8)]


def once(geometry, out, d, config, how, repeat=10):
    """(milliseconds of a launch, its result as float32 of some pictures)."""
    import cupy

    def memory(parts):
        return device.empty((geometry.n, parts, geometry.o, 2), "float32", like=out)

    wanted = memory if geometry.oh * geometry.ow >= 256 else None
    d.fill(0xFFFF)  # NaN
    cuda_conv.forward(geometry, out, 0, config=config, sums=wanted, **how)
    got = (cupy.asnumpy(d[:2]).astype(np.uint32) << 16).view(np.float32)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(repeat):
        cuda_conv.forward(geometry, out, 0, config=config, sums=wanted, **how)
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) / repeat, got


def as_bfloat16(x):
    """uint16 memory as what the kernels write."""
    place = x.device, x.framework, x.owner, x.name
    return device.DeviceArray(x.address, x.shape, x.strides, "bfloat16", *place)


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
        rows += report("forward", batch, alternate(arms, args.rounds), operations(arms))
        gained(rows, "forward", batch)
    return rows


def train(args):
    arms = [Ours(name, 256, route, train=True, phases=phases) for name, route, phases in ARMS]
    rows = report("train", 256, alternate(arms, args.rounds), operations(arms, train=True))
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
    parts = {"agreement": agreement, "forward": forward, "train": train, "configs": configs,
             "layers": layers}  # fmt: skip
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
    bad = [f"config {r['config']} at {r['side']}" for r in rows if not r.get("right", True)]
    for name, value in distance.items():
        track = name.split(" ")[0]
        if not (value < WRONG[track] and value <= 1.1 * distance[track]):  # nor is NaN
            bad.append(name)
            print(f"MISS {name}: {value:.3g} from diffusers FP32", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
