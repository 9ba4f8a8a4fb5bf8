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
DTYPES = {"float32": (0, np.dtype(np.float32)), "bfloat16": (1, np.dtype(ml_dtypes.bfloat16))}


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
    names = re.findall(r"\b(fp4bf16_\w+)\(", HEADER.read_text().split("cffi: begin")[1])
    assert len(names) >= 11
    for name in names:
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
    exported = _dynamic_symbols(library.path)
    assert exported == {"fp4bf16_" + name for name in (
        "abi_version", "version", "source_digest", "last_error", "cuda_versions", "device_count",
        "device_query", "pack", "unpack", "amax", "quantize", "dequantize",
    )}  # fmt: skip
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
        ("amax", (64, 0, 2, 8, 4, 1, 64, 0), "row stride of x is 4 elements, less than its 8 columns"),
        ("amax", (64, 0, 2, 8, 8, 0, 64, 0), "rows_per_amax is 0"),
        ("quantize", (64, 0, 2, 8, 8, 9, 0, 64, 1, 64, 64, 64, 0), "format is 9"),
        ("quantize", (64, 0, 2, 8, 8, 0, 5, 64, 1, 64, 64, 64, 0), "search is 5"),
        ("quantize", (64, 0, 2, 8, 8, 0, 0, 64, 1, 64, 64, 0, 0), "outer_scale is NULL"),
        ("dequantize", (64, 0, 64, 2, 8, 1, 64, 0, 8, 0), "block_scale is NULL"),
    ],
)
def test_bad_arguments_are_refused_before_any_launch(library, name, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        library.call(name, *arguments)
    library.call("pack", 0, 0, 0, 16, 16, 0, 0)  # empty: nothing to do, and no error is left behind


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
