"""``python -m fp4bf16 validate``: every primitive on every backend of this machine against the NumPy
reference."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from .. import testing
from ..backends import compiled
from ..errors import nearest
from ..formats import FORMATS
from ..testing import OPERATIONS, Report
from ..tracks import TRACKS
from . import validate_cuda

FP4 = ("nvfp4_exact", "nvfp4", "mxfp4")
#: What the numbers of ``--shape`` are, and the shapes of the table: a ragged one, a single row, a real
#: layer's.
SHAPES: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "quantize": ("rows x K", ((1, 16), (33, 100), (256, 1152))),
    "dequantize": ("rows x K", ((1, 16), (33, 100), (256, 1152))),
    "matmul": ("M x K x N", ((1, 64, 8), (33, 100, 17), (256, 1152, 128))),
    "linear": ("M x K x N", ((1, 64, 8), (33, 100, 17), (256, 1152, 128))),
    "dual": ("M x K x N", ((33, 100, 17), (128, 320, 64))),
    "conv2d": ("N x H x W x C x O", ((1, 5, 7, 3, 4), (2, 8, 8, 64, 32))),
    "attention": ("batch x seq x heads x dim", ((1, 7, 1, 16), (2, 64, 2, 32))),
    "matmul_vjp": ("M x K x N", ((33, 100, 17), (128, 320, 64))),
    "linear_vjp": ("M x K x N", ((33, 100, 17), (128, 320, 64))),
    "conv2d_vjp": ("N x H x W x C x O", ((1, 5, 7, 3, 4), (2, 8, 8, 32, 16))),
    "attention_vjp": ("batch x seq x heads x dim", ((1, 7, 1, 16), (2, 32, 2, 32))),
    "certify": ("M x K x N", ((33, 100, 17), (128, 320, 64))),
}


@dataclass(frozen=True)
class Case:
    """One line of the table: a primitive, on a backend, for one kind of input."""

    backend: str
    op: str
    shape: tuple[int, ...]
    track: str | None
    format: str
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)


# ---- which cases there are
def _tracks(op: str) -> tuple[str | None, ...]:
    if not OPERATIONS[op][2]:
        return (None,)
    return ("bf16", "fp4", "dual", "reference") if op == "attention" else ("bf16", "fp4", "reference")


def _formats(op: str, track: str | None) -> tuple[str, ...]:
    if op in ("quantize", "dequantize"):
        return tuple(FORMATS)
    if track in ("bf16", "reference") or op in ("dual", "certify") or op.startswith("attention"):
        return ("nvfp4_exact",)
    return FP4


def _dtypes(op: str, track: str | None) -> tuple[str, ...]:
    if track == "reference":
        return ("float64",)
    if op == "quantize":
        return ("float32", "bfloat16", "float16")
    return ("float32", "bfloat16") if op in ("matmul", "conv2d") else ("float32",)


def _options(op: str, track: str | None, fmt: str) -> list[dict[str, Any]]:
    """Variants of one primitive worth a line of their own."""
    if op.startswith("conv2d"):
        return [{"stride": 1, "padding": 1}, {"stride": 2, "padding": ((0, 1), (0, 1))}]
    if op.startswith("attention"):
        return [{}, {"causal": True}]
    if op == "quantize":
        bounds = ("", "_mae", "_448", "_mae_448")
        rules = {"nvfp4_exact": [{"search": "full"}, {"search": "fast"}, {"outer": "tensor"}],
                 "nvfp4": [{"scale_rule": "te"}, {"outer": "row"}]
                 + [{"scale_rule": f"four_over_six{bound}"} for bound in bounds],
                 "mxfp4": [{"scale_rule": r} for r in ("even", "floor", "rceil", "ceil")]}  # fmt: skip
        return [*rules.get(fmt, [{}]), {"rounding": "stochastic", "seed": (7, 1, 2)}]
    return [{}]


def cases(args: argparse.Namespace, backends: list[str]) -> Iterator[Case]:
    """The lines of the table that `args` ask for, cheapest backend first."""
    for backend in backends:
        for op in OPERATIONS if args.op is None else (args.op,):
            if backend.startswith("cuda") and op not in validate_cuda.OPS:
                continue
            for shape in SHAPES[op][1] if args.shape is None else (args.shape,):
                yield from _of_shape(args, backend, op, shape)


def _of_shape(args: argparse.Namespace, backend: str, op: str, shape: tuple[int, ...]) -> Iterator[Case]:
    ragged = shape == SHAPES[op][1][0]
    for track in _tracks(op):
        if backend.startswith("cuda") and not validate_cuda.runs(op, track):
            continue
        for fmt in _formats(op, track):
            if (args.track not in (None, track)) or (args.format not in (None, fmt)):
                continue
            for dtype in _dtypes(op, track):
                if backend in ("cpu/torch", "cuda/cupy") and not ragged and args.shape is None:
                    continue  # the kernels are those of another framework's rows: one shape shows the door
                case = Case(backend, op, shape, track, fmt, dtype)
                more = validate_cuda.options(case) if backend.startswith("cuda") else []
                for options in _options(op, track, fmt) + more:
                    yield replace(case, options=options)


# ---- inputs
def _operand_shapes(op: str, s: tuple[int, ...], options: dict[str, Any]) -> list[tuple[int, ...]]:
    if op in ("quantize", "dequantize"):
        return [s]
    if op.startswith("attention"):
        return [s] * (4 if op.endswith("vjp") else 3)
    if op.startswith("conv2d"):
        n, h, w, c, o = s
        x, weight = (n, h, w, c), (o, 3, 3, c)
        if not op.endswith("vjp"):
            return [x, weight]
        pads = (
            options["padding"] if isinstance(options["padding"], tuple) else ((options["padding"],) * 2,) * 2
        )
        out = [(pads[i][0] + s[i + 1] + pads[i][1] - 3) // options["stride"] + 1 for i in (0, 1)]
        return [(n, *out, o), x, weight]
    m, k, n = s
    right = (n, k) if op.startswith("linear") else (k, n)
    return [(m, n), (m, k), right] if op.endswith("vjp") else [(m, k), right]


def draw(case: Case, seed: int) -> list[np.ndarray]:
    """Gaussian inputs whose rows differ in size, a few outliers among them; the same for the same case and
    seed."""
    import ml_dtypes

    rng = np.random.default_rng([seed, *case.shape, *case.op.encode()])
    arrays = []
    for shape in _operand_shapes(case.op, case.shape, case.options):
        x = rng.standard_normal(shape) * np.exp2(rng.integers(-2, 3, (*shape[:-1], 1)))
        x[rng.random(shape) < 0.01] *= 8
        arrays.append(x.astype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype))
    return arrays


def _torch_arrays(arrays: list[np.ndarray]) -> list[Any]:
    from ..interop import unwrap

    return [unwrap(a, "torch") for a in arrays]


def run_case(case: Case, seed: int) -> Report:
    """Compute `case` and compare; whatever it raises is a failure with the error as its detail."""
    try:
        arrays = draw(case, seed)
        if case.backend.startswith("cuda"):
            arrays = validate_cuda.arrays(case, arrays)
        elif case.backend == "cpu/torch":
            arrays = _torch_arrays(arrays)
        return testing.check(case.op, *arrays, track=case.track, format=case.format, **dict(case.options))
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        return Report(case.op, case.track or "", case.format, (case.shape,), "raised", math.inf, 0.0, detail)


# ---- backends
def available_backends() -> tuple[list[str], list[str]]:
    """Backends that can run here, and a line for each that cannot."""
    found, absent = ["cpu/numpy"], []
    try:
        import torch  # noqa: F401

        found.append("cpu/torch")
    except ImportError:
        absent.append("cpu/torch: PyTorch is not installed")
    on_gpu, without = validate_cuda.backends()
    return found + on_gpu, absent + without


# ---- the table
ROW = "{:<10} {:<14} {:<10} {:<12} {:<9} {:<38} {:>9} {:>9}"
HEAD = ROW.format("backend", "op", "track", "format", "dtype", "input", "error", "bound")


def _kind(case: Case) -> tuple[str, ...]:
    """What cases that share one row of the short table have in common."""
    fmt = "" if case.track in ("bf16", "reference") else case.format
    return case.backend, case.op, case.track or "", fmt, case.dtype


def _row(case: Case, report: Report, what: str) -> str:
    row = ROW.format(*_kind(case), what, f"{report.error:.2g}", f"{report.bound:.2g}")
    return f"{row}  PASS" if report.passed else f"{row}  FAIL  {report.detail}"


def line(case: Case, report: Report) -> str:
    """One case: what was run, its error, the bound, the verdict."""
    options = " ".join(f"{k}={v}".replace(" ", "") for k, v in case.options.items())
    return _row(case, report, " ".join(filter(None, ("x".join(map(str, case.shape)), options))))


def summary(group: list[tuple[Case, Report]]) -> str:
    """One row for cases that passed: how many, and the one that came nearest to its bound."""
    case, report = max(group, key=lambda g: g[1].error / g[1].bound if g[1].bound else g[1].error)
    return _row(case, report, f"{len(group)} cases" if len(group) > 1 else "1 case")


class Bar:
    """``[ 12/240] op`` in one place on a terminal; nothing elsewhere, where the rows themselves show
    progress."""

    def __init__(self, total: int):
        self.total, self.on = total, sys.stderr.isatty()

    def show(self, done: int, case: Case) -> None:
        if self.on:
            print(
                f"\r\x1b[K[{done}/{self.total}] {case.backend} {case.op}", end="", file=sys.stderr, flush=True
            )

    def clear(self) -> None:
        if self.on:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def main(args: argparse.Namespace) -> int:
    """Print the table; 1 if a row failed, 2 if nothing matched."""
    found, absent = available_backends()
    todo = list(cases(args, found))
    if not todo:
        asked = ", ".join(f"{n} {getattr(args, n)}" for n in ("op", "track", "format") if getattr(args, n))
        print(f"fp4bf16 validate: no case has {asked} together", file=sys.stderr)
        return 2
    print(f"seed {args.seed}; errors are relative norms, differing bytes for quantize and dequantize, "
          f"distance / bound for certify")  # fmt: skip
    for text in absent:
        print(f"not run: {text}")
    if not compiled.kernels_cached():
        print(compiled.FIRST_RUN, flush=True)
    print(HEAD, flush=True)
    start = time.perf_counter()
    failed = _run_all(todo, args.seed, every_case=args.verbose or args.op is not None)
    seconds = time.perf_counter() - start
    print(f"{len(todo) - failed} passed, {failed} failed in {seconds:.1f} s on {', '.join(found)}")
    return 1 if failed else 0


def _run_all(todo: list[Case], seed: int, every_case: bool) -> int:
    """Run the cases kind by kind and print their rows; the number that failed."""
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in todo:
        groups.setdefault(_kind(case), []).append(case)
    failed, done, bar = 0, 0, Bar(len(todo))
    for group in groups.values():
        passed = []
        for case in group:
            done += 1
            bar.show(done, case)
            report = run_case(case, seed)
            bar.clear()
            failed += not report.passed
            if report.passed:
                passed.append((case, report))
            if every_case or not report.passed:
                print(line(case, report), flush=True)
        if passed and not every_case:
            print(summary(passed), flush=True)
    return failed


# ---- command line
def _one_of(known: Any, what: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in known:
            raise argparse.ArgumentTypeError(f"{value!r} is not {what}{nearest(value, known)}")
        return value

    return parse


def _parse_shape(value: str) -> tuple[int, ...]:
    parts = value.lower().replace(",", "x").split("x")
    if not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise argparse.ArgumentTypeError(f"{value!r} is not a shape; give whole numbers like 128x256x64")
    return tuple(map(int, parts))


def add_parser(subparsers: Any) -> None:
    """Add ``validate`` to the command line."""
    described = "; ".join(f"{op}: {SHAPES[op][0]}" for op in OPERATIONS)
    parser = subparsers.add_parser(
        "validate",
        help="compare every primitive on every backend with the NumPy reference",
        description="Compares every primitive on every available backend with the NumPy reference.",
        epilog=f"The numbers of --shape, by operation: {described}.",
    )
    parser.add_argument(
        "--op", type=_one_of(OPERATIONS, "an operation"), metavar="OP", help=", ".join(OPERATIONS)
    )
    parser.add_argument(
        "--shape", type=_parse_shape, metavar="AxBxC", help="one shape instead of the table's (with --op)"
    )
    parser.add_argument("--track", type=_one_of(TRACKS, "a track"), metavar="TRACK", help=", ".join(TRACKS))
    parser.add_argument(
        "--format", type=_one_of(FORMATS, "a format"), metavar="FORMAT", help=", ".join(FORMATS)
    )
    parser.add_argument("--verbose", action="store_true", help="a row for each case (so it is with --op)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs (default: 0)")

    def checked(args: argparse.Namespace) -> int:
        _check(parser, args)
        return main(args)

    parser.set_defaults(function=checked)


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None | NoReturn:
    if args.seed < 0:
        parser.error(f"--seed is {args.seed}, but must not be negative")
    if args.shape is None:
        return None
    if args.op is None:
        parser.error("--shape needs --op, because operations have different numbers of axes")
    axes, examples = SHAPES[args.op]
    if len(args.shape) != len(examples[0]):
        parser.error(f"--shape has {len(args.shape)} numbers, but {args.op} takes {axes}")
    return None
