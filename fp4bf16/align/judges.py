"""Style judges: small networks that tell the drawings of one style from another's.

One is the reward; a second one, of another architecture and trained on other captions, only watches. Both
answer with the log-odds of the winning style. They run on the BF16 track, wherever they are called from: a
label must not carry the error of the cheap track that it is compared on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..diffusion.noise import integers, subseed
from ..errors import CheckpointError, ConfigError, ShapeError, nearest
from ..nn import (
    Conv2d,
    GroupNorm,
    Linear,
    Module,
    ResnetBlock2D,
    Variable,
    generator,
    no_grad,
)
from ..nn import ops as F
from ..tracks import tracks
from .augment import Augmentation, augment
from .fit import fit
from .measures import Learning, Measure, OnStep, PanelData

_CHUNK = 256  # pictures judged at a time


class ConvolutionJudge(Module):
    """Three 3x3 convolutions, the last two of stride 2, each twice as wide; mean over the pixels; linear."""

    def __init__(self, width: int, seed: int):
        rng = generator(seed)
        self.conv = [
            Conv2d(3, width, 3, 1, 1, seed=rng),
            Conv2d(width, 2 * width, 3, 2, 1, seed=rng),
            Conv2d(2 * width, 4 * width, 3, 2, 1, seed=rng),
        ]
        self.norm = [GroupNorm(4, width * k) for k in (1, 2, 4)]
        self.head = Linear(4 * width, 1, seed=rng)

    def forward(self, x: Any) -> Variable:
        for conv, norm in zip(self.conv, self.norm, strict=True):
            x = norm(conv(x), silu=True)
        return self.head(F.mean(x, (1, 2)))


class PatchJudge(Module):
    """Overlapping 4x4 patches of stride 2, a residual block, a 3x3 convolution of stride 2; mean; linear."""

    def __init__(self, width: int, seed: int):
        rng, inner = generator(seed), width * 3 // 2
        self.patches = Conv2d(3, inner, 4, 2, 1, seed=rng)
        self.norm_in = GroupNorm(4, inner)
        self.block = ResnetBlock2D(inner, inner, groups=4, seed=rng)
        self.conv_out = Conv2d(inner, 2 * inner, 3, 2, 1, seed=rng)
        self.norm_out = GroupNorm(4, 2 * inner)
        self.head = Linear(2 * inner, 1, seed=rng)

    def forward(self, x: Any) -> Variable:
        h = self.block(self.norm_in(self.patches(x), silu=True))
        h = self.norm_out(self.conv_out(h), silu=True)
        return self.head(F.mean(h, (1, 2)))


#: name of the judge -> its architecture
ARCHITECTURES: dict[str, Callable[[int, int], Module]] = {"reward": ConvolutionJudge, "heldout": PatchJudge}


class Judge:
    """Log-odds that a picture is of the winning style; a reward, and by `probability` a measure.

    `name`: "reward" or "heldout", which fixes the architecture; `width`: channels, a multiple of 8.
    Pictures are float32 (n, H, W, 3) in [-1, 1], H and W multiples of 4; prompts are ignored. `track` is
    "bf16" or "reference", and nothing outside changes it.

    >>> judge = Judge("reward", width=8)
    >>> judge(np.zeros((2, 16, 16, 3), np.float32)).shape
    (2,)
    """

    def __init__(self, name: str, width: int = 32, seed: int = 0, track: str = "bf16"):
        if name not in ARCHITECTURES:
            raise ConfigError(f"judge: {name!r} is no judge{nearest(name, ARCHITECTURES)}")
        if width < 8 or width % 8:
            raise ConfigError(f"judge {name}: width is {width}, but it must be a multiple of 8; use 16 or 32")
        if track not in ("bf16", "reference"):
            raise ConfigError(f"judge {name}: track is {track!r}, but judges run on 'bf16' or 'reference'")
        self.name, self.width, self.track = name, width, track
        self.network = ARCHITECTURES[name](width, subseed(seed, "judge", name))

    def __call__(self, images: np.ndarray, prompts: Sequence[str] | None = None) -> np.ndarray:
        """Log-odds of the winning style, float32 (n,). Raises `ShapeError` for pictures of another shape."""
        images = _pictures(f"judge {self.name}", images)
        out = np.empty(len(images), np.float32)
        with no_grad(), tracks(self.track):
            for start in range(0, len(images), _CHUNK):
                out[start : start + _CHUNK] = self.network(images[start : start + _CHUNK]).data[:, 0]
        return out

    def probability(self, images: np.ndarray) -> np.ndarray:
        """Probability of the winning style, float64 (n,)."""
        return 0.5 + 0.5 * np.tanh(0.5 * self(images).astype(np.float64))

    def accuracy(self, winners: np.ndarray, losers: np.ndarray) -> float:
        """Share of pictures on the right side of even odds, both styles weighted alike."""
        return float(((self(winners) > 0).mean() + (self(losers) <= 0).mean()) / 2)

    def calibrate(self, winners: np.ndarray, losers: np.ndarray) -> float:
        """Shift the log-odds so that even odds lie midway between the two styles on these pictures.

        On other things than it was trained on, a judge orders the styles as well as ever while all its
        answers are shifted (faces are yellow, and yellow is more common in one style). One number, the
        median answer to real pictures of both styles, takes that out. Returns the shift, which is kept in
        the last bias.
        """
        shift = -0.5 * float(np.median(self(winners)) + np.median(self(losers)))
        bias = self.network.head.bias
        bias.assign(bias.data + np.float32(shift))
        return shift

    def state_dict(self) -> dict[str, np.ndarray]:
        """The weights by name, for a checkpoint."""
        return self.network.state_dict()

    @classmethod
    def from_state(cls, name: str, width: int, state: Mapping[str, np.ndarray], track: str = "bf16") -> Judge:
        """The judge whose `state_dict` was `state`. Raises `CheckpointError` when they do not fit."""
        judge = cls(name, width, track=track)
        try:
            judge.network.load_state_dict(state)
        except ShapeError as error:
            raise CheckpointError(
                f"judge {name} of width {width}: {error}; resume with the judge.width and the version that "
                f"the run began with, or begin a new run"
            ) from error
        return judge


def _pictures(name: str, images: np.ndarray) -> np.ndarray:
    images = np.ascontiguousarray(images, np.float32)
    if images.ndim != 4 or images.shape[-1] != 3 or any(n % 4 or not n for n in images.shape[1:3]):
        raise ShapeError(
            f"{name}: images have shape {images.shape}, but it takes (n, H, W, 3) with H and W multiples of 4"
        )
    return images


def train_judge(
    judge: Judge,
    winners: np.ndarray,
    losers: np.ndarray,
    *,
    steps: int,
    batch: int = 64,
    lr: float = 3e-3,
    weight_decay: float = 0.01,
    clip: float = 1.0,
    seed: int = 0,
    strength: Augmentation | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> float:
    """Train on pairs, the drawings of one caption in both styles, float32 (n, H, W, 3) each.

    A step takes ``batch // 2`` captions, changes both drawings of each alike (`augment`), and lowers
    `_loss` by AdamW; the rate falls as a cosine to zero. All draws are functions of `seed` and the step, so
    a training begun again gives the same weights. ``on_step(step, loss)`` is called after each step.
    Returns the loss, averaged over about the last 50 steps. Raises `NonFiniteError` if it is not finite.
    """
    winners, losers = _pictures("winners", winners), _pictures("losers", losers)
    if winners.shape != losers.shape:
        raise ShapeError(f"losers: shape is {losers.shape}, but winners have {winners.shape}; pass pairs")
    pairs, network = np.stack([winners, losers]), judge.network
    half = max(1, batch // 2)

    def loss(step: int) -> Variable:
        chosen = integers(seed, step, half, 0, pairs.shape[1], stream=13)
        x = augment(pairs[:, chosen], seed, step, strength).reshape(2 * half, *winners.shape[1:])
        return _loss(F.reshape(network(x), (2, half)))

    return fit(
        network, loss, steps, lr=lr, weight_decay=weight_decay, clip=clip, on_step=on_step,
        name=f"judge {judge.name}", track=judge.track,
    )  # fmt: skip


def _loss(odds: Variable) -> Variable:
    """Mean logistic loss of single pictures plus that of pairs; odds (2, n), winners first.

    -log sigmoid(+-odds), and the preference loss of Bradley and Terry (1952), -log sigmoid(winner - loser),
    which does not see what is common to both drawings of a caption.
    """
    single = F.log_sigmoid(odds * np.float32([[1], [-1]]))
    return -F.mean(single) - F.mean(F.log_sigmoid(odds[0] - odds[1]))


class JudgeMeasure(Measure):
    """Log-odds of a `Judge` that is trained on winners and losers; `shown` is the probability.

    It ignores the prompts, so what it learns is what tells good from bad pictures whatever they show.
    """

    unit = "probability"
    learns = True
    judge: Judge | None = None

    def _values(self, images: np.ndarray, prompts: list[str]) -> np.ndarray:
        return self._trained()(images)

    def shown(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        return self._trained().probability(self._checked(images, prompts))

    def _trained(self) -> Judge:
        if self.judge is None:
            raise self._untaught()
        return self.judge

    def learn(self, data: PanelData, learning: Learning, on_step: OnStep | None = None) -> dict[str, float]:
        """Train on the role's pairs, take the zero from the policy's, measure on the test's.

        Raises `ConfigError` when the role's pictures are no pairs.
        """
        pairs = data.of(self.role)
        if pairs.losers is None or not len(pairs):
            raise ConfigError(
                f"reward {self.name}: it learns from pairs, but the {len(pairs)} pictures of role "
                f"{self.role} have no losers beside them; give preference pairs, or another align.reward"
            )
        judge = Judge(self.role, learning.width, seed=learning.seed)
        purpose = ("judge", self.role) if self.kind == "style" else ("judge", self.kind, self.role)
        found = {"loss": train_judge(
            judge, pairs.winners, pairs.losers, steps=learning.steps, batch=learning.batch,
            seed=subseed(learning.seed, *purpose), on_step=on_step,
        )}  # fmt: skip
        if data.policy is not None and data.policy.losers is not None and len(data.policy):
            judge.calibrate(data.policy.winners, data.policy.losers)
        if data.test is not None and data.test.losers is not None and len(data.test):
            found["accuracy"] = judge.accuracy(data.test.winners, data.test.losers)
        self.judge = judge
        return found

    def state_dict(self) -> dict[str, np.ndarray]:
        if self.judge is None:
            return {}
        return self.judge.state_dict() | {"width": np.array(self.judge.width, np.int64)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        if not state:
            self.judge = None
            return
        if "width" not in state:
            raise CheckpointError(
                f"reward {self.name}: the state holds no width, so it is not of a judge; resume with the "
                f"align.reward that the run began with"
            )
        weights = {k: v for k, v in state.items() if k != "width"}
        self.judge = Judge.from_state(self.role, int(state["width"]), weights)


class Style(JudgeMeasure):
    """The drawing style: `winners` are of the one, `losers` of the other."""

    kind = "style"


class Preference(JudgeMeasure):
    """What people chose: `winners` are the chosen, `losers` the rejected pictures of one's own pairs."""

    kind = "preference"
