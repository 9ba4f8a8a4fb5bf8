"""Checkpoints: one safetensors file, complete or absent, with a checksum of all that it holds.

The file holds float32 and integer arrays under flat names ("policy.conv_in.weight", "adam.m", ...) and, as
its metadata, one JSON object: format, configuration, stage and step. It holds no clock and no path, so the
same run writes the same bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .extras import require

FORMAT = "fp4bf16-checkpoint-1"
NEEDED = {"config": dict, "stage": str, "step": int, "lines": int, "words": list}  # of the metadata of a run


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a crash at any moment leaves the old file or the new one, never a part.

    Written beside it, flushed to the disk, renamed over it, and the folder flushed too (a rename is durable
    only after that).
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp made it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network filesystems do not know it
        pass
    finally:
        os.close(handle)


def save(path: Path, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    """Write `arrays` and `meta` (JSON values) to `path`, atomically. Equal content gives equal bytes."""
    safetensors = require("safetensors.numpy", "writing checkpoints")
    arrays = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
    meta = {"format": FORMAT, **meta}
    # under one name: safetensors writes several in an order that differs from process to process
    text = json.dumps({**meta, "crc32": _checksum(arrays, meta)}, sort_keys=True)
    write_atomic(Path(path), safetensors.save(arrays, {"fp4bf16": text}))


def _checksum(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> str:
    """CRC-32 of the metadata and of all arrays: safetensors itself does not see a byte that has changed."""
    crc = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(arrays):
        a = np.ascontiguousarray(arrays[name])
        crc = zlib.crc32(f"{name} {a.dtype} {a.shape}".encode(), crc)
        crc = zlib.crc32(a.reshape(-1).view(np.uint8), crc)
    return f"{crc:08x}"


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, meta) of a checkpoint.

    Raises `CheckpointError`, with what is wrong and what to do, for a file that is cut short or damaged, is
    no safetensors file, or was not written by `save`.
    """
    path = Path(path)
    numpy_format = require("safetensors.numpy", "reading checkpoints")
    safetensors = require("safetensors", "reading checkpoints")
    advice = "move it away to start the run anew, or use another --out"
    try:
        with safetensors.safe_open(path, framework="numpy") as f:
            meta = f.metadata() or {}
        if "fp4bf16" not in meta:
            raise CheckpointError(f"{path}: is a safetensors file, but not a checkpoint of fp4bf16; {advice}")
        meta = json.loads(meta["fp4bf16"])
        arrays = numpy_format.load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint") from None
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as a checkpoint ({error}); {advice}") from error
    found = meta.get("format") if isinstance(meta, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path}: has format {found!r}, this version reads {FORMAT!r}; {advice}")
    crc = meta.pop("crc32", None)
    if crc != (computed := _checksum(arrays, meta)):
        raise CheckpointError(
            f"{path}: is damaged: its checksum is {crc}, but that of its content is {computed}; {advice}"
        )
    return arrays, meta


def load_run(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """`load` of the checkpoint of a run, whose metadata say where the run stands."""
    arrays, meta = load(path)
    for name, kind in NEEDED.items():
        if not isinstance(meta.get(name), kind):
            raise CheckpointError(
                f"{path}: is no checkpoint of a run: {name} is {meta.get(name)!r}, but a {kind.__name__} is "
                f"needed; use another --out"
            )
    return arrays, meta


def take(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays whose name starts with ``prefix.``, without it."""
    return {name[len(prefix) + 1 :]: a for name, a in arrays.items() if name.startswith(prefix + ".")}


def give(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The same arrays under ``prefix.``; the inverse of `take`."""
    return {f"{prefix}.{name}": a for name, a in arrays.items()}
