"""Tables that name pictures: CSV of any usual delimiter, and one JSON object a line.

Names in a table are compared with the files that were found; they are never opened as they stand there.
"""

from __future__ import annotations

import csv
import json
import posixpath
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

_LINE = 1 << 20  # characters; a longer line comes in pieces, which are no rows
_DELIMITERS = ",;\t|"
_CAPTION = ("text", "caption", "prompt")


class Layout(NamedTuple):
    """Columns that a table must have, each under one of several names."""

    columns: tuple[tuple[str, ...], ...]

    def find(self, names: list[str]) -> list[str] | None:
        """Which of `names` the columns are; None when one is missing."""
        found = [next((n for n in options if n in names), None) for options in self.columns]
        return None if None in found else found

    def __str__(self) -> str:
        return ", ".join("/".join(options) for options in self.columns)


CAPTIONED = Layout((("file_name", "file", "filename", "image", "path"), _CAPTION))
CHOSEN = Layout((("chosen",), ("rejected",), _CAPTION))
LABELLED = Layout((("image_0",), ("image_1",), ("label_0",), _CAPTION))


class Table(NamedTuple):
    """A table whose columns are known.

    rows: gives the rows as tuples of text, in the order of the layout's columns, and calls its argument for
    every row that cannot be read or lacks a column.
    """

    layout: Layout
    rows: Callable[[Callable[[], None]], Iterator[tuple[str, ...]]]


def open_table(path: Path, layouts: tuple[Layout, ...]) -> Table | None:
    """The table in a file, or None where it has none of the `layouts` (or cannot be read)."""
    try:
        with _open(path) as file:
            if path.suffix.lower() == ".jsonl":
                layout = _first_json(file, layouts)
                return layout and Table(layout, lambda bad: _json_rows(path, layout, bad))
            header = file.readline(_LINE)
    except OSError:
        return None
    for layout in layouts:
        for delimiter in _DELIMITERS:
            names = _header(header, delimiter)
            found = layout.find(names)
            if found:
                where = [names.index(n) for n in found]
                return Table(layout, partial(_csv_rows, path, delimiter, where))
    return None


def columns_of(path: Path) -> str:
    """The names in the first line of a table, for messages."""
    try:
        with _open(path) as file:
            line = file.readline(_LINE)
    except OSError:
        return "none that can be read"
    if path.suffix.lower() == ".jsonl":
        return ", ".join(map(str, _object(line))) or "none"
    return ", ".join(max((_header(line, d) for d in _DELIMITERS), key=len))[:200]


def inside(folder: str, name: str) -> str:
    """A name in a table of `folder` (relative, "" for the uppermost) as `files.Entry` has it.

    >>> inside("train", "./a.jpg"), inside("", "sub\\\\b.png"), inside("", "../c.png")
    ('train/a.jpg', 'sub/b.png', '../c.png')
    """
    return posixpath.normpath(posixpath.join(folder, name.strip().replace("\\", "/")))


def _open(path: Path) -> IO[str]:
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def _lines(file: IO[str]) -> Iterator[str]:
    return iter(lambda: file.readline(_LINE), "")


def _header(line: str, delimiter: str) -> list[str]:
    try:
        row = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error:
        return []
    return [name.strip().lower() for name in row]


def _csv_rows(
    path: Path, delimiter: str, where: list[int], bad: Callable[[], None]
) -> Iterator[tuple[str, ...]]:
    with _open(path) as file:
        reader = csv.reader(_lines(file), delimiter=delimiter, skipinitialspace=True)
        first = True
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error:  # the reader goes on with the next line
                row = None
            if first:
                first = False
            elif row is None or (row and len(row) <= max(where)):
                bad()
            elif row:
                yield tuple(row[i] for i in where)


def _object(line: str) -> Mapping[str, object]:
    try:
        known = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _first_json(file: IO[str], layouts: tuple[Layout, ...]) -> Layout | None:
    for line in _lines(file):
        names = list(_object(line))
        for layout in layouts:
            if layout.find(names):
                return layout
    return None


def _json_rows(path: Path, layout: Layout, bad: Callable[[], None]) -> Iterator[tuple[str, ...]]:
    with _open(path) as file:
        for line in _lines(file):
            known = _object(line)
            found = layout.find(list(known))
            if found and all(isinstance(known[n], str | int | float) for n in found):
                yield tuple(str(known[n]) for n in found)
            elif line.strip():
                bad()
