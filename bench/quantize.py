"""Speed of the quantisers on the CPU.

    python bench/quantize.py [--json] [--rows 4096] [--columns 2048]

A line a format and rule: MB/s of float32 input through `quantize_rows` (codes, scales and row norms), through
`fake_quantize_rows`, MB/s of float32 output of `dequantize_rows`, and how many times faster than the NumPy
reference; the last four formats round stochastically. A last line quantises right after a BLAS product and
alone: the two thread pools must not slow each other down. Ends with status 1 when a goal is missed.
``--json`` writes bench/results/cpu/quantize.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fp4bf16.backends import cpu_quantize as cpu  # noqa: E402
from fp4bf16.backends.threads import num_threads  # noqa: E402
from fp4bf16.cli.bench.record import cpu_name  # noqa: E402
from fp4bf16.python_ref import quantize as reference  # noqa: E402
from fp4bf16.quantize import quantize  # noqa: E402

QUANTIZE, DEQUANTIZE, INTERFERENCE = 600.0, 2000.0, 1.5  # MB/s, MB/s, ratio
TIMES = 30.0  # the NumPy reference
OVERHEAD = 100.0  # us of a call on 16 x 32: Python, checks and allocations
ARMS = [
    ("nvfp4_exact", None, "full"),
    ("nvfp4_exact", None, "fast"),
    ("nvfp4", "te", "full"),
    ("nvfp4", "four_over_six", "full"),
    ("nvfp4", "four_over_six_mae", "full"),
    ("mxfp4", "even", "full"),
    ("mxfp4", "rceil", "full"),
    ("fp8", None, "full"),
    ("nvfp4_exact", None, "stochastic"),  # its scale needs no search
    ("nvfp4", "te", "stochastic"),
    ("mxfp4", "rceil", "stochastic"),
    ("fp8", None, "stochastic"),
]


def seconds(run, repeats: int = 15) -> tuple[float, float]:
    """(least, median) of `repeats` runs after one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times), statistics.median(times)


def name_of(fmt: str, rule: str | None, search: str) -> str:
    if search == "stochastic":
        return f"{fmt} stochastic"
    return fmt if fmt == "fp8" else f"{fmt} {rule or search}"


def measure(x: np.ndarray, small: np.ndarray, fmt: str, rule: str | None, search: str) -> dict:
    """Speeds from the least time of each (other programs on the machine only add), and the median of the
    first.
    """
    out, options = np.empty_like(x), {"scale_rule": rule, "search": "full"}
    options |= {"rounding": "stochastic", "seed": 1} if search == "stochastic" else {"search": search}
    q = cpu.quantize_rows(x, fmt, **options)
    into = q.packed, q.block_scale
    given = options | {"outer": None if fmt == "mxfp4" else "row"}
    slow, _ = seconds(lambda: reference.quantize(x, fmt, **given), 2)
    codes, median = seconds(lambda: cpu.quantize_rows(x, fmt, out=into, **options))
    fake, _ = seconds(lambda: cpu.fake_quantize_rows(x, fmt, out=out, **options))
    back, _ = seconds(lambda: cpu.dequantize_rows(*into, q.outer, fmt, x.shape[1], out))
    call, _ = seconds(lambda: quantize(small, fmt, **given), 101)
    tiny, _ = seconds(lambda: quantize(small[:16], fmt, **given), 101)
    megabytes = x.nbytes / 1e6
    return {
        "name": name_of(fmt, rule, search),
        "quantize_mb_s": megabytes / codes,
        "median_mb_s": megabytes / median,
        "fake_quantize_mb_s": megabytes / fake,
        "dequantize_mb_s": megabytes / back,
        "times_reference": slow / codes,
        "small_us": call * 1e6,
        "overhead_us": tiny * 1e6,
    }


def interference(x: np.ndarray) -> dict:
    """Quantise alone, and right after a BLAS product on all of NumPy's threads."""
    a = np.random.default_rng(1).standard_normal((1024, 1024)).astype(np.float32)
    run = lambda: cpu.quantize_rows(x, search="fast")  # noqa: E731
    run()
    alone, after = [], []
    for _ in range(15):
        time.sleep(0.05)  # idle BLAS threads have stopped spinning
        start = time.perf_counter()
        run()
        alone.append(time.perf_counter() - start)
        a @ a
        start = time.perf_counter()
        run()
        after.append(time.perf_counter() - start)
    least = min(alone), min(after)
    return {"alone_ms": least[0] * 1e3, "after_blas_ms": least[1] * 1e3, "ratio": least[1] / least[0]}


def goals(rows: list[dict], pools: dict) -> list[str]:
    missed = []
    for r in rows:
        for key, least in (
            ("quantize_mb_s", QUANTIZE),
            ("dequantize_mb_s", DEQUANTIZE),
            ("times_reference", TIMES),
        ):
            if r[key] < least:
                missed.append(f"{r['name']}: {key} is {r[key]:.0f}, the goal is {least:.0f}")
        if r["overhead_us"] > OVERHEAD:
            missed.append(
                f"{r['name']}: a call on 16 x 32 takes {r['overhead_us']:.0f} us, the goal is {OVERHEAD:.0f}"
            )
    if pools["ratio"] > INTERFERENCE:
        missed.append(
            f"quantising after a product takes {pools['ratio']:.2f} x as long, the goal is {INTERFERENCE}"
        )
    return missed


def commit() -> str:
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"


def table(x: np.ndarray, small: np.ndarray) -> list[dict]:
    heads = ("quantize", "fake", "decode", "x reference", "2048x32", "16x32")
    print(f"{'format':24s}" + "".join(f"{head:>12s}" for head in heads))
    keys = ("quantize_mb_s", "fake_quantize_mb_s", "dequantize_mb_s", "times_reference")
    rows = []
    for arm in ARMS:
        r = measure(x, small, *arm)
        numbers = "".join(f"{r[key]:12.0f}" for key in keys)
        print(f"{r['name']:24s}{numbers}{r['small_us']:9.0f} us{r['overhead_us']:9.0f} us")
        rows.append(r)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="write bench/results/cpu/quantize.json")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=2048)
    args = parser.parse_args()
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((args.rows, args.columns)).astype(np.float32)
    small = rng.standard_normal((2048, 32)).astype(np.float32)
    print(f"x {x.shape} float32, seed {seed}, {num_threads()} threads, MB/s of float32")
    rows, pools = table(x, small), interference(x)
    print(
        f"quantise alone {pools['alone_ms']:.2f} ms, after a BLAS product {pools['after_blas_ms']:.2f} ms, "
        f"ratio {pools['ratio']:.2f} (goal under {INTERFERENCE})"
    )
    missed = goals(rows, pools)
    if args.json:
        path = ROOT / "bench/results/cpu/quantize.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"commit": commit(), "cpu": cpu_name(), "threads": num_threads()}
        record |= {
            "numpy": np.__version__,
            "python": platform.python_version(),
            "shape": x.shape,
            "seed": seed,
        }
        record |= {"rows": rows, "pools": pools, "missed": missed}
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path.relative_to(ROOT)}")
    for line in missed:
        print("MISSED", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
