"""What products were measured to cost: a table of latencies, kept in a JSON file between runs.

A time is kept by operation, shape, track and device, as a moving average with the number of measurements in
it. Shapes that differ a little in their rows (the batch) share an entry: `shape_bucket`.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError
from .files import write_atomic
from .tracks import check_track

FORMAT, VERSION = "fp4bf16-latency", 1
_LARGEST_FILE = 64 << 20  # bytes: a table of every layer of a thousand networks is a tenth of it


class Latency(NamedTuple):
    """A moving average in microseconds, and how many measurements went into it."""

    microseconds: float
    count: int


class Key(NamedTuple):
    """What a latency belongs to; `shape` is a bucket."""

    op: str
    shape: tuple[int, ...]
    track: str
    device: str


def cache_folder() -> Path:
    """Where files of this package are kept between runs: ``FP4BF16_CACHE_DIR``, else ``fp4bf16`` in
    ``XDG_CACHE_HOME``, else in ``~/.cache``. Not made here. Raises `ConfigError` for an account without a
    home.
    """
    if named := os.environ.get("FP4BF16_CACHE_DIR"):
        return Path(named)
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "fp4bf16"
    try:
        return Path.home() / ".cache" / "fp4bf16"
    except RuntimeError:
        raise ConfigError(
            "FP4BF16_CACHE_DIR: is not set, and this account has no home folder; set it to a folder"
        ) from None


def shape_bucket(shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` (rows, columns, length of the sums, ...) with the rows rounded to the nearest power of two.

    Rows are the batch times the pixels: they vary, while the rest is the network's. Raises `ValueError` for
    anything but whole numbers from 0.

    >>> shape_bucket((1000, 256, 2304)), shape_bucket((1100, 256, 2304)), shape_bucket((0, 8, 8))
    ((1024, 256, 2304), (1024, 256, 2304), (0, 8, 8))
    """
    sizes = tuple(shape)
    for n in sizes:
        if isinstance(n, bool) or not hasattr(n, "__index__") or n < 0:
            raise ValueError(f"shape_bucket: shape {sizes} holds {n!r}, but whole numbers from 0 are needed")
    if not sizes:
        raise ValueError("shape_bucket: shape is (), but at least the rows are needed")
    rows, *rest = (int(n) for n in sizes)
    return (1 << round(math.log2(rows)) if rows else 0, *rest)


class LatencyTable:
    """Moving averages of latencies by operation, shape bucket, track and device.

    The first `window` measurements of an entry are averaged alike; then each counts 1 / window, so that a
    machine that changed is followed. frozen: measurements are refused silently, so that a
    test or a replayed run sees the table that it was given.

    >>> table = LatencyTable()
    >>> _ = table.update("conv2d", (1000, 256, 2304), "fp4", "NVIDIA H200", 12.0)
    >>> _ = table.update("conv2d", (1010, 256, 2304), "fp4", "NVIDIA H200", 14.0)
    >>> table.get("conv2d", (1024, 256, 2304), "fp4", "NVIDIA H200")
    Latency(microseconds=13.0, count=2)
    >>> table.get("conv2d", (1024, 256, 2304), "bf16", "NVIDIA H200") is None
    True
    """

    def __init__(self, window: int = 16, frozen: bool = False):
        if not (type(window) is int and window >= 1):
            raise ValueError(f"LatencyTable: window is {window!r}, but a whole number from 1 is needed")
        self.window, self.frozen = window, frozen
        self._entries: dict[Key, Latency] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[Key, Latency]]:
        """Entries in the order in which they were first measured."""
        return iter(list(self._entries.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LatencyTable) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]  (it changes)

    def __repr__(self) -> str:
        return f"LatencyTable({len(self)} entries, window={self.window}, frozen={self.frozen})"

    def update(
        self, op: str, shape: Sequence[int], track: str, device: str, microseconds: float
    ) -> Latency | None:
        """Add one measurement; returns the entry, or what it was (None: nothing) where the table is frozen.

        Raises `ValueError` for a time that is negative or not finite, and for no track.
        """
        key, value = self._key(op, shape, track, device), _checked(microseconds)
        held = self._entries.get(key)
        if self.frozen:
            return held
        held = held or Latency(0.0, 0)
        share = 1.0 / min(held.count + 1, self.window)
        mean = held.microseconds + share * (value - held.microseconds)
        self._entries[key] = Latency(mean, held.count + 1)
        return self._entries[key]

    def get(self, op: str, shape: Sequence[int], track: str, device: str) -> Latency | None:
        """The entry of that shape's bucket, None if there is none."""
        return self._entries.get(self._key(op, shape, track, device))

    def merge(self, other: LatencyTable) -> None:
        """Take over what `other` knows: an entry of both becomes their mean by count, each count at most
        `window`. Nothing happens where this table is frozen.

        >>> a, b = LatencyTable(), LatencyTable()
        >>> _ = a.update("linear", (8, 4, 4), "bf16", "cpu", 1.0), b.update("linear", (8, 4, 4), "bf16",
        ...     "cpu", 2.0), b.update("linear", (8, 4, 4), "bf16", "cpu", 3.0)
        >>> a.merge(b); a.get("linear", (8, 4, 4), "bf16", "cpu")
        Latency(microseconds=2.0, count=3)
        """
        if self.frozen:
            return
        for key, theirs in other:
            ours = self._entries.get(key)
            if ours is None:
                self._entries[key] = theirs
                continue
            a, b = min(ours.count, self.window), min(theirs.count, self.window)
            mean = (a * ours.microseconds + b * theirs.microseconds) / (a + b)
            self._entries[key] = Latency(mean, ours.count + theirs.count)

    @staticmethod
    def _key(op: str, shape: Sequence[int], track: str, device: str) -> Key:
        for what, text in (("op", op), ("device", device)):
            if not (isinstance(text, str) and text):
                raise ValueError(f"LatencyTable: {what} is {text!r}, but its name is needed")
        return Key(op, shape_bucket(shape), check_track(track), device)

    # ---- as JSON
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` takes them back to the bit."""
        entries = [[*key[:1], list(key.shape), *key[2:], *value] for key, value in self]
        return {"format": FORMAT, "version": VERSION, "window": self.window, "entries": entries}

    @classmethod
    def from_dict(cls, data: Any, where: str = "LatencyTable") -> LatencyTable:
        """The table that `to_dict` gave. Raises `ConfigError` naming `where` for anything else."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ConfigError(f"{where}: is no table of latencies ({FORMAT!r}); delete it or name another")
        if data.get("version") != VERSION:
            raise ConfigError(
                f"{where}: has version {data.get('version')!r}, but this program reads {VERSION}; delete it, "
                "and times are measured anew"
            )
        try:
            table = cls(window=data["window"])
            for op, shape, track, device, microseconds, count in data["entries"]:
                if not (type(count) is int and count >= 1):
                    raise ValueError(f"a count of {count!r}")
                # Buckets are what is stored: an octave's middle is its own bucket
                key = table._key(op, shape, track, device)
                table._entries[key] = Latency(_checked(microseconds), count)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{where}: does not hold what a table of latencies holds ({error}); delete it"
            ) from None
        return table

    def save(self, path: str | os.PathLike | None = None) -> Path:
        """Write the table to `path`, by default ``latency.json`` in `cache_folder`; returns the path.

        The cache is that of all runs: what others have stored there of products that this table does not
        know stays in it. A crash at any moment leaves the old file or the new one; of two that write at the
        same moment, one may lose what it added. Raises `OSError`.
        """
        path, table = (Path(path), self) if path is not None else (_cache_file(), self._with_others())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(table.to_dict(), allow_nan=False).encode())
        return path

    def _with_others(self) -> LatencyTable:
        """This table and, behind it, the cache's entries that it does not have."""
        table = LatencyTable(self.window)
        try:
            others = self._read(_cache_file())._entries
        except (ConfigError, OSError):  # none yet, or one that is replaced
            others = {}
        table._entries = self._entries | {k: v for k, v in others.items() if k not in self._entries}
        return table

    @classmethod
    def load(cls, path: str | os.PathLike | None = None) -> LatencyTable:
        """The table in the file `path`; `ConfigError` if it holds none, `OSError` if it cannot be read.

        Without `path` it is the cache's, and an empty table stands for one that is not there. One that
        cannot be used is a `RuntimeWarning`, for a cache can always be made anew.

        >>> import tempfile
        >>> table = LatencyTable()
        >>> _ = table.update("linear", (64, 32, 32), "bf16", "cpu", 3.5)
        >>> LatencyTable.load(table.save(tempfile.mkdtemp() + "/latency.json")) == table
        True
        """
        if path is not None:
            return cls._read(Path(path))
        try:
            return cls._read(_cache_file())
        except FileNotFoundError:
            pass
        except (ConfigError, OSError) as error:
            warnings.warn(f"the latencies measured before are not used: {error}", RuntimeWarning, 2)
        return cls()

    @classmethod
    def _read(cls, path: Path) -> LatencyTable:
        if path.stat().st_size > _LARGEST_FILE:
            raise ConfigError(
                f"{path}: has {path.stat().st_size} bytes, more than {_LARGEST_FILE}; delete it"
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not JSON ({error}); delete it") from None
        return cls.from_dict(data, str(path))


def _cache_file() -> Path:
    return cache_folder() / "latency.json"


def _checked(microseconds: float) -> float:
    value = float(microseconds)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"LatencyTable: microseconds is {microseconds!r}, but a finite time from 0 is needed"
        )
    return value
