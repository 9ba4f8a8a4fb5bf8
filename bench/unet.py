"""Forward and training step of the UNet on the CPU: milliseconds and pictures a second on each track.

    python bench/unet.py [--config tiny|ddpm-cifar10-32] [--batch 32] [--repeat 20] [--profile]
                          [--peers] [--json]

Prints one line for each case: median, 20th and 80th percentile of wall time and the median of CPU time (all
threads), which other programs on the machine disturb less. --peers times diffusers' network on PyTorch too;
--json writes bench/results/cpu/unet.json.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pathlib
import pstats
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import fp4bf16 as fb  # noqa: E402
from fp4bf16 import nn  # noqa: E402
from fp4bf16.backends.threads import num_threads  # noqa: E402

CONFIGS = {"tiny": (nn.UNetConfig.tiny, 8), "ddpm-cifar10-32": (nn.UNetConfig.ddpm_cifar10_32, 32)}
RESULTS = pathlib.Path(__file__).parent / "results" / "cpu" / "unet.json"
ROUTE = {"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"}


rows: list[dict] = []  # what has been measured, for --json


def line(name: str, run, pictures: int, repeat: int) -> None:
    run()
    wall, cpu = [], []
    for _ in range(repeat):
        w, c = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - w)
        cpu.append(time.process_time() - c)
    low, middle, high = (1e3 * np.percentile(wall, p) for p in (20, 50, 80))
    rows.append({"case": name, "ms": middle, "p20_ms": low, "p80_ms": high, "cpu_ms": 1e3 * np.median(cpu)})
    print(
        f"{name:28s} {middle:9.2f} ms  (p20 {low:.2f}, p80 {high:.2f}; CPU {1e3 * np.median(cpu):.2f})"
        f"  {1e3 * pictures / middle:9.0f} pictures/s"
    )


def ours(config: nn.UNetConfig, x: np.ndarray, t: np.ndarray, args) -> None:
    model = nn.UNet2D(config)

    def step():
        model.zero_grad()
        nn.ops.mean_squared_error(model(x, t), x).backward()

    def forward():
        with nn.no_grad():
            model(x, t)

    line("forward bf16", forward, len(x), args.repeat)
    line("training step bf16", step, len(x), args.repeat)
    if args.profile:
        with cProfile.Profile() as profile:
            for _ in range(args.repeat):
                step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    model.apply_route(ROUTE)
    line("forward fp4", forward, len(x), args.repeat)
    with fb.tracks("reference"):
        line("forward reference (float32)", forward, len(x), args.repeat)


def peers(config: nn.UNetConfig, x: np.ndarray, t: np.ndarray, args) -> None:
    import diffusers
    import torch

    torch.set_num_threads(num_threads())
    arguments = config.to_dict()
    del arguments["caption_vocabulary"]
    model = diffusers.UNet2DModel(**arguments)
    pictures, times = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(t)

    def step():
        model.zero_grad()
        ((model(pictures, times).sample - pictures) ** 2).mean().backward()

    def forward():
        with torch.no_grad():
            model(pictures, times)

    line("forward PyTorch float32", forward, len(x), args.repeat)
    line("step PyTorch float32", step, len(x), args.repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", choices=CONFIGS, default="tiny")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="where the time of a training step goes")
    parser.add_argument("--peers", action="store_true", help="diffusers on PyTorch beside it")
    parser.add_argument("--json", action="store_true", help=f"write {RESULTS}")
    args = parser.parse_args()
    make, size = CONFIGS[args.config]
    config, rng = make(), np.random.default_rng(0)
    x = rng.standard_normal((args.batch, size, size, config.in_channels)).astype(np.float32)
    t = rng.integers(0, 1000, args.batch)
    print(f"fp4bf16 {fb.__version__}, {args.config}, batch {args.batch}, {num_threads()} threads")
    ours(config, x, t, args)
    if args.peers:
        peers(config, x, t, args)
    if args.json:
        report = {"config": args.config, "batch": args.batch, "threads": num_threads(), "rows": rows}
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
