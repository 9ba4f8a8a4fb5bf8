"""``python -m fp4bf16 train`` and ``sample``; ``route`` is in `route_cli`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import (
    CheckpointError,
    ConfigError,
    CudaError,
    LibraryError,
    NonFiniteError,
    RewardError,
    ShapeError,
    UnsupportedArchError,
    nearest,
)
from ..routing import RouteSet
from ..routing.routes import parsed
from . import route_cli
from .config import PRESETS, Config, check, from_dict, get_preset, override, with_objective, with_value

DEVICES = ("cpu", "cuda")
#: What a user can cause; shown as one sentence, without a traceback.
_USER = (
    CheckpointError,
    ConfigError,
    CudaError,
    ImportError,
    LibraryError,
    NonFiniteError,
    RewardError,
    ShapeError,
    UnsupportedArchError,
    OSError,
)


def add_parsers(subparsers: Any) -> None:
    """Add the commands ``train``, ``sample`` and ``route``; each sets ``function``, which takes the arguments
    and returns the exit code.
    """
    train = subparsers.add_parser(
        "train",
        help="train a small diffusion model, then align it with a reward",
        description="Trains a diffusion model on captioned pictures, explores on the FP4 track, "
        "labels and trains on BF16, and writes a report. The same command again goes on where the run was "
        "left.",
    )
    _add_train(train)
    train.set_defaults(function=train_command)
    sample = subparsers.add_parser(
        "sample", help="draw pictures from a run", description="Draws pictures from a run."
    )
    _add_sample(sample)
    sample.set_defaults(function=sample_command)
    route_cli.add_parser(subparsers, _guarded)


def _add_train(train: argparse.ArgumentParser) -> None:
    # No argparse choices: an unknown preset gets a sentence with the nearest name.
    train.add_argument(
        "--preset",
        default="faces16",
        metavar="NAME",
        help=f"{', '.join(PRESETS)}; ci takes seconds and learns nothing (default: faces16)",
    )
    train.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/PRESET)")
    train.add_argument(
        "--dry-run", action="store_true", help="print the configuration and the plan, write nothing"
    )
    train.add_argument("--seed", type=int, metavar="N", help="seed of everything random (default: 0)")
    train.add_argument(
        "--route",
        type=Path,
        metavar="FILE",
        help="JSON: parameter-name pattern -> track, for exploring and "
        "(loop.forward) training; or what the command route has saved",
    )
    train.add_argument(
        "--select",
        metavar="HOW",
        help="best_worst (default), random, mean_deviation or extremes: which explored seeds are kept",
    )
    train.add_argument(
        "--objective", metavar="NAME", help="dpo (default), nft or ppo, with the settings that suit it"
    )
    train.add_argument(
        "--reward",
        metavar="SPEC",
        help="style (default), preference, caption, class, jpeg, colourfulness, or a sum with weights: "
        "'style + 0.5 colourfulness'; write --reward=-jpeg for a minus",
    )
    _add_data(train)
    train.add_argument(
        "--log", default="", metavar="NAMES", help="also to tensorboard, wandb (extras; metrics.jsonl always)"
    )
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="e.g. base.steps=500, may be given again; the keys are those that --dry-run prints",
    )
    _add_device(train)
    train.add_argument(
        "--from",
        dest="start",
        metavar="WHAT",
        help="begin with trained weights and skip the base training: base (those that ship for the preset), "
        "a checkpoint, or the folder of a run (its base model)",
    )


def _add_data(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--data", metavar="PATH", help="captioned pictures of your own: a folder, or tar shards"
    )
    train.add_argument(
        "--pairs", metavar="PATH", help="preference pairs of your own: parquet, or a folder with a table"
    )
    train.add_argument(
        "--offline", action="store_true", help="learn from pairs that others judged, not from rollouts"
    )


def _add_sample(sample: argparse.ArgumentParser) -> None:
    of = sample.add_mutually_exclusive_group(required=True)
    of.add_argument("--run", type=Path, metavar="DIR", help="folder of the run")
    of.add_argument(
        "--from", dest="start", metavar="WHAT", help="base (weights that ship), a checkpoint, a run's folder"
    )
    sample.add_argument(
        "--preset", default="emoji32", metavar="NAME", help="whose weights --from base are (default: emoji32)"
    )
    sample.add_argument(
        "--caption",
        metavar="TEXT",
        help="what to draw, in words of the training captions, such as 'angry face' (default: one picture "
        "each of captions from all over the list)",
    )
    sample.add_argument("--n", type=int, default=16, metavar="N", help="pictures (default: 16)")
    sample.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the first picture; the next has N + 1 (default: 0)",
    )
    sample.add_argument("--track", default="bf16", metavar="T", help="bf16 (default) or fp4")
    sample.add_argument(
        "--steps",
        type=int,
        default=None,
        metavar="N",
        help="sampling steps (default: as the run's evaluation)",
    )
    sample.add_argument("--weights", default="aligned", metavar="W", help="aligned (default) or base")
    sample.add_argument("--out", type=Path, required=True, metavar="FILE", help="PNG file to write")
    _add_device(sample)


def _add_device(parser: Any) -> None:
    parser.add_argument(
        "--device", default="cpu", metavar="D", help="cpu (default), or cuda: a GPU, by the extra cuda (CuPy)"
    )


def _check_device(device: str) -> str:
    if device not in DEVICES:
        raise ConfigError(f"--device {device}: is not a device to compute on{nearest(device, DEVICES)}")
    return device


def _guarded(function):
    """Run a command; what the user can cause becomes a sentence on stderr and exit code 2."""

    def command(arguments: argparse.Namespace) -> int:
        try:
            with np.errstate(all="ignore"):  # a run that diverges says so in a sentence
                return function(arguments)
        except BrokenPipeError:  # of whoever reads the output: no fault of the run
            raise
        except _USER as error:
            print(f"fp4bf16: {error}", file=sys.stderr)
            return 2

    return command


def configuration(arguments: argparse.Namespace) -> Config:
    """The configuration that the command line asks for."""
    config = get_preset(arguments.preset)
    if arguments.seed is not None:
        config = dataclasses.replace(config, seed=arguments.seed)
    if arguments.objective is not None:
        config = with_objective(config, arguments.objective)
    for name, value in _named(arguments).items():
        config = with_value(config, name, value)
    if arguments.route is not None:
        config = dataclasses.replace(config, **_read_route(arguments.route))
    config = override(config, arguments.set)
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"--seed {config.seed}: must be a whole number from 0 to 2^63 - 1")
    return config


def _named(arguments: argparse.Namespace) -> dict[str, str]:
    """Settings that have an argument of their own. Data of one's own has no styles and no special word."""
    found = {
        "align.select": arguments.select,
        "align.reward": arguments.reward,
        "data.pictures": arguments.data,
        "data.pairs": arguments.pairs,
        "align.pairs": "data" if arguments.offline else None,
    }
    if arguments.data is not None or arguments.pairs is not None:
        found["word"] = ""
        if arguments.reward is None and arguments.pairs is not None:
            found["align.reward"] = "preference"
    return {name: value for name, value in found.items() if value is not None}


def _read_route(path: Path) -> dict[str, Any]:
    """The settings that ``--route FILE`` stands for: a plain route is `route`, saved ones of noise levels are
    `routes`.
    """
    try:
        route = parsed(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--route {path}: cannot be read as JSON ({error})") from error
    if isinstance(route, dict) and "format" in route:
        routes = RouteSet.from_dict(route, f"--route {path}")
        return {"routes": (*routes.buckets, routes.training)}
    if not isinstance(route, dict) or not all(isinstance(v, str) for v in route.values()):
        raise ConfigError(
            f'--route {path}: must be one JSON object of pattern -> track, like {{"conv_in*": "bf16"}}'
        )
    return {"route": route}


def plan(config: Config, start: Any = None) -> str:
    """What a run would do, in lines. start: the weights that it begins with, if any."""
    from ..align.panel import Panel
    from ..align.rollout import choose_prompts
    from .denoiser import Denoiser
    from .host_loop import make_loop
    from .state import check_adapters, warnings_of
    from .task import check_reward, make_task

    task, panel = make_task(config), Panel.parse(config.align.reward)
    panel.require()
    check_reward(task, panel)
    if config.align.pairs == "rollouts":
        choose_prompts(task.prompts, config.align.prompts, 0, 0)  # says so where they are too few
    model = Denoiser(config, task.words)
    check_adapters(config, model)
    if start is not None:
        start.check(config, model)
    warnings = warnings_of(config, model, make_loop(config, model), start)
    b, a, e = config.base, config.align, config.eval
    trained = sum(trainer.steps for trainer in panel.trainers(task.panel_data(), _learning(config)))
    return "\n".join(
        [
            f"model     {model.unet.parameter_count() / 1e6:.2f} M parameters, {config.size} x {config.size} "
            f"pixels, {len(task.words)} words; {config.diffusion.schedule} schedule, "
            f"{config.diffusion.prediction} prediction, {config.diffusion.sampler} sampler",
            f"data      {task.facts}",
            f"base      {b.steps} steps of {b.batch} pictures"
            if start is None
            else f"base      is there: --from {start.source}",
            f"judges    reward {panel.name}: {trained} steps of {config.judge.batch} pictures",
            f"align     {a.iterations} iterations: {_iteration(config)}",
            *_loop(config),
            f"evaluate  {e.captions or 'all'} captions x {e.seeds} seeds x {e.steps} steps, base and aligned",
            *(f"warning   {sentence}" for sentence in warnings),
        ]
    )


def _loop(config: Config) -> list[str]:
    """What the closed loop does, none where training's forward is on BF16."""
    o = config.loop
    if o.forward == "bf16":
        return []
    if o.forward == "fp4":
        return [f"loop      training's forward on the route; one step in {o.every} looks at both tracks"]
    return [
        f"loop      a router ({o.sensitivity}), for {100 * o.budget:g} % of the loss: one step in {o.every} "
        f"looks at both tracks, one in {o.decide} decides"
    ]


def _learning(config: Config) -> Any:
    from ..align.measures import Learning

    return Learning(config.judge.steps, config.judge.batch, config.judge.width, config.seed)


def _iteration(config: Config) -> str:
    """One iteration of the alignment."""
    a = config.align
    pairs = f"{a.prompts * a.keep // 2} pairs"
    trains = "" if a.parameters == "full" else f", LoRA of rank {config.lora.rank}"
    if a.pairs == "data":
        return f"{pairs} of the data x {a.timesteps} timesteps of DPO{trains}"
    cost = a.prompts * a.seeds * a.explore_steps
    again = ""
    if a.train_on == "bf16":
        cost += a.prompts * a.keep * a.steps
        again = f", {a.keep} a prompt x {a.steps} steps on bf16"
    learns = {
        "dpo": f"{pairs} x {a.timesteps} timesteps of DPO",
        "nft": f"{a.prompts * a.keep} pictures x {a.timesteps} timesteps of DiffusionNFT",
        "ppo": f"{a.prompts * a.keep} trajectories of PPO",
    }[a.objective]
    return (
        f"{a.prompts} prompts x {a.seeds} seeds x {a.explore_steps} steps on {a.explore_track}, {a.select}"
        f"{again} ({cost} evaluations), {learns}{trains}"
    )


@_guarded
def train_command(arguments: argparse.Namespace) -> int:
    """Exit code 0: finished; 2: the request cannot be met; 130 or 143: stopped by Ctrl-C or SIGTERM, and
    saved.
    """
    from ..extras import require
    from .loggers import parse_loggers
    from .progress import Progress, announce_compilation
    from .run import Stopped, train
    from .weights import load_start

    config, device = configuration(arguments), _check_device(arguments.device)
    log = parse_loggers(arguments.log)
    start = None if arguments.start is None else load_start(arguments.start, config.preset)
    if arguments.dry_run:
        print(json.dumps(config.to_dict(), indent=2) + "\n" + plan(config, start))
        return 0
    for module, purpose in (("PIL.Image", "train"), ("safetensors.numpy", "train")):
        require(module, purpose)
    out = arguments.out or Path("runs") / config.preset
    progress = Progress()
    announce_compilation(progress.say)
    again = "python -m fp4bf16 " + shlex.join(sys.argv[1:])
    try:
        s = train(config, out, progress, device, start, log)
    except Stopped as stopped:
        progress.say(f"stopped and saved in {out}; go on with the same command: {again}")
        return 128 + stopped.args[0]
    except KeyboardInterrupt:
        progress.say(
            f"stopped at once; {out} holds the last checkpoint, go on with the same command: {again}"
        )
        return 130
    except OSError as error:  # a full disk, for one
        raise CheckpointError(
            f"--out {out}: the run stopped ({error}); put that right, and the same command goes on from its "
            f"last checkpoint: {again}"
        ) from error
    _say_result(s)
    print(f"report: {out / 'report.html'}")
    return 0


def _say_result(s: dict[str, Any]) -> None:
    """The headline of a finished run, and each broken guard."""
    from .chart import number

    digits = ".1f" if s["heldout_unit"] == "points" else ".3g"
    gain, low, high = (format(s[f"heldout_gain{part}"], f"+{digits}") for part in ("", "_low", "_high"))
    print(
        f"finished: held-out judge {gain} {s['heldout_unit']} (95 % interval {low} to {high}) on "
        f"{s['pictures']} pictures, reward {number(s['reward_base'])} -> {number(s['reward'])}, "
        f"{s['seconds']:.0f} s, {s['peak_rss_mb']:.0f} MB"
    )
    for guard in s["guards"]:
        if not guard["holds"]:
            before = number(guard["base"])
            print(
                f"guard broken: {guard['name']} is {number(guard['aligned'])} (base {before}), allowed is "
                f"{number(guard['low'])} to {number(guard['high'])}: do not believe the gain"
            )


def load_model(folder: Path, weights: str = "aligned"):
    """The `Denoiser` of a run's folder, with its ``aligned`` or its ``base`` weights."""
    from . import checkpoint
    from .data import Vocabulary
    from .denoiser import Denoiser
    from .folder import RunFolder
    from .host_loop import routes_in

    run = RunFolder(folder)
    config = check(from_dict(run.read_config()["config"]))
    found = checkpoint.load_last(run.checkpoint_file, run.previous_file)
    if found is None:
        raise CheckpointError(f"{run.checkpoint_file}: there is no such checkpoint")
    arrays, meta, _ = found
    model = Denoiser(config, Vocabulary(tuple(meta["words"])))
    model.unet.upsample_by_phases(meta.get("phases", False))
    # Before the alignment the average of the weights is the model; afterwards it is what DPO started from.
    which = "ema" if weights == "base" or meta["stage"] == "base" else "policy"
    model.routes = routes_in(config, model, meta.get("loop"))
    model.unet.load_state_dict(checkpoint.take(arrays, which))
    return model


def _model_to_sample(arguments: argparse.Namespace) -> Any:
    """The `Denoiser` that `sample` is asked to draw from."""
    from .weights import load_start

    if arguments.weights not in ("aligned", "base"):
        raise ConfigError(f"--weights {arguments.weights}: is not known; use aligned or base")
    if arguments.run is not None:
        return load_model(arguments.run, arguments.weights)
    get_preset(arguments.preset)
    return load_start(arguments.start, arguments.preset).model()


def _captions(model: Any, n: int) -> list[str]:
    """`n` captions that the model was trained on, from all over the list."""
    from .task import make_task

    known = make_task(model.config).prompts
    step = max(1, len(known) / n)
    return [known[int(i * step) % len(known)] for i in range(n)]


@_guarded
def sample_command(arguments: argparse.Namespace) -> int:
    """Write one PNG with `n` pictures, of one caption or of one each."""
    from ..align.pool import healthy
    from .engine import make_sampler
    from .pictures import grid, png, to_bytes

    device = _check_device(arguments.device)
    if arguments.track not in ("bf16", "fp4"):
        raise ConfigError(f"--track {arguments.track}: is not a track to sample on; use bf16 or fp4")
    if not 1 <= arguments.n <= 10000 or not 0 <= arguments.seed < 2**63:
        raise ConfigError(
            f"--n {arguments.n} --seed {arguments.seed}: give 1 to 10000 pictures and a seed from 0"
        )
    if arguments.out.is_dir():
        raise ConfigError(f"--out {arguments.out}: is a folder; name the PNG file to write")
    model = _model_to_sample(arguments)
    n, one = arguments.n, arguments.caption
    captions = [one] * n if one is not None else _captions(model, n)
    steps = model.config.eval.steps if arguments.steps is None else arguments.steps
    if one is not None:
        model.encode(captions, strict=True)
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {arguments.out}: {arguments.out.parent} cannot be made a folder "
                          f"({error.strerror}); name another file") from None  # fmt: skip
    draw = make_sampler(device, model)
    pictures = draw([arguments.seed + i for i in range(n)], captions, steps, arguments.track)
    if not healthy(pictures).any():
        raise NonFiniteError(
            f"sample: none of {n} pictures is finite and not constant, so the model has diverged; train anew "
            f"with a lower rate, or draw from --weights base"
        )
    sheet = grid(to_bytes(pictures), min(n, 8))
    arguments.out.write_bytes(png(sheet, scale=max(1, 128 // model.config.size)))
    named = [repr(one)] if one is not None else [*map(repr, captions[:8]), *["..."] * (n > 8)]
    print(f"{n} pictures of {', '.join(named)}: {arguments.out}")
    return 0
