"""Certificates on a GPU with CuPy: what they bound, graphs that decide at each replay, the trainer's limit.

As test_certificates_device.py, which runs the same code by the emulated library.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_certificates_device import frozen, run
from unet_cases import FP4, Case

import fp4bf16 as fb
from fp4bf16 import certify, device
from fp4bf16.backends import cuda_math
from fp4bf16.consistency import Sketcher
from fp4bf16.nn.cuda import watch
from fp4bf16.nn.cuda.certificates import Certificates, Fallback
from fp4bf16.nn.cuda.graph import Graph
from fp4bf16.nn.cuda.sketches import Sketches
from fp4bf16.nn.cuda.workspace import converted, shaped
from fp4bf16.nn.tape import no_grad

pytestmark = pytest.mark.gpu
ROUTE = {"conv_out*": "bf16"} | FP4  # whose BF16 form is a kernel of its own


class Distances(watch.RunWatcher):
    """|y_fp4 - y_bf16|_F of every FP4 product with its bias alone, and the norm of y_fp4."""

    def __init__(self):
        self.found, self.sizes = {}, {}

    def product(self, run, layer, feed, scale, d, finish):
        if feed.scale is None or d is None:
            return
        y = {}
        with run.aside():
            for kind in ("fp4", "bf16"):
                other, of = (feed, layer) if kind == "fp4" else feed.other(run, kind)
                out = watch.alone(run, layer if of is None else of, other, kind, d)
                y[kind] = (
                    cuda_math.of(out).raw(converted(run, out, out.shape[3], "float32")).astype(np.float64)
                )
            bias = layer.bias(run)
            bias = cuda_math.of(bias).raw(
                converted(run, shaped(bias, (1, 1, 1, bias.size)), bias.size, "float32")
            )
        for name, _, _ in layer.members:
            self.found[name] = math.sqrt(float(((y["fp4"] - y["bf16"]) ** 2).sum()))
            self.sizes[name] = math.sqrt(float(((y["fp4"] - bias) ** 2).sum()))


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize("name, phases, batch", [
    ("tiny", True, None), ("variants", False, None), ("no middle", True, None),
    ("ddpm-cifar10-32", False, 20), ("ddpm-cifar10-32", True, 3),
])  # fmt: skip
def test_bounds_hold_on_every_product(name, phases, batch, accumulate, cupy, rng):
    """And are those of the emulation: 3 to 7 times the distance on random weights."""
    case = Case(name, rng, cupy.asarray, ROUTE, batch=batch, accumulate=accumulate)
    case.device.upsample_by_phases(phases)
    plain = case.fetch(case.forward().data)
    certificates, distances, sketcher = Certificates(case.device), Distances(), Sketcher(every=1, seed=5)
    sketches = Sketches(sketcher)
    np.testing.assert_array_equal(run(case, certificates), plain)  # by the sums that norms do not read, too
    run(case, certificates, distances, sketches)
    found, estimates = certificates.read(), sketches.read()
    assert set(found) == set(distances.found) == set(estimates) and len(found) > 10
    loose, below = [], 0
    for layer, apart in distances.found.items():
        of = found[layer]
        assert math.isfinite(of.bound) and apart <= of.bound + of.accumulation, layer
        loose.append(of.bound / apart)
        whole = (batch or case.shape[0]) <= 64
        below += whole and estimates[layer] * distances.sizes[layer] + of.accumulation < apart
    assert np.median(loose) < 9 and max(loose) < 30 and below <= 2
    y = frozen(case, Certificates(case.device))
    np.testing.assert_array_equal(y, frozen(case))


def test_over_the_threshold_a_product_is_the_bf16_tracks(cupy, rng):
    """In a graph: the bits of the route on which the redone layers are on BF16, at every replay."""
    case = Case("ddpm-cifar10-32", rng, cupy.asarray, ROUTE, batch=8)
    certificates = Certificates(case.device)
    run(case, certificates)
    ratios = sorted({of.ratio for of in certificates.read().values()})
    x, t = cupy.asarray(case.x), cupy.asarray(case.t)
    for threshold in (0.0, math.sqrt(ratios[len(ratios) // 2] * ratios[len(ratios) // 2 - 1]), 1e30):
        fallback, graph = Fallback(case.device, threshold), Graph(x)

        def once(stream, fallback=fallback):
            with watch.watching(fallback), no_grad():
                return case.device(x, t).data

        y = graph.capture(once)
        first = fallback.counts
        for _ in range(3):
            graph.replay()
        got, counts = case.fetch(y), fallback.counts
        assert counts == {n: 4 * c for n, c in first.items()}
        assert bool(counts) == (threshold < 1e30) and fallback.calls == certificates.calls * 4
        case.device.apply_route(dict.fromkeys(counts, "bf16") | ROUTE)
        want = frozen(case)
        case.device.apply_route(ROUTE)
        # Norms may read sums of other parts there: the last bits of statistics
        np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * np.abs(want).max())
        if threshold == 1e30:
            np.testing.assert_array_equal(got, want)


def test_a_graph_decides_anew_at_each_replay(cupy, rng):
    """`matmul(threshold=)`: the threshold lies between the ratios of two inputs."""
    x, w = (
        cupy.zeros((256, 512), np.float32),
        cupy.asarray(rng.standard_normal((512, 384)).astype(np.float32)),
    )
    hard = cupy.asarray(rng.standard_normal(x.shape).astype(np.float32))
    easy = cupy.sign(w[:, 0]) * cupy.ones((256, 1), np.float32)  # on the grid: no error of its own
    ratios = {}
    for name, value in (("hard", hard), ("easy", easy)):
        ratios[name] = fb.matmul(value, w, track="fp4", certify="bound")[1].relative
    low, high = sorted(ratios.values())
    assert low < 0.9 * high
    held = {}

    def once(stream):
        y, held["certificate"] = fb.matmul(
            x, w, track="fp4", threshold=math.sqrt(low * high), certify="bound"
        )
        return y

    graph = Graph(x)
    graph.capture(once)
    certify.fallbacks.reset()
    for name in ("hard", "easy", "easy", "hard"):
        x[...] = hard if name == "hard" else easy
        y = cupy.asnumpy(graph.replay())
        over = ratios[name] == high
        want = fb.matmul(x, w, track="bf16" if over else "fp4")
        assert np.abs(y - cupy.asnumpy(want)).max() < 1e-5 * float(abs(want).max())
    assert certify.fallbacks.calls == {"matmul": 4} and certify.fallbacks.redone == {"matmul": 2}
    assert (held["certificate"].refused is not None) == (ratios["hard"] == high)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bounds_of_the_public_products(dtype, cupy, rng):
    """Against the BF16 track, and beside the host's certificate."""
    x, w = (cupy.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((200, 768), (768, 130)))
    p, k = (cupy.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((3, 9, 10, 64), (48, 3, 3, 64)))
    for call in (
        lambda **how: fb.matmul(x, w, **how),
        lambda **how: fb.linear(x, w.T, activation="gelu", **how),
        lambda **how: fb.conv2d(p, k, padding=1, **how),
    ):
        y, cert = call(track="fp4", dtype=dtype, threshold=1e9, certify="bound")
        _, known = call(track="fp4", dtype=dtype, certify="bound")
        other = call(track="bf16", dtype=dtype)
        apart = np.linalg.norm(
            device.to_host(y).astype(np.float64) - device.to_host(other).astype(np.float64)
        )
        assert 0 < apart <= cert.limit
        assert known.limit * (1 - 1e-5) <= cert.limit <= 1.02 * known.limit
        redone = call(track="fp4", dtype=dtype, threshold=0.0)
        other = call(track="bf16", dtype=dtype, certify="bound")[0]  # whose epilogue is the framework's, too
        np.testing.assert_array_equal(device.to_host(redone), device.to_host(other))


def test_the_trainers_limit(cupy):
    """As on the emulated GPU: layers over it, and those whose weights jump, are held at once, to the bit."""
    pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
    pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")
    import test_loop_device_limit as emulated

    emulated.test_limit_holds_the_layers_over_it(None)
    emulated.test_weights_that_jump_under_a_limit(None)
