"""The folder of a run: configuration, metrics, checkpoint, samples, report; who may write it, and how it
resumes.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..backends.threads import blas_name, num_threads
from ..errors import CheckpointError, ConfigError
from . import checkpoint
from .config import Config


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    import importlib.metadata

    found = {"fp4bf16": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("numpy", "ml_dtypes", "numba"):
        found[name] = importlib.metadata.version(name)
    return found


class RunFolder:
    """One run's folder.

    `open` makes it, or takes up what is there if it is the same run. ``metrics.jsonl`` gets one JSON object
    a line; a resumed run first drops the lines that its checkpoint does not know, so that no step is there
    twice.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.config_file, self.metrics_file = self.path / "config.json", self.path / "metrics.jsonl"
        self.checkpoint_file, self.report_file = (
            self.path / "checkpoint.safetensors",
            self.path / "report.html",
        )
        self.samples = self.path / "samples"
        self.lines = 0
        self._metrics: Any = None
        self._lock: Any = None

    def open(
        self, config: Config, device: str = "cpu", start: dict[str, str] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """Take the folder for `config`; the checkpoint in it (arrays, meta), or None for a fresh start.

        device: what the run is computed on. start: which weights it begins with (``from``, ``weights``).

        Raises `ConfigError` when the folder belongs to another configuration, holds something else, or
        cannot be written, `CheckpointError` when its checkpoint cannot be read. Nothing in it is changed
        then.
        """
        self._make()
        self._take_lock()
        for torn in self.path.glob(
            ".*.tmp"
        ):  # a write that a crash cut short; the lock says that nobody is at it
            torn.unlink()
        others = [p.name for p in self.path.iterdir() if not p.name.startswith(".")]
        if not self.config_file.exists():
            if others:
                raise ConfigError(
                    f"--out {self.path}: holds {sorted(others)[0]!r} but no config.json, so it is not the "
                    f"folder of a run; name another folder"
                )
            self._write_config(config, device, start)
        else:
            self._compare(config)
            self._compare_start(start)
        resumed = None
        if self.checkpoint_file.exists():
            resumed = checkpoint.load_run(self.checkpoint_file)
            if resumed[1].get("config") != config.to_dict():
                raise CheckpointError(
                    f"{self.checkpoint_file}: was written by another configuration than config.json "
                    f"beside it; name another folder with --out"
                )
        self._open_metrics(resumed[1]["lines"] if resumed else 0)
        return resumed

    def _make(self) -> None:
        try:
            self.samples.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"--out {self.path}: cannot be written ({error.strerror}); name another folder"
            ) from error
        # An empty samples folder is no sign of a run; `open` looks at the rest.
        if not self.config_file.exists() and not any(self.samples.iterdir()):
            self.samples.rmdir()

    def _take_lock(self) -> None:
        """Two runs in one folder would mix their metrics; the lock goes with the process, however it ends."""
        try:
            import fcntl
        except ImportError:  # not on this system: nothing to hold
            return
        self._lock = open(self.path / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--out {self.path}: another run is writing there; wait for it or name another folder"
            ) from None

    def _write_config(self, config: Config, device: str, start: dict[str, str] | None) -> None:
        self.samples.mkdir(exist_ok=True)
        content = {
            "config": config.to_dict(),
            **({} if start is None else {"start": start}),
            "device": device,
            "threads": num_threads(),
            "blas": blas_name(),
            "versions": versions(),
            "command": sys.argv[1:],
        }
        checkpoint.write_atomic(self.config_file, (json.dumps(content, indent=2) + "\n").encode())

    def read_config(self) -> dict[str, Any]:
        """What ``config.json`` holds; `ConfigError` where it is missing or no JSON."""
        try:
            content = json.loads(self.config_file.read_text(encoding="utf-8"))
            if not isinstance(content.get("config"), dict):
                raise ValueError("no object 'config'")
            return content
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path}: there is no config.json, so it is not the folder of a run"
            ) from None
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{self.config_file}: cannot be read ({error}); name another folder") from error

    def _compare(self, config: Config) -> None:
        there, here = _flat(self.read_config()["config"]), _flat(config.to_dict())
        different = [k for k in sorted({*there, *here}) if there.get(k) != here.get(k)]
        if different:
            k = different[0]
            more = f" and {len(different) - 1} more differ" if len(different) > 1 else ""
            raise ConfigError(
                f"--out {self.path}: holds a run with {k} = {there.get(k)!r}, but this one has {k} = "
                f"{here.get(k)!r}{more}; name another folder, or give that run's settings to go on with it"
            )

    def _compare_start(self, start: dict[str, str] | None) -> None:
        there = self.read_config().get("start")
        if (there or {}).get("weights") == (start or {}).get("weights"):
            return

        def described(s: dict[str, str] | None) -> str:
            return f"--from {s['from']} (weights {s['weights']})" if s else "a base model of its own"

        raise ConfigError(
            f"--out {self.path}: holds a run with {described(there)}, but this one begins with "
            f"{described(start)}; name another folder, or give the same --from to go on with it"
        )

    def notes(self, device: str = "cpu") -> list[str]:
        """Sentences about what has changed since the run began and may keep it from being bit-identical."""
        before, now, notes = self.read_config(), versions(), []
        if (was := before.get("device", "cpu")) != device:
            notes.append(
                f"the run began on {was} and goes on on {device}: the result will not be bit-identical"
            )
        if before.get("threads") != num_threads():
            notes.append(
                f"the run began with {before.get('threads')} threads and goes on with {num_threads()}: the "
                f"result will not be bit-identical (FP4BF16_NUM_THREADS={before.get('threads')} keeps it so)"
            )
        changed = [
            f"{k} {v} -> {now.get(k)}" for k, v in before.get("versions", {}).items() if now.get(k) != v
        ]
        if changed:
            notes.append(
                f"versions have changed since the run began ({', '.join(changed)}): the result may not be "
                f"bit-identical"
            )
        return notes

    def _open_metrics(self, keep: int) -> None:
        """Keep the first `keep` lines of the metrics and go on writing after them."""
        kept: list[bytes] = []
        if self.metrics_file.exists():
            kept = self.metrics_file.read_bytes().splitlines(keepends=True)[:keep]
            if len(kept) < keep or (kept and not kept[-1].endswith(b"\n")):
                raise CheckpointError(
                    f"{self.metrics_file}: has {len(kept)} lines but the checkpoint was written after "
                    f"{keep}; restore the file or name another folder"
                )
        elif keep:
            raise CheckpointError(
                f"{self.metrics_file}: is missing but the checkpoint was written after {keep} lines of "
                f"it; restore the file or name another folder"
            )
        checkpoint.write_atomic(self.metrics_file, b"".join(kept))
        self.lines = len(kept)
        self._metrics = open(self.metrics_file, "a", encoding="utf-8")

    def log(self, **values: Any) -> None:
        """Append one line to ``metrics.jsonl``."""
        self._metrics.write(json.dumps(values, allow_nan=True) + "\n")
        self._metrics.flush()
        self.lines += 1

    def save(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Write the checkpoint; the metrics up to here are on the disk before it is."""
        os.fsync(self._metrics.fileno())
        checkpoint.save(self.checkpoint_file, arrays, {**meta, "lines": self.lines})

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of ``metrics.jsonl`` so far. `CheckpointError` for one that `log` did not write."""
        if not self.metrics_file.exists():
            return []
        found = []
        for number, line in enumerate(self.metrics_file.read_bytes().splitlines(), 1):
            try:
                found.append(json.loads(line))
                if not {"stage", "seconds"} <= set(found[-1]):
                    raise ValueError("it has no stage and seconds")
            except (ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{self.metrics_file}: line {number} is no line of a run ({error}); restore the file or "
                    f"name another folder"
                ) from error
        return found

    def close(self) -> None:
        """Give the folder back."""
        for f in (self._metrics, self._lock):
            if f is not None:
                f.close()
        self._metrics = self._lock = None


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for k, v in config.items():
        inner = isinstance(v, dict) and k != "route"
        flat.update(_flat(v, f"{prefix}{k}.") if inner else {prefix + k: v})
    return flat
