"""The emoji pairs: 1,678 captions, each drawn in two styles, with a fixed split by caption.

The pictures ship with the package (``assets/``, licences in ``assets/NOTICE``);
``tools/build_emoji_pairs.py`` rebuilds them. The split is by caption and never by picture, because the two
drawings of one caption show the same thing: what a judge has seen in one style it would know in the other.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ..align.classes import words_of
from ..errors import ConfigError, nearest

ASSETS = Path(__file__).with_name("assets")
STYLES = ("noto", "twemoji")  # images[0], images[1]
ROLES = ("policy", "reward", "heldout", "evaluation")


@dataclass(frozen=True)
class Pairs:
    """Captioned pictures in two styles.

    `images`: float32 (2, n, size, size, 3) in [-1, 1], first axis `STYLES`, channels RGB;
    `captions`: n strings; `roles`: n of `ROLES`.
    """

    images: np.ndarray
    captions: tuple[str, ...]
    roles: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def size(self) -> int:
        """Pixels a side."""
        return self.images.shape[2]

    def select(self, role: str | None = None, word: str | None = None, without: str | None = None) -> Pairs:
        """The captions of one role, with `word`, and without the word `without`, in the order of the table.

        Raises `ConfigError` for an unknown role or when nothing is left.

        >>> len(load_pairs(16).select(word="face"))
        121
        """
        if role is not None and role not in ROLES:
            raise ConfigError(f"role: {role!r} is not in the split table{nearest(role, ROLES)}")
        keep = [
            i for i, caption in enumerate(self.captions)
            if (role is None or self.roles[i] == role)
            and (word is None or word in words_of(caption))
            and (without is None or without not in words_of(caption))
        ]
        if not keep:
            raise ConfigError(f"select: no caption has role {role!r}, the word {word!r} and not {without!r}")
        captions, roles = (tuple(column[i] for i in keep) for column in (self.captions, self.roles))
        return Pairs(self.images[:, keep], captions, roles)

    def style(self, name: str) -> np.ndarray:
        """The pictures of one style: float32 (n, size, size, 3)."""
        if name not in STYLES:
            raise ConfigError(f"style: {name!r} is not a style of the emoji pairs{nearest(name, STYLES)}")
        return self.images[STYLES.index(name)]


def load_pairs(size: int = 32) -> Pairs:
    """All 1,678 pairs at `size` pixels: 32 as rendered, or a divisor of 32, averaged over square boxes.

    >>> pairs = load_pairs(16)
    >>> pairs.images.shape, pairs.images.dtype, pairs.captions[0]
    ((2, 1678, 16, 16, 3), dtype('float32'), '1st place medal')
    """
    x, captions = _read()
    roles = split_table()
    images = downsample(x, size)
    images *= np.float32(1 / 127.5)
    images -= np.float32(1)
    return Pairs(images, captions, tuple(roles[c] for c in captions))


@cache
def _read() -> tuple[np.ndarray, tuple[str, ...]]:
    with np.load(ASSETS / "pairs32.npz", allow_pickle=False) as archive:
        x, captions = archive["x"], tuple(map(str, archive["cap"]))
    x.flags.writeable = False
    return x, captions


@cache
def split_table() -> dict[str, str]:
    """Caption -> role, from the committed table ``assets/split.tsv``.

    Captions with the word "face": 100 policy, 21 evaluation. Others: 550 reward (judge), 550 heldout (judge),
    60 evaluation, 397 policy; captions that differ in gender or direction alone have one role.
    """
    lines = (ASSETS / "split.tsv").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines[1:])


def downsample(x: np.ndarray, size: int) -> np.ndarray:
    """Mean over square boxes: (..., H, W, C) -> float32 (..., size, size, C), in the units of `x`.

    Raises `ConfigError` when `size` does not divide H and W.
    """
    height, width, channels = x.shape[-3:]
    if size < 1 or height % size or width % size:
        fitting = [s for s in range(1, height + 1) if height % s == 0 and width % s == 0]
        raise ConfigError(f"size: {size} does not divide {height} x {width} pixels; choose one of {fitting}")
    if height == size and width == size:
        return x.astype(np.float32)
    boxes = x.reshape(*x.shape[:-3], size, height // size, size, width // size, channels)
    return boxes.mean(axis=(-4, -2), dtype=np.float32)


@dataclass(frozen=True)
class Vocabulary:
    """The known words, sorted; word i is column i of `encode`."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, captions: Iterable[str]) -> Vocabulary:
        """Every word of `captions`."""
        return cls(tuple(sorted({w for c in captions for w in words_of(c)})))

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, captions: Sequence[str]) -> np.ndarray:
        """Bag of words: float32 (n, len(self)), 1 where the caption has the word, the empty caption all zero.

        Raises `ConfigError` for a word that no training caption has, with the nearest known ones, and for a
        caption that is not empty but has no word at all.

        >>> Vocabulary.of(["cat face", "dog face"]).encode(["face", "dog"])
        array([[0., 0., 1.],
               [0., 1., 0.]], dtype=float32)
        """
        if isinstance(captions, str):
            raise ConfigError(f"captions: got the single string {captions!r}; pass a list of captions")
        index = {w: i for i, w in enumerate(self.words)}
        out = np.zeros((len(captions), len(self)), np.float32)
        for row, caption in zip(out, captions, strict=True):
            if caption.strip() and not words_of(caption):
                raise ConfigError(f"caption {caption!r}: has no word of letters or digits, and only "
                                  f"words are known; leave it empty for no caption")  # fmt: skip
            for word in words_of(caption):
                if word not in index:
                    raise ConfigError(self._unknown(word, caption))
                row[index[word]] = 1
        return out

    def _unknown(self, word: str, caption: str) -> str:
        close = difflib.get_close_matches(word, self.words, n=3, cutoff=0.6)
        hint = "nearest are " + ", ".join(map(repr, close)) if close else "no known word comes near"
        return f"caption {caption!r}: the vocabulary of {len(self)} words has no {word!r}; {hint}"


@cache
def vocabulary() -> Vocabulary:
    """The words of all 1,678 captions.

    >>> len(vocabulary())
    1451
    """
    return Vocabulary.of(_read()[1])
