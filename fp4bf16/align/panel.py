"""A panel: rewards with weights, a held-out judge beside each, and what is needed to add them up.

    panel = Panel.parse("style + 0.5 colourfulness")
    for trainer in panel.trainers(data, Learning(steps=400)):  # judges, then the scales
        trainer()
    values = panel.reward(pictures, prompts)                   # float32 (n,)

Rewards have other units each, so those of a sum are normalised: less the running mean, over the running
standard deviation of what `Panel.observe` was shown. Between two calls of `observe` the reward is a pure
function of picture and prompt: it does not depend on the order, the batches or the process in which a pool of
rollouts is scored.

Scales that move are right for labels, which are compared within an iteration, and wrong for numbers that are
compared across a run. Those come from `shown_reward` and `shown_heldout`, whose scales are fixed once, when
the judges have been trained.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import CheckpointError, ConfigError, RewardError, nearest
from .caption import CaptionJudge, CaptionRidge
from .classes import ClassMeasure
from .judges import Preference, Style
from .measures import ROLES, Learning, Measure, OnStep, PanelData
from .rewards import Chroma, Colourfulness, JpegSize, PngSize, score

#: name -> (the reward, the judge that watches it)
KINDS: dict[str, tuple[type[Measure], type[Measure]]] = {
    "style": (Style, Style),
    "preference": (Preference, Preference),
    "caption": (CaptionRidge, CaptionJudge),
    "class": (ClassMeasure, ClassMeasure),
    "jpeg": (JpegSize, PngSize),
    "colourfulness": (Colourfulness, Chroma),
}
ALIASES = {"colorfulness": "colourfulness"}

_CONSTANT = 1e-6  # a standard deviation below this part of the mean is rounding
_TERM = re.compile(
    r"\s*(?P<sign>[+-])?\s*"
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|nan\b|inf(?:inity)?\b)?"
    r"\s*(?P<times>\*)?\s*(?P<name>[A-Za-z_]\w*)?",
)


class Running:
    """Count, mean and sum of squared deviations of all values seen (Welford 1962), merged a batch at a time
    (Chan et al. 1979).

    >>> running = Running()
    >>> running.add(np.array([1.0, 2.0])); running.add(np.array([6.0]))
    >>> running.mean, round(running.std, 3)
    (3.0, 2.16)
    """

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        """See more values (n,)."""
        values, n = np.asarray(values, np.float64), len(values)
        if not n:
            return
        mean, total = float(values.mean()), self.count + n
        away = mean - self.mean
        self.squares += float(((values - mean) ** 2).sum()) + away * away * self.count * n / total
        self.mean += away * n / total
        self.count = total

    @property
    def std(self) -> float:
        """Standard deviation of the values seen; 0 before the first and where only rounding differs."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        return std if std > _CONSTANT * abs(self.mean) else 0.0

    def normalise(self, values: np.ndarray) -> np.ndarray:
        """(values - mean) / std, float64 (n,); zeros where all values seen were the same. What is not finite
        stays so.
        """
        away = np.asarray(values, np.float64) - self.mean
        return away / self.std if self.std else np.where(np.isfinite(away), 0.0, away)

    def to_array(self) -> np.ndarray:
        """float64 (3,): count, mean, squares."""
        return np.array([self.count, self.mean, self.squares], np.float64)

    def from_array(self, array: np.ndarray) -> None:
        """Take over what `to_array` gave."""
        count, self.mean, self.squares = (float(v) for v in np.asarray(array, np.float64))
        self.count = int(count)


@dataclass(frozen=True)
class Part:
    """One reward of a panel: its weight, the unit of `shown`, and the judge that watches it."""

    name: str
    weight: float
    unit: str
    reward: Measure
    heldout: Measure

    def shown(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        """The reward as people read it, without weight, in `unit`: float64 (n,). For style a probability, for
        jpeg the bytes, of which fewer are better.
        """
        return self.reward.shown(images, prompts)

    def shown_heldout(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        """The same of the held-out judge."""
        return self.heldout.shown(images, prompts)


@dataclass(frozen=True)
class Trainer:
    """One short training, called with ``on_step(step, loss)`` or nothing; returns what is worth logging.

    Run from the start when it was interrupted: its result is a function of the data and the seed.
    """

    name: str
    steps: int
    run: Callable[[OnStep | None], dict[str, float]]

    def __call__(self, on_step: OnStep | None = None) -> dict[str, float]:
        return self.run(on_step)


class Panel:
    """Rewards with weights. It is itself a reward: ``panel(images, prompts)``, with ``name`` for messages.

    >>> panel = Panel.parse("colourfulness")
    >>> pictures = np.zeros((2, 8, 8, 3), np.float32); pictures[1, :4, :, 0] = 1
    >>> panel.reward(pictures, ["a", "b"]).astype(int).tolist()
    [0, 92]
    """

    def __init__(self, parts: Sequence[Part]):
        self.parts = tuple(parts)
        if not self.parts:
            raise ConfigError("reward: a panel without parts; give at least one of " + ", ".join(KINDS))
        self._scales = self._no_scales()  # these move with `observe`
        self._fixed = self._no_scales()  # these are set once, by the trainer "scales"

    def _no_scales(self) -> dict[tuple[str, str], Running]:
        return {(p.name, role): Running() for p in self.parts for role in ROLES}

    @classmethod
    def parse(cls, spec: str) -> Panel:
        """The panel of a specification: names with weights, added and subtracted.

        "style", "-jpeg" (large files), "style + 0.5 colourfulness", "2*class - jpeg". Raises `ConfigError`
        for an empty one, an unknown name (with the nearest), a weight of 0 or that is not finite, a name that
        stands twice.

        >>> [(p.name, p.weight) for p in Panel.parse("colourfulness - 0.5 jpeg").parts]
        [('colourfulness', 1.0), ('jpeg', -0.5)]
        """
        weights = parse_weights(spec)
        made = []
        for name, weight in weights.items():
            reward, heldout = (kind(role) for kind, role in zip(KINDS[name], ROLES, strict=True))
            made.append(Part(name, weight, reward.unit, reward, heldout))
        return cls(made)

    @property
    def name(self) -> str:
        """The specification, written one way."""
        terms = []
        for part in self.parts:
            sign = "-" if part.weight < 0 else "+" if terms else ""
            number = "" if abs(part.weight) == 1 else f"{abs(part.weight):g} "
            terms.append(f"{sign} {number}{part.name}" if terms else f"{sign}{number}{part.name}")
        return " ".join(terms)

    def require(self) -> None:
        """Import what its parts need, or raise `ImportError` with the command to run; before a run begins."""
        for part in self.parts:
            part.reward.require()
            part.heldout.require()

    # ---- scores
    def reward(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        """What a policy is to raise: float32 (n,) for pictures (n, H, W, 3) in [-1, 1] and n prompts.

        One part: its weight times its value. Several: the sum of weight times normalised value. A number of
        a part that is not finite is passed on, and so is not finite here either: who asks decides whether to
        try another picture, as `pool.explore` does, or to refuse it, as `rewards.score` does. Raises
        `RewardError` when a part does not give one number a picture, or when several are to be added and
        none was observed.
        """
        return self._moving("reward", images, prompts, finite=False).astype(np.float32)

    __call__ = reward

    def heldout(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        """The same of the judges that watch, which no policy is trained on: float64 (n,). Raises
        `RewardError` also for a number that is not finite.
        """
        return self._moving("heldout", images, prompts)

    def shown_reward(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        """The reward on scales that never move, for comparing pictures of two times of a run: float64 (n,).

        One part: its weight times its value. Several: the weighted sum on the scales that the trainer
        "scales" set, whatever was observed since. Raises `RewardError` when it has not run, and for numbers
        that are not finite.
        """
        return self._still("reward", images, prompts)

    def shown_heldout(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        """The same of the judges that watch: float64 (n,)."""
        return self._still("heldout", images, prompts)

    def shown(self, images: np.ndarray, prompts: Sequence[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name -> (reward, held-out judge) as people read them (`Part.shown`), each float64 (n,)."""
        return {p.name: (p.shown(images, prompts), p.shown_heldout(images, prompts)) for p in self.parts}

    def _values(
        self, role: str, images: np.ndarray, prompts: Sequence[str], finite: bool = True
    ) -> list[np.ndarray]:
        measures = [getattr(p, role) for p in self.parts]
        return [score(m, images, prompts, finite=finite).astype(np.float64) for m in measures]

    def _moving(
        self, role: str, images: np.ndarray, prompts: Sequence[str], finite: bool = True
    ) -> np.ndarray:
        if len(self.parts) > 1 and not self._scales[self.parts[0].name, role].count:
            raise RewardError(
                f"reward {self.name}: its parts have units of their own, and nothing was observed to bring "
                "them to one scale; call observe(images, prompts) with some pictures first"
            )
        return self._sum(role, self._values(role, images, prompts, finite), self._scales)

    def _still(self, role: str, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        if len(self.parts) > 1 and not self._fixed[self.parts[0].name, role].count:
            raise RewardError(
                f"reward {self.name}: its parts have units of their own, and no fixed scales were set to "
                'show them on; run its trainers first, of which the last, "scales", sets them'
            )
        return self._sum(role, self._values(role, images, prompts), self._fixed)

    def _sum(
        self, role: str, values: Sequence[np.ndarray], scales: Mapping[tuple[str, str], Running]
    ) -> np.ndarray:
        if len(self.parts) == 1:
            return self.parts[0].weight * values[0]
        with np.errstate(invalid="ignore"):  # a part that is not finite: neither is the sum
            terms = [p.weight * scales[p.name, role].normalise(v)
                     for p, v in zip(self.parts, values, strict=True)]  # fmt: skip
            return np.sum(terms, axis=0)

    def observe(self, images: np.ndarray, prompts: Sequence[str]) -> None:
        """Take pictures into the running mean and deviation of every part, rewards and judges.

        Call it between iterations with the pictures that were kept. A panel of one part needs no scale and
        does nothing.
        """
        if len(self.parts) == 1 or not len(images):
            return
        for role in ROLES:
            for part, values in zip(self.parts, self._values(role, images, prompts), strict=True):
                self._scales[part.name, role].add(values)

    # ---- training and state
    def trainers(self, data: PanelData, learning: Learning | None = None) -> list[Trainer]:
        """The trainings that the parts need, in order, then that of the scales where there are several parts.

        Each is short and independent of the others but for the last, which looks at the pictures of both
        roles with the judges trained before. Those of shipped or fixed rewards need none.
        """
        learning = learning or Learning()
        made = []
        for part in self.parts:
            for role in ROLES:
                measure = getattr(part, role)
                if measure.learns:
                    made.append(_trainer(part.name, role, measure, data, learning))
        if len(self.parts) > 1:
            made.append(Trainer("scales", 1, lambda on_step: self._observe_data(data, on_step)))
        return made

    def _observe_data(self, data: PanelData, on_step: OnStep | None) -> dict[str, float]:
        self._scales = self._no_scales()
        for role in ROLES:
            known = data.of(role)
            for pictures in known.pictures():
                self.observe(pictures, known.captions)
        self._fixed = copy.deepcopy(self._scales)
        if on_step is not None:
            on_step(0, 0.0)
        return {f"{name}/{role}/std": scale.std for (name, role), scale in self._scales.items()}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Arrays by name, for a checkpoint: what every part has learnt, and the scales."""
        found = {}
        for part in self.parts:
            for role in ROLES:
                measure: Measure = getattr(part, role)
                prefix = f"{part.name}.{role}"
                found |= {f"{prefix}.{k}": v for k, v in measure.state_dict().items()}
                found[f"{prefix}.scale"] = self._scales[part.name, role].to_array()
                found[f"{prefix}.fixed"] = self._fixed[part.name, role].to_array()
        return found

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what `state_dict` gave; scores are then the same bits.

        Raises `CheckpointError` when it is of another panel.
        """
        left = set(state)
        for part in self.parts:
            for role in ROLES:
                prefix = f"{part.name}.{role}."
                own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
                left -= {prefix + k for k in own}
                scale, fixed = own.pop("scale", None), own.pop("fixed", None)
                if scale is None or (fixed is None and len(self.parts) > 1):  # one part needs none
                    lacks = "nothing" if scale is None else "no fixed scale"
                    raise CheckpointError(
                        f"reward {self.name}: the state holds {lacks} of {part.name} ({role}); resume with "
                        "the align.reward and the version that the run began with, or begin a new run"
                    )
                getattr(part, role).load_state_dict(own)
                self._scales[part.name, role].from_array(scale)
                self._fixed[part.name, role].from_array(np.zeros(3) if fixed is None else fixed)
        if left:
            raise CheckpointError(
                f"reward {self.name}: the state holds {min(left)!r}, which is of another reward; resume with "
                "the align.reward that the run began with"
            )


def _trainer(name: str, role: str, measure: Measure, data: PanelData, learning: Learning) -> Trainer:
    steps = measure.steps(data, learning)
    return Trainer(f"{name}/{role}", steps, lambda on_step: measure.learn(data, learning, on_step))


def parse_weights(spec: str) -> dict[str, float]:
    """Name -> weight of a specification, as `Panel.parse` takes it; makes nothing.

    >>> parse_weights("2 style - colorfulness")
    {'style': 2.0, 'colourfulness': -1.0}
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ConfigError(f"align.reward: is {spec!r}, but it must name a reward; known: {', '.join(KINDS)}")
    weights: dict[str, float] = {}
    at = 0
    while at < len(spec.rstrip()):
        term = _TERM.match(spec, at)
        name, number = ALIASES.get(term["name"], term["name"]), term["number"]
        joined = term["sign"] or not weights
        if term.end() == at or name is None or not joined or (term["times"] and not number):
            raise ConfigError(
                f"align.reward: {spec!r} cannot be read from {spec[at:].strip()!r} on; write names with "
                "weights, such as 'style + 0.5 colourfulness'"
            )
        weight = float(number or 1) * (-1 if term["sign"] == "-" else 1)
        if name not in KINDS:
            raise ConfigError(f"align.reward: {name!r} in {spec!r} is no reward{nearest(name, KINDS)}")
        if weight == 0 or not math.isfinite(weight):
            raise ConfigError(
                f"align.reward: the weight of {name} is {weight:g} in {spec!r}; give it a finite weight "
                "other than 0, or leave it out"
            )
        if name in weights:
            raise ConfigError(f"align.reward: {name} stands twice in {spec!r}; add up its weights")
        weights[name] = weight
        at = term.end()
    return weights
