"""`fp4bf16_gram` on a GPU against extended precision, alone and in a graph; what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fp4bf16 import device
from fp4bf16.backends.cuda_spectral import gram, spectral_norms
from fp4bf16.nn.cuda.graph import Graph

SHAPES = [
    (1, 1, 1), (3, 5, 40), (2, 64, 16), (1, 65, 17), (2, 130, 7), (1, 256, 2304), (4, 63, 1), (1, 3, 0),
    (0, 4, 4), (2, 0, 3),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_gram(library, gpu, shape, rng):
    """A sum of n products, one rounding each: within n 2^-53 of the sum of their magnitudes (Higham, section
    3.1); the same bits again, and above the diagonal as below.
    """
    count, m, n = shape
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-30, 30, (count, m, 1)))
    out = gpu.empty(8 * count * m * m)
    found = []
    for _ in range(2):
        library.call("gram", library.ffi.cast("double*", gpu.put(x)), *shape,
                     library.ffi.cast("double*", out), library.ffi.NULL)  # fmt: skip
        found.append(gpu.get(out, (count, m, m), np.float64))
    gpu.free()
    np.testing.assert_array_equal(found[0].view(np.int64), found[1].view(np.int64))
    np.testing.assert_array_equal(found[0].view(np.int64), found[0].swapaxes(1, 2).view(np.int64))
    whole, size = x.astype(np.longdouble), np.abs(x)
    want, magnitude = whole @ whole.swapaxes(1, 2), size @ size.swapaxes(1, 2)
    assert (np.abs(found[0] - want) <= (n + 1) * 2.0**-53 * magnitude).all()


@pytest.mark.gpu
def test_norms_are_captured(cupy, rng):
    """What a graph of CuPy's cannot hold of the framework's own products."""
    w = cupy.asarray(rng.standard_normal((2, 40, 90)))
    graph = Graph(w)
    found = graph.capture(lambda stream: spectral_norms(cupy, w, 4))
    for _ in range(2):
        w[...] = cupy.asarray(rng.standard_normal((2, 40, 90)))
        graph.replay(0)
        want = np.linalg.norm(cupy.asnumpy(w), 2, axis=(1, 2))
        got = cupy.asnumpy(found)
        assert (want <= got).all() and (got <= 40 ** (1 / 64) * (1 + 2.0**-19) * want).all()
    w[1, 3, 4] = np.nan
    graph.replay(0)
    assert np.isfinite(cupy.asnumpy(found)[0]) and np.isnan(cupy.asnumpy(found)[1])
    turned = gram(cupy, w[:1].swapaxes(1, 2))  # not contiguous
    np.testing.assert_allclose(cupy.asnumpy(turned), cupy.asnumpy(w[:1].swapaxes(1, 2) @ w[:1]), rtol=1e-12,
                               atol=1e-12)  # fmt: skip


@pytest.mark.parametrize("bad, named", [
    ({"count": -1}, "count is -1"), ({"count": 65536}, "count"), ({"m": -2}, "m is -2"),
    ({"n": -3}, "n is -3"), ({"x": 0}, "x is NULL"), ({"out": 0}, "out is NULL"), ({"x": 12}, "x"),
])  # fmt: skip
def test_bad_arguments(library, bad, named):
    given = {"x": 64, "count": 1, "m": 2, "n": 3, "out": 128} | bad
    with pytest.raises(ValueError, match=named):
        device.call("gram", *given.values(), 0)
