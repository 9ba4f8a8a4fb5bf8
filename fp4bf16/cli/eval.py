"""``python -m fp4bf16 eval``: distances, scores and neighbours of what a run draws."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RewardError, UnsupportedArchError, nearest

DEVICES = ("cpu", "cuda")


def add_parser(subparsers: Any) -> None:
    """Add ``eval`` to the command line."""
    parser = subparsers.add_parser(
        "eval",
        help="measure what a run has learnt, and FP4 against BF16",
        description="Draws pictures from the base and the aligned model of a run, on the BF16 and the FP4 "
        "track, and writes kernel and Fréchet distances to real pictures, the judges' scores with intervals, "
        "distances to the nearest training pictures, and sheets of pictures. The run may still be going on.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--n", type=int, metavar="N", help="pictures a set (default: as the run's evaluation)"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="sampling steps (default: as the run's evaluation)"
    )
    parser.add_argument("--sampler", metavar="S", help="ddim, euler, heun or ancestral (default: the run's)")
    parser.add_argument(
        "--guidance", type=float, metavar="G", help="of the captions; 1: none (default: the run's)"
    )
    parser.add_argument(
        "--route", metavar="FILE", help="draw the FP4 pictures on these routes: JSON as the command route "
        "saves it, for each part of the noise levels, or one object of pattern -> track (default: the run's)"
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of the pictures (default: the run's, so that they are its own)"
    )
    parser.add_argument(
        "--floor-seeds",
        type=int,
        default=3,
        metavar="N",
        help="BF16 sets from other seeds, that say how far sets differ by their seeds alone (default: 3)",
    )
    parser.add_argument(
        "--extractors",
        metavar="NAMES",
        help="of pixels, classes, efficientnet, with commas (default: all that are installed; efficientnet "
        "needs the extra eval)",
    )
    parser.add_argument(
        "--extrapolate", action="store_true", help="also the Fréchet distance for n to infinity; takes long"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="D", help="cpu (default), or cuda: a GPU, by the extra cuda (CuPy)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: RUN/eval)")
    parser.set_defaults(function=main)


def main(args: argparse.Namespace) -> int:
    """Exit code 0: done; 2: what was asked for cannot be done, and a sentence says why."""
    try:
        return _evaluate(args)
    except (ImportError, RewardError, UnsupportedArchError) as error:
        print(f"fp4bf16: {error}", file=sys.stderr)
        return 2


def _evaluate(args: argparse.Namespace) -> int:
    from ..extras import require
    from ..train.evaluation import Settings, check_target, evaluate, write_folder

    if args.device not in DEVICES:
        raise ConfigError(
            f"--device {args.device}: is not a device to compute on{nearest(args.device, DEVICES)}"
        )
    for module in ("PIL.Image", "safetensors.numpy"):
        require(module, "eval")
    named = args.extractors
    settings = Settings(
        args.n, args.steps, args.sampler, args.guidance, args.seed, args.device, args.floor_seeds,
        None if named is None else tuple(name.strip() for name in named.split(",")), args.extrapolate,
        args.route,
    )  # fmt: skip
    if not args.run.is_dir():
        raise ConfigError(f"eval {args.run}: there is no such folder; name the folder of a run")
    out = args.out or args.run / "eval"
    check_target(out)  # before anything is drawn
    from ..train.evaluation_page import files, text

    done = evaluate(args.run, settings)
    write_folder(out, files(done))
    print(text(done.report))
    print(f"\nreport: {out / 'report.html'}")
    return 0
