"""The CUDA kernels' rows of ``validate``: the library is called on device memory from cuda-python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import cuda
from ..errors import CudaError, LibraryError
from ..interop import BFLOAT16
from ..testing import Report

if TYPE_CHECKING:
    from .validate import Case

OPS = ("quantize", "dequantize")
_FORMATS, _SEARCHES = {"nvfp4_exact": 0, "nvfp4": 1}, {"full": 0, "fast": 1}


def problem() -> str | None:
    """Why the CUDA rows cannot run here, or None."""
    try:
        if cuda.load().device_count() == 0:
            return "no GPU"
    except (LibraryError, CudaError) as error:
        return str(error)
    try:
        from cuda.bindings import runtime  # noqa: F401
    except ImportError:
        return "there is a GPU, but cuda-python is not installed; run: python -m pip install 'fp4bf16[cuda]'"
    return None


def takes(case: Case) -> bool:
    """Whether the kernels have this variant."""
    return case.format in _FORMATS and case.options.get("scale_rule", "te") == "te"


class _Memory:
    """Device memory that is freed at the end of a ``with`` block."""

    def __enter__(self):
        from cuda.bindings import runtime

        self.runtime, self.held = runtime, []
        return self

    def __exit__(self, *_):
        for address in self.held:
            self.runtime.cudaFree(address)

    def _checked(self, result: tuple) -> Any:
        if result[0] != 0:
            raise CudaError(f"validate: {result[0].name}")
        return result[1] if len(result) > 1 else None

    def empty(self, nbytes: int) -> int:
        """Address of `nbytes` bytes that hold 0xA5."""
        self.held.append(int(self._checked(self.runtime.cudaMalloc(max(nbytes, 1)))))
        self._checked(self.runtime.cudaMemset(self.held[-1], 0xA5, max(nbytes, 1)))
        return self.held[-1]

    def put(self, array: np.ndarray) -> int:
        """Address of a copy of `array`."""
        address, kind = self.empty(array.nbytes), self.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._checked(self.runtime.cudaMemcpy(address, array.ctypes.data, array.nbytes, kind))
        return address

    def get(self, address: int, like: np.ndarray) -> np.ndarray:
        """What lies at `address`, as an array like `like`; waits for the kernels before it."""
        host, kind = np.empty_like(like), self.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._checked(self.runtime.cudaMemcpy(host.ctypes.data, address, host.nbytes, kind))
        return host


def run(case: Case, x: np.ndarray) -> Report:
    """Quantise `x` (rows, K) on the GPU, and for "dequantize" back again; bytes that differ from the
    reference."""
    from ..python_ref import quantize as ref

    library, (rows, k), dtype = cuda.load(), x.shape, int(x.dtype == BFLOAT16)
    want = ref.quantize(x, case.format, **case.options)
    group = rows if want.outer_scale.size == 1 else 1
    search = _SEARCHES[case.options.get("search", "full")]
    with _Memory() as memory:
        source, amax = memory.put(x), memory.empty(4 * want.outer_scale.size)
        parts = [(name, getattr(want, name)) for name in ("packed", "block_scale", "outer_scale")]
        outputs = [memory.empty(array.nbytes) for _, array in parts]
        library.call("amax", source, dtype, rows, k, k, group, amax, 0)
        library.call(
            "quantize", source, dtype, rows, k, k, _FORMATS[case.format], search, amax, group, *outputs, 0
        )
        got = [(n, memory.get(a, w), w) for (n, w), a in zip(parts, outputs, strict=True)]
        if case.op == "dequantize":
            value = ref.dequantize(want)
            back = memory.empty(value.nbytes)
            library.call("dequantize", *outputs, rows, k, group, back, 0, k, 0)
            got = [("x", memory.get(back, value), value)]
    return _report(case, x, got)


def _report(case: Case, x: np.ndarray, got: list[tuple[str, np.ndarray, np.ndarray]]) -> Report:
    differing = {n: int((g.view(np.uint8) != w.view(np.uint8)).sum()) for n, g, w in got}
    detail = ", ".join(f"{count} bytes of {name}" for name, count in differing.items() if count)
    error = float(sum(differing.values()))
    return Report(case.op, "", case.format, (x.shape,), "differing bytes", error, 0.0, detail)
