"""Tar shards as webdataset and img2dataset write them: ``000000123.jpg``, ``.txt``, ``.json``, one after
the other, the name up to its first dot being the key.

A shard is read where it lies, from front to back; nothing is unpacked, and no name in it is ever used as a
path. The reading is this module's own, because `tarfile` follows sizes in damaged headers wherever they
lead. Formats: POSIX.1-1988 ustar, pax (POSIX.1-2001) and GNU tar, as in "Basic Tar Format" of the GNU tar
manual.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from . import decode
from .counts import Counts, Skip
from .files import FileSet
from .readers import Record
from .roles import role

_BLOCK = 512
_MAX_NAME = 1 << 16  # bytes of a long name, or of a pax header
_REGULAR = (b"0", b"\0", b"7")
_EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes: no data whatever the size
_SCAN = 1 << 20


class Member(NamedTuple):
    """A regular file in a shard: where its headers begin, its name, where its data lie and how many."""

    start: int
    name: str
    data: int
    size: int


def members(file: BinaryIO, length: int, start: int, counts: Counts) -> Iterator[Member]:
    """The regular files of a shard of `length` bytes from the header at `start` on.

    Damage is passed over up to the next header, and counted; a member that would end behind the end of the
    file is not given.
    """
    position, first, name, size, zeros = start, start, None, None, 0
    while position + _BLOCK <= length:
        file.seek(position)
        block = file.read(_BLOCK)
        zeros = zeros + 1 if not any(block) else 0
        if zeros == 2:  # the end of an archive
            return
        header = None if zeros else _header(block)
        if header is None:
            if not zeros:
                counts.fault("damaged_places")
                position = _next_header(file, position + _BLOCK, length)
            else:
                position += _BLOCK
            first, name, size = position, None, None
            continue
        kind, short, own = header
        own = own if size is None or kind not in _REGULAR else size
        data = position + _BLOCK
        held = 0 if kind in _EMPTY else own
        if data + held > length:  # cut off, unless there is a header behind what the size is wrong about
            position = _next_header(file, data, length)
            counts.fault("truncated_shards" if position == length else "damaged_places")
            first, name, size = position, None, None
            continue
        position = data + -(-held // _BLOCK) * _BLOCK
        if kind == b"L" and held <= _MAX_NAME:
            name = _text(file.read(held))
        elif kind == b"x" and held <= _MAX_NAME:
            name, size = _pax(file.read(held), name)
        elif kind not in (b"K", b"g"):
            if kind in _REGULAR:
                yield Member(first, short if name is None else name, data, own)
            first, name, size = position, None, None
    if position != length:  # within a header, or in what fills up the last block
        counts.fault("truncated_shards")


def _header(block: bytes) -> tuple[bytes, str, int] | None:
    """(kind, name, size) of a header; None when its checksum or its size says that it is none."""
    stated = _number(block[148:156])
    # The sum of all bytes with those of the sum itself taken as spaces.
    if stated is None or stated != sum(block) - sum(block[148:156]) + 8 * 32:
        return None
    size = _number(block[124:136])
    if size is None:
        return None
    name = _text(block[:100])
    prefix = (
        _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    )  # GNU's magic has other fields there
    return block[156:157], f"{prefix}/{name}" if prefix else name, size


def _number(field: bytes) -> int | None:
    """Octal digits between spaces and NULs, or, with the highest bit set, base 256."""
    if field[0] & 0x80:
        return None if field[0] & 0x40 else int.from_bytes(bytes([field[0] & 0x3F]) + field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits.strip(b"01234567"):
        return None
    return int(digits or b"0", 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _pax(records: bytes, name: str | None) -> tuple[str | None, int | None]:
    """Name and size out of pax records, each ``length key=value`` and a newline."""
    size, at = None, 0
    while at < len(records):
        digits, _, _ = records[at : at + 12].partition(b" ")
        end = at + int(digits) if digits.isdigit() else 0
        if end <= at + len(digits) or records[end - 1 : end] != b"\n":
            break
        key, _, value = records[at + len(digits) + 1 : end - 1].partition(b"=")
        if key == b"path":
            name = _text(value)
        elif key == b"size" and value.isdigit() and len(value) < 20:
            size = int(value)
        at = end
    return name, size


def _next_header(file: BinaryIO, position: int, length: int) -> int:
    """Where the next block with the magic of a header begins, from `position` on; `length` without any."""
    start = position
    while position + _BLOCK <= length:
        file.seek(position)
        chunk, at = file.read(_SCAN), -1
        while (at := chunk.find(b"ustar", at + 1)) >= 0:
            if (position + at - start) % _BLOCK == 257:
                return position + at - 257
        position += _SCAN
    return length


class _Sample:
    """The members of one key."""

    def __init__(self, key: str, place: int):
        self.key, self.place = key, place
        self.picture: Member | None = None
        self.texts: dict[str, bytes] = {}

    def take(self, ending: str, member: Member, file: BinaryIO) -> None:
        if ending in decode.ENDINGS:
            self.picture = self.picture or member
        elif ending in ("txt", "json") and ending not in self.texts:
            limit = decode.MAX_CAPTION if ending == "txt" else decode.MAX_JSON
            if member.size <= limit:
                file.seek(member.data)
                self.texts[ending] = file.read(member.size)

    def record(self, file: BinaryIO, after: int, pictures: bool) -> Record | None:
        """None when the key has neither picture nor caption; `Skip` when it lacks one of them."""
        caption = decode.caption_of(self.texts.get("txt"), self.texts.get("json"))
        if self.picture is None:
            if not caption:
                return None
            raise Skip("no_picture")
        if not caption:
            raise Skip("no_caption")
        if self.picture.size > decode.MAX_BYTES:
            raise Skip("too_large")
        data = b""
        if pictures:
            file.seek(self.picture.data)
            data = file.read(self.picture.size)
        return Record(caption, (data,), self.place, after)


class TarShards:
    """Captioned pictures in tar shards (`readers.Shards`): a unit is a shard, a place the offset at which
    the headers of a key begin.
    """

    noun, looked_for = "members", "keys with a picture (.jpg, .jpeg, .png, .webp, .gif) and a caption"
    looked_for += ' (.txt, or "caption" in .json)'

    def __init__(self, files: FileSet):
        self.files, self.units = files, len(files.entries)
        self.faults: dict[str, int] = {}
        self.role = role

    def identity(self) -> dict[str, Any]:
        return self.files.identity()

    def captions(self, counts: Counts) -> Iterator[str]:
        for unit in range(self.units):
            for record in self._read(unit, 0, counts, pictures=False):
                counts.read += 1
                yield record.caption

    def records(self, unit: int, start: int, counts: Counts) -> Iterator[Record]:
        return self._read(unit, start, counts, pictures=True)

    def fetch(self, unit: int, places: Sequence[int]) -> Iterator[Record]:
        for place in sorted(places):
            record = next(self.records(unit, place, Counts()), None)
            if record is not None and record.place == place:
                yield record

    def _read(self, unit: int, start: int, counts: Counts, pictures: bool) -> Iterator[Record]:
        name, length = self.files.entries[unit]
        try:
            # Captions alone jump over the pictures, so that reading ahead would be in vain.
            file = self.files.path(name).open("rb", buffering=1 << 18 if pictures else io.DEFAULT_BUFFER_SIZE)
        except OSError:
            counts.fault("unreadable_files")
            return
        with file:
            try:
                yield from _samples(file, length, start, counts, pictures)
            except OSError:
                counts.fault("unreadable_files")


def _samples(file: BinaryIO, length: int, start: int, counts: Counts, pictures: bool) -> Iterator[Record]:
    sample = None
    for member in members(file, length, start, counts):
        folder, slash, base = member.name.rpartition("/")
        stem, dot, ending = base.partition(".")
        key = folder + slash + stem
        if not dot or not stem:
            continue
        if sample is None or key != sample.key:
            yield from _finished(sample, file, member.start, counts, pictures)
            sample = _Sample(key, member.start)
        sample.take(ending.lower(), member, file)
    yield from _finished(sample, file, length, counts, pictures)


def _finished(
    sample: _Sample | None, file: BinaryIO, after: int, counts: Counts, pictures: bool
) -> Iterator[Record]:
    if sample is None:
        return
    try:
        record = sample.record(file, after, pictures)
    except Skip as reason:
        counts.skip(reason.reason)
        return
    if record is not None:
        yield record
