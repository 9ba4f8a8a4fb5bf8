"""Rows of a run: as a printed line, as CSV, as JSON beside what they were measured on."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...backends import cuda
from ...backends.threads import num_threads
from .timing import Arm

ROOT = cuda.PACKAGE.parent  # of a checkout
WRONG_ABOVE = 1e-2  # relative error of a product of the operands as an arm gets them, rounded to BF16
SHARED = ("gpu", "cpu", "driver", "torch", "torch_cuda", "triton", "numpy", "fp4bf16", "sources", "commit",
          "date")  # fmt: skip


def commit() -> str | None:
    """The checkout's commit, with a plus where files differ from it."""
    if not (ROOT / ".git").exists():
        return None
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True,
                                 text=True, check=True)  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def host() -> dict[str, Any]:
    """What a CPU run was measured on."""
    return {
        "cpu": cpu_name(), "cores": os.cpu_count(), "threads": num_threads(), "load": os.getloadavg()[0],
        "python": platform.python_version(), "numpy": np.__version__, "fp4bf16": __version__,
        "commit": commit(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def gpu(torch: Any) -> dict[str, Any]:
    """What a GPU run was measured on."""
    library = cuda.load()
    driver, runtime = library.cuda_versions()
    device = library.device(torch.cuda.current_device())
    about = {
        "gpu": device.name, "multiprocessors": device.multiprocessors, "l2_bytes": device.l2_cache,
        "driver": nvidia_smi("driver_version") or f"CUDA {driver // 1000}.{driver % 1000 // 10}",
        "library_cuda": f"{runtime // 1000}.{runtime % 1000 // 10}", "sources": library.source_digest,
        "torch": torch.__version__, "torch_cuda": torch.version.cuda, "cublas": version("nvidia-cublas"),
        "triton": version("triton"),
    }  # fmt: skip
    return about | {k: v for k, v in host().items() if k not in ("threads", "load")}


def nvidia_smi(query: str) -> str | None:
    """One value that the driver's tool reports of the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def row(op: str, shape: tuple[int, ...], arm: Arm, yardstick: float | None) -> dict[str, Any]:
    """One arm's result; numbers that there are none of are None."""
    us, known = arm.median * 1e6, bool(arm.seconds)
    number = lambda x: x if x is not None and math.isfinite(x) else None  # noqa: E731
    limit = WRONG_ABOVE if op == "matmul" else 0.0
    wrong = arm.kernel_error is not None and arm.kernel_error > limit
    note = "; ".join(filter(None, ("WRONG RESULT" if wrong else "", arm.note)))
    return {
        "op": op, "shape": list(shape), "track": arm.name, "us": number(us),
        "us_p20": number(arm.share(0.2) * 1e6), "us_p80": number(arm.share(0.8) * 1e6),
        "tflop_s": arm.flops / us / 1e6 if known and arm.flops else None,
        "gb_s": arm.nbytes / us / 1e3 if known and arm.nbytes else None,
        "x_cublas": yardstick / us if known and yardstick else None,
        "error": number(arm.error), "kernel_error": number(arm.kernel_error), "note": note,
        "wrong": wrong,
    }  # fmt: skip


HEAD = (f"{'op shape track':55s} | {'us':>9s} | {'TFLOP/s':>7s} | {'GB/s':>6s} | {'x cuBLAS':>8s} | "
        f"{'rel. error':>10s} | {'of kernel':>9s}")  # fmt: skip


def line(r: dict[str, Any]) -> str:
    """``op shape track | us | TFLOP/s | GB/s | x cuBLAS | rel. error | of the kernel alone``."""

    def show(key: str, form: str, width: int) -> str:
        value = r.get(key)
        return f"{'-' if value is None else format(value, form):>{width}s}"

    name = f"{r['op']} {'x'.join(map(str, r['shape']))} {r['track']}"
    columns = (("us", ".1f", 9), ("tflop_s", ".0f", 7), ("gb_s", ".0f", 6), ("x_cublas", ".2f", 8),
               ("error", ".2g", 10), ("kernel_error", ".2g", 9))  # fmt: skip
    text = " | ".join([f"{name:55s}", *(show(*column) for column in columns)])
    return f"{text} | {r['note']}" if r.get("note") else text


def write_csv(path: str, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """A line a row; what all rows share (GPU, driver, versions, commit) stands in every line."""
    shared = {k: about[k] for k in SHARED if k in about}
    columns = dict.fromkeys(column for r in rows for column in r)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, [*columns, *shared])
        writer.writeheader()
        for r in rows:
            writer.writerow(r | {"shape": "x".join(map(str, r["shape"]))} | shared)


def write_json(path: str, data: dict[str, Any]) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(data, indent=1) + "\n")


def default_json(name: str, machine: str) -> str:
    """``bench/results/<machine>/`` of a checkout, or the current folder."""
    folder = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    results = ROOT / "bench" / "results"
    return str(results / folder / f"{name}.json") if results.is_dir() else f"bench-{name}-{folder}.json"
