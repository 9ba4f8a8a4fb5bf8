"""Checkpoints: one safetensors file, complete or absent, with a checksum of all that it holds.

The file holds float32 and integer arrays under flat names ("policy.conv_in.weight", "adam.m", ...) and, as
its metadata, one JSON object: format, configuration, stage and step. It holds no clock and no path, so the
same run writes the same bytes.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..extras import require
from ..files import write_atomic

FORMAT = "fp4bf16-checkpoint-1"
NEEDED = {"config": dict, "stage": str, "step": int, "lines": int, "words": list}  # of the metadata of a run
_ADVICE = "move it away to start the run anew, or use another --out"


class DamagedError(CheckpointError):
    """The file at `path` is there but is no checkpoint (`reason`): an older one beside it may be."""

    def __init__(self, path: Path, reason: str, advice: str = _ADVICE):
        super().__init__(f"{path}: {reason}; {advice}")
        self.path, self.reason = path, reason


def save(
    path: Path, arrays: dict[str, np.ndarray], meta: dict[str, Any], previous: Path | None = None
) -> None:
    """Write `arrays` and `meta` (JSON values) to `path`, atomically. Equal content gives equal bytes.

    previous: the name that the checkpoint which was at `path` gets.
    """
    safetensors = require("safetensors.numpy", "writing checkpoints")
    # not np.ascontiguousarray, which gives a single number an axis
    arrays = {name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}
    meta = {"format": FORMAT, **meta}
    # under one name: safetensors writes several in an order that differs from process to process
    text = json.dumps({**meta, "crc32": _checksum(arrays, meta)}, sort_keys=True)
    write_atomic(Path(path), safetensors.save(arrays, {"fp4bf16": text}), previous)


def _checksum(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> str:
    """CRC-32 of the metadata and of all arrays: safetensors itself does not see a byte that has changed."""
    crc = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(arrays):
        a = np.asarray(arrays[name], order="C")
        crc = zlib.crc32(f"{name} {a.dtype} {a.shape}".encode(), crc)
        crc = zlib.crc32(a.reshape(-1).view(np.uint8), crc)
    return f"{crc:08x}"


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, meta) of a checkpoint.

    Raises `CheckpointError`, with what is wrong and what to do: `DamagedError` for a file that is cut short
    or damaged, is no safetensors file, or was not written by `save`.
    """
    path = Path(path)
    numpy_format = require("safetensors.numpy", "reading checkpoints")
    safetensors = require("safetensors", "reading checkpoints")
    try:
        with open(path, "rb"):  # whose errors have names; those of safetensors are text
            pass
        with safetensors.safe_open(path, framework="numpy") as f:
            meta = f.metadata() or {}
        if "fp4bf16" not in meta:
            raise DamagedError(path, "is a safetensors file, but not a checkpoint of fp4bf16")
        meta = json.loads(meta["fp4bf16"])
        arrays = numpy_format.load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint") from None
    except PermissionError:
        raise CheckpointError(f"{path}: may not be read; give it read permission (chmod u+r)") from None
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise DamagedError(path, f"cannot be read as a checkpoint ({error})") from error
    found = meta.get("format") if isinstance(meta, dict) else None
    if found != FORMAT:
        raise DamagedError(path, f"has format {found!r}, this version reads {FORMAT!r}")
    crc = meta.pop("crc32", None)
    if crc != (computed := _checksum(arrays, meta)):
        raise DamagedError(path, f"is damaged: its checksum is {crc}, but that of its content is {computed}")
    return arrays, meta


def load_run(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """`load` of the checkpoint of a run, whose metadata say where the run stands."""
    arrays, meta = load(path)
    for name, kind in NEEDED.items():
        if not isinstance(meta.get(name), kind):
            raise DamagedError(
                Path(path),
                f"is no checkpoint of a run: {name} is {meta.get(name)!r}, but a {kind.__name__} is needed",
                "use another --out",
            )
    return arrays, meta


def load_last(
    newest: Path, previous: Path
) -> tuple[dict[str, np.ndarray], dict[str, Any], str | None] | None:
    """(arrays, meta, what is wrong with `newest`) of the newest checkpoint of a run that is good.

    The last is None where `newest` itself is. The whole is None where there is neither file. Raises
    `CheckpointError` where no file is good. Changes nothing.
    """
    if not previous.exists():
        return (*load_run(newest), None) if newest.exists() else None
    try:
        if newest.exists():
            return (*load_run(newest), None)
        wrong = "is missing"
    except DamagedError as error:
        wrong = error.reason
    try:
        arrays, meta = load_run(previous)
    except DamagedError as error:
        raise CheckpointError(
            f"{newest}: {wrong}, and {previous.name} beside it {error.reason}; move both away to start the "
            f"run anew, or use another --out"
        ) from error
    return arrays, meta, wrong


def take(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays whose name starts with ``prefix.``, without it."""
    return {name[len(prefix) + 1 :]: a for name, a in arrays.items() if name.startswith(prefix + ".")}


def give(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The same arrays under ``prefix.``; the inverse of `take`."""
    return {f"{prefix}.{name}": a for name, a in arrays.items()}
