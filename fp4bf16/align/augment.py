"""Random changes of pictures that a judge must not mind.

A judge that saw clean pictures only would reward whatever tells a generated picture from a real one. So it is
trained on pictures that are shifted, mirrored, recoloured, blurred, noisy and overlaid with small periodic
patterns; both drawings of a caption get the same change, so that no change hints at the style.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..diffusion.noise import normal, uniform


@dataclass(frozen=True)
class Augmentation:
    """Largest strengths. Blur, noise and pattern are drawn for half of the pictures each."""

    shift: int = 1  # pixels, edge colours move in
    brightness: float = 0.15  # added, in units of [-1, 1]
    contrast: float = 0.2  # factor 1 +- this
    saturation: float = 0.3  # factor 1 +- this
    hue: float = 0.3  # rotation about the grey axis, radians
    blur: float = 1.0  # share of the (1, 2, 1) / 4 blur along both axes that is mixed in
    noise: float = 0.15  # standard deviation
    pattern: float = 0.2  # largest value of a pattern of period 2 or 4, grey or coloured


def _blurred(x: np.ndarray) -> np.ndarray:
    """(1, 2, 1) / 4 along H and W of (..., H, W, C), edges repeated."""
    for axis in (-3, -2):
        n = x.shape[axis]
        before = x.take(np.maximum(np.arange(n) - 1, 0), axis=axis)
        after = x.take(np.minimum(np.arange(n) + 1, n - 1), axis=axis)
        x = 0.25 * (before + after) + 0.5 * x
    return x


def _moved(x: np.ndarray, mirror: np.ndarray, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Picture i of (k, n, H, W, C) mirrored where mirror[i] and moved by (down[i], right[i]) pixels."""
    n, height, width = x.shape[1:4]
    rows = np.clip(np.arange(height) - down[:, None], 0, height - 1)
    columns = np.clip(np.arange(width) - right[:, None], 0, width - 1)
    columns = np.where(mirror[:, None], width - 1 - columns, columns)
    return x[:, np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _colour_matrices(hue: np.ndarray, saturation: np.ndarray, contrast: np.ndarray) -> np.ndarray:
    """(n, 3, 3) matrices that act on RGB columns from the right.

    Chroma, which is what is orthogonal to the grey axis (1, 1, 1), is rotated about it by `hue` (Rodrigues'
    formula) and scaled by `saturation`; everything is scaled by `contrast`.
    """
    grey = np.full((3, 3), 1 / 3, np.float32)
    cross = np.float32([[0, 1, -1], [-1, 0, 1], [1, -1, 0]]) / math.sqrt(3)  # v @ cross = axis x v
    h, s, c = (v[:, None, None] for v in (hue, saturation, contrast))
    return c * (grey + s * (np.cos(h) * (np.eye(3, dtype=np.float32) - grey) + np.sin(h) * cross))


def _patterns(seed: int, step: int, n: int, u: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """n periodic patterns (n, H, W, 3) with largest magnitude 1; u (n, 2) chooses period and colour."""
    tiles = normal(seed, step, (n, 4, 4, 3), stream=12)
    fine, grey = (u[:, 0] < 0.5)[:, None, None, None], (u[:, 1] < 0.5)[:, None, None, None]
    tiles = np.where(fine, np.tile(tiles[:, :2, :2], (1, 2, 2, 1)), tiles)
    tiles = np.where(grey, tiles[..., :1], tiles)
    tiles /= np.abs(tiles).max(axis=(1, 2, 3), keepdims=True)
    rows, columns = -(-size[0] // 4), -(-size[1] // 4)
    return np.tile(tiles, (1, rows, columns, 1))[:, : size[0], : size[1]]


def drawn(seed: int, step: int, n: int, strength: Augmentation | None = None) -> dict[str, np.ndarray]:
    """What `augment` does to n pictures in this step: name -> float32 (n,), in the units of `Augmentation`.

    "blur", "noise" and "pattern" are 0 for the pictures that are spared.

    >>> found = drawn(seed=0, step=0, n=4)
    >>> sorted(found), found["noise"].shape
    (['blur', 'brightness', 'contrast', 'hue', 'noise', 'pattern', 'saturation'], (4,))
    """
    s = strength or Augmentation()
    u = uniform(seed, step, (n, 14), stream=10)
    signed = {"hue": 3, "saturation": 4, "contrast": 5, "brightness": 6}
    found = {name: np.float32(getattr(s, name)) * (2 * u[:, j] - 1) for name, j in signed.items()}
    for name, j in {"blur": 7, "noise": 9, "pattern": 11}.items():
        found[name] = np.float32(getattr(s, name)) * ((u[:, j] < 0.5) * u[:, j + 1])
    return found


def augment(images: np.ndarray, seed: int, step: int, strength: Augmentation | None = None) -> np.ndarray:
    """Change float32 (k, n, H, W, 3) pictures at random: new float32 pictures, clipped to [-1, 1].

    Pictures [0, i] .. [k-1, i] get the same change (and each its own noise). A pure function of (seed, step).

    >>> x = np.zeros((2, 3, 16, 16, 3), np.float32)
    >>> augment(x, seed=0, step=0).shape
    (2, 3, 16, 16, 3)
    """
    s = strength or Augmentation()
    k, n, height, width, _ = images.shape
    u = uniform(seed, step, (n, 14), stream=10)
    amount = drawn(seed, step, n, s)
    column = {name: v[:, None, None, None] for name, v in amount.items()}  # broadcasts over a picture
    down, right = (np.floor(u[:, j] * (2 * s.shift + 1)).astype(np.int64) - s.shift for j in (0, 1))
    x = _moved(images, u[:, 2] < 0.5, down, right)
    colours = _colour_matrices(amount["hue"], 1 + amount["saturation"], 1 + amount["contrast"])
    x = (x.reshape(k, n, height * width, 3) @ colours).reshape(images.shape) + column["brightness"]
    x += column["blur"] * (_blurred(x) - x)
    choice = np.stack([u[:, 13], (u[:, 13] * 2) % 1], axis=1)
    x += column["pattern"] * _patterns(seed, step, n, choice, (height, width))
    x += column["noise"] * normal(seed, step, (k, n, height, width, 3), stream=11)
    return np.clip(x, -1, 1, out=x)
