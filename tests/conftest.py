"""Fixtures that all tests share: a seeded generator whose seed is shown, and hypothesis profiles."""

from __future__ import annotations

import os
import pathlib
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"  # peers' answers, where they are at hand

for _name, _examples in (("default", 50), ("thorough", 1000)):
    settings.register_profile(
        _name, max_examples=_examples, deadline=None, suppress_health_check=list(HealthCheck)
    )
settings.load_profile(os.environ.get("FP4BF16_HYPOTHESIS", "default"))

_SEED = int(os.environ.get("FP4BF16_TEST_SEED", int.from_bytes(os.urandom(4), "little")))


def pytest_report_header() -> str:
    return f"fp4bf16: random seed {_SEED} (repeat it with FP4BF16_TEST_SEED={_SEED})"


def pytest_terminal_summary(terminalreporter) -> None:
    """Under ``-q`` there is no header, but a failure needs the seed."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(pytest_report_header())


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator of the run's seed and the test's name; the seed stands in the header of the report."""
    return np.random.default_rng([_SEED, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def shared() -> pathlib.Path:
    """Folder of the peers' answers; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no peers' answers at hand")
    return SHARED


@pytest.fixture(scope="module")
def library():
    """The compiled library that the checkout or the installation holds."""
    from fp4bf16 import LibraryError
    from fp4bf16.backends import cuda

    if cuda.find_library() is None:
        with pytest.raises(LibraryError, match="nvcc"):
            cuda.load()
        pytest.skip("no nvcc: the CUDA library was not built")
    return cuda.load()


@pytest.fixture(scope="module")
def gpu(library):
    """Device memory of the first GPU through cuda-python (extra `cuda`)."""
    from fp4bf16.backends import cuda

    if not cuda.devices():
        pytest.skip("no GPU")
    return Memory()


@pytest.fixture
def cupy(library):
    """CuPy on the first GPU; what a test leaves in its pool goes back."""
    from fp4bf16.backends import cuda

    if not cuda.devices():
        pytest.skip("no GPU")
    module = pytest.importorskip("cupy")
    yield module
    module.get_default_memory_pool().free_all_blocks()


class Memory:
    """cudaMalloc and cudaMemcpy, with errors raised and everything freed at the end."""

    POISON = 0xA5

    def __init__(self):
        from cuda.bindings import runtime

        self.rt, self.held = runtime, []

    def check(self, result):
        error, *values = result if isinstance(result, tuple) else (result,)
        assert error == 0, f"CUDA error {int(error)}"
        return values[0] if len(values) == 1 else values

    def empty(self, nbytes: int) -> int:
        """Address of `nbytes` poisoned bytes with a poisoned margin behind them."""
        address = int(self.check(self.rt.cudaMalloc(nbytes + 64)))
        self.held.append(address)
        self.check(self.rt.cudaMemset(address, self.POISON, nbytes + 64))
        return address

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        address = self.empty(array.nbytes)
        kind = self.rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        if array.nbytes:
            self.check(self.rt.cudaMemcpy(address, array.ctypes.data, array.nbytes, kind))
        return address

    def get(self, address: int, shape, dtype) -> np.ndarray:
        """The array at `address`; fails where something wrote past its end."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        host = np.empty(size + 64, np.uint8)
        kind = self.rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.check(self.rt.cudaMemcpy(host.ctypes.data, address, host.nbytes, kind))
        assert (host[size:] == self.POISON).all(), "the kernel wrote past the end of its output"
        return host[:size].view(dtype).reshape(shape)

    def free(self) -> None:
        """Frees everything that `empty` and `put` gave."""
        for address in self.held:
            self.rt.cudaFree(address)
        self.held = []

    def __del__(self):
        self.free()
