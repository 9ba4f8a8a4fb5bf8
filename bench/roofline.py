"""Each launch of a function on the GPU, timed alone beside what the hardware allows.

A launch is bounded by its arithmetic at the rate of its track and by its bytes, each operand and result once,
at the rate of a copy. All were measured on an H200: 1,340 TFLOP/s of FP4 products with promoted sums, 1,480
with fast ones, which a network's forward takes by default (8192^3, results/nvidia-h200/gemm.json), 700 of
BF16 ones, 4.27 TB/s. Launches of one kind and shape are one row.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fp4bf16 import device

RATE8 = (1.34e15, 1.48e15)  # by fp4bf16_accumulate
RATE16, BYTES = 0.70e15, 4.27e12
Work = tuple[float, float, str]  # seconds of arithmetic, bytes, shape
SIZES = (4, 2, 2)  # of fp4bf16_dtype


def _kernels(a: Any) -> int:
    """Kernels of an output channel."""
    return 4 if getattr(a, "phases", 0) else 1


def _kernel(a: Any) -> str:
    return f"{'4 of ' if _kernels(a) > 1 else ''}{a.kh}x{a.kw}/{a.stride}"


def _conv(a: Any) -> Work:
    out = a.n * a.oh * a.ow
    taps = a.kh * a.kw
    k16 = a.c16 * (1 if a.x16_on_output else taps)
    read = a.n * a.h * a.w * (a.c8 + (0 if a.x16_on_output else 2 * a.c16))
    read += out * 2 * a.c16 * a.x16_on_output
    written = SIZES[a.d_dtype] + bool(a.expanded)
    nbytes = read + _kernels(a) * a.o * (taps * a.c8 + 2 * k16) + out * a.o * (written + 2 * bool(a.residual))
    shape = f"{a.n}x{a.h}x{a.w} {a.c8}+{a.c16}->{a.o} {_kernel(a)}"
    return 2.0 * out * a.o * (taps * a.c8 / RATE8[a.accumulate] + k16 / RATE16), nbytes, shape


def _gradient(a: Any) -> Work:
    out = a.n * a.oh * a.ow
    nbytes = 2 * (out * a.o + a.n * a.h * a.w * a.c) + 2 * _kernels(a) * a.o * a.c * a.kh * a.kw
    shape = f"{a.n}x{a.h}x{a.w} {a.c}->{a.o} {_kernel(a)}"
    return 2.0 * out * a.o * a.c * a.kh * a.kw / RATE16, nbytes, shape


def _norm(a: Any) -> Work:
    count = a.n * a.pixels * a.c
    width = 2 + 2 * bool(a.y) + bool(a.expanded) + 0.5625 * bool(a.packed)
    return 0.0, count * width, f"{a.n}x{a.pixels}x{a.c}"


def _norm_backward(a: Any) -> Work:
    return 0.0, a.n * a.pixels * a.c * (6 + 2 * bool(a.add)), f"{a.n}x{a.pixels}x{a.c}"


def _attention(factor: float):
    def work(a: Any) -> Work:
        flops = factor * 2.0 * a.n * a.heads * a.q_tokens * a.k_tokens * a.dim
        nbytes = 2.0 * a.n * a.heads * a.dim * (a.q_tokens + a.k_tokens) * factor
        return flops / RATE16, nbytes, f"{a.n}x{a.q_tokens}x{a.dim}"

    return work


WORK = {"conv2d": _conv, "conv2d_dgrad": _gradient, "conv2d_wgrad": _gradient, "group_norm": _norm,
        "group_norm_backward": _norm_backward, "attention": _attention(2),
        "attention_backward": _attention(5)}  # fmt: skip


def recorded(function) -> tuple[list[tuple[str, tuple]], list]:
    """The launches of ``function()``, in order, and the memory that it took, none of it used twice: each
    launch then reads its own operands when it is repeated.
    """
    import cupy

    found, call, pool, memory = [], device.call, cupy.cuda.MemoryPool(), []

    def keep(name: str, *arguments: Any) -> None:
        call(name, *arguments)
        found.append((name, arguments))

    def take(size: int) -> Any:
        memory.append(pool.malloc(size))
        return memory[-1]

    device.call = keep
    try:
        with cupy.cuda.using_allocator(take):
            function()
    finally:
        device.call = call
    return found, [pool, *memory]


def alone(name: str, arguments: tuple, repeat: int = 5) -> float:
    """Seconds of one launch, again on what its memory holds by now; the least of `repeat` readings."""
    import torch

    best = float("inf")
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            device.call(name, *arguments[:-1], 0)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e-3 / 4)
    return best


def breakdown(function, title: str, most: int = 24) -> list[dict[str, Any]]:
    """Rows by kind and shape: launches, milliseconds, the bound and the share of it that is reached."""
    rows: dict[tuple, list] = defaultdict(lambda: [0, 0.0, 0.0])
    launches, memory = recorded(function)
    for name, arguments in launches:
        seconds = alone(name, arguments)
        work = WORK.get(name)
        arithmetic, nbytes, shape = work(arguments[0][0]) if work else (0.0, 0.0, "")
        entry = rows[name, shape]
        entry[0] += 1
        entry[1] += seconds
        entry[2] += max(arithmetic, nbytes / BYTES)
    del memory
    total = sum(entry[1] for entry in rows.values())
    longest_first = sorted(rows.items(), key=lambda item: -item[1][1])
    found = [{"part": title, "kernel": name, "shape": shape, "launches": n, "ms": ms * 1e3,
              "share": ms / total, "roofline": bound / ms if bound else None}
             for (name, shape), (n, ms, bound) in longest_first]  # fmt: skip
    print(f"{title}: {sum(r['launches'] for r in found)} launches, {total * 1e3:.2f} ms one by one")
    for r in found[:most]:
        reached = "" if r["roofline"] is None else f"{100 * r['roofline']:3.0f} % of the roofline"
        print(f"  {r['kernel']:20s} {r['shape']:34s} x{r['launches']:3d} {r['ms']:8.3f} ms "
              f"{100 * r['share']:5.1f} %  {reached}", flush=True)  # fmt: skip
    return found
