"""Routes as files, and the noise levels that they belong to.

A route is a dict from a pattern of parameter names to a track. A `RouteSet` holds one for each bucket of
noise levels, and the one that training runs on, where all levels meet in a batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..files import write_atomic
from ..tracks import check_track

FORMAT, VERSION = "fp4bf16-route", 1
_LARGEST_FILE = 16 << 20  # bytes

Route = dict[str, str]


def bucket_of(timesteps: Any, levels: int, buckets: int) -> Any:
    """The bucket of each of `timesteps`, whole numbers in 0..levels-1: an int, or an int64 array of their
    shape.

    The levels are cut into `buckets` equal parts (their sizes differ by one at most); bucket 0 has the least
    noise. Raises `ValueError` for a timestep outside, and unless 1 <= buckets <= levels.

    >>> bucket_of(0, 1000, 4), bucket_of(999, 1000, 4), bucket_of(np.array([249, 250]), 1000, 4).tolist()
    (0, 3, [0, 1])
    """
    if not 1 <= buckets <= levels:
        raise ValueError(
            f"bucket_of: buckets is {buckets}, but 1 to {levels} parts of the {levels} levels exist"
        )
    t = np.asarray(timesteps)
    if t.dtype.kind not in "iu" and t.size:
        raise ValueError(f"bucket_of: timesteps are {t.dtype}, but whole numbers are needed")
    if t.size and not (0 <= int(t.min()) and int(t.max()) < levels):
        raise ValueError(
            f"bucket_of: timesteps reach from {t.min()} to {t.max()}, but the levels are 0 to {levels - 1}"
        )
    found = t.astype(np.int64) * buckets // levels
    return int(found) if found.ndim == 0 else found


def check_route(route: Any, where: str = "route") -> Route:
    """`route` as a dict from pattern to track. Raises `ConfigError` naming `where`, pattern and track.

    >>> check_route({"conv_in*": "bf16", "*": "fp4"})
    {'conv_in*': 'bf16', '*': 'fp4'}
    """
    if not isinstance(route, Mapping):
        raise ConfigError(
            f"{where}: is a {type(route).__name__}, but a dict from patterns of names to tracks is needed, "
            'such as {"conv_in*": "bf16", "*": "fp4"}'
        )
    checked = {}
    for pattern, track in route.items():
        if not isinstance(pattern, str) or not isinstance(track, str):
            raise ConfigError(f"{where}: {pattern!r}: {track!r} is no pattern with a track; both are strings")
        checked[pattern] = check_track(track, f"{where}: {pattern!r}")
    return checked


@dataclass(frozen=True)
class RouteSet:
    """Routes of a network: one for each bucket of noise levels, least noise first, and that of training.

    buckets: at least one route. training: the route where all levels meet; by default that of the only
    bucket, and needed where there are several. about: anything JSON holds, such as the run it came from.

    >>> RouteSet([{"*": "fp4"}]).at(500, 1000)
    {'*': 'fp4'}
    """

    buckets: Sequence[Route]
    training: Route | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.buckets, Mapping | str) or not isinstance(self.buckets, Sequence):
            raise ConfigError(
                f"route: buckets is a {type(self.buckets).__name__}, but a list of routes is needed; put one "
                "route in a list"
            )
        if not self.buckets:
            raise ConfigError("route: there are no buckets, but at least one route is needed")
        routes = tuple(check_route(r, f"route: bucket {i}") for i, r in enumerate(self.buckets))
        if self.training is None and len(routes) > 1:
            raise ConfigError(
                f"route: there are {len(routes)} buckets but no route for training, where all noise levels "
                'meet; add "training"'
            )
        training = routes[0] if self.training is None else check_route(self.training, "route: training")
        object.__setattr__(self, "buckets", routes)
        object.__setattr__(self, "training", training)

    def of(self, bucket: int | None = None) -> Route:
        """The route of a bucket; None: of training. Raises `ValueError` for a bucket that is not there."""
        if bucket is None:
            return dict(self.training)
        if not 0 <= bucket < len(self.buckets):
            raise ValueError(
                f"route: bucket is {bucket!r}, but there are 0 to {len(self.buckets) - 1}; None is training's"
            )
        return dict(self.buckets[bucket])

    def at(self, timestep: int, levels: int) -> Route:
        """The route of the bucket that a timestep in 0..levels-1 lies in."""
        return self.of(bucket_of(timestep, levels, len(self.buckets)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to the file."""
        return {
            "format": FORMAT, "version": VERSION, "buckets": [dict(r) for r in self.buckets],
            "training": dict(self.training), "about": dict(self.about),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Any, where: str = "route") -> RouteSet:
        """What `to_dict` gave, or a plain route (a dict from patterns to tracks): one bucket.

        Raises `ConfigError` naming `where`.

        >>> RouteSet.from_dict({"conv_in*": "bf16", "*": "fp4"}).buckets
        ({'conv_in*': 'bf16', '*': 'fp4'},)
        """
        if not isinstance(data, Mapping) or "format" not in data:
            return cls([check_route(data, where)])
        if data["format"] != FORMAT or data.get("version") != VERSION:
            raise ConfigError(
                f"{where}: is {data['format']!r} of version {data.get('version')!r}, but {FORMAT!r} of "
                f"version {VERSION} is read here; save the route with this version of the package"
            )
        unknown = set(data) - {"format", "version", "buckets", "training", "about"}
        if unknown or not isinstance(data.get("about", {}), Mapping):
            raise ConfigError(
                f"{where}: holds {', '.join(map(repr, sorted(unknown))) or 'an about that is no object'}; a "
                "route has format, version, buckets, training and about"
            )
        try:
            return cls(data.get("buckets"), data.get("training"), dict(data.get("about", {})))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


def save_routes(path: str | os.PathLike, routes: RouteSet | Mapping[str, str]) -> Path:
    """Write routes, or one plain route, as JSON; returns the path. The old file or the new one is there at
    any moment.

    >>> import tempfile
    >>> file = save_routes(tempfile.mkdtemp() + "/route.json", {"conv_in*": "bf16", "*": "fp4"})
    >>> load_routes(file).of()
    {'conv_in*': 'bf16', '*': 'fp4'}
    """
    path = Path(path)
    routes = routes if isinstance(routes, RouteSet) else RouteSet.from_dict(routes)
    text = json.dumps(routes.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if not path.parent.is_dir():
        raise FileNotFoundError(f"save_routes: {path}: the folder {path.parent} is not there; make it first")
    write_atomic(path, text.encode())
    return path


def load_routes(path: str | os.PathLike) -> RouteSet:
    """Read routes from JSON: what `save_routes` wrote, or a plain dict from patterns to tracks.

    Raises `ConfigError` naming the file and what is wrong with it, `OSError` if it cannot be read.
    """
    path = Path(path)
    try:
        return RouteSet.from_dict(parsed(path), str(path))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: is no JSON of a route: {error}") from None


def parsed(path: Path) -> Any:
    """What JSON a file holds. Raises `ValueError` saying why it is none that a route can be, `OSError` if it
    cannot be read.
    """
    if (size := path.stat().st_size) > _LARGEST_FILE:
        raise ValueError(f"it has {size} bytes, but a route has {_LARGEST_FILE} at most")
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A pattern given twice would be decided by the last, where the first match is meant to decide."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{double!r} stands in it twice; leave one")
    return found
