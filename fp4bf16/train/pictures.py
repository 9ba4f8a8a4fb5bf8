"""Pictures as bytes, as PNG, and side by side."""

from __future__ import annotations

import io

import numpy as np

from ..extras import require


def to_bytes(pictures: np.ndarray) -> np.ndarray:
    """[-1, 1] float -> uint8, rounded, clipped; NaN becomes 0."""
    return np.clip(np.nan_to_num(pictures) * 127.5 + 127.5, 0, 255).round().astype(np.uint8)


def from_bytes(pictures: np.ndarray) -> np.ndarray:
    """uint8 -> float32 in [-1, 1]."""
    return pictures.astype(np.float32) * np.float32(1 / 127.5) - np.float32(1)


def png(picture: np.ndarray, scale: int = 1) -> bytes:
    """One uint8 picture (H, W, 3) as PNG, each pixel `scale` x `scale`."""
    image = require("PIL.Image", "writing pictures")
    buffer = io.BytesIO()
    image.fromarray(picture.repeat(scale, 0).repeat(scale, 1)).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def grid(pictures: np.ndarray, columns: int, gap: int = 1) -> np.ndarray:
    """uint8 (n, H, W, 3) side by side, row by row, on white: (rows (H + gap) + gap, columns (W + gap) +
    gap, 3).

    >>> grid(np.zeros((3, 4, 4, 3), np.uint8), columns=2).shape
    (11, 11, 3)
    """
    n, height, width, channels = pictures.shape
    rows = -(-n // columns)
    sheet = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, channels), 255, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = (i // columns) * (height + gap) + gap, (i % columns) * (width + gap) + gap
        sheet[top : top + height, left : left + width] = picture
    return sheet
