"""Train a base model on a GPU and write it as the weights that ship: ``train --from base`` begins with them.

    python tools/train_base.py --preset emoji32 --out runs/base                    # weights, recipe, pictures
    python tools/train_base.py --preset emoji32 --out fp4bf16/train/assets --ship  # the same into the package

Writes PRESET.safetensors (BF16, the average of the weights), PRESET.json (recipe and SHA-256), and without
--ship also curve.json and picture grids of the average at several points. ``--seconds`` measures the rate
first and chooses the steps from it; the recipe then holds the steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp4bf16._version import __version__  # noqa: E402
from fp4bf16.cli.bench.record import commit  # noqa: E402
from fp4bf16.diffusion.noise import subseed  # noqa: E402
from fp4bf16.train.checkpoint import take  # noqa: E402
from fp4bf16.train.config import Config, get_preset, override, with_value  # noqa: E402
from fp4bf16.train.data import Pairs, Vocabulary, load_pairs  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402
from fp4bf16.train.engine import make_engine, make_sampler  # noqa: E402
from fp4bf16.train.pictures import grid, png, to_bytes  # noqa: E402
from fp4bf16.train.stages import base_data, learning_rate  # noqa: E402
from fp4bf16.train.weights import write_base  # noqa: E402

COLUMNS, ROWS = 16, 10  # of a grid: captions side by side, seeds below each other
WARM_UP, MEASURED = 50, 200  # steps
DATA = {
    "captions": "the policy's captions of fp4bf16/train/assets/split.tsv, both drawing styles",
    "noto": "Noto Emoji, Copyright Google LLC, Apache-2.0, https://github.com/googlefonts/noto-emoji",
    "twemoji": "Twemoji, Copyright 2020 Twitter, Inc and other contributors, CC-BY-4.0, "
    "https://github.com/jdecked/twemoji",
}


class Training:
    """A base model in training, its curve and its pictures."""

    def __init__(self, config: Config, device: str):
        self.config, self.device = config, device
        self.pairs: Pairs = load_pairs(config.size).select(role="policy", word=config.word or None)
        self.begin()

    def begin(self) -> None:
        """From the start, with the configuration's seed."""
        self.model = Denoiser(self.config, Vocabulary.of(self.pairs.captions))
        self.engine = make_engine(self.device, self.model, self.config)
        self.data = base_data(self.pairs, self.model, lambda purpose: subseed(self.config.seed, purpose))
        self.losses: list[float] = []

    def steps(self, count: int) -> float:
        """`count` more steps; the seconds that they took."""
        base, began = self.config.base, time.perf_counter()
        for step in range(len(self.losses), len(self.losses) + count):
            lr = learning_rate(step, base.steps, base.lr, base.decay)
            self.losses.append(self.engine.base_step(self.data, step, lr).loss)
        return time.perf_counter() - began

    def average(self) -> dict[str, np.ndarray]:
        return take(self.engine.state(), "ema")

    def pictures(self, steps: int) -> bytes:
        """A grid of the average's pictures as PNG: captions from all over the list, `ROWS` seeds of each."""
        every = len(self.pairs) / COLUMNS
        captions = [self.pairs.captions[int(i * every)] for i in range(COLUMNS)]
        model = Denoiser(self.config, self.model.vocabulary)
        model.unet.load_state_dict(self.average())
        draw = make_sampler(self.device, model)
        found = draw(list(range(COLUMNS * ROWS)), captions * ROWS, steps)
        return png(grid(to_bytes(found), COLUMNS), scale=2)


def measured_steps(config: Config, device: str, seconds: float) -> tuple[int, float]:
    """(steps that take about `seconds`, seconds a step)."""
    trial = Training(config, device)
    trial.steps(WARM_UP)
    step = trial.steps(MEASURED) / MEASURED
    return max(100, int(seconds / step) // 100 * 100), step


def recipe(training: Training, seconds: float) -> dict:
    """How the weights were made."""
    config = training.config
    return {
        "preset": config.preset,
        "steps": config.base.steps,
        "seed": config.seed,
        "pictures_seen": config.base.steps * config.base.batch,
        "loss": float(np.mean(training.losses[-500:])),
        "seconds": round(seconds, 1),
        "device": training.engine.device,
        "version": __version__,
        "commit": commit(),
        "made_with": "tools/train_base.py",
        "data": DATA,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="emoji32")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seconds", type=float, help="choose base.steps so that the training takes so long")
    parser.add_argument("--points", type=int, default=4, help="grids on the way (default: 4)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ship", action="store_true", help="weights and recipe alone")
    args = parser.parse_args()
    config = override(get_preset(args.preset), args.set)
    if args.seconds is not None:
        steps, step = measured_steps(config, args.device, args.seconds)
        print(f"{step * 1e3:.2f} ms a step, {config.base.batch / step:.0f} pictures/s: {steps} steps")
        config = with_value(config, "base.steps", steps)
    training, took = Training(config, args.device), 0.0
    args.out.mkdir(parents=True, exist_ok=True)
    for mark in sorted({round(config.base.steps * i / args.points) for i in range(1, args.points + 1)}):
        took += training.steps(mark - len(training.losses))
        recent = float(np.mean(training.losses[-500:]))
        print(f"step {mark}: loss {recent:.5f}, {took:.1f} s", flush=True)
        if not args.ship:
            (args.out / f"{mark:07d}.png").write_bytes(training.pictures(25))
    path, words = args.out / f"{config.preset}.safetensors", training.model.vocabulary.words
    whole = write_base(path, training.average(), config, words, recipe(training, took))
    if not args.ship:
        parts = np.array_split(training.losses, min(400, config.base.steps))
        (args.out / "curve.json").write_text(json.dumps({"loss": [float(np.mean(part)) for part in parts]}))
    print(f"{path}: {whole['parameters']} parameters, {whole['bytes']} bytes, sha256 {whole['sha256']}")


if __name__ == "__main__":
    main()
