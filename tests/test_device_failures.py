"""What the compiled library reports, as exceptions: each status, by a first call and by the plan of one."""

from __future__ import annotations

import numpy as np
import pytest
from host_cuda import FakeArray, host_cuda, put  # noqa: F401  (fixtures)
from test_gemm_device import close, draw, gpu  # noqa: F401

import fp4bf16 as fb
from fp4bf16 import device

STATUSES = [
    (1, ValueError, "gemm: m is -1, but must be 0 to 2147482624"),
    (2, fb.CudaError, "gemm: no usable GPU: no CUDA-capable device is detected (CUDA error 100)"),
    (3, fb.UnsupportedArchError, "gemm: this GPU has compute capability 7.5, but 8.0 or later is needed"),
    (4, fb.CudaError, "gemm: an illegal memory access was encountered (CUDA error 700)"),
]


@pytest.mark.parametrize("status,kind,sentence", STATUSES)
@pytest.mark.parametrize("planned", [False, True])
def test_a_status_is_an_exception(rng, gpu, monkeypatch, status, kind, sentence, planned):  # noqa: F811
    failing, launch = [], gpu.lib.fp4bf16_gemm
    text = sentence.encode() + b"\0"

    def maybe(args, stream):
        if not failing:
            return launch(args, stream)
        gpu.ffi.buffer(gpu._error)[: len(text)] = text
        return status

    callback = gpu.ffi.callback("fp4bf16_status(fp4bf16_gemm_args*, void*)", maybe)
    monkeypatch.setattr(gpu.lib, "fp4bf16_gemm", callback)
    device._function.cache_clear()
    a, b = draw(rng, (8, 32)), draw(rng, (32, 4))
    x, w = put(a), put(b)
    if planned:
        fb.matmul(x, w)
    failing.append(True)
    for _ in range(2):  # the second time, too: nothing of the first is left
        with pytest.raises(kind) as refused:
            fb.matmul(x, w)
        assert type(refused.value) is kind and str(refused.value) == sentence
    failing.clear()
    close(fb.matmul(x, w), np.matmul(a.astype(np.float64), b), 2e-2)
    device._function.cache_clear()


def test_strided_outer_scales_of_single_rows(rng, gpu, monkeypatch):  # noqa: F811
    """Matrices of one row fold into one, whose scales the library takes only side by side."""
    steps, launch = [], gpu.lib.fp4bf16_gemm

    def look(args, stream):
        steps.extend((args.row_scale_step, args.col_scale_step))
        return launch(args, stream)

    callback = gpu.ffi.callback("fp4bf16_status(fp4bf16_gemm_args*, void*)", look)
    monkeypatch.setattr(gpu.lib, "fp4bf16_gemm", callback)
    device._function.cache_clear()
    q, w = fb.quantize(put(draw(rng, (4, 1, 32)))), fb.quantize(put(draw(rng, (32, 8))), axis=-2)
    want = fb.matmul(q, w)
    wide = np.ones((8, 1, 1), np.float32)
    wide[::2] = q.outer_scale.array
    by_hand = fb.QuantizedArray(q.packed, q.block_scale, FakeArray(wide[::2]), q.format, q.shape, q.order)
    for _ in range(2):
        close(fb.matmul(by_hand, w), want.array)
    assert set(steps) <= {0, 1}
    device._function.cache_clear()
