"""Which configurations a run can be made of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..align.panel import parse_weights
from ..align.rollout import SELECT
from ..diffusion.samplers import SAMPLERS
from ..diffusion.schedules import check_prediction, get_schedule
from ..errors import ConfigError, nearest
from ..tracks import TRACKS

if TYPE_CHECKING:
    from .config import Config

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
    "lora.rank",
    "lora.alpha",
    "nft.beta",
    "nft.advantage_clip",
    "ppo.clip",
    "ppo.advantage_clip",
    "ppo.epochs",
    "data.shuffle",
    "loop.every",
    "loop.decide",
    "loop.curvature_every",
    "loop.probes",
    "loop.buckets",
    "loop.cooldown",
    "loop.consistency_layers",
    "loop.target",
    "eval.seeds",
    "eval.steps",
)


#: Beyond these the arithmetic overflows, or nothing is learnt.
_RANGES = (
    ("align.hold", 0, 1e6),
    ("align.beta", 0, 1e9),
    ("base.weight_decay", 0, 1e3),
    ("lora.alpha", 0, 1e6),
    ("nft.kl", 0, 1e6),
    ("diffusion.guidance", -100, 100),
    ("loop.budget", 0, 1e3),
    ("loop.hysteresis", 0, 1e3),
    ("loop.limit", 0, 1e6),
    ("loop.consistency", 0, 1e6),
    ("loop.probes", 1, 4096),
)


def check(config: Config) -> Config:
    """Return `config` if a run can be made of it, else raise `ConfigError`: a sentence with the value and
    the fix.
    """
    get_schedule(config.diffusion.schedule, 1)
    check_prediction(config.diffusion.prediction)
    steps = config.diffusion.timesteps
    for name in _POSITIVE:
        value = _setting(config, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}: is {value}, but it must be positive and finite")
        if name.endswith("steps") and name not in ("base.steps", "judge.steps") and value > steps:
            raise ConfigError(
                f"{name}: is {value}, but a schedule of {steps} timesteps (diffusion.timesteps) has no more "
                f"steps than that; use {steps} at most"
            )
    rules = [*_model_rules(config), *_training_rules(config), *_align_rules(config), *_word_rules(config)]
    rules += _loop_rules(config)
    for name, low, high in _RANGES:
        value = _setting(config, name)
        if not low <= value <= high:
            raise ConfigError(f"{name}: is {value}, but it must be from {low:g} to {high:g}")
    for holds, sentence in rules:
        if not holds:
            raise ConfigError(sentence)
    parse_weights(config.align.reward)
    for i, route in enumerate((config.route, *config.routes)):
        for pattern, track in route.items():
            if track not in TRACKS:
                name = f"routes: number {i}, " if i else "route: "
                raise ConfigError(f"{name}pattern {pattern!r} has track {track!r}{nearest(track, TRACKS)}")
    return config


def _setting(config: Config, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def check_device(config: Config, device: str) -> None:
    """`ConfigError` for what a run of `config` needs and `device` does not have."""
    if device == "cuda" and config.align.workers:
        raise ConfigError(
            f"align.workers: is {config.align.workers}, but a GPU explores in this process alone; use 0"
        )


def _model_rules(c: Config) -> list[tuple[bool, str]]:
    m, levels = c.model, len(c.model.block_out_channels)
    side = c.size // m.unshuffle
    return [
        (
            bool(c.data.pictures or c.data.pairs) or (32 % c.size == 0 and c.size >= 8),
            f"size: {c.size} does not divide the pictures' 32 pixels; use 8, 16 or 32",
        ),
        (8 <= c.size <= 512, f"size: is {c.size}, but it must be from 8 to 512 pixels"),
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
        (
            c.diffusion.guidance == 1 or b.drop_caption > 0,
            f"diffusion.guidance: is {c.diffusion.guidance}, but base.drop_caption is 0, so that the network "
            "never learns pictures without captions; use a drop_caption of 0.1, or a guidance of 1",
        ),
        (width >= 8 and width % 8 == 0, f"judge.width: is {width}, but it must be a multiple of 8"),
    ]


#: Settings that are one of a few words.
_WORDS = {
    "diffusion.sampler": tuple(SAMPLERS),
    "align.objective": ("dpo", "nft", "ppo"),
    "align.parameters": ("full", "lora"),
    "align.pairs": ("rollouts", "data"),
    "align.train_on": ("bf16", "fp4"),
    "align.guard": ("hold", "warn"),
    "loop.forward": ("bf16", "fp4", "router"),
    "loop.sensitivity": ("outputs", "fisher", "hutchinson", "hutch++"),
    "loop.latency": ("model", "measured"),
}


def _loop_rules(c: Config) -> list[tuple[bool, str]]:
    o, given = c.loop, len(c.routes) - 1
    return [
        (
            o.decide % o.every == 0,
            f"loop.decide: is {o.decide}, but decisions are made on sampled steps, each {o.every}th "
            f"(loop.every); use a multiple of it",
        ),
        (
            o.curvature_every % o.every == 0,
            f"loop.curvature_every: is {o.curvature_every}, but curvature is measured on sampled steps, each "
            f"{o.every}th (loop.every); use a multiple of it",
        ),
        (
            o.sensitivity != "hutch++" or o.probes >= 3,
            f"loop.probes: is {o.probes}, but hutch++ shares them out to three parts; use 3 or more",
        ),
        (
            o.jump == 0 or 1 < o.jump < math.inf,
            f"loop.jump: is {o.jump}, but it is a factor over 1 that norms may jump by; use e.g. 8, or 0 to "
            f"allow any",
        ),
        (
            o.buckets <= c.diffusion.timesteps,
            f"loop.buckets: is {o.buckets}, but there are {c.diffusion.timesteps} noise levels "
            f"(diffusion.timesteps); use that many at most",
        ),
        (
            not c.routes or given >= 1,
            "routes: has one route, but the last is that of training and at least one of a bucket is needed; "
            "give --route a file of them",
        ),
        (
            not c.routes or o.forward != "router" or given in (1, o.buckets),
            f"routes: are of {given} buckets, but loop.buckets is {o.buckets}; set loop.buckets={given}",
        ),
        (
            given <= c.diffusion.timesteps,
            f"routes: are of {given} buckets, but there are {c.diffusion.timesteps} noise levels "
            f"(diffusion.timesteps); give fewer",
        ),
    ]


def _word_rules(c: Config) -> list[tuple[bool, str]]:
    """Words that are known, and go together."""
    rules = []
    for name, known in _WORDS.items():
        section, field_name = name.split(".")
        word = getattr(getattr(c, section), field_name)
        rules.append((word in known, f"{name}: {word!r} is not known{nearest(word, known)}"))
    a = c.align
    rules += [
        (
            a.pairs == "rollouts" or a.objective == "dpo",
            f"align.pairs: is data, but objective {a.objective} needs rewards of its own pictures; use "
            f"align.objective=dpo, or align.pairs=rollouts",
        ),
        (
            a.objective != "ppo" or a.train_on == "bf16",
            "align.train_on: is fp4, but ppo needs the likelihood of its own samples, which only BF16 has; "
            "use bf16, or another objective",
        ),
        (
            a.objective != "ppo" or a.steps > 1,
            "align.steps: is 1, but ppo learns nothing from the last step; use 2",
        ),
        (
            a.pairs == "data"
            or (a.objective != "ppo" and c.diffusion.sampler != "ancestral")
            or a.explore_steps == a.steps,
            f"align.explore_steps: is {a.explore_steps}, but the ancestral sampler, which ppo takes, makes "
            f"another picture of a seed in {a.explore_steps} steps than in the {a.steps} of align.steps; "
            f"give both the same",
        ),
        (
            a.objective != "dpo" or a.pairs == "data" or a.keep >= 2,
            f"align.keep: is {a.keep}, but dpo compares two pictures of a prompt; keep 2 or more",
        ),
        (a.workers >= 0, f"align.workers: is {a.workers}, but it cannot be negative; use 0 or more"),
        (
            math.isfinite(c.diffusion.guidance),
            f"diffusion.guidance: is {c.diffusion.guidance}, give a number",
        ),
    ]
    return rules


def _align_rules(c: Config) -> list[tuple[bool, str]]:
    a = c.align
    return [
        (
            1 <= a.keep <= a.seeds and (a.keep % 2 == 0 or a.select not in ("best_worst", "extremes")),
            f"align.keep: is {a.keep} of {a.seeds} seeds; give an even number from 2 to align.seeds",
        ),
        (
            0 < a.timestep_fraction <= 1,
            f"align.timestep_fraction: is {a.timestep_fraction}, but it is a share over 0, at most 1",
        ),
        (0 <= a.decay <= 1, f"align.decay: is {a.decay}, but it is a share from 0 to 1"),
        (a.iterations >= 0, f"align.iterations: is {a.iterations}, but it cannot be negative; use 0 or more"),
        (a.retries >= 0, f"align.retries: is {a.retries}, but it cannot be negative; use 0 or more"),
        (a.select in SELECT, f"align.select: {a.select!r} is not known{nearest(a.select, SELECT)}"),
        (
            a.explore_track in ("fp4", "bf16"),
            f"align.explore_track: {a.explore_track!r} is not a track to explore on; use fp4 or bf16",
        ),
    ]
