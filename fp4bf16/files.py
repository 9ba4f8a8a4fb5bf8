"""Files that are whole at any moment: written beside, flushed to the disk, renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

Data = bytes | memoryview


def write_atomic(path: Path, data: Data | Iterable[Data], previous: Path | None = None) -> None:
    """Write `data` to `path` so that a crash at any moment leaves the old file or the new one, never a part.

    Written beside it, flushed to the disk, renamed over it, and the folder flushed too (a rename is durable
    only after that). A link stays, and what it names is written; a device or a pipe is written as it is.
    data: bytes, or parts that follow one another. previous: in the same folder; the name under which the old
    file stays.

    Raises `OSError` that names the file, a full disk among them: both files are then as they were.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "x"
    >>> write_atomic(file, b"old"), write_atomic(file, b"new", file.with_name("x.previous"))
    (None, None)
    >>> file.read_bytes(), file.with_name("x.previous").read_bytes()
    (b'new', b'old')
    """
    if previous is None and path.is_symlink():
        path = Path(os.path.realpath(path))
    parts = (data,) if isinstance(data, Data) else data
    if path.exists() and not path.is_file():
        with path.open("wb", buffering=0) as stream:
            for part in parts:
                write_all(stream.fileno(), part)
        return
    temporary = _beside(path)
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for part in parts:
                write_all(handle, part)
            os.fsync(handle)
        finally:
            os.close(handle)
        if previous is not None and path.exists():
            _keep(path, previous)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        named = isinstance(error, OSError) and error.errno is not None  # others are words of somebody's own
        if named and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    flush_folder(path.parent)


def write_all(handle: int, data: Data) -> None:
    """Write all of `data`: one call of the system may write less, as on a disk that runs full."""
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


def _beside(path: Path) -> Path:
    """The name of a new file in the same folder. A part of the name says whose it is; all of it could be
    longer than a name may be.
    """
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}.tmp")


def _keep(path: Path, previous: Path) -> None:
    """Give the file `path` the name `previous` as well, in place of the file that had it.

    `path` itself stays, so that whichever of the renames survive a crash, a whole file has each name.
    """
    link = _beside(previous)
    try:
        os.link(path, link)
    except OSError:
        # A filesystem without hard links. Until the new file is renamed, `previous` alone is there: the
        # newest file, so that nothing is lost.
        os.replace(path, previous)
        return
    try:
        os.replace(link, previous)
    finally:
        # POSIX: a rename between two names of one file does nothing and leaves both. A crash between the
        # renames of the last time made them one file.
        link.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where its system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # one that may be written to, and not read
        return
    try:
        os.fsync(handle)
    except OSError:  # some network filesystems do not know it
        pass
    finally:
        os.close(handle)
