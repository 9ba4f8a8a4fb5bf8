"""numba's ``njit``, once it is sure that compiled kernels can be kept somewhere.

numba refuses ``cache=True`` where it can write neither beside the source nor in the user's cache folder: an
installation that is read-only, run by an account without a home, as in many containers.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from numba import config, njit

from .compiled import cache_folders, default_folders

__all__ = ["njit"]


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _keep_somewhere() -> None:
    """Where no folder can be written, keep the kernels of this process in one of its own."""
    if not any(map(_writable, [*cache_folders(), *default_folders()])):
        # not a shared one: the kernels in it are code that would be run
        config.CACHE_DIR = tempfile.mkdtemp(prefix="fp4bf16-")
        atexit.register(shutil.rmtree, config.CACHE_DIR, ignore_errors=True)


_keep_somewhere()
