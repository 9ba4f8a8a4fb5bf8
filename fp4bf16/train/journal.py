"""A journal: an append-only file of JSON objects that outlives a crash, line by line."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from ..files import flush_folder, write_all


class Journal:
    """Work that is done but in no checkpoint yet, such as the chunks of a pool of rollouts.

    Each entry is one line of ``path``: a JSON object with the entry and a CRC-32, flushed to the disk
    before `append` returns. What a crash leaves of a line is dropped, and so is all that follows a line that
    is damaged: entries are read as a beginning of what was written, never with a hole. Floats come back with
    the same bits, NaN too. One process writes at a time (`RunFolder` holds the lock); the file is opened by
    the first write, and read again in each process.

    >>> import tempfile
    >>> journal = Journal(Path(tempfile.mkdtemp()) / "rollout.jsonl")
    >>> journal.begin(iteration=3)
    False
    >>> journal.append({"chunk": 0, "reward": [0.1, float("nan")]})
    >>> journal.begin(iteration=3), journal.read()
    (True, [{'chunk': 0, 'reward': [0.1, nan]}])
    >>> journal.begin(iteration=4), journal.read()
    (False, [])
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._handle: int | None = None
        self._key: Any = None
        self._size = 0  # of the good lines

    def begin(self, **key: Any) -> bool:
        """Make it the journal of `key` (JSON values): emptied, unless it was begun with an equal one.

        Returns whether it was, so that its entries are still good.
        """
        self._key = json.loads(json.dumps(key))
        lines = self._lines()
        if lines and lines[0].get("key") == self._key:
            return True
        self.clear()
        return False

    def read(self) -> list[dict[str, Any]]:
        """All entries, oldest first; none where there is no file."""
        return [line["entry"] for line in self._lines() if "entry" in line]

    def append(self, entry: dict[str, Any]) -> None:
        """Write `entry` behind the others; it is on the disk when this returns.

        Raises `TypeError` for what JSON cannot hold (arrays: use ``tolist()``), `OSError` for a full disk;
        the journal is then as it was.
        """
        self._write({"entry": entry})

    def clear(self) -> None:
        """Drop all entries, durably; the key of `begin` holds on."""
        if self._handle is not None or self.path.exists():
            handle = self._open()
            os.ftruncate(handle, 0)
            os.fsync(handle)
            self._size = 0
        if self._key is not None:
            self._write({"key": self._key})

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _lines(self) -> list[dict[str, Any]]:
        """The good lines; `_size` is their length."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = b""
        lines, self._size = [], 0
        for line in content.splitlines(keepends=True):
            found = _parse(line)
            if found is None:
                break
            lines.append(found)
            self._size += len(line)
        return lines

    def _open(self) -> int:
        if self._handle is None:
            self._lines()
            self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.ftruncate(self._handle, self._size)  # what a crash left of a line would join the next one
            flush_folder(self.path.parent)
        return self._handle

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line).encode()
        data = _head(text) + text[1:] + b"\n"
        handle = self._open()
        try:
            write_all(handle, data)
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, self._size)
            raise
        self._size += len(data)


def _head(text: bytes) -> bytes:
    """What stands for the brace with which `text`, a JSON object, begins: the brace and the checksum."""
    return b'{"crc32": "%08x", ' % zlib.crc32(text)


def _parse(line: bytes) -> dict[str, Any] | None:
    """What a line holds, None for one that is torn or damaged."""
    text = b"{" + line[len(_head(b"")) : -1]
    if not line.endswith(b"\n") or not line.startswith(_head(text)):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a checksum that another program made
        return None
