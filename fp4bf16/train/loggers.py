"""Where metrics go beside ``metrics.jsonl``: TensorBoard and Weights & Biases, if asked for.

Neither is ever needed: the file gets every line first, and a logger that fails is dropped with a sentence
while the run goes on. The step of a line is its number in ``metrics.jsonl``, which grows through all stages
and is taken back with the file when a run goes on from a checkpoint.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError, nearest
from ..extras import require
from .events import EventFile
from .pictures import png


class Logger(Protocol):
    """Takes the numbers and pictures of a run; may raise whatever it likes."""

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step, named ``stage/number``. Steps grow."""

    def pictures(self, step: int, name: str, picture: np.ndarray) -> None:
        """A picture: uint8 (H, W, 3)."""

    def close(self) -> None:
        """Write what is still to write."""


class TensorBoardLogger:
    """Event files in ``RUN/tensorboard``; ``tensorboard --logdir RUN`` (extra `tensorboard`) shows them.

    Nothing is written before the first step.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, config: Mapping[str, Any], after: int = 0):
        self._folder, self._after = folder / "tensorboard", after
        self._file: EventFile | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One record with all the numbers."""
        self._open().scalars(step, values)

    def pictures(self, step: int, name: str, picture: np.ndarray) -> None:
        """The picture as PNG."""
        self._open().picture(step, name, png(picture), picture.shape)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> EventFile:
        if self._file is None:
            self._file = EventFile(self._folder, self._after)
        return self._file


class WandbLogger:
    """A run of Weights & Biases (extra `wandb`), its files in ``RUN/wandb``.

    Offline where there is no key: ``wandb sync`` sends it later. The variables WANDB_MODE, WANDB_PROJECT and
    WANDB_ENTITY hold as always. ``RUN/wandb/position`` keeps the run's id and the last step that was given
    away: steps that a resumed run computes again are the same numbers and are not given twice.
    """

    name = "wandb"

    def __init__(self, folder: Path, config: Mapping[str, Any], after: int = 0):
        self._folder, self._config = folder, dict(config)
        self._wandb: Any = None
        self._run: Any = None
        self._file: int | None = None
        self._id, self._given, self._own = "", 0, 0  # _own: the last step that this process gave
        self._stages: set[str] = set()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step; each stage has its own step as the axis."""
        self._open()
        for stage in sorted({name.split("/")[0] for name in values} - self._stages):
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self._stages.add(stage)
        self._give(step, dict(values))

    def pictures(self, step: int, name: str, picture: np.ndarray) -> None:
        """The picture, with the numbers of its step."""
        self._open()
        self._give(step, {name: self._wandb.Image(picture)})

    def close(self) -> None:
        """Hand over what is left."""
        if self._run is not None:
            self._run.finish()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _give(self, step: int, values: dict[str, Any]) -> None:
        if step <= self._given and step != self._own:
            return
        if step > self._given:  # noted first: a crash in between loses a step rather than giving it twice
            self._note(step)
        self._own = step
        self._run.log(values, step=step)

    def _open(self) -> None:
        if self._run is not None:
            return
        self._wandb = require("wandb", "--log wandb", extra="wandb")
        self._read_position()
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fp4bf16"),
            name=self._folder.resolve().name,
            id=self._id,
            resume="allow",
            dir=str(self._folder),
            mode=self._mode(),
            config=self._config,
            settings=self._wandb.Settings(console="off", silent=True),
        )

    def _mode(self) -> str | None:
        if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
            return None  # as the user says
        try:
            known = self._wandb.login(prompt=False, verify=False)
        except TypeError:  # a version that could only ask for a key, which a run must not
            known = False
        return None if known else "offline"

    def _read_position(self) -> None:
        file = self._folder / "wandb" / "position"
        file.parent.mkdir(exist_ok=True)
        try:
            name, given = file.read_text(encoding="utf-8").split()
            self._id, self._given = name, int(given)
        except (OSError, ValueError):  # the first time in this folder
            self._id, self._given = secrets.token_hex(4), 0
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
        self._note(self._given)

    def _note(self, step: int) -> None:
        self._given = step
        os.pwrite(self._file, f"{self._id} {step:12d}\n".encode(), 0)  # always as long: no line is torn


LOGGERS: dict[str, Callable[..., Logger]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}


def parse_loggers(text: str) -> tuple[str, ...]:
    """The names in ``--log`` text, separated by commas; "jsonl", which is always there, is left out.

    Raises `ConfigError` for a name that is not known and `ImportError` for a package that is not installed;
    imports none.

    >>> parse_loggers("tensorboard, jsonl")
    ('tensorboard',)
    """
    return check_loggers([part.strip() for part in text.split(",") if part.strip()])


def check_loggers(names: Sequence[str]) -> tuple[str, ...]:
    """`names` without "jsonl" and repetitions, as `parse_loggers` checks them."""
    if isinstance(names, str):
        raise ConfigError(f"--log: got the text {names!r}, but a list of names is needed; use [{names!r}]")
    found = dict.fromkeys(names)
    for name in found:
        if name not in (*LOGGERS, "jsonl"):
            raise ConfigError(f"--log {name}: is not a logger{nearest(name, (*LOGGERS, 'jsonl'))}")
    found.pop("jsonl", None)
    if "wandb" in found and sys.modules.get("wandb") is None and not importlib.util.find_spec("wandb"):
        require("wandb", "--log wandb", extra="wandb")
    return tuple(found)


def open_loggers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], after: int = 0
) -> list[Logger]:
    """The loggers of those names for the run in `folder`.

    config: plain values, shown beside the run. after: the step that the run goes on from; what an earlier
    process logged of later steps is replaced. Errors as `check_loggers`. Nothing is written yet.

    >>> [logger.name for logger in open_loggers(["tensorboard"], Path("run"), {})]
    ['tensorboard']
    """
    return [LOGGERS[name](folder, config, after) for name in check_loggers(names)]


def scalars(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers in a line of the metrics, by names as loggers want them; the rest is left out.

    >>> scalars({"stage": "align", "loss": 0.5, "kl": None, "guards": {"contrast": {"value": 1, "ok": True}}})
    {'align/loss': 0.5, 'align/guards/contrast/value': 1.0, 'align/guards/contrast/ok': 1.0}
    """
    if not prefix:
        values = dict(values)
        prefix = f"{values.pop('stage', 'run')}/"
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (Real, np.bool_)):
            found[prefix + name] = float(value)
    return found


class Loggers:
    """Several as one; one that fails is named in a sentence (`say`) and gets nothing more."""

    def __init__(self, loggers: Sequence[Logger] = (), say: Callable[[str], None] = print):
        self.left, self._say = list(loggers), say

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """The numbers of one line of the metrics."""
        if self.left and (found := scalars(values)):
            self._each(lambda logger: logger.log(step, found))

    def pictures(self, step: int, name: str, picture: np.ndarray) -> None:
        """A picture: uint8 (H, W, 3)."""
        self._each(lambda logger: logger.pictures(step, name, picture))

    def close(self) -> None:
        """Close all; the list is empty afterwards."""
        self._each(lambda logger: logger.close())
        self.left = []

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self.left):
            try:
                call(logger)
            except Exception as error:  # other people's code, a network, a full disk: none stops a run
                self.left.remove(logger)
                reason = " ".join(str(error).split()) or type(error).__name__
                self._say(
                    f"warning: the logger {logger.name} failed ({reason}) and gets nothing more; the run "
                    f"goes on, and metrics.jsonl has everything"
                )
                self._close(logger)

    def _close(self, logger: Logger) -> None:
        try:
            logger.close()
        except Exception:  # it has been said that it failed
            pass
