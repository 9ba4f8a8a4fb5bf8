"""Weights that a run begins with, in place of a base model of its own: those that ship, or a checkpoint's.

A base file is safetensors with BF16 weights by name and, in its header, what is needed to use them
(configuration, vocabulary). Beside it stands a JSON file of the same name: the recipe (commit, steps, seed,
data and their licences) and the SHA-256 that the file must have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .. import io
from ..align.panel import parse_weights
from ..errors import CheckpointError, ConfigError, ShapeError
from ..files import write_atomic
from ..interop import FLOATS
from . import checkpoint
from .config import PRESETS, Config, ModelConfig, check, from_dict
from .data import ASSETS, Vocabulary
from .denoiser import Denoiser

FORMAT = "fp4bf16-base-1"
#: What a file of JSON that somebody else wrote can raise, too deep a nesting among it.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_KEY = "fp4bf16.base"  # of our line in the header
#: Settings that weights are bound to.
_BOUND = (
    "size",
    *(f"model.{field.name}" for field in fields(ModelConfig)),
    "diffusion.schedule",
    "diffusion.timesteps",
    "diffusion.prediction",
)
#: Settings that the judges' training depends on.
_JUDGED = ("seed", "size", "word", "winner", "judge", "data", "align.reward")


def _setting(config: Config, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


@dataclass(frozen=True)
class Start:
    """Weights by name (float32), with the configuration and the words that they were trained with.

    source: what the user named, for messages. panel, accuracy: of the judges that the same run has trained,
    if it has; data: the identity of its data (`task.Task`).
    """

    source: str
    arrays: dict[str, np.ndarray]
    config: Config
    words: tuple[str, ...]
    panel: Mapping[str, np.ndarray] = field(default_factory=dict)
    accuracy: Mapping[str, float] = field(default_factory=dict)
    data: Any = None

    def judges(self, config: Config, data: Any) -> Mapping[str, np.ndarray]:
        """The state of a panel (`align.panel.Panel`) that a run of `config` on `data` would train alike; else
        empty. A sum of rewards is trained anew, for its scales have followed that run's pictures.
        """
        same = all(_setting(self.config, name) == _setting(config, name) for name in _JUDGED)
        same = same and self.data == data
        return self.panel if same and len(parse_weights(config.align.reward)) == 1 else {}

    def identity(self) -> dict[str, str]:
        """What the folder of a run remembers: where the weights came from, and a hash of their values."""
        digest = hashlib.sha256()
        for name in sorted(self.arrays):
            digest.update(f"{name} {self.arrays[name].shape}".encode())
            digest.update(np.ascontiguousarray(self.arrays[name], np.float32).data)
        return {"from": self.source, "weights": digest.hexdigest()[:16]}

    def check(self, config: Config, model: Denoiser) -> None:
        """`ConfigError` unless a run of `config` can go on from these weights."""
        for name in _BOUND:
            there, here = _setting(self.config, name), _setting(config, name)
            if there != here:
                raise ConfigError(
                    f"--from {self.source}: was trained with {name} = {there}, but this run has {here}; use "
                    f"--preset {self.config.preset} or the settings that it was trained with"
                )
        if self.words != model.vocabulary.words:
            raise ConfigError(
                f"--from {self.source}: knows {len(self.words)} words, but the captions of this run have "
                f"{len(model.vocabulary)} others; use --preset {self.config.preset} or the same word="
            )
        self.fit(model)

    def fit(self, model: Denoiser) -> None:
        """`CheckpointError` unless the weights are those of `model`'s network, and finite."""
        try:
            shapes = {name: p.shape for name, p in model.unet.flat.named.items()}
            for name in sorted({*shapes, *self.arrays}):
                if name not in self.arrays or name not in shapes:
                    raise ShapeError(f"parameter {name} is on one side only")
                if self.arrays[name].shape != shapes[name]:
                    raise ShapeError(f"{name} has shape {self.arrays[name].shape} instead of {shapes[name]}")
                if not np.isfinite(self.arrays[name]).all():
                    raise ShapeError(f"{name} holds NaN or Inf")
        except ShapeError as error:
            raise CheckpointError(
                f"--from {self.source}: does not fit the network of its configuration ({error}); name "
                f"another file"
            ) from None

    def model(self) -> Denoiser:
        """The network with these weights."""
        model = Denoiser(self.config, Vocabulary(self.words))
        self.fit(model)
        model.unet.load_state_dict(self.arrays)
        return model


def load_start(source: str, preset: str) -> Start:
    """The weights that ``--from`` names: "base" (those that ship for `preset`), a base file, a checkpoint or
    the folder of a run (its base model).

    Raises `ConfigError` where there are none, `CheckpointError` for a file that cannot be read or is not the
    one that its recipe describes.
    """
    if source == "base":
        path = ASSETS / f"{preset}.safetensors"
        if not path.exists():
            shipped = [name for name in PRESETS if (ASSETS / f"{name}.safetensors").exists()]
            other = f"--preset {' or '.join(shipped)}, or " if shipped else ""
            raise ConfigError(
                f"--from base: no weights ship for preset {preset}; use {other}a checkpoint of your own"
            )
        return _read_base(source, path, need_recipe=True)
    path = Path(source)
    if path.is_dir():
        path = path / "checkpoint.safetensors"
    if not path.is_file():
        raise ConfigError(
            f"--from {source}: there is no file {path}; name a checkpoint, the folder of a run, or base"
        )
    try:
        is_base = _KEY in io.load_metadata(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--from {source}: {error}; name another file") from None
    return _read_base(source, path) if is_base else _read_checkpoint(source, path)


def _read_checkpoint(source: str, path: Path) -> Start:
    arrays, meta = checkpoint.load_run(path)
    average = checkpoint.take(arrays, "ema")  # of the base training, which the alignment leaves as it is
    trained = meta["stage"] not in ("base", "judges")
    panel = checkpoint.take(arrays, "panel") if trained else {}
    accuracy = meta.get("results", {}).get("judge_accuracy", {})
    return Start(source, average, check(from_dict(meta["config"])), tuple(meta["words"]), panel, accuracy,
                 meta.get("data"))  # fmt: skip


def _read_base(source: str, path: Path, need_recipe: bool = False) -> Start:
    _verify(source, path, need_recipe)
    try:
        known = json.loads(io.load_metadata(path)[_KEY])
        if known["format"] != FORMAT:
            raise ValueError(f"format {known['format']!r} is not {FORMAT!r}")
        arrays = {name: _float32(name, a) for name, a in io.load(path).items()}
        config, words = check(from_dict(known["config"])), _words(known["words"])
    except _UNREADABLE as error:
        raise CheckpointError(
            f"--from {source}: cannot be read as the weights of a base model ({error}); name another file"
        ) from None
    return Start(source, arrays, config, words)


def _float32(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.name not in FLOATS:
        raise ValueError(f"{name} has dtype {array.dtype}, but one of {', '.join(FLOATS)} is needed")
    with np.errstate(over="ignore"):  # to Inf, which `Start.fit` reports
        return np.asarray(array, np.float32)


def _words(words: Any) -> tuple[str, ...]:
    if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
        raise ValueError("its words are no list of words")
    if len(set(words)) < len(words):
        raise ValueError(f"{len(words) - len(set(words))} of its {len(words)} words stand there twice")
    return tuple(words)


def _verify(source: str, path: Path, need_recipe: bool) -> None:
    """Compare the file with the SHA-256 that stands beside it."""
    recipe = path.with_suffix(".json")
    fix = "install the package anew" if need_recipe else "fetch both files anew"
    if not recipe.exists():
        if need_recipe:
            raise CheckpointError(f"--from {source}: {recipe} with its SHA-256 is missing; {fix}")
        return
    try:
        wanted = json.loads(recipe.read_text(encoding="utf-8"))["sha256"]
    except _UNREADABLE as error:
        raise CheckpointError(f"--from {source}: {recipe} cannot be read ({error!r}); {fix}") from None
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wanted:
        raise CheckpointError(
            f"--from {source}: {path} has SHA-256 {found}, but {recipe.name} beside it says {wanted}; {fix}"
        )


def write_base(path: Path, arrays: Mapping[str, np.ndarray], config: Config, words: tuple[str, ...],
               recipe: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    """Write a base file, its weights rounded to BF16, and its recipe beside it; returns the recipe."""
    path = Path(path)
    rounded = {name: np.asarray(a, np.float32).astype(ml_dtypes.bfloat16) for name, a in arrays.items()}
    known = {"format": FORMAT, "config": config.to_dict(), "words": list(words)}
    io.save(path, rounded, {_KEY: json.dumps(known, sort_keys=True)})
    content = path.read_bytes()
    whole = {
        "file": path.name,
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "parameters": sum(a.size for a in rounded.values()),
        **recipe,
        "config": config.to_dict(),
    }
    write_atomic(path.with_suffix(".json"), (json.dumps(whole, indent=1) + "\n").encode())
    return whole
