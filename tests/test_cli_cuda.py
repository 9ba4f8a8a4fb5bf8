"""``info``, ``validate`` and ``testing.check`` on device arrays: emulated in host memory, and on a GPU."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from host_cuda import Arrays, FakeArray, host_cuda, put  # noqa: F401  (host_cuda is a fixture)

import fp4bf16 as fb
from fp4bf16.__main__ import main
from fp4bf16.backends import cuda, cuda_gemm, cuda_math, cuda_tape
from fp4bf16.cli import info, validate, validate_cuda


@pytest.fixture
def emulated(host_cuda, monkeypatch):  # noqa: F811
    """The backend "cuda/fake" in place of this machine's."""
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())
    monkeypatch.setattr(cuda_tape, "_local", type(cuda_tape._local)())  # no plans of another emulation
    cuda_gemm._struct.cache_clear()
    monkeypatch.setattr(validate_cuda, "ARRAYS", {"fake": put})
    monkeypatch.setattr(validate_cuda, "problem", lambda: None)
    monkeypatch.setattr(validate, "available_backends", validate_cuda.backends)
    return host_cuda


@pytest.mark.parametrize("op, calls", [
    ("quantize", {"quantize"}), ("dequantize", {"quantize", "dequantize"}), ("matmul", {"quantize", "gemm"}),
    ("linear", {"quantize", "gemm"}), ("dual", {"quantize", "gemm"}), ("certify", {"quantize", "gemm"}),
    ("conv2d", {"quantize", "conv2d"}), ("conv2d_vjp", {"quantize", "conv2d_dgrad", "conv2d_wgrad"}),
    ("attention", {"attention"}), ("attention_vjp", {"attention", "attention_backward"}),
])  # fmt: skip
def test_validate_runs_the_library(emulated, op, calls, capsys):
    shapes = {"quantize": "9x48", "conv2d": "2x7x5x24x8", "attention": "2x9x3x24"}
    shape = next((shape for part, shape in shapes.items() if part in op), "9x48x16")
    status = main(["validate", "--op", op, "--shape", shape])
    out = capsys.readouterr().out
    assert status == 0, out
    assert re.search(r"[1-9]\d* passed, 0 failed in \d+\.\d s on cuda/fake", out)
    assert calls <= set(emulated.calls)


def test_validate_fails_where_the_library_is_wrong(emulated, monkeypatch, capsys):
    from fp4bf16.python_ref import gemm

    right = gemm.operands  # the reference is moved instead, by more than tensor cores are allowed
    monkeypatch.setattr(gemm, "operands", lambda *a: [x * np.float32(1 + 2e-3) for x in right(*a)])
    assert main(["validate", "--op", "matmul", "--shape", "9x48x16", "--track", "fp4"]) == 1
    assert re.search(r"FAIL  most in y at \(\d+, \d+\)", capsys.readouterr().out)


def test_check_takes_device_arrays(emulated, rng):
    x, w = (put(rng.standard_normal(s).astype(np.float32)) for s in ((5, 70), (70, 9)))
    for fmt in ("nvfp4_exact", "nvfp4", "mxfp4", "fp8"):
        assert fb.testing.check("quantize", x, format=fmt, rounding="stochastic", seed=3)
        assert fb.testing.check("matmul", x, w, track="fp4", format=fmt)
    assert fb.testing.check("dual", x, w, rank=4)
    report = fb.testing.check("matmul", x, w, track="fp4", accumulate="fast")
    assert report.bound == fb.testing.TENSOR_CORES["fast"]
    assert fb.testing.check("matmul", x, w, track="bf16").bound == fb.testing.TENSOR_CORES["bf16"]


def test_a_backend_that_cannot_run_says_why(emulated, monkeypatch, capsys):
    def broken(array):
        raise OSError("libgone.so: cannot open shared object file")

    monkeypatch.setattr(validate_cuda, "ARRAYS", {"fake": put, "gone": broken})
    assert main(["validate", "--op", "dequantize", "--shape", "1x16", "--format", "fp8"]) == 0
    assert "not run: cuda/gone: OSError: libgone.so" in capsys.readouterr().out


def test_info_has_rows_of_the_frameworks_on_the_gpu(emulated, monkeypatch):
    make = lambda dtype: put(np.arange(8).astype(getattr(ml_dtypes, dtype, dtype)))  # noqa: E731
    monkeypatch.setattr(info, "ON_GPU", {"numpy": make, "nowhere": make})
    table = info.exchange_table()
    assert table["numpy, GPU"]["float32"] == table["numpy, GPU"]["bfloat16"] == "zero-copy"
    assert table["nowhere, GPU"] == "not installed"
    monkeypatch.setattr(validate_cuda, "problem", lambda: "no GPU")
    assert info.exchange_table()["numpy, GPU"] == "no GPU"


@pytest.mark.gpu
def test_validate_on_the_gpu(capsys):
    if not cuda.available():
        pytest.skip("no GPU")
    for op in validate_cuda.OPS:
        status = main(["validate", "--op", op])
        out = capsys.readouterr().out
        assert status == 0, out
        assert "cuda/torch" in out
