"""What a reward is, and the check that every answer of one passes through.

A reward is any callable ``reward(images, prompts)``: images float32 (n, H, W, 3), RGB in [-1, 1], prompts n
strings; it returns n finite numbers, larger is better. Give it a ``name`` for messages and logs.

Here are also the rewards that count pixels: the size as JPEG, and colourfulness, each with another measure
beside it that watches. `fp4bf16.align.panel` puts rewards together.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import RewardError
from ..extras import require
from . import guards
from .measures import Measure


@runtime_checkable
class Reward(Protocol):
    """The protocol; a plain function with this signature is one."""

    def __call__(self, images: np.ndarray, prompts: Sequence[str]) -> Any: ...


def reward_name(reward: Any) -> str:
    """How messages call `reward`: its ``name``, else its function or class name."""
    return getattr(reward, "name", None) or getattr(reward, "__name__", None) or type(reward).__name__


def numbers(answer: Any) -> np.ndarray:
    """What a reward returned, as float32: an array, a sequence, or a tensor of another framework, from any
    device. Masked places are NaN; numbers beyond float32 are infinite. Raises `TypeError` or `ValueError` for
    what is no real numbers.

    >>> numbers([1, 2.5, 1e300]).tolist()
    [1.0, 2.5, inf]
    """
    if hasattr(answer, "detach"):  # of a PyTorch model, which may be on a GPU and want a gradient
        answer = answer.detach().cpu()
    if isinstance(answer, np.ma.MaskedArray):
        answer = answer.filled(np.nan)
    values = np.asarray(answer)
    if values.dtype.kind == "c":
        raise TypeError("complex numbers have no order")
    with np.errstate(over="ignore"):  # beyond float32: infinite, and refused as such
        return values.astype(np.float32)


def score(reward: Reward, images: np.ndarray, prompts: Sequence[str], *, finite: bool = True) -> np.ndarray:
    """``reward(images, prompts)``, checked: float32 (n,).

    Raises `RewardError` when there are not as many prompts as pictures, or unless the reward returns one
    number a picture, which must be finite unless `finite` is False.

    >>> pictures = np.full((2, 4, 4, 3), 0.5, np.float32)
    >>> score(lambda images, prompts: images.mean(axis=(1, 2, 3)), pictures, ["a", "b"])
    array([0.5, 0.5], dtype=float32)
    """
    name, n = reward_name(reward), len(images)
    if len(prompts) != n:
        raise RewardError(f"reward {name}: {n} pictures but {len(prompts)} prompts; pass one a picture")
    answer = reward(images.copy(), list(prompts))  # what it does to them is its own affair
    try:
        values = numbers(answer)
    except (TypeError, ValueError):
        raise RewardError(
            f"reward {name}: returned {type(answer).__name__}, no numbers; it must return {n} numbers"
        ) from None
    if values.shape != (n,):
        raise RewardError(
            f"reward {name}: returned shape {values.shape} for {n} pictures; it must return one number "
            "a picture"
        )
    if finite:
        require_finite(name, values, prompts)
    return values


def require_finite(name: str, values: np.ndarray, prompts: Sequence[str]) -> None:
    """Raise `RewardError` unless all of `values` (n,) that the reward `name` returned are finite."""
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        first = int(bad[0])
        raise RewardError(
            f"reward {name}: returned {values[first]} for picture {first} ({prompts[first]!r}), and is not "
            f"finite for {bad.size} of {len(values)} pictures; it must return a finite number for each"
        )


def _bytes(images: np.ndarray) -> np.ndarray:
    """uint8 of pictures in [-1, 1], rounded to nearest."""
    return np.clip(np.rint((images + 1) * np.float32(127.5)), 0, 255).astype(np.uint8)


class _FileSize(Measure):
    """Minus the bytes of the picture's file; `shown` are the bytes themselves, of which fewer are better."""

    kind = "jpeg"
    unit = "bytes"
    format: dict[str, Any] = {}

    def require(self) -> None:
        require("PIL.Image", f"reward {self.kind}", "train")

    def _values(self, images: np.ndarray, prompts: list[str]) -> np.ndarray:
        image = require("PIL.Image", f"reward {self.kind}", "train")
        sizes = np.zeros(len(images))
        for i, pixels in enumerate(_bytes(images)):
            file = io.BytesIO()
            image.fromarray(pixels).save(file, **self.format)
            sizes[i] = file.tell()
        return -sizes

    def shown(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        return -super().shown(images, prompts)


class JpegSize(_FileSize):
    """Minus the bytes as JPEG of quality 95: "compressibility" of Black et al. 2023 (DDPO), section 5.1.

    Its optimum is a blank picture, which the guards on contrast and colour refuse. Needs Pillow.

    >>> flat = np.zeros((1, 16, 16, 3), np.float32)
    >>> bool(JpegSize("reward")(flat, [""])[0] < -100)
    True
    """

    format = {"format": "JPEG", "quality": 95}


class PngSize(_FileSize):
    """Minus the bytes as PNG: lossless, by prediction and deflate, so no trick on JPEG's blocks helps it."""

    format = {"format": "PNG", "optimize": True}


class Colourfulness(Measure):
    """Hasler and Suesstrunk's M (`guards.colourfulness`), on the scale of 0-255 pixels.

    >>> grey = np.full((1, 8, 8, 3), 0.5, np.float32)
    >>> float(Colourfulness("reward")(grey, [""])[0])
    0.0
    """

    kind = "colourfulness"
    side = 8

    def _values(self, images: np.ndarray, prompts: list[str]) -> np.ndarray:
        return guards.colourfulness(images)


#: Linear sRGB to XYZ of white (1, 1, 1) each, D65 (IEC 61966-2-1): rows X, Y, Z, each divided by its sum.
_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_XYZ /= _XYZ.sum(axis=1, keepdims=True)


def chroma(images: np.ndarray) -> np.ndarray:
    """Mean chroma sqrt(a*^2 + b*^2) of each picture's pixels in CIELAB (CIE 15:2004): float64 (n,).

    `images`: (n, H, W, 3) in [-1, 1], sRGB.

    >>> red = np.zeros((1, 8, 8, 3), np.float32) + np.float32([1, -1, -1])
    >>> chroma(red).round(1).tolist()
    [104.6]
    """
    x = np.clip((np.asarray(images, np.float64) + 1) / 2, 0, 1)
    linear = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    t = linear @ _XYZ.T
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.hypot(500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])).mean(axis=(1, 2))


class Chroma(Measure):
    """Mean CIELAB chroma (`chroma`): watches `Colourfulness` in another colour space and by another mean."""

    kind = "colourfulness"
    side = 8

    def _values(self, images: np.ndarray, prompts: list[str]) -> np.ndarray:
        return chroma(images)
