"""The kernels' own code compiled for the host: what a test calls without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOPPER = ("-gencode", "arch=compute_90a,code=sm_90a", "-Xcompiler=-fPIC")
#: Arithmetic that is the device's to the bit: no sum and product in one rounding unless the source says so.
EXACT = ("-arch=sm_90", "--fmad=false", "-Xcompiler=-fPIC,-ffp-contract=off")


def compiled(
    tmp_path_factory, name: str, flags: tuple[str, ...] = EXACT, optimise: str = "-O2"
) -> ctypes.CDLL:
    """tests/`name`.cu as a loaded library; the test is skipped where there is no nvcc."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).is_file():
        pytest.skip("no nvcc")
    out = tmp_path_factory.mktemp("host") / f"{name}.so"
    source, headers = ROOT / "tests" / f"{name}.cu", ROOT / "src" / "cuda"
    command = [nvcc, "-std=c++17", optimise, "-shared", *flags, f"-I{headers}", str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(out))
