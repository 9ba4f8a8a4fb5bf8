"""``python -m fp4bf16 info``: everything that a bug report needs, no probe of which can fail the report."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .. import __version__, device, interop
from ..backends import compiled, cuda, threads
from . import validate_cuda

#: Packages by what needs them.
PACKAGES = {
    "needed": ("numpy", "ml_dtypes", "numba", "llvmlite", "cffi"),
    "train": ("pillow", "safetensors", "tqdm"),
    "frameworks": ("torch", "jax", "cupy-cuda13x", "cuda-bindings", "cuda-core", "diffusers"),
    "test": ("pytest", "hypothesis", "ruff"),
}
#: Environment variables: (default, meaning).
VARIABLES = {
    "FP4BF16_TRACK": ("unset", "track of every call, over its argument: fp4, bf16, dual or reference"),
    "FP4BF16_NUM_THREADS": ("usable cores", "threads of a CPU kernel"),
    "FP4BF16_LIBRARY": ("unset", "path of the CUDA library to load, with its _ffi.py beside it"),
    "FP4BF16_PDL": ("1", "0: on Hopper no kernel's launch overlaps the end of the one before"),
    "FP4BF16_TEST_SEED": ("random", "seed of the tests' random inputs"),
    "FP4BF16_HYPOTHESIS": (
        "default",
        "how many examples property tests try: default (50) or thorough (1000)",
    ),
    "FP4BF16_CACHE_DIR": ("fp4bf16 in the user's cache", "where measured latencies are kept between runs"),
    "NUMBA_CACHE_DIR": ("beside the source", "where compiled CPU kernels are kept between runs"),
}
DTYPES = ("float64", "float32", "float16", "bfloat16", "uint8", "float8_e4m3fn", "float8_e8m0fnu")


def _guarded(probe: Callable[[], Any]) -> Any:
    """What `probe` returns, or its error as text: a broken installation is what the report is for."""
    try:
        return probe()
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_gpus() -> list[str]:
    """GPUs as the driver's own tool lists them, for where the library is not built."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


# ---- which framework exchanges which dtype
def _numpy_array(dtype: str) -> np.ndarray:
    return np.arange(8).astype(getattr(ml_dtypes, dtype, dtype))


def _torch_array(dtype: str) -> Any:
    torch = importlib.import_module("torch")
    return torch.arange(8).to(getattr(torch, dtype))


def _jax_array(dtype: str) -> Any:
    # On a GPU, JAX would take three quarters of its memory for this one array, or complain that it cannot.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return importlib.import_module("jax.numpy").arange(8).astype(getattr(ml_dtypes, dtype, dtype))


def _torch_on_gpu(dtype: str) -> Any:
    return _torch_array(dtype).cuda()


def _cupy_array(dtype: str) -> Any:
    return importlib.import_module("cupy").arange(8).astype(getattr(ml_dtypes, dtype, dtype))


FRAMEWORKS = {"numpy": _numpy_array, "torch": _torch_array, "jax": _jax_array}
ON_GPU = {"torch": _torch_on_gpu, "cupy": _cupy_array}


def _exchange(make: Callable[[str], Any], dtype: str) -> str:
    """How an array of `dtype` goes in and out: "zero-copy" if it shares its memory, else why not."""
    try:
        x = make(dtype)
    except (TypeError, ValueError, AttributeError):
        return "the framework has no such dtype"
    try:
        view = interop.wrap(x, "x").array
    except TypeError as error:
        return f"not taken: {error}"
    back = interop.unwrap(view, interop.wrap(x, "x").framework)
    shared = np.shares_memory(view, interop.wrap(back, "x").array) and type(back) is type(x)
    return ("zero-copy" if str(view.dtype) == dtype else f"zero-copy as {view.dtype}") if shared else "copied"


def _device_exchange(make: Callable[[str], Any], dtype: str) -> str:
    """How an array of `dtype` on the GPU is taken: by its address, or not at all."""
    try:
        x = make(dtype)
    except (TypeError, ValueError, AttributeError):
        return "the framework has no such dtype"
    try:
        found = device.operand(x, "x")
    except TypeError as error:
        return f"not taken: {error}"
    return "zero-copy" if found.dtype == dtype else f"zero-copy as {found.dtype}"


def exchange_table() -> dict[str, dict[str, str] | str]:
    """Framework -> dtype -> how an array of it is taken; a framework that is not installed says so."""
    table = {name: _row(name, make, _exchange) for name, make in FRAMEWORKS.items()}
    problem = validate_cuda.problem()  # which the library's section tells
    for name, make in ON_GPU.items():
        table[f"{name}, GPU"] = "no GPU" if problem else _row(name, make, _device_exchange)
    return table


def _row(name: str, make: Callable[[str], Any], exchange: Callable[..., str]) -> dict[str, str] | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(name)
        except ImportError:
            return "not installed"
        except Exception as error:  # a framework whose own import is broken
            return f"cannot be imported: {type(error).__name__}: {error}"
        row = {dtype: _guarded(lambda dtype=dtype: exchange(make, dtype)) for dtype in DTYPES}
    refused = {how for how in row.values() if how.startswith("not taken")}
    return refused.pop() if refused else row


def report() -> dict[str, Any]:
    """The whole report as plain data."""
    blas = _guarded(threads.blas_name)
    return {
        "fp4bf16": __version__,
        "package": str(cuda.PACKAGE),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "packages": {group: {n: _version(n) for n in names} for group, names in PACKAGES.items()},
        "library": _guarded(cuda.state),
        "gpus": _guarded(_driver_gpus),
        "exchange": _guarded(exchange_table),
        "cpu": {
            "cores": os.cpu_count(),
            "threads": _guarded(threads.num_threads),
            "blas": blas,
            "kernels compiled": compiled.kernels_cached(),
        },
        "environment": {
            name: {"value": os.environ.get(name), "default": default, "meaning": meaning}
            for name, (default, meaning) in VARIABLES.items()
        },
    }


# ---- as text
def _library_lines(state: Any) -> list[str]:
    if not isinstance(state, dict):
        return [str(state)]
    lines = [f"path     {state['path'] or 'none'}"]
    if "version" in state:
        lines.append(f"built    fp4bf16 {state['version']}, ABI {state['abi']}, sources {state['sources']}")
    if "runtime" in state:
        driver = f"{state['driver'] // 1000}.{state['driver'] % 1000 // 10}" if state["driver"] else "none"
        lines.append(
            f"CUDA     runtime {state['runtime'] // 1000}.{state['runtime'] % 1000 // 10}, driver {driver}"
        )
    for gpu in state["gpus"]:
        lines.append(
            f"GPU {gpu['index']}    {gpu['name']}, compute capability {gpu['compute_capability']}, "
            f"{gpu['multiprocessors']} multiprocessors, {gpu['memory'] / 2**30:.1f} GiB"
        )
    if state["problem"]:
        lines.append(f"         {state['problem']}")
    return lines


def _exchange_lines(table: Any) -> list[str]:
    if not isinstance(table, dict):
        return [str(table)]
    lines = []
    for framework, row in table.items():
        if isinstance(row, str):
            lines.append(f"{framework:<10} {row}")
            continue
        kinds: dict[str, list[str]] = {}
        for dtype, how in row.items():
            kinds.setdefault(how, []).append(dtype)
        for i, (how, dtypes) in enumerate(kinds.items()):
            lines.append(f"{framework if i == 0 else '':<10} {how}: {', '.join(dtypes)}")
    return lines


def text(data: dict[str, Any]) -> str:
    """The report for people."""
    sections = {
        "": [
            f"fp4bf16  {data['fp4bf16']}  {data['package']}",
            f"python   {data['python']}",
            f"platform {data['platform']}",
        ],
        "packages": [
            f"{group:<10} " + ", ".join(f"{n} {v or '-'}" for n, v in names.items())
            for group, names in data["packages"].items()
        ],
        "CUDA library": _library_lines(data["library"]),
        "GPUs": (data["gpus"] if isinstance(data["gpus"], list) else [data["gpus"]])
        or ["none: all runs on the CPU"],
        "arrays taken": _exchange_lines(data["exchange"]),
        "CPU": [f"{name:<16} {value}" for name, value in data["cpu"].items()],
        "environment": [
            f"{name:<20} {v['value'] if v['value'] is not None else 'unset':<10} {v['meaning']}"
            + ("" if v["default"] == "unset" else f" (default: {v['default']})")
            for name, v in data["environment"].items()
        ],
    }
    blocks = ["\n".join(([title] if title else []) + [("  " if title else "") + line for line in lines])
              for title, lines in sections.items()]  # fmt: skip
    return "\n\n".join(blocks)


def add_parser(subparsers: Any) -> None:
    """Add ``info`` to the command line."""
    parser = subparsers.add_parser(
        "info", help="versions, GPUs, library, arrays taken, environment variables"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(function=main)


def main(args: argparse.Namespace) -> int:
    """Print the report; always 0."""
    data = report()
    print(json.dumps(data, indent=2) if args.json else text(data))
    return 0
