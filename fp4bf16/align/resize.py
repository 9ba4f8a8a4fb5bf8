"""Pictures of another size: averaged down, interpolated up. For networks that look at one size only."""

from __future__ import annotations

from functools import cache

import numpy as np

from ..errors import ShapeError


@cache
def _weights(source: int, target: int) -> np.ndarray:
    """float32 (target, source), rows sum to 1.

    Down: output pixel i is the mean over [i s, (i + 1) s) of the input, s = source / target, an input pixel
    counting by its part inside. Up: linear between the centres of the pixels, edges repeated.
    """
    if target <= source:
        edges = np.arange(target + 1) * (source / target)
        pixels = np.arange(source)
        inside = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
        weights = np.maximum(inside, 0) * (target / source)
    else:
        at = np.clip((np.arange(target) + 0.5) * (source / target) - 0.5, 0, source - 1)
        weights = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(source)))
    weights = weights.astype(np.float32)
    weights.flags.writeable = False
    return weights


def resize(images: np.ndarray, size: int) -> np.ndarray:
    """float32 (n, H, W, 3) -> float32 (n, size, size, 3): box means down, bilinear up, per axis.

    Pictures that have the size already come back as they are, not copied. Raises `ShapeError` for anything
    but (n, H, W, 3) with H, W >= 1.

    >>> ramp = np.arange(4, dtype=np.float32)[None, :, None, None] * np.ones((1, 4, 4, 3), np.float32)
    >>> resize(ramp, 2)[0, :, 0, 0].tolist(), resize(ramp, 8)[0, :3, 0, 0].tolist()
    ([0.5, 2.5], [0.0, 0.25, 0.75])
    """
    images = np.asarray(images, np.float32)
    if images.ndim != 4 or images.shape[-1] != 3 or min(images.shape[1:3]) < 1 or size < 1:
        raise ShapeError(
            f"resize: images have shape {images.shape} and size is {size}; pass (n, H, W, 3) and a size >= 1"
        )
    n, height, width, channels = images.shape
    if height != size:
        rows = _weights(height, size) @ images.reshape(n, height, width * channels)
        images = rows.reshape(n, size, width, channels)
    if width != size:
        images = _weights(width, size) @ images  # (size, W) @ (n, size, W, 3): each row of each picture
    return images
