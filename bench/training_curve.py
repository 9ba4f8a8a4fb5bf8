"""The loss of a UNet in training, ours on a GPU against the same network in PyTorch FP32.

    python bench/training_curve.py [--steps 300] [--batch 64] [--seeds 3] [--json FILE]

The published ``ddpm-cifar10-32`` network learns the emoji of this package at 32 pixels (noise prediction,
linear schedule, AdamW, norm clipped at 1). Seed s fixes initial weights, order of pictures, noise levels and
noise, and is the same for every arm, so that arms of one seed differ by their arithmetic alone:

    torch   PyTorch FP32 (no TF32), `bench/torch_unet.py`
    bf16    ours, BF16 forward and backward
    fp4     ours, FP4 forward where the route says so, BF16 backward

Claimed is that the mean curve of an arm stays within the seed-to-seed spread of PyTorch's runs: curves are
means over `WINDOW` steps; `inside` is the share of points at which it lies between the lowest and the highest
of PyTorch's seeds, `distance` the mean distance to PyTorch's curve of the same seed, as a multiple of the
mean distance between two of PyTorch's seeds. Under 1 it says that FP4 or BF16 moves the curve less than
another seed does.

Writes bench/results/<gpu>/training_curve.json; exit status 1 where an arm leaves the spread.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fp4bf16 import nn  # noqa: E402
from fp4bf16._version import __version__  # noqa: E402
from fp4bf16.backends import cuda  # noqa: E402
from fp4bf16.cli.bench.record import commit, default_json, write_json  # noqa: E402
from fp4bf16.diffusion.noise import normal, subseed  # noqa: E402
from fp4bf16.diffusion.schedules import get_schedule  # noqa: E402
from fp4bf16.train.config import BaseConfig, Config  # noqa: E402
from fp4bf16.train.data import load_pairs  # noqa: E402
from fp4bf16.train.device import CudaEngine  # noqa: E402
from fp4bf16.train.engine import BaseData  # noqa: E402

WINDOW = 20  # steps
LR, CLIP = 2e-4, 1.0  # DDPM's rate and norm
ARMS = {"bf16": "bf16", "fp4": None}  # name -> track of the forward; None: the route's


def task(seed: int, args: argparse.Namespace) -> tuple[SimpleNamespace, Config, BaseData]:
    """(network and schedule, configuration, data) of a seed; alike for all arms."""
    unet = nn.UNet2D(nn.UNetConfig.ddpm_cifar10_32(), seed=subseed(seed, "weights"))
    config = Config(
        seed=seed, size=32, base=BaseConfig(args.steps, args.batch, LR, clip=CLIP, drop_caption=0.0)
    )
    unet.apply_route(config.route)
    schedule = get_schedule("linear", 1000)
    model = SimpleNamespace(unet=unet, schedule=schedule, prediction="eps", shape=(32, 32, 3), config=config)
    pictures = load_pairs(32).images.reshape(-1, 32, 32, 3)
    seeds = {name: subseed(seed, "curve", name) for name in ("row", "t", "noise", "drop")}
    return model, config, BaseData(pictures, None, seeds, len(schedule))


def ours(seed: int, track: str | None, args: argparse.Namespace) -> list[float]:
    """Losses of our network, step by step."""
    model, config, data = task(seed, args)
    engine = CudaEngine(model, config, track)
    return [engine.base_step(data, step, LR).loss for step in range(args.steps)]


def theirs(seed: int, args: argparse.Namespace) -> list[float]:
    """Losses of PyTorch's, on the same pictures, noise levels, noise and initial weights."""
    import torch
    from torch_unet import TorchUNet

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    model, config, data = task(seed, args)
    net = TorchUNet(model.unet.config)
    state = nn.to_diffusers(model.unet.state_dict())
    net.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in state.items()})
    net = net.cuda()
    optimizer = torch.optim.AdamW(net.parameters(), LR, weight_decay=0.0, fused=True)
    pictures = torch.from_numpy(data.pictures).permute(0, 3, 1, 2).contiguous().cuda()
    alpha_bar = torch.from_numpy(model.schedule.alpha_bar).cuda()
    losses = []
    for step in range(args.steps):
        row, t, _ = data.draw(step, args.batch, 0.0)
        eps = normal(data.seeds["noise"], step, (args.batch, *model.shape))
        eps = torch.from_numpy(eps).cuda().permute(0, 3, 1, 2).contiguous()
        row, t = torch.from_numpy(row).cuda(), torch.from_numpy(t).cuda()
        a = alpha_bar[t].reshape(-1, 1, 1, 1)
        x = a.sqrt().float() * pictures[row] + (1 - a).sqrt().float() * eps
        loss = torch.nn.functional.mse_loss(net(x, t), eps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu().tolist()


def smoothed(losses: list[list[float]]) -> np.ndarray:
    """(seeds, points): means over `WINDOW` steps, one after the other."""
    a = np.array(losses)
    points = a.shape[1] // WINDOW
    return a[:, : points * WINDOW].reshape(len(a), points, WINDOW).mean(2)


def compare(arm: list[list[float]], torch: list[list[float]]) -> dict:
    """How an arm's curves lie to PyTorch's."""
    a, b = smoothed(arm), smoothed(torch)
    mean, low, high = a.mean(0), b.min(0), b.max(0)
    apart = float(np.mean([np.abs(b[i] - b[j]).mean() for i, j in combinations(range(len(b)), 2)]))
    return {
        "inside": float(((mean >= low) & (mean <= high)).mean()),
        "distance": float(np.abs(a - b).mean() / apart),
        "last": a[:, -1].tolist(),
        "torch_last": b[:, -1].tolist(),
        "spread_between_seeds": apart,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    gpu = cuda.load().device(0).name
    curves: dict[str, list[list[float]]] = {}
    for name in ("torch", *ARMS):
        began, seeds = time.perf_counter(), range(args.seeds)
        if name == "torch":
            curves[name] = [theirs(seed, args) for seed in seeds]
        else:
            curves[name] = [ours(seed, ARMS[name], args) for seed in seeds]
        took, last = time.perf_counter() - began, smoothed(curves[name])[:, -1].mean()
        print(f"{name:6s} {took:6.1f} s   last {WINDOW} steps: loss {last:.5f}", flush=True)
    found = {name: compare(curves[name], curves["torch"]) for name in ARMS}
    good = all(f["inside"] >= 0.9 and f["distance"] <= 1 for f in found.values())
    for name, f in found.items():
        print(f"{name}: inside {f['inside']:.2f}, distance {f['distance']:.3f} of that between two seeds")
    path = args.json or default_json("training_curve", gpu)
    result = {
        "gpu": gpu, "version": __version__, "commit": commit(), "network": "ddpm-cifar10-32",
        "batch": args.batch, "steps": args.steps, "lr": LR, "window": WINDOW,
        "must_be": "inside >= 0.9, distance <= 1", "met": good, "arms": found,
        "curves": {name: smoothed(losses).tolist() for name, losses in curves.items()},
    }  # fmt: skip
    write_json(path, result)
    print(f"written: {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
