"""The folder of a run: configuration, metrics, checkpoint, samples, report; who may write it, and how it
resumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..align.notes import Forgiving
from ..backends.threads import blas_name, num_threads
from ..errors import CheckpointError, ConfigError
from ..files import flush_folder, write_all, write_atomic
from . import checkpoint
from .config import Config
from .journal import Journal
from .loggers import Loggers, open_loggers
from .pictures import png


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    import importlib.metadata

    found = {"fp4bf16": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("numpy", "ml_dtypes", "numba"):
        found[name] = importlib.metadata.version(name)
    for name in ("pillow", "pyarrow", "torch"):  # some rewards and data depend on them
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class RunFolder:
    """One run's folder.

    `open` makes it, or takes up what is there if it is the same run. ``metrics.jsonl`` gets one JSON object
    a line; a resumed run first drops the lines that its checkpoint does not know, so that no step is there
    twice. The last two checkpoints are kept: where the newest is damaged, the run goes on from the one
    before. ``rollout.jsonl`` is the journal of what is done but in no checkpoint yet.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.config_file, self.metrics_file = self.path / "config.json", self.path / "metrics.jsonl"
        self.checkpoint_file = self.path / "checkpoint.safetensors"
        self.previous_file = self.path / "checkpoint.previous.safetensors"
        self.report_file, self.samples = self.path / "report.html", self.path / "samples"
        self.journal = Forgiving(Journal(self.path / "rollout.jsonl"))
        self.lines = 0
        self.warnings: list[str] = []  # what `open` found damaged, in sentences
        self._loggers = Loggers()
        self.decisions: list[dict[str, Any]] = []  # of the router, made after the checkpoint that is taken up
        self._metrics: int | None = None
        self._lock: Any = None

    def open(
        self, config: Config, device: str = "cpu", start: dict[str, str] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """Take the folder for `config`; the checkpoint in it (arrays, meta), or None for a fresh start.

        device: what the run is computed on. start: which weights it begins with (``from``, ``weights``).
        A damaged checkpoint is put aside where the one before it is good; `notes` says so.

        Raises `ConfigError` when the folder belongs to another configuration, holds something else, or
        cannot be written, `CheckpointError` when neither checkpoint can be read. Nothing in it is changed
        then.
        """
        self._make()
        self._take_lock()
        # Writes that a crash cut short; the lock says that nobody is at them.
        for torn in (*self.path.glob(".*.tmp"), *self.samples.glob(".*.tmp")):
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
        found = checkpoint.load_last(self.checkpoint_file, self.previous_file)
        if found is None:
            if self.metrics_file.exists() and self.metrics_file.stat().st_size:
                self.warnings.append(f"{self.path}: there is no checkpoint yet, so the run begins anew")
            self._open_metrics(0)
            self.journal.clear()
            return None
        arrays, meta, wrong = found
        if _differing(meta["config"], config.to_dict()):
            file = self.previous_file if wrong else self.checkpoint_file
            raise CheckpointError(
                f"{file}: was written by another configuration than config.json beside it; name another "
                f"folder with --out"
            )
        self._open_metrics(meta["lines"])
        if wrong:
            self._put_aside(wrong, meta)
        return arrays, meta

    def _put_aside(self, wrong: str, meta: dict[str, Any]) -> None:
        """Keep the damaged checkpoint under another name, and say which one is taken."""
        kept = ""
        if self.checkpoint_file.exists():
            number, aside = 1, self.path / "checkpoint.damaged.safetensors"
            while aside.exists():
                number += 1
                aside = self.path / f"checkpoint.damaged.{number}.safetensors"
            os.replace(self.checkpoint_file, aside)
            flush_folder(self.path)
            kept = f"; it is kept as {aside.name}"
        self.warnings.append(
            f"{self.checkpoint_file}: {wrong}{kept}. The run goes on from {self.previous_file.name}, which "
            f"was written at stage {meta['stage']}, step {meta['step']}"
        )

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
        write_atomic(self.config_file, (json.dumps(content, indent=2) + "\n").encode())

    def read_config(self) -> dict[str, Any]:
        """What ``config.json`` holds; `ConfigError` where it is missing or no JSON."""
        try:
            content = json.loads(self.config_file.read_text(encoding="utf-8"))
            for name in ("config", "versions", "start"):
                if not isinstance(content.get(name, None if name == "config" else {}), dict):
                    raise ValueError(f"no object {name!r}")
            return content
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path}: there is no config.json, so it is not the folder of a run"
            ) from None
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{self.config_file}: cannot be read ({error}); name another folder") from error

    def _compare(self, config: Config) -> None:
        there, here = _default() | _flat(self.read_config()["config"]), _flat(config.to_dict())
        different = _differing(self.read_config()["config"], config.to_dict())
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
        """Sentences about what `open` found damaged, and about what has changed since the run began and may
        keep it from being bit-identical.
        """
        before, now, notes = self.read_config(), versions(), list(self.warnings)
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
        there = self.metrics_file.exists()
        lines = self.metrics_file.read_bytes().splitlines(keepends=True) if there else []
        kept, self.decisions = lines[:keep], _decisions(lines[keep:])
        if keep and not there:
            raise CheckpointError(
                f"{self.metrics_file}: is missing but the checkpoint was written after {keep} lines of "
                f"it; restore the file or name another folder"
            )
        if len(kept) < keep or (kept and not kept[-1].endswith(b"\n")):
            raise CheckpointError(
                f"{self.metrics_file}: has {len(kept)} lines but the checkpoint was written after "
                f"{keep}; restore the file or name another folder"
            )
        self._metrics = os.open(self.metrics_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(self._metrics, sum(map(len, kept)))  # in place: on a full disk it must work too
        os.fsync(self._metrics)
        flush_folder(self.path)
        self.lines = len(kept)

    def log_to(self, names: Sequence[str], say: Callable[[str], None]) -> None:
        """Give what follows to further loggers as well (`loggers.LOGGERS`); `say` tells of one that fails.

        To be called after `open`. Raises as `loggers.check_loggers`.
        """
        config = self.read_config()["config"]
        self._loggers = Loggers(open_loggers(names, self.path, config, self.lines), say)

    def log(self, **values: Any) -> None:
        """Append one line to ``metrics.jsonl``, and give its numbers to the loggers.

        Raises `OSError` on a full disk; the file then ends with the line before.
        """
        self._still_there()
        line = (json.dumps(values, allow_nan=True) + "\n").encode()
        size = os.fstat(self._metrics).st_size
        try:
            write_all(self._metrics, line)
        except OSError:
            os.ftruncate(self._metrics, size)
            raise
        self.lines += 1
        if values["stage"] == "router":  # a decision holds numbers of every layer: too many curves
            values = {k: v for k, v in values.items() if not isinstance(v, dict)}
        self._loggers.log(self.lines, values)

    def picture(self, name: str, sheet: np.ndarray, scale: int = 1) -> None:
        """Write ``samples/NAME.png`` from uint8 (H, W, 3), each pixel `scale` x `scale`, and give the picture
        to the loggers.
        """
        self._still_there()
        self.samples.mkdir(exist_ok=True)
        write_atomic(self.samples / f"{name}.png", png(sheet, scale))
        self._loggers.pictures(self.lines, name, sheet.repeat(scale, 0).repeat(scale, 1))

    def save(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Write the checkpoint, keeping the one before; the metrics up to here are on the disk before it is.

        Raises `OSError` on a full disk; both checkpoints are then as they were.
        """
        self._still_there()
        os.fsync(self._metrics)
        checkpoint.save(self.checkpoint_file, arrays, {**meta, "lines": self.lines}, self.previous_file)

    def _still_there(self) -> None:
        """An open file takes lines even when it has been removed: nobody would ever see them."""
        if os.fstat(self._metrics).st_nlink:
            return
        if not self.path.is_dir():
            raise CheckpointError(
                f"--out {self.path}: the folder was removed while the run was writing to it, and what it "
                f"held is lost; give the same command again to start anew"
            )
        raise CheckpointError(
            f"{self.metrics_file}: was removed while the run was writing to it, and its checkpoints cannot "
            f"be gone on with without it; restore the file or name another folder"
        )

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
        self._loggers.close()
        self.journal.close()
        if self._metrics is not None:
            os.close(self._metrics)
        if self._lock is not None:
            self._lock.close()
        self._metrics = self._lock = None


def _decisions(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The router's decisions among lines of the metrics, those that a crash cut short left out."""
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and entry.get("event") == "decision":
            found.append(entry)
    return found


def _default() -> dict[str, Any]:
    """What settings are that a run of an earlier version does not have: what came later is off by default."""
    return _flat(Config().to_dict())


#: Settings that change nothing in the result: a run may go on with others.
_FREE = ("align.workers",)


def _differing(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Names of the settings that two configurations differ in, but for those that change nothing."""
    a, b = _default() | _flat(there), _flat(here)
    return [k for k in sorted({*a, *b}) if a.get(k) != b.get(k) and k not in _FREE]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for k, v in config.items():
        inner = isinstance(v, dict) and k != "route"
        flat.update(_flat(v, f"{prefix}{k}.") if inner else {prefix + k: v})
    return flat
