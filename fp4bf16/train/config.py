"""Configuration of a run: frozen dataclasses, presets by name, ``--set section.field=value`` overrides.

A run is defined by steps, never by seconds: the same configuration gives the same numbers on a slower
machine.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from ..errors import ConfigError, nearest
from ..routing import DEFAULT_ROUTE
from .rules import check


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

    schedule: str = "cosine"  # or linear (both DDPM/VP), ve
    timesteps: int = 1000
    prediction: str = "v"  # or eps, x0
    sampler: str = "ddim"  # or euler, heun, ancestral
    guidance: float = 1.0  # classifier-free: without + guidance (with - without the caption); 1: off
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
    """Explore, select, regenerate, learn.

    Where the defaults are not the published ones: Diffusion-DPO has beta 5000 and a rate of 1e-8 times the
    batch of 2048; DDPO and NFT train LoRA with a weight decay of 1e-4; none has `hold`, which is not part of
    the loss that is logged; 0 leaves it out.
    """

    objective: str = "dpo"  # or nft, ppo
    parameters: str = "full"  # or lora
    reward: str = "style"  # names with weights: "style", "style + 0.5 colourfulness", ...
    pairs: str = "rollouts"  # "data": pairs that others judged, for dpo
    train_on: str = "bf16"  # "fp4": on the explored pictures themselves (a negative control)
    guard: str = "hold"  # a broken guard takes the iteration back; "warn": it only says so
    workers: int = 0  # processes that explore; 0: this one alone
    iterations: int = 10
    prompts: int = 16  # an iteration
    seeds: int = 24  # a prompt
    keep: int = 8  # the best half and the worst half of them a prompt
    explore_steps: int = 4
    steps: int = 10
    explore_track: str = "fp4"
    select: str = "best_worst"
    beta: float = 4000.0
    # Keeps folded pixels from drifting apart; in units of beta (dpo) or of the advantage clip (nft, ppo).
    hold: float = 3.0
    timesteps: int = 4  # a pair, or a picture (nft)
    timestep_fraction: float = 0.6  # of the sampler's steps, from the noisy end: where a pair is compared
    batch: int = 32  # pairs times timesteps in one optimizer step
    lr: float = 1e-4
    decay: float = 0.5  # last share of the iterations, in which the learning rate falls linearly to 0
    clip: float = 1.0
    fidelity_every: int = 5  # iterations between measurements of the rank fidelity
    retries: int = 2  # new seeds tried for a rollout that is not healthy


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters, where align.parameters is lora: W + alpha / rank up down."""

    rank: int = 8
    alpha: float = 16.0


@dataclass(frozen=True)
class NFTConfig:
    """DiffusionNFT; these are the published values (0.1 for `beta` with several rewards, as `--objective nft`
    sets it, and a rate of 3e-4).
    """

    beta: float = 1.0  # how far the implicit policies lie from the old one
    kl: float = 1e-4  # weight of the distance from the reference
    advantage_clip: float = 5.0


@dataclass(frozen=True)
class PPOConfig:
    """DDPO with importance sampling; these are the published values (and a rate of 3e-4; `--objective ppo`
    sets others). Advantages are taken within an iteration, where DDPO keeps statistics of each prompt.
    """

    clip: float = 1e-4  # of the ratio
    advantage_clip: float = 5.0
    epochs: int = 1  # passes over the steps of an iteration


@dataclass(frozen=True)
class DataConfig:
    """Data of one's own; empty: the emoji pairs that ship."""

    pictures: str = ""  # folder of captioned pictures, or tar shards
    pairs: str = ""  # preference pairs: parquet, or a folder with a table
    shuffle: int = 2048  # pictures that a stream is shuffled among


@dataclass(frozen=True)
class LoopConfig:
    """The closed loop: which track the forward of training runs on, and what moves it (`routing.loop`).

    The budget is a share of the loss that FP4 may add by the router's own predictions; a consistency worse
    than `target` takes from it, the latency moves what it is spent on.
    """

    forward: str = "bf16"  # or fp4: the route as it is; router: the loop decides about its layers
    # What the router predicts a layer's rise of the loss from: what FP4 changes in its output; or what it
    # changes in its input, and the weight's error by the optimizer's moments (fisher) or the curvature
    # (hutchinson, hutch++), which cost more and were no better (bench/sensitivity.py).
    sensitivity: str = "outputs"
    budget: float = 0.02  # share of the loss that FP4 may add
    every: int = 20  # steps between sampled ones, which look at both tracks
    decide: int = 100  # steps between decisions
    curvature_every: int = 500  # steps between traces of the Hessian (hutchinson, hutch++)
    probes: int = 8  # Hessian-vector products of a trace
    buckets: int = 1  # parts of the noise levels that are routed on their own when sampling
    hysteresis: float = 0.25  # how much better a layer must be to drive another out
    # Certified ratio above which a layer runs on BF16 for the step; 0: only counted. The presets' layers stay
    # under 2 on the CPU. On a GPU it is over the layer's whole result, and what the sums of FP8 tensor cores
    # may lose comes to it, sqrt(K) / 62 or so: with a limit they are promoted (docs/certificate.md, 11).
    limit: float = 0.0
    jump: float = 8.0  # times its moving average that a layer's product or weight may have
    cooldown: int = 50  # steps on BF16 after a violation
    consistency: float = 0.0  # weight of the consistency term in the loss; 0: only measured
    consistency_layers: int = 4  # layers that it looks at on a sampled step
    # The measured consistency (a mean square, relative) above which the budget is made less, to an eighth at
    # most. FP4 of a normal distribution has 0.016, the presets 0.015 at first and 0.007 after 240 steps.
    target: float = 0.02
    feedback: bool = True  # whether it is
    latency: str = "model"  # or measured: what the router counts as saved


@dataclass(frozen=True)
class EvalConfig:
    """Pictures that the base and the final model are judged by: the same noise for both."""

    seeds: int = 4  # a caption
    captions: int = 0  # 0: all
    steps: int = 10


@dataclass(frozen=True)
class Config:
    """One run. `route` maps parameter-name patterns to the track of the exploring network, and with
    ``loop.forward`` other than bf16 of the training one. `routes`: for each bucket of noise levels, least
    noise first, and last for training; empty: `route` everywhere. To the router `route` is what is pinned,
    and `routes` what it starts from.
    """

    preset: str = "faces16"
    seed: int = 0
    size: int = 16  # pixels a side
    word: str = "face"  # captions of the policy hold this word; "": all
    winner: str = "noto"
    route: dict[str, str] = field(default_factory=lambda: dict(DEFAULT_ROUTE))
    routes: tuple[dict[str, str], ...] = ()
    model: ModelConfig = ModelConfig()
    diffusion: DiffusionConfig = DiffusionConfig()
    base: BaseConfig = BaseConfig()
    judge: JudgeConfig = JudgeConfig()
    align: AlignConfig = AlignConfig()
    lora: LoRAConfig = LoRAConfig()
    nft: NFTConfig = NFTConfig()
    ppo: PPOConfig = PPOConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    loop: LoopConfig = LoopConfig()

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


#: What else `--objective` sets: the objectives do not share a learning rate, and small networks with few
#: updates want a wider trust region than those that the defaults were published for. PPO explores with all
#: steps, for the ancestral sampler makes another picture of a seed in fewer.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {},
    "nft": {"align.lr": 5e-5, "nft.beta": 0.1},
    "ppo": {"align.lr": 1e-4, "align.steps": 8, "ppo.clip": 1e-3},
}


def with_objective(config: Config, name: str) -> Config:
    """`config` with that objective and the settings that suit it.

    >>> with_objective(get_preset("faces16"), "nft").align.objective
    'nft'
    """
    if name not in OBJECTIVES:
        raise ConfigError(f"align.objective: {name!r} is not known{nearest(name, OBJECTIVES)}")
    for key, value in {"align.objective": name, **OBJECTIVES[name]}.items():
        config = with_value(config, key, value)
    return with_value(config, "align.explore_steps", config.align.steps) if name == "ppo" else config


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
        if kind == tuple[dict[str, str], ...] and isinstance(value, (list, tuple)):
            return tuple({str(k): str(v) for k, v in route.items()} for route in value)
        item = (
            kind.__args__[0]
            if isinstance(value, list) and getattr(kind, "__origin__", None) is tuple
            else None
        )
        if item is not None and all(type(v) is item for v in value):
            return tuple(value)
    except (KeyError, ValueError, TypeError, AttributeError):
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
