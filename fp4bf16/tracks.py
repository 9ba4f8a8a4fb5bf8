"""The track of a call: argument, ``with tracks(...)``, ``FP4BF16_TRACK``, and routes by parameter name."""

from __future__ import annotations

import contextvars
import fnmatch
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .errors import ConfigError, nearest

#: "fp4", "bf16" and "dual" are what a GPU runs. "reference" rounds nothing and computes in the operands' own
#: dtype (float32 or float64) on the CPU: the oracle for gradients and for comparing networks.
TRACKS = ("fp4", "bf16", "dual", "reference")

_override: contextvars.ContextVar[str | None] = contextvars.ContextVar("fp4bf16_track", default=None)


def check_track(track: str, where: str = "track") -> str:
    """Return `track` if it is one of `TRACKS`, else raise `ValueError` with the nearest name (`ConfigError`
    where it is no argument).
    """
    if track not in TRACKS:
        kind = ValueError if where == "track" else ConfigError
        raise kind(f"{where}: {track!r} is not a track{nearest(track, TRACKS)}")
    return track


@contextmanager
def tracks(track: str | None) -> Iterator[None]:
    """Run every primitive inside on `track`, whatever its ``track=`` says; ``None`` lifts an outer override.

    >>> import numpy as np, fp4bf16 as fb
    >>> a = np.ones((2, 16), np.float32)
    >>> with fb.tracks("bf16"):
    ...     y = fb.matmul(a, a.T, track="fp4")      # runs on the BF16 track
    """
    token = _override.set(None if track is None else check_track(track))
    try:
        yield
    finally:
        _override.reset(token)


def resolve_track(track: str | None, default: str) -> str:
    """The track of one call: ``with tracks()``, else ``FP4BF16_TRACK``, else the argument, else `default`."""
    chosen = _override.get()
    if chosen is None and "FP4BF16_TRACK" in os.environ and (named := os.environ["FP4BF16_TRACK"]):
        return check_track(named, "FP4BF16_TRACK")
    chosen = track if chosen is None else chosen
    return default if chosen is None else check_track(chosen)


def match_route(route: Mapping[str, str] | None, name: str, default: str = "bf16") -> str:
    """Track of the parameter or layer `name` under `route`: the first pattern that matches, in dict order.

    A route is a plain dict from a shell-style pattern to a track.

    >>> match_route({"conv_in*": "bf16", "*": "fp4"}, "conv_in.weight")
    'bf16'
    """
    for pattern, track in (route or {}).items():
        if fnmatch.fnmatchcase(name, pattern):
            return check_track(track, f"route: {pattern!r}")
    return default
