"""``python -m fp4bf16 route RUN``: which layer of a run is on which track, and why; saved for other runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError
from ..routing import ClosedLoop, RouteSet, save_routes


def add_parser(subparsers: Any, guarded: Any) -> None:
    """Add the command ``route``; guarded: makes sentences of what a user can cause."""
    route = subparsers.add_parser(
        "route",
        help="show which layers of a run are on FP4, and why",
        description="Shows the routes of a run as its last checkpoint has them: of each layer the track, "
        "what FP4 costs and saves there, its share of the operations, and why; saves them for train --route.",
    )
    route.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    route.add_argument(
        "--save", type=Path, metavar="FILE", help="write the routes as JSON, for train --route and others"
    )
    route.add_argument(
        "--bucket", type=int, metavar="N", help="show a part of the noise levels, from 0, the least noise; "
        "by default training"
    )  # fmt: skip
    route.set_defaults(function=guarded(route_command))


def loop_of(folder: Path) -> tuple[ClosedLoop, RouteSet, bool]:
    """(closed loop, routes that pictures are drawn on, whether the loop trains) of a run's last checkpoint.

    A run whose training is on BF16 has a loop that holds the user's route. Raises `CheckpointError` and
    `ConfigError` for a folder that holds no run, or no checkpoint yet.
    """
    from . import checkpoint
    from .config import check, from_dict, with_value
    from .data import Vocabulary
    from .denoiser import Denoiser, base_routes
    from .folder import RunFolder
    from .host_loop import make_loop

    run = RunFolder(folder)
    config = check(from_dict(run.read_config()["config"]))
    found = checkpoint.load_last(run.checkpoint_file, run.previous_file)
    if found is None:
        raise CheckpointError(f"{run.checkpoint_file}: there is no such checkpoint")
    _, meta, _ = found
    trains = config.loop.forward != "bf16"
    model = Denoiser(config, Vocabulary(tuple(meta["words"])))
    model.unet.upsample_by_phases(meta.get("phases", False))
    loop = make_loop(config if trains else with_value(config, "loop.forward", "fp4"), model)
    if trains:
        try:
            loop.restore(meta["loop"])
        except (KeyError, ConfigError) as error:
            raise CheckpointError(
                f"{run.checkpoint_file}: does not hold the state of its loop ({error}); train the run anew"
            ) from None
        return loop, loop.routes(), True
    return loop, base_routes(config) or RouteSet([config.route]), False


def route_command(arguments: argparse.Namespace) -> int:
    """Print the table, and write the file if one is named."""
    loop, routes, trains = loop_of(arguments.run)
    count = len(routes.buckets)
    if arguments.bucket is not None and not 0 <= arguments.bucket < count:
        raise ConfigError(
            f"--bucket {arguments.bucket}: the run has {count} part{'s' * (count > 1)} of the noise levels, "
            f"counted from 0; give 0 to {count - 1}, or leave it out for training"
        )
    if not trains:
        print("training is on BF16 (loop.forward); this is the route that pictures are explored on")
    bucket = arguments.bucket if loop.deciding else None
    print(loop.explain(bucket=bucket), end="")
    for name, reason in loop.constraint.held(loop.number).items():
        print(f"held on BF16: {name}: {reason}")
    if arguments.save is not None:
        if not arguments.save.parent.is_dir():
            raise ConfigError(f"--save {arguments.save}: there is no folder {arguments.save.parent}; make it")
        if arguments.save.is_dir():
            raise ConfigError(f"--save {arguments.save}: is a folder; name a file in it")
        about = {"run": arguments.run.name, "step": loop.number}
        path = save_routes(arguments.save, RouteSet(routes.buckets, routes.training, about))
        print(f"routes: {path}")
    return 0
