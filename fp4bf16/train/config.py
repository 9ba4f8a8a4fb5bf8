"""Configuration of a run: frozen dataclasses, presets by name, ``--set section.field=value`` overrides.

A run is defined by steps, never by seconds: the same configuration gives the same numbers on a slower
machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from ..align.rollout import SELECT
from ..diffusion.schedules import check_prediction, get_schedule
from ..errors import ConfigError, nearest
from ..tracks import TRACKS


@dataclass(frozen=True)
class ModelConfig:
    """The UNet, in diffusers' words, on pictures folded by `unshuffle` (space to depth)."""

    unshuffle: int = 2
    block_out_channels: tuple[int, ...] = (32, 64)
    attention: tuple[bool, ...] = (False, False)  # attention blocks on each level; the middle always has one
    layers_per_block: int = 1
    norm_num_groups: int = 8


@dataclass(frozen=True)
class DiffusionConfig:
    """Noise schedule, prediction and sampler."""

    schedule: str = "cosine"
    timesteps: int = 1000
    prediction: str = "v"
    chunk: int = 64  # pictures that the network samples at a time


@dataclass(frozen=True)
class BaseConfig:
    """Training of the base model, on both styles, without telling it which."""

    steps: int = 1000
    batch: int = 32
    lr: float = 3e-3
    decay: float = 0.4  # last share of the steps, in which the learning rate falls linearly to 0
    weight_decay: float = 0.0
    clip: float = 1.0  # largest gradient norm
    ema: float = 0.995
    drop_caption: float = 0.1
    checkpoint_every: int = 200


@dataclass(frozen=True)
class JudgeConfig:
    """The reward judge and the held-out judge, trained on captions that the policy never sees."""

    steps: int = 800
    batch: int = 64
    width: int = 32


@dataclass(frozen=True)
class AlignConfig:
    """Explore, select, regenerate, DPO."""

    iterations: int = 10
    prompts: int = 16  # an iteration
    seeds: int = 24  # a prompt
    keep: int = 8  # the best half and the worst half of them a prompt
    explore_steps: int = 4
    steps: int = 10
    explore_track: str = "fp4"
    select: str = "best_worst"
    beta: float = 4000.0
    hold: float = 3.0  # weight, in units of beta, that keeps folded pixels from drifting apart
    timesteps: int = 4  # a pair
    timestep_fraction: float = 0.6  # of the sampler's steps, from the noisy end: where a pair is compared
    batch: int = 32  # pairs times timesteps in one optimizer step
    lr: float = 1e-4
    decay: float = 0.5  # last share of the iterations, in which the learning rate falls linearly to 0
    clip: float = 1.0
    fidelity_every: int = 5  # iterations between measurements of the rank fidelity
    retries: int = 2  # new seeds tried for a rollout that is not healthy


@dataclass(frozen=True)
class EvalConfig:
    """Pictures that the base and the final model are judged by: the same noise for both."""

    seeds: int = 4  # a caption
    captions: int = 0  # 0: all
    steps: int = 10


@dataclass(frozen=True)
class Config:
    """One run. `route` maps parameter-name patterns to the track of the exploring network."""

    preset: str = "faces16"
    seed: int = 0
    size: int = 16  # pixels a side
    word: str = "face"  # captions of the policy hold this word; "": all
    winner: str = "noto"
    route: dict[str, str] = field(
        default_factory=lambda: {"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"}
    )
    model: ModelConfig = ModelConfig()
    diffusion: DiffusionConfig = DiffusionConfig()
    base: BaseConfig = BaseConfig()
    judge: JudgeConfig = JudgeConfig()
    align: AlignConfig = AlignConfig()
    eval: EvalConfig = EvalConfig()

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, as written to ``config.json``."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


PRESETS: dict[str, Config] = {
    "faces16": Config(),
    "emoji32": Config(
        preset="emoji32",
        size=32,
        word="",
        model=ModelConfig(unshuffle=2, block_out_channels=(32, 64, 64), attention=(False, True, True)),
        # The base is for a GPU; its weights ship (--from base), and what follows it takes minutes on a CPU.
        base=BaseConfig(steps=5200, batch=256, lr=2e-3, ema=0.9998, checkpoint_every=5000),
        judge=JudgeConfig(steps=400, batch=32, width=24),
        align=AlignConfig(iterations=12),
        eval=EvalConfig(seeds=1),
    ),
    "ci": Config(
        preset="ci",
        model=ModelConfig(block_out_channels=(16, 32), norm_num_groups=4),
        diffusion=DiffusionConfig(chunk=16),
        base=BaseConfig(steps=40, batch=16, checkpoint_every=10),
        judge=JudgeConfig(steps=20, batch=32, width=16),
        align=AlignConfig(
            iterations=2,
            prompts=4,
            seeds=6,
            keep=4,
            explore_steps=2,
            steps=4,
            timesteps=2,
            batch=8,
            fidelity_every=1,
        ),
        eval=EvalConfig(seeds=1, captions=24, steps=4),
    ),
}


def get_preset(name: str) -> Config:
    """The preset of that name; `ConfigError` with the nearest name otherwise.

    >>> get_preset("faces16").base.steps
    1000
    """
    if name not in PRESETS:
        raise ConfigError(f"preset: {name!r} is not known{nearest(name, PRESETS)}")
    return PRESETS[name]


def _convert(name: str, text: Any, kind: Any) -> Any:
    """A value from the command line or from JSON as the field's type."""
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(text).lower()]
        if kind in (int, float, str):
            return kind(text)
        value = json.loads(text) if isinstance(text, str) else text
        if kind == dict[str, str] and isinstance(value, dict):
            return {str(k): str(v) for k, v in value.items()}
        item = (
            kind.__args__[0]
            if isinstance(value, list) and getattr(kind, "__origin__", None) is tuple
            else None
        )
        if item is not None and all(type(v) is item for v in value):
            return tuple(value)
    except (KeyError, ValueError, TypeError):
        pass
    word = getattr(kind, "__name__", str(kind)) if not hasattr(kind, "__origin__") else str(kind)
    raise ConfigError(f"{name}: {text!r} is not a value of type {word}; give for example --set {name}=...")


def with_value(config: Any, name: str, value: Any, prefix: str = "") -> Any:
    """`config` with the field `name` ("section.field" or "field") set to `value`, text or the thing itself.

    >>> with_value(get_preset("ci"), "base.steps", "50").base.steps
    50
    """
    head, _, rest = name.partition(".")
    known = get_type_hints(type(config))
    if head not in known:
        raise ConfigError(f"{prefix}{head}: no such setting{nearest(head, known)}")
    inner = getattr(config, head)
    if dataclasses.is_dataclass(inner):
        if not rest:
            fields = ", ".join(f.name for f in dataclasses.fields(inner))
            raise ConfigError(f"{prefix}{head}: is a section, not a setting; it has {fields}")
        return dataclasses.replace(config, **{head: with_value(inner, rest, value, f"{prefix}{head}.")})
    if rest:
        raise ConfigError(
            f"{prefix}{name}: {prefix}{head} is a setting, not a section; use --set {prefix}{head}=..."
        )
    return dataclasses.replace(config, **{head: _convert(prefix + head, value, known[head])})


def override(config: Config, settings: list[str]) -> Config:
    """`config` with ``key=value`` settings applied in order, then checked."""
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r}: has no '='; write --set section.field=value")
        config = with_value(config, name.strip(), value.strip())
    return check(config)


def from_dict(data: dict[str, Any]) -> Config:
    """The configuration that `Config.to_dict` wrote. Unknown or wrong fields raise `ConfigError`."""
    config = Config()
    for name, value in data.items():
        if isinstance(value, dict) and dataclasses.is_dataclass(getattr(config, name, None)):
            for inner, item in value.items():
                config = with_value(config, f"{name}.{inner}", item)
        else:
            config = with_value(config, name, value)
    return config


#: Fields that must be larger than 0.
_POSITIVE = (
    "size",
    "model.unshuffle",
    "model.layers_per_block",
    "model.norm_num_groups",
    "diffusion.timesteps",
    "diffusion.chunk",
    "base.steps",
    "base.batch",
    "base.checkpoint_every",
    "base.lr",
    "base.clip",
    "judge.steps",
    "judge.batch",
    "align.prompts",
    "align.seeds",
    "align.batch",
    "align.timesteps",
    "align.lr",
    "align.clip",
    "align.beta",
    "align.explore_steps",
    "align.steps",
    "align.fidelity_every",
    "eval.seeds",
    "eval.steps",
)


def check(config: Config) -> Config:
    """Return `config` if a run can be made of it, else raise `ConfigError`: a sentence with the value and
    the fix.
    """
    get_schedule(config.diffusion.schedule, 1)
    check_prediction(config.diffusion.prediction)
    steps = config.diffusion.timesteps
    for name in _POSITIVE:
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}: is {value}, but it must be positive and finite")
        if name.endswith("steps") and name not in ("base.steps", "judge.steps") and value > steps:
            raise ConfigError(
                f"{name}: is {value}, but a schedule of {steps} timesteps (diffusion.timesteps) has no more "
                f"steps than that; use {steps} at most"
            )
    for holds, sentence in [*_model_rules(config), *_training_rules(config), *_align_rules(config)]:
        if not holds:
            raise ConfigError(sentence)
    for pattern, track in config.route.items():
        if track not in TRACKS:
            raise ConfigError(f"route: pattern {pattern!r} has track {track!r}{nearest(track, TRACKS)}")
    return config


def _model_rules(c: Config) -> list[tuple[bool, str]]:
    m, levels = c.model, len(c.model.block_out_channels)
    side = c.size // m.unshuffle
    return [
        (
            32 % c.size == 0 and c.size >= 8,
            f"size: {c.size} does not divide the pictures' 32 pixels; use 8, 16 or 32",
        ),
        (
            c.size % m.unshuffle == 0,
            f"model.unshuffle: {m.unshuffle} does not divide size {c.size}; use 1, 2 or 4",
        ),
        (
            levels > 0 and side % 2 ** max(levels - 1, 0) == 0,
            f"model.block_out_channels: {levels} levels halve {side} pixels {levels - 1} times, which does "
            "not go; "
            "use fewer levels or a larger size",
        ),
        (
            len(m.attention) == levels,
            f"model.attention: has {len(m.attention)} entries for {levels} levels; give one a level",
        ),
        (
            all(n > 0 and n % m.norm_num_groups == 0 for n in m.block_out_channels),
            f"model.norm_num_groups: {m.norm_num_groups} does not divide block_out_channels "
            f"{m.block_out_channels}; "
            "use a common divisor",
        ),
    ]


def _training_rules(c: Config) -> list[tuple[bool, str]]:
    b, width = c.base, c.judge.width
    return [
        (c.winner in ("noto", "twemoji"), f"winner: {c.winner!r} is not a style; use noto or twemoji"),
        (
            c.eval.captions == 0 or c.eval.captions >= 2,
            f"eval.captions: is {c.eval.captions}, but an interval needs 2 captions; give 0 for all of them",
        ),
        (0 <= b.decay <= 1, f"base.decay: is {b.decay}, but it is a share from 0 to 1"),
        (0 <= b.drop_caption <= 1, f"base.drop_caption: is {b.drop_caption}, but it is a share from 0 to 1"),
        (0 <= b.ema < 1, f"base.ema: is {b.ema}, but a decay is at least 0 and under 1"),
        (width >= 8 and width % 8 == 0, f"judge.width: is {width}, but it must be a multiple of 8"),
    ]


def _align_rules(c: Config) -> list[tuple[bool, str]]:
    a = c.align
    return [
        (
            a.keep % 2 == 0 and 2 <= a.keep <= a.seeds,
            f"align.keep: is {a.keep} of {a.seeds} seeds; give an even number from 2 to align.seeds",
        ),
        (
            0 < a.timestep_fraction <= 1,
            f"align.timestep_fraction: is {a.timestep_fraction}, but it is a share over 0, at most 1",
        ),
        (0 <= a.decay <= 1, f"align.decay: is {a.decay}, but it is a share from 0 to 1"),
        (a.iterations >= 0, f"align.iterations: is {a.iterations}, but it cannot be negative"),
        (a.retries >= 0, f"align.retries: is {a.retries}, but it cannot be negative"),
        (a.select in SELECT, f"align.select: {a.select!r} is not known{nearest(a.select, SELECT)}"),
        (
            a.explore_track in ("fp4", "bf16"),
            f"align.explore_track: {a.explore_track!r} is not a track to explore on; use fp4 or bf16",
        ),
    ]
