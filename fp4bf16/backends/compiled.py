"""Whether the CPU kernels have been compiled before: the first run of a new installation takes seconds
longer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

FIRST_RUN = "first run: compiling the CPU kernels (under a minute; later runs take them from the cache)"


def cache_folders() -> list[Path]:
    """Folders that numba may keep our kernels in, in the order that it tries them."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    return [Path(named)] if named else default_folders()


def default_folders() -> list[Path]:
    """Those that it tries where ``NUMBA_CACHE_DIR`` is unset, or cannot be written."""
    beside = Path(__file__).resolve().parent / "__pycache__"
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(named) if named else Path.home() / ".cache"
    except RuntimeError:  # an account without a home
        return [beside]
    return [beside, home / "numba"]


def _indices(folder: Path) -> Iterator[Path]:
    """Index files of our kernels, in `folder` or in those that numba makes in it by the package's path."""
    if folder.is_dir():
        yield from folder.glob("cpu_*.nbi")
        yield from folder.glob("backends_*/cpu_*.nbi")


def kernels_cached() -> bool:
    """Whether compiled kernels lie in numba's cache."""
    try:
        return any(True for folder in cache_folders() for _ in _indices(folder))
    except OSError:
        return False
