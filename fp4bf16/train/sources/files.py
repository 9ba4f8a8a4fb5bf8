"""The files of a set: found under a path or by a pattern, and recognised when they are seen again."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ConfigError

_MOST = 1_000_000  # paths that one brace pattern may stand for


class Entry(NamedTuple):
    """A regular file: its name relative to the folder, with "/" between folders, and its bytes."""

    name: str
    size: int

    @property
    def ending(self) -> str:
        """What follows the last dot of the name, in lower case; "" without a dot."""
        stem, dot, ending = self.name.rpartition("/")[2].rpartition(".")
        return ending.lower() if dot and stem else ""


@dataclass(frozen=True)
class FileSet:
    """Files under one folder, in a fixed order.

    root: the folder that names are relative to; entries: the files; folder: whether they are all that the
    folder holds, rather than files that were named.
    """

    root: Path
    entries: tuple[Entry, ...]
    folder: bool = False

    def path(self, name: str) -> Path:
        """Where the file of that name lies."""
        return self.root / name

    def only(self, *endings: str) -> FileSet:
        """Those with one of these endings."""
        return replace(self, entries=tuple(e for e in self.entries if e.ending in endings))

    def identity(self, tables: Sequence[str] = ()) -> dict[str, Any]:
        """What tells this set from another: number of files, bytes, and a hash of names and sizes, and of
        the content of `tables`, on which the order depends.
        """
        digest = hashlib.sha256()
        for name, size in self.entries:
            digest.update(f"{size} {len(name)} ".encode() + name.encode("utf-8", "surrogateescape"))
        for name in tables:
            with self.path(name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        total = sum(e.size for e in self.entries)
        return {"files": len(self.entries), "bytes": total, "digest": digest.hexdigest()[:16]}

    def describe(self) -> str:
        """How many files of which endings, most frequent first, for messages."""
        if not self.entries:
            return "no files"
        endings = Counter(f".{e.ending}" if e.ending else "without ending" for e in self.entries)
        ranked = sorted(endings.items(), key=lambda item: (-item[1], item[0]))
        kinds = [f"{n:,} {ending}" for ending, n in ranked[:5]]
        more = ", ..." if len(endings) > 5 else ""
        number = f"{len(self.entries):,} file" + "s" * (len(self.entries) != 1)
        return f"{number} ({', '.join(kinds)}{more})"


def walk(root: Path) -> FileSet:
    """Every regular file under a folder, sorted by name; those whose names begin with a dot are left out.

    Links to folders are followed, but no folder is entered twice.
    """
    found, seen, waiting = [], set(), [("", root)]
    while waiting:
        prefix, folder = waiting.pop()
        try:
            here = folder.stat()
            if (here.st_dev, here.st_ino) in seen:
                continue
            seen.add((here.st_dev, here.st_ino))
            items = list(os.scandir(folder))
        except OSError:
            continue
        for item in items:
            if item.name.startswith("."):
                continue
            try:
                about = item.stat()
            except OSError:  # a link to nowhere
                continue
            if stat.S_ISDIR(about.st_mode):
                waiting.append((f"{prefix}{item.name}/", folder / item.name))
            elif stat.S_ISREG(about.st_mode):
                found.append(Entry(prefix + item.name, about.st_size))
    return FileSet(root, tuple(sorted(found)), folder=True)


def expand(pattern: str) -> Iterator[str]:
    """The paths of a brace pattern: ``{00000..00012}`` counts, zeros in front kept, ``{a,b}`` lists.

    >>> list(expand("s/{08..10}.tar"))
    ['s/08.tar', 's/09.tar', 's/10.tar']
    >>> list(expand("{a,b}{1..2}"))
    ['a1', 'a2', 'b1', 'b2']
    """
    match = re.search(r"\{(\d{1,18})\.\.(\d{1,18})\}|\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        yield pattern
        return
    first, last, listed = match.groups()
    if listed is not None:
        middles: Iterator[str] = iter(listed.split(","))
    else:
        padded = any(len(t) > 1 and t[0] == "0" for t in (first, last))
        width = max(len(first), len(last)) if padded else 0
        low, high = int(first), int(last)
        numbers = range(low, high + 1) if low <= high else range(low, high - 1, -1)
        middles = (f"{n:0{width}d}" for n in numbers)
    for middle in middles:
        yield from expand(pattern[: match.start()] + middle + pattern[match.end() :])


def find(setting: str, path: str | os.PathLike) -> FileSet:
    """The files that `path` names: one file, those of a folder, or of a pattern of braces or * ? [].

    Raises `ConfigError` with the `setting` when there is nothing, or when a brace pattern stands for a file
    that is not there.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{setting}: {text!r} is no path; name a folder, a file or a pattern of files")
    if re.match(r"[a-z][a-z0-9+]+:", text) and not os.path.exists(text):
        raise ConfigError(
            f"{setting}: {text} is an address, but only files of this machine are read; copy them"
        )
    text = os.path.expanduser(text)
    try:
        about = os.stat(text)
    except (OSError, ValueError):
        return _pattern(setting, text)
    if stat.S_ISDIR(about.st_mode):
        return walk(Path(text))
    if not stat.S_ISREG(about.st_mode):
        raise ConfigError(f"{setting}: {text} is neither a file nor a folder; name one of them")
    return FileSet(Path(text).parent, (Entry(Path(text).name, about.st_size),))


def _pattern(setting: str, text: str) -> FileSet:
    named = list(islice(expand(text), _MOST + 1))
    if len(named) > _MOST:
        raise ConfigError(f"{setting}: {text} stands for more than {_MOST:,} files; name their folder")
    paths, absent = [], []
    for one in named:
        globbed = [one] if os.path.exists(one) else sorted(glob.glob(one))
        paths += globbed
        absent += [] if globbed else [one]
    if not paths:
        fix = "check the pattern" if len(absent) > 1 or glob.has_magic(text) else "check the path"
        raise ConfigError(f"{setting}: there is no {text}; {fix}")
    if absent:
        raise ConfigError(
            f"{setting}: {text} stands for {len(paths) + len(absent):,} files, but {len(absent):,} are not "
            f"there, {absent[0]} the first; correct the pattern, or name the folder to take what is there"
        )
    paths = [p for p in dict.fromkeys(paths) if os.path.isfile(p)]
    root = os.path.commonpath([os.path.dirname(p) or "." for p in paths]) if paths else "."
    entries = (Entry(Path(os.path.relpath(p, root)).as_posix(), os.stat(p).st_size) for p in paths)
    return FileSet(Path(root), tuple(entries))
