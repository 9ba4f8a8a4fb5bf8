"""The run on a GPU: shape by shape, then the quantisers, then what Python costs."""

from __future__ import annotations

import gc
import importlib
from typing import Any

from ...backends import cuda
from ...errors import CudaError, LibraryError
from . import goals, record
from . import timing as clock
from .arms import COPY, YARDSTICK, Arms, operand_sets, overhead_calls, quantise_arms
from .raw import Raw

METHOD = (
    "graph replays of at least 1 ms a reading, arms taken in turn in every round, each call on the next of "
    "so many operand sets that twice the L2 cache is touched before one returns; medians and 20th and 80th "
    "percentiles of the readings; Gaussian operands, fresh each run; errors on 16 rows against float64: of "
    "the product of the BF16 operands, and (kernel) of the operands that the arm multiplies"
)
QUICK = ((4096, 4096, 4096), (1000, 520, 328))


def problem() -> str | None:
    """Why a GPU cannot be measured here, or None."""
    try:
        if cuda.load().device_count() == 0:
            return "no GPU"
    except (LibraryError, CudaError) as error:
        return str(error)
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "there is a GPU, but PyTorch, whose cuBLAS is the yardstick, is not installed"
    return None if torch.cuda.is_available() else "there is a GPU, but PyTorch was built without CUDA"


def run(options: Any) -> tuple[dict[str, Any], list[dict], dict[str, dict[str, Any]]]:
    """Print the table; (what the report says besides, its rows, the goals)."""
    torch = importlib.import_module("torch")
    torch.manual_seed(options.seed)
    raw, about = Raw(torch), record.gpu(torch)
    rounds = 8 if options.quick else 40
    print(", ".join(f"{key} {about[key]}" for key in ("gpu", "driver", "torch", "triton", "commit")) +
          f", seed {options.seed}, {rounds} rounds")  # fmt: skip
    print(record.HEAD, flush=True)
    rows: list[dict] = []
    if options.what == "gemm":
        for shape in options.shapes or (QUICK if options.quick else goals.SHAPES):
            rows += products(torch, raw, shape, rounds, about["l2_bytes"], options)
    if not options.shapes:
        sides = ((4096, 4096),) if options.quick else (goals.SQUARE, goals.SQUARE4)
        for rows_, k in sides:
            rows += quantisers(torch, raw, rows_, k, rounds, about["l2_bytes"])
    if options.what == "gemm" and not options.shapes:
        rows += host(torch, raw, options.quick)
    report = {"machine": about, "seed": options.seed, "rounds": rounds, "method": METHOD}
    return report, rows, goals.results(rows)


def _measured(torch: Any, op: str, shape: tuple[int, ...], arms: list, rounds: int) -> list[dict]:
    for arm in arms:
        clock.prepare(torch, arm)
    clock.measure(torch, arms, rounds)
    state = [record.nvidia_smi(q) for q in ("clocks.sm", "power.draw", "temperature.gpu")]
    base = next((arm.median for arm in arms if arm.name == YARDSTICK and arm.seconds), None)
    rows = [record.row(op, shape, arm, None if base is None else base * 1e6) for arm in arms]
    for r in rows:
        r["gpu_state"] = ", ".join(filter(None, state))
        print(record.line(r), flush=True)
    for arm in arms:
        arm.graph = None
    return rows


def _let_go(torch: Any) -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def products(torch: Any, raw: Raw, shape, rounds: int, l2: int, options: Any) -> list[dict]:
    """Rows of one shape (M, N, K)."""
    made = Arms(torch, raw, operand_sets(torch, raw, shape, l2))
    square = shape == goals.CUBE4 or bool(options.shapes)
    triton = options.triton and shape in (goals.CUBE4, goals.CUBE8)
    rows = _measured(torch, "matmul", shape, made.all(dual=square, triton=triton), rounds)
    del made
    _let_go(torch)
    return rows


def quantisers(torch: Any, raw: Raw, rows: int, k: int, rounds: int, l2: int) -> list[dict]:
    """Rows of quantising BF16 (rows, k); ``x_copy`` is the share of the copy's rate."""
    arms = quantise_arms(torch, raw, rows, k, l2, with_t=True)
    found = _measured(torch, "quantize", (rows, k), arms, rounds)
    copy = next((r["gb_s"] for r in found if r["track"] == COPY), None)
    for r in found:
        r["x_copy"] = r["gb_s"] / copy if r["gb_s"] and copy else None
    shares = ", ".join(f"{r['track']} {r['x_copy']:.0%}" for r in found if r["x_copy"] and r["track"] != COPY)
    print(f"of the copy's rate, bytes in and out: {shares}")
    del arms
    _let_go(torch)
    return found


def host(torch: Any, raw: Raw, quick: bool) -> list[dict]:
    """Rows of the host's time in a call of a small product."""
    shape, rows, taken = (128, 128, 128), [], {}
    for name, call in overhead_calls(torch, raw, *shape).items():
        try:
            call()
            torch.cuda.synchronize()
            taken[name] = call
        except Exception as error:
            rows.append({"op": "host", "shape": list(shape), "track": name, "us": None,
                         "note": clock.refused(error)})  # fmt: skip
    for name, seconds in clock.host_seconds(torch, taken, 5 if quick else 30).items():
        rows.append({"op": "host", "shape": list(shape), "track": name, "us": seconds * 1e6, "note": ""})
    for r in rows:
        print(record.line(r), flush=True)
    return rows
