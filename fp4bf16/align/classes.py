"""What a picture shows: two small networks that tell 64 classes of drawings, and their 128 features.

The classes are the 63 most frequent words of the captions of the emoji pairs, words such as "with" left out,
and "other" (``assets/classes.tsv``). A caption's class is the most frequent of its words that stands in the
table, so "smiling face with open hands" is a "face"; a caption with none of them is "other".

Two networks ship, of other architectures and trained on other captions (`half`): "reward" gives the reward
``class``, log p(class of the prompt), "heldout" watches. Captions of the role "evaluation" were seen by
neither. Their features also measure distances between sets of pictures. ``tools/train_classes.py`` trains
them; ``assets/classes_*.json`` say how, and how good they are.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .. import io
from ..diffusion.noise import subseed
from ..errors import CheckpointError, ConfigError, ShapeError, nearest
from ..nn import Attention, Conv2d, GroupNorm, Linear, Module, ResnetBlock2D, Variable, generator, no_grad
from ..nn import ops as F
from ..tracks import tracks
from .measures import Measure
from .resize import resize

ASSETS = Path(__file__).with_name("assets")
SIZE = 32  # pixels a side that the networks look at
FEATURES = 128
OTHER = "other"
_CHUNK = 128  # pictures at a time

#: Words without a picture of their own: they are no classes.
FUNCTION_WORDS = frozenset("a and at for in of on or the to with".split())
#: Captions that differ in these words alone show nearly the same drawing, and fall to one half.
VARIANT_WORDS = frozenset(
    "man woman person men women people boy girl boys girls mx mrs male female facing right".split()
)


def words_of(caption: str) -> list[str]:
    """Lower-case words of a caption: runs of letters and digits of any script.

    >>> words_of("Smiling face, with heart-eyes")
    ['smiling', 'face', 'with', 'heart', 'eyes']
    """
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", caption).lower())


@cache
def class_names() -> tuple[str, ...]:
    """The 64 classes: the words of the table, most frequent first, then "other".

    >>> class_names()[:3], class_names()[-1], len(class_names())
    (('face', 'woman', 'man'), 'other', 64)
    """
    lines = (ASSETS / "classes.tsv").read_text(encoding="utf-8").splitlines()
    return (*(line.split("\t")[0] for line in lines[1:]), OTHER)


@cache
def _positions() -> dict[str, int]:
    return {name: i for i, name in enumerate(class_names()[:-1])}


def class_of(caption: str) -> str:
    """The class of a caption: its most frequent word in the table, else "other".

    >>> class_of("grinning face with open mouth"), class_of("Sushi"), class_of("")
    ('face', 'other', 'other')
    """
    return class_names()[class_index([caption])[0]]


def class_index(captions: Sequence[str]) -> np.ndarray:
    """`class_of` as positions in `class_names()`: int64 (n,).

    >>> class_index(["cat face", "Sushi"]).tolist()
    [0, 63]
    """
    if isinstance(captions, str):
        raise ConfigError(f"captions: got the single string {captions!r}; pass a list of captions")
    known, other = _positions(), len(class_names()) - 1
    return np.array(
        [min((known.get(w, other) for w in words_of(c)), default=other) for c in captions], np.int64
    )


def half(caption: str) -> str:
    """Which network learns a caption of the policy: "reward" or "heldout", even odds by SHA-256.

    Captions that differ in gender or direction alone go together. So the two networks share no caption, and
    yet both have seen what the policy draws.

    >>> half("man running") == half("woman running facing right")
    True
    """
    kept = sorted(w for w in words_of(caption) if w not in VARIANT_WORDS)
    return ("reward", "heldout")[hashlib.sha256(" ".join(kept).encode()).digest()[0] & 1]


class ConvolutionClassifier(Module):
    """Three 3x3 convolutions, the last two of stride 2, a residual block; mean over the pixels; 128; 64."""

    def __init__(self, width: int, seed: int):
        rng = generator(seed)
        self.conv = [
            Conv2d(3, width, 3, 1, 1, seed=rng),
            Conv2d(width, 2 * width, 3, 2, 1, seed=rng),
            Conv2d(2 * width, 4 * width, 3, 2, 1, seed=rng),
        ]
        self.norm = [GroupNorm(8, width * k) for k in (1, 2, 4)]
        self.block = ResnetBlock2D(4 * width, 4 * width, groups=8, seed=rng)
        self.norm_out = GroupNorm(8, 4 * width)
        self.project = Linear(4 * width, FEATURES, seed=rng)
        self.head = Linear(FEATURES, len(class_names()), seed=rng)

    def features(self, x: Any) -> Variable:
        for conv, norm in zip(self.conv, self.norm, strict=True):
            x = norm(conv(x), silu=True)
        x = self.norm_out(self.block(x), silu=True)
        return F.silu(self.project(F.mean(x, (1, 2))))

    def forward(self, x: Any) -> Variable:
        return self.head(self.features(x))


class AttentionClassifier(Module):
    """Overlapping 4x4 patches of stride 2, a residual block, a 3x3 convolution of stride 2, self-attention
    over its 8x8 pixels, a residual block; mean over the pixels; 128; 64.
    """

    def __init__(self, width: int, seed: int):
        rng = generator(seed)
        self.patches = Conv2d(3, width, 4, 2, 1, seed=rng)
        self.norm_in = GroupNorm(8, width)
        self.block_1 = ResnetBlock2D(width, width, groups=8, seed=rng)
        self.down = Conv2d(width, 2 * width, 3, 2, 1, seed=rng)
        self.attention = Attention(2 * width, width, groups=8, seed=rng)
        self.block_2 = ResnetBlock2D(2 * width, 2 * width, groups=8, seed=rng)
        self.norm_out = GroupNorm(8, 2 * width)
        self.project = Linear(2 * width, FEATURES, seed=rng)
        self.head = Linear(FEATURES, len(class_names()), seed=rng)

    def features(self, x: Any) -> Variable:
        x = self.block_1(self.norm_in(self.patches(x), silu=True))
        x = self.norm_out(self.block_2(self.attention(self.down(x))), silu=True)
        return F.silu(self.project(F.mean(x, (1, 2))))

    def forward(self, x: Any) -> Variable:
        return self.head(self.features(x))


#: name of the network -> (architecture, width)
ARCHITECTURES: dict[str, tuple[Callable[[int, int], Module], int]] = {
    "reward": (ConvolutionClassifier, 24),
    "heldout": (AttentionClassifier, 40),
}


class ClassNetwork:
    """Log-probabilities of the 64 classes and 128 features of pictures, by the weights that ship.

    `name`: "reward" or "heldout". `track`: "bf16" or "reference"; nothing outside changes it. Pictures are
    float32 (n, H, W, 3) in [-1, 1] of any size; they are brought to 32 x 32 pixels by `resize`.

    >>> network = ClassNetwork("reward")
    >>> pictures = np.zeros((2, 16, 16, 3), np.float32)
    >>> network.features(pictures).shape, network.log_probabilities(pictures).shape
    ((2, 128), (2, 64))
    """

    def __init__(self, name: str = "reward", track: str = "bf16"):
        self._begin(name, track, 0)
        state, self.sha256 = _shipped(name)
        self.load_state_dict(state)

    def _begin(self, name: str, track: str, seed: int) -> None:
        if name not in ARCHITECTURES:
            raise ConfigError(f"class network: {name!r} is no network{nearest(name, ARCHITECTURES)}")
        if track not in ("bf16", "reference"):
            raise ConfigError(
                f"class network {name}: track is {track!r}, but it runs on 'bf16' or 'reference'"
            )
        self.name, self.track, self.sha256 = name, track, ""
        kind, width = ARCHITECTURES[name]
        self.network = kind(width, subseed(seed, "classes", name))

    @classmethod
    def untrained(cls, name: str, seed: int = 0, track: str = "bf16") -> ClassNetwork:
        """A network that knows nothing yet, for `tools/train_classes.py`."""
        made = cls.__new__(cls)
        made._begin(name, track, seed)
        return made

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the columns of `log_probabilities`."""
        return class_names()

    class_of = staticmethod(class_of)

    def features(self, images: np.ndarray) -> np.ndarray:
        """What the last layer sees: float32 (n, 128). Raises `ShapeError` for anything but (n, H, W, 3)."""
        return self._run(images, self.network.features, FEATURES)

    def log_probabilities(self, images: np.ndarray) -> np.ndarray:
        """Natural logarithms of the classes' probabilities: float32 (n, 64); each row's exponentials sum to
        1.
        """
        logits = self._run(images, self.network, len(class_names())).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True) if len(logits) else 0
        return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)

    def _run(self, images: np.ndarray, function: Callable[[Any], Variable], columns: int) -> np.ndarray:
        images = np.asarray(images)
        if images.ndim != 4 or images.shape[-1] != 3 or not all(images.shape[1:3]):
            raise ShapeError(
                f"class network {self.name}: images have shape {images.shape}, but it takes (n, H, W, 3)"
            )
        out = np.empty((len(images), columns), np.float32)
        with no_grad(), tracks(self.track):
            for start in range(0, len(images), _CHUNK):
                x = resize(images[start : start + _CHUNK], SIZE)
                out[start : start + _CHUNK] = function(np.ascontiguousarray(x)).data
        return out

    def state_dict(self) -> dict[str, np.ndarray]:
        """The weights by name."""
        return self.network.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Weights from `state`. Raises `CheckpointError` when they do not fit."""
        try:
            self.network.load_state_dict({k: np.asarray(v, np.float32) for k, v in state.items()})
        except ShapeError as error:
            raise CheckpointError(f"class network {self.name}: {error}") from error


def asset(name: str, ending: str) -> Path:
    """Path of a shipped file: ``assets/classes_<name>.<ending>``."""
    return ASSETS / f"classes_{name}.{ending}"


@cache
def _shipped(name: str) -> tuple[dict[str, np.ndarray], str]:
    """(weights, SHA-256 of the file), the file checked against its recipe."""
    path, recipe = asset(name, "safetensors"), asset(name, "json")
    try:
        content, expected = path.read_bytes(), json.loads(recipe.read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"class network {name}: {error}; reinstall fp4bf16") from error
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise CheckpointError(
            f"class network {name}: SHA-256 of {path.name} is {found[:16]}..., but {recipe.name} says "
            f"{expected[:16]}...; reinstall fp4bf16"
        )
    return io.load(path), found


class ClassMeasure(Measure):
    """log p(class of the prompt) of the picture, by the network of its role, which ships.

    A prompt with no word of the table asks for "other". Reward and held-out network differ in architecture
    and captions.
    """

    kind = "class"
    unit = "log p"

    @property
    def network(self) -> ClassNetwork:
        """The network, one for all."""
        return shared(self.role)

    def _values(self, images: np.ndarray, prompts: list[str]) -> np.ndarray:
        found = self.network.log_probabilities(images)
        return found[np.arange(len(prompts)), class_index(prompts)]

    def state_dict(self) -> dict[str, np.ndarray]:
        """The digest of the weights that ship, so that a run is not resumed with others."""
        return {"sha256": np.frombuffer(bytes.fromhex(self.network.sha256), np.uint8).copy()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        given = bytes(np.asarray(state.get("sha256", ()), np.uint8)).hex()
        if given and given != self.network.sha256:
            raise CheckpointError(
                f"reward {self.name}: the run was made with the weights {given[:16]}..., but this version of "
                f"fp4bf16 ships {self.network.sha256[:16]}...; finish it with the version that began it"
            )


@cache
def shared(name: str) -> ClassNetwork:
    """One network for all who ask, on the BF16 track; do not change it."""
    return ClassNetwork(name)
