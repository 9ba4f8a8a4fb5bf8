"""Products on the tracks against np.matmul: time, memory, and what a BLAS pool that still spins costs.

Every shape's calls are interleaved with np.matmul in float32, with a pause before each so that BLAS's idle
threads have stopped spinning.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from typing import Any

import numpy as np

from ... import gemm
from ...dual import DualWeight
from ...interop import BFLOAT16
from ...quantize import quantize
from . import record

SHAPES = [(1024, 1024, 1024), (64, 2048, 2048), (4096, 320, 320), (256, 128, 128), (32, 128, 128)]
GOAL, GOAL_SHAPE = 1.5, (1024, 1024, 1024)
SPIN_SECONDS = 0.2  # OpenBLAS's idle threads spin for 2^26 turns, each of them a yield


def calls(shape, rng):
    """{name: function} for one shape (M, N, K); "np.matmul" is the yardstick."""
    m, n, k = shape
    a, b = (rng.standard_normal(s, np.float32) for s in ((m, k), (k, n)))
    a16, b16 = (x.astype(BFLOAT16) for x in (a, b))
    aq, bq, dual = (
        quantize(a, search="fast"),
        quantize(b, axis=-2),
        DualWeight(b, rank=min(32, k, n)),
    )
    g = rng.standard_normal((m, n), np.float32)
    out = np.empty((m, n), np.float32)
    return {
        "np.matmul": lambda: np.matmul(a, b, out=out),
        "fp4 prepared": lambda: gemm.matmul(aq, bq, out=out),
        "fp4 prepared weight": lambda: gemm.matmul(a, bq, out=out),
        "fp4 both on the fly": lambda: gemm.matmul(a, b, track="fp4", out=out),
        "dual": lambda: gemm.matmul(a, dual, out=out),
        "bf16 of float32": lambda: gemm.matmul(a, b, out=out),
        "bf16 of bfloat16": lambda: gemm.matmul(a16, b16),
        "reference": lambda: gemm.matmul(a, b, track="reference", out=out),
        "bf16 silu(x w + bias)": lambda: gemm.matmul(a, b, bias=b[0], activation="silu", out=out),
        "vjp bf16 (two products)": lambda: gemm.matmul_vjp(g, a, b),
    }


def interleaved(functions: dict, rounds: int, pause: float, run: int = 5) -> dict[str, list[float]]:
    """Seconds of each call. In each round every function runs `run` times back to back, after a pause in
    which the threads of the one before it go to sleep and a call that wakes its own: else a call would be
    charged for the spinning of another's threads or for the waking of its cores.
    """
    seconds = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            time.sleep(pause)
            function()
            for _ in range(run):
                start = time.perf_counter()
                function()
                seconds[name].append(time.perf_counter() - start)
    return seconds


def small_call(function, repeats: int = 200, batches: int = 20) -> float:
    """Seconds of a call too short for one reading: the best batch mean."""
    best = float("inf")
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def measure(shape, rng, quick: bool) -> list[dict]:
    """One row a track: times of a shape."""
    functions, (m, n, k) = calls(shape, rng), shape
    flops = 2 * m * k * n
    if flops < 2e7:  # back to back: this is how a small network calls them
        seconds = {name: [small_call(f, 50 if quick else 200)] for name, f in functions.items()}
    else:
        seconds = interleaved(functions, 3 if quick else 8, SPIN_SECONDS)
    base = statistics.median(seconds["np.matmul"])
    rows = []
    for name, values in seconds.items():
        values = sorted(values)
        middle = statistics.median(values)
        work = flops * (2 if "vjp" in name else 1)
        rows.append({
            "op": "matmul", "shape": list(shape), "track": name, "us": middle * 1e6,
            "us_p20": values[len(values) // 5] * 1e6, "us_p80": values[len(values) * 4 // 5] * 1e6,
            "gflops": work / middle / 1e9, "x_np": middle / base,
            "x_np_best": values[0] / min(seconds["np.matmul"]),
        })  # fmt: skip
    return rows


def contention(rng, rounds: int) -> dict:
    """The FP4 product alone, right after np.matmul (whose threads spin on), and after the package's own
    product."""
    functions = calls(GOAL_SHAPE, rng)
    product, blas, own = functions["fp4 prepared"], functions["np.matmul"], functions["reference"]

    def after(first):
        def run():
            first()
            start = time.perf_counter()
            product()
            return time.perf_counter() - start

        return run

    kinds = {"alone": after(lambda: None), "after np.matmul": after(blas), "after fp4bf16": after(own)}
    seconds = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, run in kinds.items():
            time.sleep(SPIN_SECONDS)
            seconds[name].append(run())
    return {name: statistics.median(values) * 1e6 for name, values in seconds.items()}


def memory(rng) -> dict:
    """Bytes of the peak of one FP4 product of prepared operands, and of what is still held after it."""
    a, b = (quantize(rng.standard_normal((1024, 1024), np.float32), axis=x) for x in (-1, -2))
    out = np.empty((1024, 1024), np.float32)
    gemm.matmul(a, b, out=out)
    gc.collect()
    tracemalloc.start()
    gemm.matmul(a, b, out=out)
    first, peak = tracemalloc.get_traced_memory()
    gemm.matmul(a, b, out=out)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "float32_operand": 4 * 1024 * 1024,
        "packed_operand": a.nbytes,
        "peak": peak,
        "kept": max(first, kept),
    }




def goals(rows: list[dict], bytes_: dict[str, int]) -> dict[str, dict[str, Any]]:
    """What must hold, where the shape that it is about was measured."""
    kept = bytes_["kept"] < bytes_["float32_operand"]
    held = {"no float32 copy is kept": {"goal": True, "measured": kept, "held": kept}}
    for r in rows:
        if tuple(r["shape"]) == GOAL_SHAPE and r["track"] == "fp4 prepared":
            ratio = {"goal": f"<= {GOAL:g}", "measured": round(r["x_np"], 4), "held": r["x_np"] <= GOAL}
            held["fp4 prepared 1024x1024x1024: x np.matmul's time"] = ratio
    return held


def run(options: Any) -> tuple[dict[str, Any], list[dict], dict[str, dict[str, Any]]]:
    """Print the table; (what the report says besides, its rows, the goals)."""
    rng, about = np.random.default_rng(options.seed), record.host()
    print(f"{about['cpu']}, {about['threads']} threads, load {about['load']:.2f}, seed {options.seed}")
    print(f"{'op shape track':46s} | {'us':>9s} | {'GFLOP/s':>7s} | x np.matmul")
    rows = []
    for shape in options.shapes or SHAPES:
        for row in measure(shape, rng, options.quick):
            rows.append(row)
            label = f"matmul {'x'.join(map(str, shape))} {row['track']}"
            print(f"{label:46s} | {row['us']:9.1f} | {row['gflops']:7.1f} | {row['x_np']:.2f}", flush=True)
    spin, bytes_ = contention(rng, 5 if options.quick else 15), memory(rng)
    print("fp4 prepared 1024^3, us: " + ", ".join(f"{name} {us:.0f}" for name, us in spin.items()))
    print("fp4 prepared 1024^3, KiB: " + ", ".join(f"{name} {b // 1024}" for name, b in bytes_.items()))
    report = {"machine": about, "seed": options.seed, "contention_us": spin, "bytes": bytes_}
    return report, rows, goals(rows, bytes_)
