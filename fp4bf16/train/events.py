"""TensorBoard's event files, written without TensorBoard or any other package.

A file is a row of records: length (uint64), checksum of the length, data, checksum of the data, little-endian
(TensorFlow, "TFRecord": CRC-32C, rotated right by 15 bits and shifted by 0xa282ead8). The data of a record
is one ``Event`` in the wire format of protocol buffers (tensorflow/core/util/event.proto and
framework/summary.proto; field numbers beside the fields below). The packages that write them put
records into a queue that a thread empties, and on a full disk that thread ends and the queue blocks the run;
here an error is raised where it happens.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from ..files import write_all

_SERIAL = itertools.count()


class EventFile:
    """One new event file in the folder `path`, for steps after `after`.

    It says that the run starts there, so that TensorBoard drops what earlier files of the folder hold of
    later steps: a run that was killed and taken up again shows no step twice.

    >>> import tempfile
    >>> file = EventFile(Path(tempfile.mkdtemp()), after=0)
    >>> file.scalars(1, {"align/loss": 0.5})
    >>> file.close()
    """

    def __init__(self, path: Path, after: int = 0):
        path.mkdir(parents=True, exist_ok=True)
        # Read in the order of their names. The serial number: two of one process within a second.
        name = (
            f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}.{next(_SERIAL)}"
        )
        self._handle: int | None = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._event(_bytes(3, b"brain.Event:2"))  # file_version: the first of every file
        self._event(_int(2, after + 1) + _bytes(7, _int(1, 1)))  # session_log with status START

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by tag, as float32 (beyond its range: Inf)."""
        with np.errstate(over="ignore"):
            numbers = np.array(list(values.values()), np.float64).astype("<f4")
        parts = (
            _bytes(1, tag.encode()) + bytes([2 << 3 | 5]) + number.tobytes()  # tag, simple_value
            for tag, number in zip(values, numbers, strict=True)
        )
        self._summary(step, b"".join(_bytes(1, part) for part in parts))

    def picture(self, step: int, tag: str, png: bytes, shape: tuple[int, int, int]) -> None:
        """A PNG file under `tag`; shape: (height, width, channels)."""
        height, width, channels = shape
        image = _int(1, height) + _int(2, width) + _int(3, channels) + _bytes(4, png)
        self._summary(step, _bytes(1, _bytes(1, tag.encode()) + _bytes(4, image)))

    def close(self) -> None:
        """Close the file; every record is in it already."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _summary(self, step: int, values: bytes) -> None:
        self._event(_int(2, step) + _bytes(5, values))

    def _event(self, fields: bytes) -> None:
        data = struct.pack("<Bd", 1 << 3 | 1, time.time()) + fields  # wall_time
        length = struct.pack("<Q", len(data))
        check = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
        write_all(self._handle, length + next(check) + data + next(check))


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (polynomial 0x1edc6f41, reflected) in the form in which records hold it.

    >>> hex(masked_crc32c(b"123456789"))  # of 0xe3069283, the check value of CRC-32C
    '0xc78ab0e5'
    """
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, np.uint32(0x82F63B78), np.uint32(0)) ^ (table >> np.uint32(1))
    return tuple(int(v) for v in table)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _int(field: int, value: int) -> bytes:
    """A field of an integer that is not negative."""
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    """A field of text, bytes or an inner message."""
    return _varint(field << 3 | 2) + _varint(len(value)) + value
