"""Upsampling by phases on a GPU with CuPy: the network against the CPU's, and in a captured graph."""

from __future__ import annotations

import numpy as np
import pytest
from unet_cases import FP4, Case, joined, relative

from fp4bf16.nn.cuda.graph import Graph
from fp4bf16.nn.tape import no_grad

pytestmark = pytest.mark.gpu
ROUTES = {"bf16": {}, "fp4": FP4}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["variants", "ddpm-cifar10-32"])
def test_upsampling_by_phases(name, route, cupy, rng):
    """As near to the unrounded network as the CPU's, also by phases; in a graph the same bits, and other
    weights' phases when the weights have changed.
    """
    case = Case(name, rng, cupy.asarray, ROUTES[route])
    exact, exact_gradients = case.on_host("reference")
    theirs, their_gradients = case.on_host()
    ours, gradients = case.on_device()
    limit = {"bf16": 2.5, "fp4": 1.4}[route]
    assert relative(ours, exact) < limit * relative(theirs, exact)
    want = joined(exact_gradients)
    assert relative(joined(gradients), want) < limit * relative(joined(their_gradients), want)
    x, t = cupy.asarray(case.x), cupy.asarray(case.t)
    more = {n: cupy.asarray(v) for n, v in case.more.items()}

    def step(stream):
        with no_grad():
            return case.device(x, t, **more).data

    graph = Graph(x)
    result = graph.capture(step)
    graph.replay()
    assert np.array_equal(cupy.asnumpy(result), ours)
    flat = case.device.flat
    flat.data_of("up_blocks.0.upsamplers.0.conv.weight").owner[...] *= 1.5
    flat.refresh()
    graph.replay()
    again = cupy.asnumpy(step(0))
    assert np.array_equal(cupy.asnumpy(result), again)
    assert not np.array_equal(again, ours)


def test_what_an_fp4_layer_does(cupy, rng):
    """The difference that the layer's FP4 makes is the CPU's, as in test_unet_gpu.py."""
    case = Case("tiny", rng, cupy.asarray, {"up_blocks.0.upsamplers*": "fp4"}, "upsamplers")
    (y0, g0), (y1, g1) = case.on_host("bf16"), case.on_host()
    (z0, h0), (z1, h1) = case.on_device("bf16"), case.on_device()
    g0, g1, h0, h1 = (joined(g) for g in (g0, g1, h0, h1))
    for a0, a1, b0, b1 in ((y0, y1, z0, z1), (g0, g1, h0, h1)):
        effect, rounding = np.linalg.norm(a1 - a0), np.linalg.norm(b0 - a0)
        assert effect > 2.5 * rounding
        assert np.linalg.norm((b1 - b0) - (a1 - a0)) < 0.85 * effect
