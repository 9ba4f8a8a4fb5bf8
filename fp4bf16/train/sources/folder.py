"""A folder of pictures with captions beside them or in tables, and pairs of pictures that a table names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import decode
from .counts import Counts
from .files import FileSet
from .readers import Record
from .roles import role
from .tables import CHOSEN, Table, inside

#: Names of the tables that caption pictures, in any folder of the set.
TABLES = ("metadata.csv", "captions.csv", "metadata.tsv", "captions.tsv", "metadata.jsonl")


class _Folder:
    """What both have in common. tables: name of the file -> table; all rows are held in memory."""

    beside: tuple[str, ...] = ()  # endings of files that belong to the picture of the same name

    def __init__(self, files: FileSet, tables: Mapping[str, Table]):
        # What else lies there, a log that grows perhaps, is no part of the set.
        pictures = files.only(*decode.ENDINGS).entries
        stems = {e.name.rpartition(".")[0] for e in pictures} if self.beside else ()
        beside = (e for e in files.only(*self.beside).entries if e.name.rpartition(".")[0] in stems)
        self.files, self.tables = FileSet(files.root, (*pictures, *beside)), tables
        self.faults: dict[str, int] = {}
        self.role = role
        self._names = {e.name: e.name for e in self.files.entries}

    def identity(self) -> dict[str, Any]:
        return self.files.identity(sorted(self.tables))

    def _bad(self) -> None:
        self.faults["bad_rows"] = self.faults.get("bad_rows", 0) + 1

    def _rows(self, name: str, table: Table) -> Iterator[tuple[str, ...]]:
        try:
            yield from table.rows(self._bad)
        except OSError:
            self.faults["unreadable_files"] = self.faults.get("unreadable_files", 0) + 1

    def _known(self, table: str, name: str) -> str | None:
        """The picture that a row of a table names; None when no such picture was found."""
        return self._names.get(inside(table.rpartition("/")[0], name))


class FolderPictures(_Folder):
    """Captioned pictures of a folder (`readers.Index`).

    First every row of the tables, in the order of the files: one picture may have several captions. Then the
    pictures that no table names, with the caption in the ``.txt`` (or ``.json``) of the same name.
    """

    noun, looked_for = "pictures", "pictures (.jpg, .jpeg, .png, .webp, .gif) with a caption each, in "
    looked_for += f"a .txt of the same name or in a table ({', '.join(TABLES)})"
    beside = ("txt", "json")

    def __init__(self, files: FileSet, tables: Mapping[str, Table]):
        super().__init__(files, tables)
        self._samples: list[tuple[str | None, str]] = []  # picture, caption; "": look beside it
        named = set()
        for name, table in sorted(tables.items()):
            for picture, caption in self._rows(name, table):
                known = self._known(name, picture)
                self._samples.append((known, decode.clean(caption)))
                named.add(known)
        self._samples += [(e.name, "") for e in files.only(*decode.ENDINGS).entries if e.name not in named]

    def __len__(self) -> int:
        return len(self._samples)

    def record(self, number: int, counts: Counts) -> Record | None:
        picture, _ = self._samples[number]
        caption = self._caption(number, counts)
        return Record(caption, (self.files.path(picture),)) if caption and picture else None

    def captions(self, counts: Counts) -> Iterator[str]:
        for number in range(len(self)):
            caption = self._caption(number, counts)
            if caption:
                counts.read += 1
                yield caption

    def _caption(self, number: int, counts: Counts) -> str:
        """The caption of a sample; "" and a count when it has none or its picture is not there."""
        picture, caption = self._samples[number]
        if picture is None:
            counts.skip("missing")
            return ""
        caption = caption or self._beside(picture)
        if not caption:
            counts.skip("no_caption")
        return caption

    def _beside(self, picture: str) -> str:
        stem = picture.rpartition(".")[0]
        found = {}
        for ending, limit in (("txt", decode.MAX_CAPTION), ("json", decode.MAX_JSON)):
            name = f"{stem}.{ending}"
            if name in self._names:
                found[ending] = _head(self.files.path(name), limit)
        return decode.caption_of(found.get("txt"), found.get("json"))


class FolderPairs(_Folder):
    """Preference pairs that tables name (`readers.Index`): columns ``chosen, rejected, caption``, or
    ``image_0, image_1, label_0, caption`` with label_0 = 1 where image_0 was preferred, 0 where image_1 was,
    0.5 for a tie.
    """

    noun, looked_for = "pairs", "rows of a table (.csv, .tsv, .jsonl) with the columns chosen, rejected, "
    looked_for += "caption, or image_0, image_1, label_0, caption, whose pictures are in the folder"

    def __init__(self, files: FileSet, tables: Mapping[str, Table]):
        super().__init__(files, tables)
        self._samples: list[tuple[str | None, str | None, str, float]] = []  # share of votes for the first
        for name, table in sorted(tables.items()):
            for first, second, *label, caption in self._rows(name, table):
                share = 1.0 if table.layout is CHOSEN else share_of(label[0])
                pair = (self._known(name, first), self._known(name, second))
                self._samples.append((*pair, decode.clean(caption), share))

    def __len__(self) -> int:
        return len(self._samples)

    def record(self, number: int, counts: Counts) -> Record | None:
        first, second, caption, share = self._samples[number]
        if first is None or second is None:
            counts.skip("missing")
            return None
        return pair_record(caption, (self.files.path(first), self.files.path(second)), share, counts)

    def captions(self, counts: Counts) -> Iterator[str]:
        for number in range(len(self)):
            record = self.record(number, counts)
            if record:
                counts.read += 1
                yield record.caption


def share_of(label: Any) -> float:
    """label_0 as the share of votes for picture 0, a number from 0 to 1; NaN for anything else."""
    try:
        share = float(label)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return share if 0 <= share <= 1 else math.nan


def pair_record(
    caption: str, blobs: tuple[Any, Any], share: float, counts: Counts, place: int = 0
) -> Record | None:
    """A pair with its chosen picture first; None, and a count, for a tie or where something is missing."""
    if not caption:
        counts.skip("no_caption")
    elif math.isnan(share):
        counts.skip("no_label")
    elif share == 0.5:
        counts.skip("tie")
    else:
        return Record(caption, blobs if share > 0.5 else blobs[::-1], place, place + 1)
    return None


def _head(path: Path, limit: int) -> bytes | None:
    """The bytes of a small file, up to one more than `limit`; None when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError:
        return None
