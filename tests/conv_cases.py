"""What the tests of convolutions on a device share: shapes, operands, and how near results must be."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from host_cuda import Arrays, FakeArray, host_cuda, put  # noqa: F401  (host_cuda is a fixture)

import fp4bf16 as fb
from fp4bf16.backends import cuda_gemm, cuda_math, cuda_tape

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("nvfp4_exact", "nvfp4", "mxfp4", "fp8")
TRACKS = [("bf16", None), ("reference", None)] + [("fp4", f) for f in FORMATS]
#: x, w, stride, padding: a real layer, ragged, single pixel, unaligned C, asymmetric, pointwise, three
#: channels in and out, large kernel, stride 3, no picture, no output channel, no channel, no line.
CASES = [
    ((4, 8, 8, 32), (32, 3, 3, 32), 1, 1),
    ((3, 7, 9, 5), (4, 3, 3, 5), 1, 1),
    ((1, 1, 1, 16), (8, 1, 1, 16), 1, 0),
    ((2, 6, 5, 20), (7, 5, 2, 20), 2, ((0, 1), (0, 1))),
    ((2, 9, 9, 48), (16, 3, 3, 48), 2, 1),
    ((2, 4, 4, 33), (64, 1, 1, 33), 1, 0),
    ((3, 5, 4, 3), (32, 3, 3, 3), 1, 1),
    ((2, 6, 6, 16), (3, 3, 3, 16), 1, 1),
    ((2, 11, 9, 24), (10, 5, 5, 24), 3, ((2, 0), (1, 3))),
    ((1, 1, 1, 8), (8, 3, 3, 8), 1, 1),
    ((2, 8, 8, 16), (8, 3, 3, 16), 2, ((0, 1), (0, 1))),
    ((0, 4, 4, 16), (8, 3, 3, 16), 1, 1),
    ((2, 4, 4, 16), (0, 3, 3, 16), 1, 1),
    ((2, 4, 4, 0), (8, 3, 3, 0), 1, 1),
    ((2, 0, 4, 16), (8, 3, 3, 16), 1, 2),
]
IDS = [f"{x}*{w}/{s}" for x, w, s, _ in CASES]


@pytest.fixture
def gpu(host_cuda, monkeypatch):  # noqa: F811
    """The emulated library, behind `put`."""
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())
    monkeypatch.setattr(cuda_tape, "_local", type(cuda_tape._local)())  # no plans of another emulation
    cuda_gemm._struct.cache_clear()
    return host_cuda


def draw(rng, shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def pictures(rng, shape, dtype=np.float32):
    """Pictures of very different sizes: a scale that is not each picture's own would be seen."""
    return (draw(rng, shape) * np.exp2(rng.integers(-6, 6, (shape[0], 1, 1, 1)))).astype(dtype)


def strong(rng, shape):
    """A weight with a few strong directions, as trained ones have."""
    o, k = shape[0], math.prod(shape[1:])
    return (draw(rng, (o, k)) + draw(rng, (o, 4)) @ draw(rng, (4, k))).reshape(shape)


def values(x):
    return np.asarray(x.array if isinstance(x, FakeArray) else x, np.float64)


def close(got, want, limit=4e-6):
    """Within `limit` of the largest of each picture: the CPU sums in FP32."""
    got, want = values(got), values(want)
    assert got.shape == want.shape
    if want.size:
        scale = np.abs(want).max(axis=tuple(range(1, want.ndim)), keepdims=True) if want.ndim == 4 else 1
        assert np.all(np.abs(got - want) <= limit * np.maximum(scale, 1e-3)), np.abs(got - want).max()


def near(got, want, limit=2e-3):
    """Where BF16 numbers are made on the way: one beside a tie may round to the other side."""
    got, want = values(got), values(want)
    assert got.shape == want.shape and np.linalg.norm(got - want) <= limit * np.linalg.norm(want)


def on_device(q):
    """A container of the host in device memory."""
    parts = [None if p is None else put(p) for p in (q.packed, q.block_scale, q.outer_scale)]
    return fb.QuantizedArray(*parts, q.format, q.shape, q.order)


def image(fmt):
    return None if fmt == "mxfp4" else "image"
