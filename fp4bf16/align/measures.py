"""One number a picture: the base of all rewards that ship, and the pictures that some of them learn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import CheckpointError, ConfigError, NonFiniteError, ShapeError
from .fit import OnStep

ROLES = ("reward", "heldout")


@dataclass(frozen=True)
class Captioned:
    """Pictures with captions, some with a worse picture of the same caption beside each.

    `winners`: float32 (n, H, W, 3) in [-1, 1]; `captions`: n strings; `losers`: like `winners`, or None.
    Raises `ShapeError` when they do not go together.

    >>> Captioned(np.zeros((2, 8, 8, 3), np.float32), ("a cat", "a dog")).losers is None
    True
    """

    winners: np.ndarray
    captions: tuple[str, ...]
    losers: np.ndarray | None = None

    def __post_init__(self) -> None:
        w, n = self.winners, len(self.captions)
        if w.ndim != 4 or w.shape[-1] != 3 or len(w) != n:
            raise ShapeError(
                f"winners: shape is {w.shape} for {n} captions; pass (n, H, W, 3), one a caption"
            )
        if self.losers is not None and self.losers.shape != w.shape:
            raise ShapeError(f"losers: shape is {self.losers.shape}, but winners have {w.shape}; pass pairs")

    def __len__(self) -> int:
        return len(self.captions)

    def where(self, keep: Sequence[bool]) -> Captioned:
        """Those for which `keep` (n,) holds."""
        keep = np.asarray(keep, bool)
        captions = tuple(c for c, k in zip(self.captions, keep, strict=True) if k)
        return Captioned(self.winners[keep], captions, None if self.losers is None else self.losers[keep])

    def pictures(self) -> tuple[np.ndarray, ...]:
        """(winners,) or (winners, losers)."""
        return (self.winners,) if self.losers is None else (self.winners, self.losers)


@dataclass(frozen=True)
class PanelData:
    """What rewards and their held-out judges learn from.

    `reward`, `heldout`: the pictures that only the one or the other learns; no caption in both. `policy`:
    pictures of the captions that the policy learns: preference judges take their zero from them, and caption
    rewards learn one half of them each (`fp4bf16.align.classes.half`), because they cannot answer for words
    that they never saw. `test`: unseen by all, for accuracies; or None.
    """

    reward: Captioned
    heldout: Captioned
    policy: Captioned | None = None
    test: Captioned | None = None

    def __post_init__(self) -> None:
        both = set(self.reward.captions) & set(self.heldout.captions)
        if both:
            raise ConfigError(
                f"panel data: {len(both)} captions are in both roles, such as {min(both)!r}; a judge that "
                "saw what the reward saw watches nothing: split by caption"
            )

    def of(self, role: str) -> Captioned:
        """The pictures of "reward" or "heldout"."""
        return {"reward": self.reward, "heldout": self.heldout}[role]


@dataclass(frozen=True)
class Learning:
    """How the judges are trained: steps of `batch` pictures, `width` channels, and the run's seed.

    `width` is that of the judges of style and preference. The caption's judge begins as the held-out class
    network, whose weights ship and fix its width (40 channels, embeddings of 64), and the caption's reward is
    a regression of one step: both leave `width` alone, and the reward `steps` and `batch` too.
    """

    steps: int = 400
    batch: int = 32
    width: int = 24
    seed: int = 0


class Measure(ABC):
    """One number a picture; larger is better. A plain reward: ``measure(images, prompts)``.

    Subclasses define `_values`; those that `learns` also `learn`, `state_dict` and `load_state_dict`.
    """

    kind = ""  #: the name in a panel's specification
    unit = ""  #: of `shown`
    learns = False  #: whether `learn` must be called before it can answer
    side = 1  #: least height and width

    def __init__(self, role: str):
        self.role = role

    @property
    def name(self) -> str:
        """How messages call it: "style", and "style (held out)" for the one that watches."""
        return self.kind if self.role == "reward" else f"{self.kind} (held out)"

    def __call__(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        """float32 (n,) for pictures (n, H, W, 3) in [-1, 1] and n prompts.

        Raises `ShapeError` for another shape, `NonFiniteError` for NaN or Inf, `ConfigError` when it has not
        learnt yet.
        """
        return self._values(self._checked(images, prompts), list(prompts)).astype(np.float32)

    @abstractmethod
    def _values(self, images: np.ndarray, prompts: list[str]) -> np.ndarray:
        """The numbers of checked pictures, (n,)."""

    def shown(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        """The number for people, in `unit`: float64 (n,)."""
        return self(images, prompts).astype(np.float64)

    def require(self) -> None:
        """Import the packages of the extras that it needs, or raise `ImportError` with the command to run."""
        return  # most need none

    def steps(self, data: PanelData, learning: Learning) -> int:
        """How many steps `learn` takes, each of `learning.batch` pictures."""
        return learning.steps

    def learn(self, data: PanelData, learning: Learning, on_step: OnStep | None = None) -> dict[str, float]:
        """Learn from `data`; what is worth logging (loss, accuracy). Learns nothing by default."""
        return {}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Arrays from which `load_state_dict` makes the same measure; empty before it has learnt."""
        return {}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what `state_dict` gave. Raises `CheckpointError` when it does not fit."""
        if state:
            raise CheckpointError(
                f"reward {self.name}: learns nothing, but the state holds {sorted(state)}; "
                "resume with the align.reward that the run began with"
            )

    def _checked(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        images = np.asarray(images, np.float32)
        if images.ndim != 4 or images.shape[-1] != 3 or min(images.shape[1:3]) < self.side:
            least = f"H and W >= {self.side}"
            raise ShapeError(
                f"reward {self.name}: images have shape {images.shape}; pass (n, H, W, 3), {least}"
            )
        if len(prompts) != len(images):
            raise ShapeError(
                f"reward {self.name}: {len(images)} pictures but {len(prompts)} prompts; pass one a picture"
            )
        broken = ~np.isfinite(images).all(axis=(1, 2, 3))
        if broken.any():
            raise NonFiniteError(
                f"reward {self.name}: {broken.sum()} of {len(images)} pictures hold NaN or Inf; leave them "
                "out"
            )
        return images

    def _untaught(self) -> ConfigError:
        return ConfigError(f"reward {self.name}: it has learnt nothing yet; train it or load its state first")
