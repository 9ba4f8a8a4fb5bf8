"""Parquet files with pictures in them: preference pairs as Pick-a-Pic has them, and captioned pictures.

Row groups are read from front to back, a few rows at a time. A picture is a column of bytes, or of structs
with a field ``bytes``, as the datasets library writes pictures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from ...extras import require
from . import decode
from .counts import Counts
from .files import FileSet
from .folder import pair_record, share_of
from .readers import Record
from .roles import role

_ROWS = 16  # that are in memory at a time
_BUFFER = 1 << 20  # bytes of a column that are read at a time, in place of the whole column of a row group


class ParquetShards(ABC):
    """What both kinds of parquet files have in common (`readers.Shards`): a unit is a row group, a place the
    number of a row in it.
    """

    noun, looked_for = "rows", ""
    optional: tuple[str, ...] = ()

    def __init__(self, files: FileSet):
        _parquet()  # its absence is no fault of the files
        self.files = files
        self.faults: dict[str, int] = {}
        self.role = role
        self._groups: list[tuple[int, int, list[str]]] = []  # file, row group, columns
        self.columns_seen: list[str] = []
        for number, entry in enumerate(files.entries):
            self._open(number, entry.name)

    @property
    def units(self) -> int:
        return len(self._groups)

    @abstractmethod
    def columns(self, names: list[str]) -> list[str] | None:
        """The columns to read, in the order in which `row` takes them; None when one is missing."""

    @abstractmethod
    def row(self, place: int, values: list[Any], counts: Counts) -> Record | None:
        """One row as a record; None, and a count, when it is to be left out."""

    def identity(self) -> dict[str, Any]:
        return self.files.identity()

    def records(self, unit: int, start: int, counts: Counts) -> Iterator[Record]:
        wanted = self._groups[unit][2]
        for place, values in self._rows(unit, start, wanted, counts):
            record = self.row(place, values, counts)
            if record is not None:
                yield record

    def fetch(self, unit: int, places: Sequence[int]) -> Iterator[Record]:
        wanted, counts = set(places), Counts()
        for place, values in self._rows(unit, min(places), self._groups[unit][2], counts):
            if place in wanted:
                wanted.remove(place)
                record = self.row(place, values, counts)
                if record is not None:
                    yield record
            if not wanted:
                return

    def captions(self, counts: Counts) -> Iterator[str]:
        for unit, (_, _, columns) in enumerate(self._groups):
            for _, (value,) in self._rows(unit, 0, columns[-1:], counts):
                caption = decode.clean(value)
                if caption:
                    counts.read += 1
                    yield caption
                else:
                    counts.skip("no_caption")

    def _open(self, number: int, name: str) -> None:
        try:
            with _parquet().ParquetFile(self.files.path(name)) as file:
                names, groups = list(map(str, file.schema_arrow.names)), file.metadata.num_row_groups
        except Exception:  # damaged files raise OSError, ValueError and kinds of Arrow's own
            return self._fault("unreadable_files")
        columns = self.columns(names)
        if columns is None:
            self.columns_seen = self.columns_seen or names
            return self._fault("other_columns")
        self._groups += [(number, group, columns) for group in range(groups)]

    def _fault(self, what: str) -> None:
        self.faults[what] = self.faults.get(what, 0) + 1

    def _rows(
        self, unit: int, start: int, columns: list[str], counts: Counts
    ) -> Iterator[tuple[int, list[Any]]]:
        """(place, values of `columns`) of the rows from `start` on."""
        number, group, _ = self._groups[unit]
        path, place = self.files.path(self.files.entries[number].name), 0
        try:
            with _parquet().ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
                for batch in file.iter_batches(_ROWS, [group], columns, use_threads=False):
                    for i in range(max(start - place, 0), batch.num_rows):
                        yield place + i, [_value(batch.column(name)[i]) for name in columns]
                    place += batch.num_rows
        except Exception:
            counts.fault("damaged_groups")


def _parquet() -> Any:
    return require("pyarrow.parquet", "reading parquet files", "data")


def _value(scalar: Any) -> Any:
    """A value of Python; of a picture's struct, its bytes."""
    try:
        value = scalar.as_py()
    except Exception:  # text that is not UTF-8, a date that Python has not
        return None
    return value.get("bytes") if isinstance(value, dict) else value


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b""


class ParquetPairs(ParquetShards):
    """Preference pairs, ``jpg_0, jpg_1, label_0, caption``: label_0 = 1 where picture 0 was preferred, 0
    where picture 1 was, 0.5 for a tie. Where there is a column ``has_label``, it must be true.
    """

    noun, looked_for = "pairs", "rows with the columns jpg_0, jpg_1 (bytes of pictures), label_0, caption"

    def columns(self, names: list[str]) -> list[str] | None:
        wanted = ["jpg_0", "jpg_1", "label_0", "caption"]
        if not set(wanted) <= set(names):
            return None
        return ["has_label"] * ("has_label" in names) + wanted

    def row(self, place: int, values: list[Any], counts: Counts) -> Record | None:
        *has_label, first, second, label, caption = values
        share = share_of(None if False in has_label else label)
        return pair_record(decode.clean(caption), (_bytes(first), _bytes(second)), share, counts, place)


class ParquetPictures(ParquetShards):
    """Captioned pictures: a column image (or jpg, png, webp) and a column text (or caption, prompt)."""

    looked_for = "rows with the columns image/jpg/png/webp (bytes of a picture) and text/caption/prompt"

    def columns(self, names: list[str]) -> list[str] | None:
        found = [
            next((n for n in options if n in names), None)
            for options in (("image", "jpg", "png", "webp"), ("text", "caption", "prompt"))
        ]
        return None if None in found else found

    def row(self, place: int, values: list[Any], counts: Counts) -> Record | None:
        data, caption = _bytes(values[0]), decode.clean(values[1])
        if not data or not caption:
            counts.skip("no_caption" if data else "no_picture")
            return None
        return Record(caption, (data,), place, place + 1)
