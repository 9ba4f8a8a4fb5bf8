"""The compiled library: loads without a driver, says what is wrong; on a GPU, bit-equal to python_ref."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fp4bf16 import CudaError, __version__
from fp4bf16.backends import cuda
from fp4bf16.python_ref.formats import decode_e2m1, encode_e2m1, pack, unpack

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "src" / "cuda" / "fp4bf16.h"
DTYPES = {
    "float32": (0, np.dtype(np.float32)),
    "bfloat16": (1, np.dtype(ml_dtypes.bfloat16)),
    "float16": (2, np.dtype(np.float16)),
}


def declared() -> set[str]:
    """Functions of the header."""
    headers = (HEADER, HEADER.with_name("fp4bf16_network.h"))
    text = "".join(header.read_text().split("cffi: begin")[1] for header in headers)
    names = re.findall(r"^FP4BF16_API\s[^;(]*\b(fp4bf16_\w+)\(", text, re.MULTILINE)
    assert len(names) == len(set(names)) == text.count("FP4BF16_API") >= 50
    return set(names)


# ---- without a GPU
def test_header_and_loader_agree_on_the_abi():
    declared = re.search(r"FP4BF16_ABI_VERSION = (\d+)", HEADER.read_text())
    assert int(declared.group(1)) == cuda.ABI_VERSION


def test_bindings_come_from_the_header(tmp_path):
    """Every function of the header is in the generated module, which needs no compiler."""
    module = tmp_path / "_ffi.py"
    script = str(ROOT / "bindings" / "build_ffi.py")
    command = [sys.executable, script, "--version", __version__, "--module", module]
    subprocess.run(command, check=True, capture_output=True)
    namespace: dict = {}
    exec(compile(module.read_text(), module, "exec"), namespace)  # noqa: S102 (our own generated file)
    assert namespace["VERSION"] == __version__
    assert namespace["SOURCE_DIGEST"] == cuda.source_digest(ROOT / "fp4bf16")
    for name in declared():
        assert name.encode() in module.read_bytes(), name


def test_loads_and_names_its_version(library):
    assert (library.version, library.abi_version) == (__version__, cuda.ABI_VERSION)
    assert library.source_digest == cuda.source_digest(ROOT / "fp4bf16")
    driver, runtime = library.cuda_versions()
    assert runtime >= 12080
    assert driver >= 0


def test_only_our_functions_are_exported(library):
    data = library.path.read_bytes()
    assert data[:4] == b"\x7fELF"
    assert _dynamic_symbols(library.path) == declared()
    assert b"libcuda.so.1" not in _needed(library.path), "the library must load without a driver"


def test_device_query_without_a_gpu_is_a_sentence(library):
    if cuda.devices():
        assert library.device_count() >= 1
        with pytest.raises(CudaError, match=r"device is 999, but there are \d+"):
            library.device(999)
    else:
        with pytest.raises(CudaError, match="device_count: no (NVIDIA driver|usable GPU)"):
            library.device_count()
        with pytest.raises(CudaError, match="no (NVIDIA driver|usable GPU)"):
            library.device(0)


@pytest.mark.parametrize(
    "name, arguments, sentence",
    [
        ("pack", (0, 0, 1, 1, 1, 0, 0), "pack: x is NULL"),
        ("pack", (64, 7, 1, 1, 1, 64, 0), "dtype is 7"),
        ("pack", (66, 0, 1, 1, 1, 64, 0), "x is 2 bytes past a multiple of 4"),
        ("pack", (64, 0, -1, 1, 1, 64, 0), r"x is \(-1, 1\)"),
        ("unpack", (0, 1, 1, 64, 0, 1, 0), "packed is NULL"),
        ("unpack", (64, 2, 1, 65, 2, 1, 0), "x is 1 bytes past a multiple of 2"),
        ("amax", (64, 0, 2, 8, 4, 1, 64, 0), "row stride of x is 4 elements, less than its 8 columns"),
        ("amax", (64, 0, 2, 8, 8, 0, 64, 0), "rows_per_amax is 0"),
        ("dequantize", (0, 64, 0, 0, 2, 8, 1, 1, 64, 0, 1, 8, 1, 0), "block_scale is NULL"),
        ("dequantize", (3, 0, 0, 0, 2, 8, 1, 1, 64, 0, 1, 8, 1, 0), "packed is NULL"),
        ("dequantize", (4, 64, 64, 0, 2, 8, 1, 1, 64, 0, 1, 8, 1, 0), "format is 4"),
        ("dequantize", (0, 64, 64, 66, 2, 8, 1, 1, 64, 0, 1, 8, 1, 0), "outer_scale is 2 bytes past"),
        ("dequantize", (0, 64, 64, 0, 2, 8, 0, 1, 64, 0, 1, 8, 1, 0), "mid is 0"),
        ("dequantize", (0, 64, 64, 0, 2, 8, 1, 1, 64, 0, 0, 8, 1, 0), "after is 0"),
        ("dequantize", (0, 64, 64, 0, 2, 8, 1, 1, 64, 0, 1, 7, 1, 0), "x_stride is 7 elements, less than"),
        ("dequantize", (0, 64, 64, 0, 4, 8, 1, 1, 64, 0, 4, 32, 3, 0), "k_stride is 3, less than after.* 4"),
        ("pack", (64, 0, 2, 8, 2**62, 64, 0), "row stride of x is 4611686018427387904 .* at most 2.40"),
        ("amax", (64, 0, 2, 8, 8, 2**63 - 1, 64, 0), "rows_per_amax is .* at most 2.40"),
        ("dequantize", (0, 64, 64, 0, 2, 8, 2**32, 2**32, 64, 0, 1, 8, 1, 0), "mid is .* product .* 2.40"),
        ("convert", (64, 0, 1, 2, 8, 0, 2**62, 1, 64, 0, 8, 0), "row_stride is .* -2.40 to 2.40"),
        ("convert", (64, 0, 2, 2, 8, -(2**62), 8, 1, 64, 0, 8, 0), "batch_stride is -.* -2.40 to 2.40"),
        ("expand", (2, 64, 64, 2, 16, 64, 16, 0, 0), "expand: format is 2"),
        ("expand", (0, 64, 64, 2, 24, 64, 32, 0, 0), "kp is 24, but must be a multiple of 16"),
        ("expand", (0, 64, 64, 2, 32, 64, 16, 0, 0), "row stride of expanded is 16 elements, less than"),
        ("expand", (0, 64, 0, 2, 32, 64, 32, 0, 0), "block_scale is NULL"),
        ("expand", (0, 64, 64, 2, 32, 64, 32, 65, 0), "inexact is 1 bytes past a multiple of 4"),
        ("convert", (64, 3, 1, 2, 8, 0, 8, 1, 64, 0, 8, 0), "convert: dtype is 3"),
        ("convert", (64, 0, 1, 2, 8, 0, 8, 1, 64, 9, 8, 0), "convert: dtype is 9"),
        ("convert", (64, 0, -1, 2, 8, 0, 8, 1, 64, 0, 8, 0), "batch is -1"),
        ("convert", (64, 0, 1, 2, 9, 0, 8, 1, 64, 0, 8, 0), "k is 9, but must be 0 to out_stride"),
        ("convert", (0, 0, 1, 2, 8, 0, 8, 1, 64, 0, 8, 0), "x is NULL"),
        ("convert", (64, 0, 1, 2, 8, 0, 8, 1, 65, 1, 8, 0), "out is 1 bytes past a multiple of 2"),
        ("gemm", (0, 0), "gemm: args is NULL"),
        ("gemm_simple", (0, 0), "gemm_simple: args is NULL"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_any_launch(library, name, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        library.call(name, *arguments)
    library.call("pack", 0, 0, 0, 16, 16, 0, 0)  # empty: nothing to do, and no error is left behind


GEMM = dict(m=4, n=8, k8=32, k16=16, a8=64, b8=64, a8_stride=32, b8_stride=32, a16=64, b16=64,
            a16_stride=16, b16_stride=16, alpha=1.0, d=64, d_stride=8)  # fmt: skip


def gemm_args(library, **fields):
    """``fp4bf16_gemm_args``; addresses are plain integers."""
    kinds = dict(library.ffi.typeof("fp4bf16_gemm_args").fields)
    cast = {
        name: library.ffi.cast(kinds[name].type, value) if kinds[name].type.kind == "pointer" else value
        for name, value in fields.items()
    }
    return library.ffi.new("fp4bf16_gemm_args*", cast)


@pytest.mark.parametrize("function", ["gemm", "gemm_simple"])
@pytest.mark.parametrize(
    "fields, sentence",
    [
        (dict(m=-1), "m is -1, but must be 0 to 2147482624"),
        (dict(n=1 << 31), "n is 2147483648"),
        (dict(k8=-5), "k8 is -5"),
        (dict(k16=1 << 40), "k16 is 1099511627776"),
        (dict(a8=0), "a8 is NULL"),
        (dict(b8=0), "b8 is NULL"),
        (dict(a16=0), "a16 is NULL"),
        (dict(b16=65), "b16 is 1 bytes past a multiple of 2"),
        (dict(d=0), "d is NULL"),
        (dict(d=66), "d is 2 bytes past a multiple of 4"),
        (dict(d_stride=7), "row stride of d is 7 elements, less than its 8 columns"),
        (dict(a8_stride=31), "row stride of a8 is 31 elements, less than its 32 columns"),
        (dict(b8_stride=-32), "row stride of b8 is -32 elements"),
        (dict(a16_stride=1 << 41), r"row stride of a16 is \d+ elements, but at most 2\^40"),
        (dict(b16_n_major=1, b16_stride=7), "row stride of b16 is 7 elements, less than its 8 columns"),
        (dict(a16_m_major=2), "a16_m_major is 2, but must be 0 to 1"),
        (dict(row_scale=66), "row_scale is 2 bytes past"),
        (dict(col_scale_step=2), "col_scale_step is 2"),
        (dict(activation=3), "activation is 3"),
        (dict(accumulate=2), "accumulate is 2"),
        (dict(d_dtype=3), "d_dtype is 3"),
        (dict(bias=64, bias_dtype=4), "bias_dtype is 4"),
        (dict(bias=65, bias_dtype=1), "bias is 1 bytes past"),
        (dict(residual=64, residual_stride=7), "row stride of residual is 7"),
        (dict(config=-1), "config is -1"),
        (dict(batch_count=-2), "batch_count is -2"),
        (dict(a_batch_mod=-1), "a_batch_mod is -1"),
        (dict(batch_count=2, b_batch_mod=2, b8_batch_stride=-1), "b8_batch_stride is -1"),
        (dict(batch_count=2, d_batch_stride=31), "2 matrices of d overlap: d_batch_stride is 31 elements"),
    ],
)
def test_bad_gemm_arguments_are_refused_before_any_launch(library, function, fields, sentence):
    with pytest.raises(ValueError, match=f"^{function}: .*{sentence}"):
        library.call(function, gemm_args(library, **GEMM | fields), 0)
    for empty in (dict(m=0), dict(n=0)):  # nothing is read or written: no pointer is looked at
        library.call(function, gemm_args(library, **GEMM | dict(a8=0, d=0) | empty), 0)


def test_gemm_configurations_have_names(library):
    args = gemm_args(library, **GEMM)
    names = []
    while text := library._text(library.lib.fp4bf16_gemm_config(args, len(names) + 1)):
        names.append(text)
    assert library._text(library.lib.fp4bf16_gemm_config(args, 0)) in [*names, "simple"]
    assert len(set(names)) == len(names) < 100
    assert library._text(library.lib.fp4bf16_gemm_config(args, -1)) == ""


def _elf_strings(path: Path, section: str) -> list[list[str]]:
    tool = ["readelf", "--wide", section, str(path)]
    text = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
    return [line.split() for line in text.splitlines()]


def _dynamic_symbols(path: Path) -> set[str]:
    """Names that the library defines for others; readelf comes with the compiler that built it."""
    rows = [r for r in _elf_strings(path, "--dyn-syms") if len(r) == 8 and r[0].rstrip(":").isdigit()]
    return {r[7].split("@")[0] for r in rows if r[6] != "UND" and r[4] in ("GLOBAL", "WEAK")}


def _needed(path: Path) -> bytes:
    return " ".join(" ".join(r) for r in _elf_strings(path, "--dynamic")).encode()


# ---- on a GPU
SHAPES = [(1, 1), (1, 16), (3, 15), (5, 17), (7, 333), (64, 256), (129, 1152), (4, 4097)]


def _data(rng, rows, k, dtype, stride=None):
    """Mixed magnitudes, zero blocks, subnormals, -0; in rows of `stride` elements."""
    x = rng.standard_normal((rows, stride or k)) * np.exp2(rng.integers(-20, 20, (rows, 1)))
    x *= np.exp2(rng.integers(-6, 7, x.shape) * (rng.random(x.shape) < 0.2))
    x[rng.random(x.shape) < 0.05] = -0.0
    x[:, :16] *= rng.random((rows, 1)) < 0.8
    return x.astype(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DTYPES)
def test_pack_and_unpack(library, gpu, rng, name):
    code, dtype = DTYPES[name]
    for rows, k in SHAPES:
        x = (_data(rng, rows, k, np.float32) % 9 - 4.5).astype(dtype)
        padded = np.pad(x.astype(np.float32), [(0, 0), (0, k % 2)])
        want = pack(encode_e2m1(padded))
        packed = gpu.empty(want.nbytes)
        library.call("pack", gpu.put(x), code, rows, k, k, packed, 0)
        np.testing.assert_array_equal(gpu.get(packed, want.shape, np.uint8), want)
        back = gpu.empty(x.nbytes)
        library.call("unpack", packed, rows, k, back, code, k, 0)
        value = decode_e2m1(unpack(want))[:, :k]
        np.testing.assert_array_equal(gpu.get(back, x.shape, dtype).astype(np.float32), value)


@pytest.mark.gpu
def test_encode_is_right_on_every_bfloat16(library, gpu):
    x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    x = x[np.isfinite(x.astype(np.float32))].reshape(1, -1)
    packed = gpu.empty(x.size // 2)
    library.call("pack", gpu.put(x), 1, 1, x.size, x.size, packed, 0)
    want = x.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(unpack(gpu.get(packed, (1, x.size // 2), np.uint8)), want)


@pytest.mark.gpu
def test_devices_are_described(library, gpu):
    device = cuda.devices()[0]
    assert device.memory > 2**30 and device.multiprocessors > 0
    assert re.fullmatch(r"\d+\.\d", device.compute_capability)
