"""What turns pictures into features that distances are taken of; each says by its name what it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..align.guards import pixel_statistics, units
from ..errors import ConfigError, ShapeError, nearest

#: The one sentence that names what the numbers could be taken for.
NOT_FID = (
    "No number here is an FID: that is the Fréchet distance on Inception-v3, whose weights are not used, and "
    "distances on other extractors cannot be compared with it or with each other."
)
#: What ``--extractors`` calls them -> the name that stands beside every number.
NAMES = {"pixels": "pixel statistics", "classes": "class network", "efficientnet": "EfficientNet-Lite0"}


@dataclass(frozen=True)
class Extractor:
    """`features` of pictures, float32 (n, H, W, 3) in [-1, 1], are (n, dimension); `about` says which
    network, of which weights, they come from.
    """

    name: str
    dimension: int
    features: Callable[[np.ndarray], np.ndarray]
    about: str


def pixels(real: np.ndarray) -> Extractor:
    """`pixel_statistics`, in the units of `real` pictures (`guards.units`).

    >>> real = np.random.default_rng(0).uniform(-1, 1, (20, 8, 8, 3)).astype(np.float32)
    >>> pixels(real).features(real).shape
    (20, 56)
    """
    known = pixel_statistics(real)
    centre, scale = units(known)

    def features(pictures: np.ndarray) -> np.ndarray:
        return (pixel_statistics(pictures) - centre) / scale

    return Extractor(
        NAMES["pixels"], known.shape[1], features, f"no network; in units of {len(real)} real pictures"
    )


def classes() -> Extractor:
    """The 128 features of the held-out class network: no reward reads it and no run trains it."""
    from ..align.classes import ClassNetwork

    network = ClassNetwork("heldout")
    about = f"align/classes.py 'heldout', weights {network.sha256[:16]}"
    return Extractor(NAMES["classes"], 128, network.features, about)


def efficientnet() -> Extractor:
    """The 1280 features of EfficientNet-Lite0. Raises `ImportError` without the extra ``eval``."""
    from ..align.efficientnet import EfficientNetLite0

    network = EfficientNetLite0()
    return Extractor(NAMES["efficientnet"], 1280, network.features, "align/efficientnet.py, on ImageNet")


def make_extractors(wanted: Sequence[str] | None, real: np.ndarray) -> tuple[list[Extractor], dict[str, str]]:
    """(extractors, name -> why it is left out). `wanted`: of `NAMES`; None: all that are installed.

    real: pictures that give the pixel statistics their units. Raises `ConfigError` for a name that is not
    known, `ImportError` for one that is asked for but not installed.
    """
    for name in wanted or ():
        if name not in NAMES:
            raise ConfigError(f"--extractors {name}: is no extractor{nearest(name, NAMES)}")
    made, absent = [], {}
    makers: dict[str, Callable[[], Any]] = {
        "pixels": lambda: pixels(real), "classes": classes, "efficientnet": efficientnet
    }  # fmt: skip
    for name in dict.fromkeys(wanted or NAMES):
        try:
            made.append(makers[name]())
        except ImportError as error:
            if wanted is not None:
                raise
            absent[NAMES[name]] = str(error)
    return made, absent


def featurise(extractor: Extractor, pictures: np.ndarray, chunk: int = 512) -> np.ndarray:
    """Features of `pictures`, `chunk` at a time: float32 (n, dimension).

    Raises `ShapeError` where the extractor answers with another shape.
    """
    out = np.empty((len(pictures), extractor.dimension), np.float32)
    for start in range(0, len(pictures), chunk):
        part = pictures[start : start + chunk]
        found = np.asarray(extractor.features(part))
        if found.shape != (len(part), extractor.dimension):
            raise ShapeError(
                f"{extractor.name}: features have shape {found.shape} for {len(part)} pictures instead of "
                f"({len(part)}, {extractor.dimension})"
            )
        out[start : start + chunk] = found
    return out
