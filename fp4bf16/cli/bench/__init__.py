"""``python -m fp4bf16 bench``: the kernels beside their peers, on this machine's GPU or, without one, its
CPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

WHAT = {
    "gemm": "products, quantisers and Python's cost beside cuBLAS and Triton (on a CPU: beside np.matmul)",
    "quantize": "the quantisers alone, beside a copy; GPU only",
}


def _shape(value: str) -> tuple[int, ...]:
    parts = value.lower().split("x")
    if len(parts) != 3 or not all(p.isdecimal() and 0 < int(p) < 1 << 31 for p in parts):
        raise argparse.ArgumentTypeError(f"{value!r} is not a shape M x N x K; give one like 4096x4096x4096")
    return tuple(map(int, parts))


def _seed(value: str) -> int:
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{value!r} is not a seed; give a whole number from 0")
    return int(value)


def _file(value: str) -> str:
    """A file that can be written, told before hours are measured for it."""
    path = Path(value)
    if not value:
        return value
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{value} is a folder; give the name of a file")
    there = path if path.exists() else next(p for p in path.absolute().parents if p.exists())
    if not os.access(there, os.W_OK) or not (path.exists() or there.is_dir()):
        raise argparse.ArgumentTypeError(f"{value} cannot be written, for {there} does not allow it; give "
                                         f"another file")  # fmt: skip
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of one bench."""
    parser.add_argument("--cpu", action="store_true", help="measure the CPU, also where there is a GPU")
    parser.add_argument("--shapes", type=_shape, nargs="+", metavar="MxNxK", help="these shapes alone")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shapes")
    parser.add_argument("--goals", action="store_true", help="end with the goals as JSON; status 1 if missed")
    parser.add_argument("--csv", type=_file, metavar="FILE", help="write a line a row")
    parser.add_argument("--plot", type=_file, metavar="FILE", help="write bars as SVG")
    parser.add_argument("--json", type=_file, nargs="?", const="", metavar="FILE",
                        help="write all of it (default: bench/results/<machine>/ of a checkout)")  # fmt: skip
    parser.add_argument("--no-triton", dest="triton", action="store_false", help="leave Triton out")
    parser.add_argument("--commit", help="commit that the results name, where git is not at hand")
    parser.add_argument("--seed", type=_seed, default=int.from_bytes(os.urandom(3), "little"))


def add_parser(subparsers: Any) -> None:
    """Add ``bench`` to the command line."""
    parser = subparsers.add_parser("bench", help="kernels beside their peers: time, rate, error")
    which = parser.add_subparsers(dest="what", required=True, metavar="{" + ",".join(WHAT) + "}")
    for name, text in WHAT.items():
        one = which.add_parser(name, help=text, description=text)
        add_options(one)
        one.set_defaults(function=main)


def main(options: argparse.Namespace) -> int:
    """Measure and write what was asked for; 1 if ``--goals`` and one is missed, 2 if there is nothing to
    measure."""
    from . import chart, cuda, record

    problem = None if options.cpu else cuda.problem()
    on_cpu = options.cpu or problem is not None
    if problem is not None:
        print(f"bench: {problem}" + ("; measuring the CPU" if options.what == "gemm" else ""), flush=True)
    if on_cpu and options.what != "gemm":
        print(f"bench {options.what}: measures a GPU; for the CPU run bench/quantize.py of a checkout",
              file=sys.stderr)  # fmt: skip
        return 2
    if on_cpu:
        from . import cpu as backend
    else:
        backend = cuda
    report, rows, held = backend.run(options)
    about = report["machine"]
    about["commit"] = options.commit or about["commit"]
    report |= {"rows": rows, "goals": held}
    if options.csv:
        record.write_csv(options.csv, rows, about)
    if options.plot:
        chart.write(options.plot, rows, about)
    if options.json is not None:
        where = options.json or record.default_json(options.what, "cpu" if on_cpu else about["gpu"])
        record.write_json(where, report)
        print(f"wrote {where}")
    missed = [key for key, goal in held.items() if not goal["held"] and goal["measured"] is not None]
    if options.goals:
        known = {k: about[k] for k in ("gpu", "cpu", "driver", "torch", "commit", "date") if k in about}
        print(json.dumps(held | {"machine": known}))
        return 1 if any(not goal["held"] for goal in held.values()) else 0
    for key in missed:
        print(f"MISSED {key}: {held[key]['measured']}, the goal is {held[key]['goal']}")
    return 1 if missed and on_cpu else 0
