"""Arms of a comparison: runs of the trainer that share a base model and differ in one thing.

Each is a process of its own, in a folder of its own, so that a comparison that was interrupted goes on with
what is missing.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fp4bf16._version import __version__  # noqa: E402
from fp4bf16.backends.threads import num_threads  # noqa: E402
from fp4bf16.files import write_atomic  # noqa: E402
from fp4bf16.train import checkpoint  # noqa: E402


def commit() -> str:
    """The commit that was measured, with a mark if files differ from it."""
    try:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine(device: str = "cpu") -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "commit": commit(),
        "version": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.processor() or platform.machine(),
        "device": device,
        "threads": num_threads(),
        "load": os.getloadavg()[0],
    }


def train(out: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Run ``python -m fp4bf16 train`` to its end; the lines of its metrics."""
    command = [sys.executable, "-m", "fp4bf16", "train", "--out", str(out), *arguments]
    subprocess.run(command, check=True, cwd=ROOT)
    return metrics(out)


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def update(out: Path) -> np.ndarray:
    """What the alignment changed: aligned less base weights, one float64 vector."""
    arrays, _ = checkpoint.load(out / "checkpoint.safetensors")
    policy, base = checkpoint.take(arrays, "policy"), checkpoint.take(arrays, "ema")
    return np.concatenate([(policy[k].astype(np.float64) - base[k]).ravel() for k in sorted(policy)])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of the angle between two vectors.

    >>> cosine(np.array([1.0, 0.0]), np.array([2.0, 0.0]))
    1.0
    """
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size else math.nan


def rise(lines: list[dict[str, Any]]) -> dict[str, float]:
    """How much higher the explored reward is in the last quarter of the iterations than in the first.

    A prompt of an iteration counts once, with the mean of its rollouts; `errors` is the difference in
    standard errors of a difference of two means.

    >>> lines = [{"stage": "align", "reward/prompts": [float(i), i + 2.0]} for i in range(8)]
    >>> found = rise(lines)
    >>> found["first"], found["last"], round(found["errors"], 2)
    (1.5, 7.5, 6.57)
    """
    by_iteration = [line["reward/prompts"] for line in lines if line["stage"] == "align"]
    quarter = max(1, len(by_iteration) // 4)
    first, last = (np.concatenate(part) for part in (by_iteration[:quarter], by_iteration[-quarter:]))
    error = math.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    change = float(last.mean() - first.mean())
    return {
        "first": float(first.mean()), "last": float(last.mean()), "rise": change, "standard_error": error,
        "errors": change / error if error else math.nan,
    }  # fmt: skip


def write(path: Path, result: dict[str, Any]) -> None:
    """JSON for people to read, too; a run that dies while it writes leaves the results of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(result, indent=1) + "\n").encode())
    print(f"written: {path}")
