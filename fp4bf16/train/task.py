"""What a run learns on: prompts, pictures for the base and the judges, real pictures for the guards.

The emoji pairs that ship, or data of one's own (`sources`): captioned pictures (``data.pictures``),
preference pairs (``data.pairs``), or both. Every caption has one role, so that no judge sees what the policy
learns on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..align.judges import JudgeMeasure
from ..align.measures import Captioned, PanelData
from ..align.panel import Panel
from ..diffusion.noise import permutation, subseed
from ..errors import ConfigError
from .config import Config
from .data import ROLES, STYLES, Pairs, Vocabulary, load_pairs, words_of
from .engine import BaseData
from .sources import PairSource, PictureSource, open_pairs, open_pictures

CAPTIONS = 100_000  # of a set of one's own that are looked at for words and prompts
WORDS = 4096  # of the vocabulary, the most frequent ones
EVALUATED = 128  # captions of one's own that the models are judged by
SHOWN = 512  # real pictures that the guards and judges of a set of one's own learn from, a role


class Task(Protocol):
    """What the stages ask for."""

    prompts: tuple[str, ...]  # that the policy explores and the base learns, each once
    eval_captions: tuple[str, ...]
    words: Vocabulary
    paired: bool  # whether there are winners and losers
    facts: str  # what it is, in a sentence for the report
    identity: Any  # JSON values that tell it from one whose files have changed

    def real(self) -> np.ndarray:
        """Real pictures of what the policy should draw, (n, size, size, 3), n >= 2."""

    def base(self, run: Any) -> Feed:
        """What the base model learns from."""

    def panel_data(self) -> PanelData:
        """What the rewards and the judges that watch them learn from."""

    def offline(self, run: Any, count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """The next `count` pairs that others judged: (chosen, rejected, captions)."""


class Feed(Protocol):
    """What the base training learns from, step after step."""

    def at(self, step: int) -> BaseData: ...


@dataclass(frozen=True)
class Constant:
    """A set that fits in memory: every step draws from all of it."""

    data: BaseData

    def at(self, step: int) -> BaseData:
        return self.data


def make_task(config: Config) -> Task:
    """The task of a configuration. Raises `ConfigError` for data that cannot be used."""
    return OwnTask(config) if config.data.pictures or config.data.pairs else EmojiTask(config)


def check_reward(task: Task, panel: Panel) -> None:
    """`ConfigError` where a reward is to learn from pairs and there are none; before anything is trained."""
    for part in panel.parts:
        if isinstance(part.reward, JudgeMeasure) and not task.paired:
            raise ConfigError(
                f"align.reward: {part.name} learns from pairs, but data.pictures holds pictures alone; give "
                f"data.pairs (--pairs) too, or another reward (--reward jpeg, colourfulness, class, caption)"
            )


def base_seeds(config: Config) -> dict[str, int]:
    return {name: subseed(config.seed, f"base/{name}") for name in ("row", "t", "noise", "drop")}


class EmojiTask:
    """The emoji pairs: the base learns both styles, the policy is to prefer one."""

    identity = None  # they ship with the package, whose version the folder of a run keeps

    def __init__(self, config: Config):
        self.config, self.pairs = config, load_pairs(config.size)
        word = config.word or None
        self.trained = self.pairs.select(role="policy", word=word)
        self.prompts = self.trained.captions
        evaluated = self.pairs.select(word=word) if word else self.pairs
        self.eval_captions = tuple(
            caption
            for caption, role in zip(evaluated.captions, evaluated.roles, strict=True)
            if role in ("policy", "evaluation")
        )
        self.words, self.paired = Vocabulary.of(self.prompts), True
        self.facts = (
            f"{len(self.prompts)} captions in the drawing styles of two emoji sets, Noto and Twemoji, "
            f"without being told which is which"
        )

    @property
    def _loser(self) -> str:
        return next(s for s in STYLES if s != self.config.winner)

    def real(self) -> np.ndarray:
        return self.pairs.select(word=self.config.word or None).style(self.config.winner)

    def base(self, run: Any) -> Constant:
        pictures = run.model.fold(np.concatenate([self.trained.style(s) for s in STYLES]))
        captions = np.concatenate([run.model.encode(self.prompts)] * 2)
        return Constant(BaseData(pictures, captions, base_seeds(self.config), len(run.model.schedule)))

    def panel_data(self) -> PanelData:
        word = self.config.word or None
        reward, heldout = (self._both(self.pairs.select(role=r, without=word)) for r in ("reward", "heldout"))
        test = self.pairs.select(word=word, role=None if word else "evaluation")
        return PanelData(reward, heldout, self._both(self.trained), self._both(test))

    def offline(self, run: Any, count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        source = open_pairs(
            "emoji", self.config.size, subseed(self.config.seed, "pairs"), winner=self.config.winner
        )
        stream = run.stream("pairs", Part(source, "policy", self.config.word or None))
        return stream.next(count)

    def _both(self, some: Pairs) -> Captioned:
        return Captioned(some.style(self.config.winner), some.captions, some.style(self._loser))


@dataclass(frozen=True)
class Part:
    """The samples of a source that one purpose may see."""

    source: PictureSource | PairSource
    role: str | None = None
    word: str | None = None

    def stream(self, state: Any = None) -> Any:
        return self.source.stream(state, role=self.role, word=self.word)


class OwnTask:
    """Data of one's own. Pictures alone have no winners: a reward that needs none must be chosen."""

    def __init__(self, config: Config):
        self.config = config
        where = config.size, subseed(config.seed, "data"), config.data.shuffle
        self.pictures = open_pictures(config.data.pictures, *where) if config.data.pictures else None
        self.pairs = open_pairs(config.data.pairs, *where) if config.data.pairs else None
        self.paired = self.pairs is not None
        if config.align.pairs == "data" and not self.paired:
            raise ConfigError(
                f"align.pairs: is data, but {config.data.pictures} holds pictures without preferences; give "
                f"data.pairs, or align.pairs=rollouts"
            )
        source = self.pictures or self.pairs
        self.noun = source.noun
        self.identity = [None if s is None else s.identity for s in (self.pictures, self.pairs)]
        counts: dict[str, Counter[str]] = {role: Counter() for role in ROLES}
        for caption in source.captions(CAPTIONS):
            counts[source.role(caption)][caption] += 1
        self.prompts = tuple(counts["policy"])
        self.eval_captions = (*counts["evaluation"], *self.prompts)[:EVALUATED]
        self.words = _vocabulary(counts["policy"])
        self.counts = {role: len(found) for role, found in counts.items()}
        if not len(self.words):
            raise ConfigError(
                f"{source.setting}: none of {len(self.prompts)} captions of {source.path} has a word of "
                f"letters or digits; give captions in words"
            )
        if not self.prompts:
            raise ConfigError(
                f"{source.setting}: {source.path} has {sum(self.counts.values())} captions, none of which "
                f"falls to the policy (7 in 10 do); give more captions"
            )
        self._seen: dict[tuple, tuple] = {}
        self.facts = f"{source.path}, {len(self.prompts)} captions of it"

    def real(self) -> np.ndarray:
        return self._some(None)[0]

    def base(self, run: Any) -> Windows:
        part = Part(self.pictures or self.pairs, "policy")
        return run.stream("base", Windowed(part, run.model, self.config))

    def panel_data(self) -> PanelData:
        return PanelData(*(self._captioned(role) for role in ("reward", "heldout", "policy", "evaluation")))

    def _captioned(self, role: str) -> Captioned:
        winners, *losers, captions = self._some(role)
        return Captioned(winners, tuple(captions), losers[0] if losers else None)

    def offline(self, run: Any, count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        return run.stream("pairs", Part(self.pairs, "policy")).next(count)

    def _some(self, role: str | None) -> tuple:
        """The first `SHOWN` samples of a role; of pairs where there are any."""
        if role not in self._seen:
            source = self.pairs or self.pictures
            found = next(iter(source.once(SHOWN, role=role)))
            if len(found[0]) < 2:
                raise ConfigError(
                    f"{source.setting}: {source.path} has {len(found[0])} good {source.noun} "
                    f"{'' if role is None else f'of the role {role} '}(by a hash of the caption), but at "
                    f"least 2 are needed; give more captions"
                )
            self._seen[role] = found
        return self._seen[role]


def _vocabulary(captions: Counter[str]) -> Vocabulary:
    """The most frequent words, at most `WORDS`."""
    counts: Counter[str] = Counter()
    for caption, times in captions.items():
        for word in set(words_of(caption)):
            counts[word] += times
    return Vocabulary(tuple(sorted(sorted(counts, key=lambda w: (-counts[w], w))[:WORDS])))


@dataclass(frozen=True)
class Windowed:
    """Makes `Windows` of a part of a source, as `Run.stream` wants it."""

    part: Part
    model: Any
    config: Config

    def stream(self, state: Any = None) -> Windows:
        return Windows(self, state)


class Windows:
    """A stream as the base training takes it: a window of pictures in memory, each of them learnt once, then
    the next. Its state is the position where the window begins; the step says where in it the training is.
    """

    def __init__(self, of: Windowed, state: Any):
        c = of.config
        self._of, self._stream = of, of.part.stream(state and state["begins"])
        self._steps = max(1, c.data.shuffle // c.base.batch)
        self._number, self._data = (state["number"] if state else 0) - 1, None
        self._began = self._stream.state()

    def at(self, step: int) -> BaseData:
        """The data of `step`; steps are asked for in order."""
        number = step // self._steps
        while self._number < number or self._data is None:  # twice where a run was left between two windows
            self._number, self._began = self._number + 1, self._stream.state()
            self._data = self._window(self._number)
        return self._data

    def _window(self, number: int) -> BaseData:
        of, count = self._of, self._steps * self._of.config.base.batch
        paired = isinstance(of.part.source, PairSource)
        pictures, *rest = self._stream.next(-(-count // 2) if paired else count)
        captions = of.model.encode(rest[-1])
        if paired:  # the base learns both pictures of each
            pictures, captions = np.concatenate([pictures, rest[0]]), np.concatenate([captions, captions])
        seeds, levels = base_seeds(of.config), len(of.model.schedule)
        order = permutation(seeds["row"], number, len(pictures))
        return WindowData(of.model.fold(pictures), captions, seeds, levels, order, self._steps)

    def state(self) -> dict[str, Any]:
        return {"number": max(self._number, 0), "begins": self._began}

    @property
    def counts(self) -> Any:
        """What was read and what was left out."""
        return self._stream.counts

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._stream.close()


@dataclass(frozen=True)
class WindowData(BaseData):
    """A window: `order` says which rows its `steps` steps take, one after the other."""

    order: np.ndarray
    steps: int

    def draw(self, step: int, batch: int, drop_caption: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        _, t, keep = super().draw(step, batch, drop_caption)
        start = step % self.steps * batch
        return self.order[start : start + batch], t, keep
