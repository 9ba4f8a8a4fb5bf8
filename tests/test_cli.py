"""``info``, ``validate`` and ``testing.check``: what they print, how they fail, that they can fail."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import testing
from fp4bf16.__main__ import main
from fp4bf16.backends import compiled
from fp4bf16.cli import info, validate, validate_cuda
from fp4bf16.formats import FORMATS

ROOT = Path(__file__).resolve().parents[1]


# ---- info
def test_info_as_text(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for part in (fb.__version__, "numpy", "CUDA library", "arrays taken", "FP4BF16_NUM_THREADS", "threads"):
        assert part in text


def test_info_as_json(capsys):
    assert main(["info", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fp4bf16"] == fb.__version__
    assert data["exchange"]["numpy"]["bfloat16"] == "zero-copy"
    assert data["cpu"]["threads"] >= 1
    assert data["package"] == str(Path(fb.__file__).parent)


def test_info_survives_a_broken_framework(monkeypatch, capsys):
    def broken(dtype):
        raise OSError("libgone.so: cannot open shared object file")

    monkeypatch.setitem(info.FRAMEWORKS, "numpy", broken)
    monkeypatch.setattr(info.threads, "blas_name", broken)
    assert main(["info"]) == 0
    assert "libgone.so" in capsys.readouterr().out


def test_info_lists_every_environment_variable_of_the_package():
    """A variable that the code reads but `info` does not explain is a surprise for somebody."""
    read = set()
    for folder in ("fp4bf16", "tests", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            read |= set(re.findall(r"environ(?:\.get\(|\[)\"(FP4BF16_\w+)\"", path.read_text()))
    assert "FP4BF16_TRACK" in read
    assert read <= set(info.VARIABLES)


def test_info_needs_no_extra(tmp_path):
    """With every optional package missing the command still runs."""
    absent = ["torch", "PIL", "safetensors", "tqdm", "jax", "cupy"]
    block = f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n"
    program = block + "from fp4bf16.__main__ import main\nsys.exit(main(['info']))"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment,
                          cwd=tmp_path, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not installed" in done.stdout


# ---- validate
def _arguments(**given) -> argparse.Namespace:
    empty = {"op": None, "shape": None, "track": None, "format": None, "seed": 0, "verbose": False}
    return argparse.Namespace(**(empty | given))


def test_the_table_has_every_operation_on_every_backend():
    backends = ["cpu/numpy", "cpu/torch", "cuda/torch", "cuda/cupy"]
    cases = list(validate.cases(_arguments(), backends))
    for backend in backends:
        known = testing.OPERATIONS if backend.startswith("cpu") else validate_cuda.OPS
        assert {c.op for c in cases if c.backend == backend} == set(known)
    for fmt in FORMATS:
        options = [c.options for c in cases if (c.backend, c.op, c.format) == ("cuda/torch", "quantize", fmt)]
        assert any(o.get("rounding") == "stochastic" for o in options)
        assert len(options) > len([o for o in options if "rounding" in o])
    assert {"fast"} == {c.options["accumulate"] for c in cases if "accumulate" in c.options}
    assert set(validate.SHAPES) == set(testing.OPERATIONS)


def test_validate_one_operation(capsys):
    assert (
        main(["validate", "--op", "quantize", "--shape", "3x40", "--format", "nvfp4_exact", "--seed", "7"])
        == 0
    )
    out = capsys.readouterr().out
    assert "3x40" in out and "seed 7" in out
    assert re.search(r"\d+ passed, 0 failed in \d+\.\d s on cpu/numpy", out)


def test_validate_fails_when_a_kernel_is_wrong(monkeypatch, capsys):
    """The reference is changed under the kernel's feet: the row says FAIL and where, and the status is 1."""
    from fp4bf16.python_ref import gemm

    right = gemm.operands
    monkeypatch.setattr(gemm, "operands", lambda *a: [x * np.float32(1 + 1e-4) for x in right(*a)])
    assert main(["validate", "--op", "matmul", "--shape", "8x32x8", "--track", "bf16"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"FAIL  most in y at \(\d+, \d+\): \S+ instead of", out)
    assert re.search(r"\d+ passed, [1-9]\d* failed", out)


def test_validate_reports_an_exception_as_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(testing, "check", lambda *a, **k: 1 / 0)
    assert main(["validate", "--op", "linear", "--shape", "2x32x2", "--track", "bf16"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_the_same_seed_draws_the_same_inputs():
    case = validate.Case("cpu/numpy", "matmul", (3, 5, 7), "bf16", "nvfp4_exact")
    first, again, other = validate.draw(case, 1), validate.draw(case, 1), validate.draw(case, 2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["validat"], "'validat' is not a command; did you mean 'validate'?"),
        (["validate", "--op", "matmull"], "'matmull' is not an operation; did you mean 'matmul'?"),
        (["validate", "--track", "fp5"], "'fp5' is not a track; did you mean 'fp4'?"),
        (["validate", "--format", "nvfp5"], "'nvfp5' is not a format; did you mean 'nvfp4'?"),
        (
            ["validate", "--op", "matmul", "--shape", "4x4"],
            "--shape has 2 numbers, but matmul takes M x K x N",
        ),
        (["validate", "--op", "matmul", "--shape", "4xfour"], "'4xfour' is not a shape"),
        (["validate", "--shape", "4x4"], "--shape needs --op"),
        (["validate", "--seed", "-1"], "--seed is -1, but must not be negative"),
        ([], "the following arguments are required"),
    ],
)
def test_wrong_command_lines_are_sentences(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_combinations_that_do_not_exist(capsys):
    assert main(["validate", "--op", "quantize", "--track", "fp4"]) == 2
    assert "no case has op quantize, track fp4 together" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"fp4bf16 {fb.__version__}"


def test_first_run_is_announced(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not compiled.kernels_cached()
    main(["validate", "--op", "dequantize", "--shape", "1x16", "--format", "fp8"])
    assert compiled.FIRST_RUN in capsys.readouterr().out
    (tmp_path / "backends_0123").mkdir()
    (tmp_path / "backends_0123" / "cpu_quantize.f-1.py311.nbi").touch()
    assert compiled.kernels_cached()


# ---- testing.check
def test_check_on_own_arrays(rng):
    x = rng.standard_normal((5, 70)).astype(np.float32)
    w = rng.standard_normal((70, 9)).astype(np.float32)
    assert fb.testing.check("quantize", x, format="mxfp4", scale_rule="rceil")
    assert fb.testing.check("matmul", x, w, track="fp4", bias=np.ones(9, np.float32), activation="silu")
    assert fb.testing.check("matmul", x.astype(ml_dtypes.bfloat16), w.astype(ml_dtypes.bfloat16))
    assert fb.testing.check("certify", x, w)
    report = fb.testing.check("linear", x, w.T.copy(), track="bf16")
    assert report.passed and report.shapes == ((5, 70), (9, 70)) and "PASS" in str(report)


def test_check_holds_where_terms_cancel(rng):
    """Rows that sum to nearly nothing: rounding is measured against the terms, not against their small
    sum."""
    x = rng.standard_normal((4, 512)).astype(np.float32)
    a = np.concatenate([x, -x], axis=1)
    b = np.ones((1024, 3), np.float32)
    b[512:] += 2.0**-9
    assert fb.testing.check("matmul", a, b, track="reference")


def test_check_is_not_moved_by_the_environment(monkeypatch, rng):
    monkeypatch.setenv("FP4BF16_TRACK", "bf16")
    x = rng.standard_normal((4, 64)).astype(np.float32)
    assert fb.testing.check("matmul", x, x.T.copy(), track="fp4")
    assert fb.testing.check("certify", x, x.T.copy())
    with fb.tracks("fp4"):
        assert fb.testing.check("matmul", x, x.T.copy(), track="reference")


def test_check_takes_torch_tensors(rng):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(rng.standard_normal((4, 64)).astype(np.float32))
    assert fb.testing.check("matmul", x.bfloat16(), x.T.bfloat16(), track="fp4")
    assert fb.testing.check("quantize", x)


@pytest.mark.parametrize(
    "call, kind, sentence",
    [
        (lambda x: fb.testing.check("matmull", x, x), ValueError, "did you mean 'matmul'"),
        (
            lambda x: fb.testing.check("matmul", x),
            TypeError,
            r"matmul takes 2 arrays \(a, b\), but 1 were given",
        ),
        (lambda x: fb.testing.check("matmul", x, x, track="fp3"), ValueError, "'fp3' is not a track"),
        (lambda x: fb.testing.check("quantize", x, track="fp4"), ValueError, "quantize takes no track"),
        (lambda x: fb.testing.check("quantize", x, format="fp4"), ValueError, "'fp4' is not a format"),
        (lambda x: fb.testing.check("matmul", x, x[:8], track="bf16"), fb.ShapeError, "K of"),
    ],
)
def test_check_refuses_in_a_sentence(call, kind, sentence):
    with pytest.raises(kind, match=sentence):
        call(np.ones((16, 16), np.float32))
