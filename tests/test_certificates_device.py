"""Certificates of the device's network, by the emulated library: bounds, thresholds, norms of weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
from host_cuda import Arrays, host_cuda, memory, put  # noqa: F401  (host_cuda is a fixture)
from unet_cases import FP4, Case, relative

import fp4bf16 as fb
from fp4bf16 import certify, device, nn
from fp4bf16.backends import cuda_conv, cuda_math
from fp4bf16.backends.cuda_spectral import rounded_up, spectral_norms
from fp4bf16.consistency import Sketcher
from fp4bf16.errors import ConfigError
from fp4bf16.interop import BFLOAT16
from fp4bf16.nn.cuda import products, watch
from fp4bf16.nn.cuda import sketches as sketches_of
from fp4bf16.nn.cuda.certificates import Certificates, Fallback
from fp4bf16.nn.cuda.graph import Graph
from fp4bf16.nn.cuda.sketches import Sketches
from fp4bf16.nn.tape import no_grad
from fp4bf16.python_ref.formats import E4M3


@pytest.fixture(autouse=True)
def _arithmetic(host_cuda, monkeypatch):  # noqa: F811
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())


class Distances(watch.RunWatcher):
    """|y_fp4 - y_bf16|_F of every FP4 product, each stored in the result's dtype with its bias alone, and the
    norm of y_fp4 without it.
    """

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
                y[kind] = cuda_math.of(out).raw(out).astype(np.float64)
        bias = numbers(layer.bias(run), np.float32)
        for name, _, _ in layer.members:
            self.found[name] = np.linalg.norm(y["fp4"] - y["bf16"])
            self.sizes[name] = np.linalg.norm(y["fp4"] - bias)


def adversarial(rng, w):
    """Weights on which a bound may fail: outliers, rows of many sizes, of low rank, on the grid, alike."""
    kind, flat = rng.integers(6), w.reshape(len(w), -1)
    if w.ndim < 2:
        return w
    if kind == 0:
        flat[rng.integers(len(flat)), rng.integers(flat.shape[1])] *= 300
    elif kind == 1:
        flat *= np.exp2(rng.integers(-12, 12, (len(flat), 1))).astype(np.float32)
    elif kind == 2:
        flat[...] = np.outer(rng.standard_normal(len(flat)), rng.standard_normal(flat.shape[1]))
    elif kind == 3:
        flat[...] = np.sign(flat) * 0.25
    elif kind == 4:
        flat[...] = flat[0]
    return w


def run(case, certificates, *watchers):
    """The prediction of a watched forward."""
    certificates.begin()
    with watch.watching(certificates, *watchers):
        y = case.fetch(case.forward().data)
    certificates.end(case.device.flat)
    return y


def frozen(case, *watchers):
    with watch.watching(*watchers), no_grad():
        return case.fetch(case.forward().data)


# ---- bounds ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize(
    "name, phases", [("tiny", False), ("tiny", True), ("variants", True), ("no middle", False)]
)
def test_bounds_hold_on_every_product(name, phases, accumulate, rng):
    """For random weights and for bad ones; the emulation sums exactly, so that the bound alone must hold."""
    case = Case(name, rng, put, FP4, accumulate=accumulate)
    case.device.upsample_by_phases(phases)
    for bad in (False, True):
        if bad:
            state = case.device.state_dict()
            case.device.load_state_dict({n: adversarial(rng, np.array(v)) for n, v in state.items()})
        certificates, distances = Certificates(case.device), Distances()
        with np.errstate(all="ignore"):
            run(case, certificates, distances)
        found = certificates.read()
        assert set(found) == set(distances.found) and len(found) > 10
        loose = []
        for layer, apart in distances.found.items():
            assert apart <= found[layer].bound, layer
            assert math.isfinite(found[layer].bound) and found[layer].accumulation > 0
            loose.append(found[layer].bound / apart if apart else 1.0)
        if not bad:  # of 20 seeds the medians were 3.0 to 6.5, the largest 13.2
            assert np.median(loose) < 9 and max(loose) < 25


class Collected(nn.Watcher):
    """The CPU's certificates by layer."""

    def __init__(self):
        self.found = {}

    def wants_certificate(self, layer):
        return True

    def product(self, layer, x, y, run, certificate):
        self.found[layer.key] = certificate
        return y


def test_bounds_are_nearly_the_cpus(rng):
    """Of nearly the same numbers, before bias and residual: of 20 seeds they were 0.97 to 1.16 of the CPU's.
    Those of q, k and v are of one product there, and of a weight by phases sigma is the root of the sum of
    four squares, none larger than the CPU's; the sums of FP8 tensor cores may lose far more than FP32's.
    """
    case, cpu = Case("tiny", rng, put, FP4), Collected()
    with nn.watching(cpu):
        case.on_host()
    certificates = Certificates(case.device)
    run(case, certificates)
    found = certificates.read()
    assert set(found) == set(cpu.found)
    for layer, of in found.items():
        theirs = cpu.found[layer]
        several = math.sqrt(3) if any(f"to_{n}." in layer for n in "qkv") else 1.0
        phases = 2.0 if "upsamplers" in layer else 1.0
        assert 0.85 < of.bound / theirs.bound < 1.3 * several * phases, layer
        assert 0.9 < of.weight / theirs.terms["w"] < 1.1 * several, layer
        assert of.accumulation > 100 * theirs.accumulation  # summed fast


def test_looking_changes_nothing(rng):
    for phases in (False, True):
        case = Case("variants", rng, put, FP4)
        case.device.upsample_by_phases(phases)
        y, gradients = case.on_device()
        certificates = Certificates(case.device)
        with watch.watching(certificates):
            seen, more = case.on_device()
        np.testing.assert_array_equal(seen, y)
        for n, g in gradients.items():
            np.testing.assert_array_equal(more[n], g, err_msg=n)
        np.testing.assert_array_equal(frozen(case, certificates), frozen(case))
        assert certificates.calls == 2 * len(certificates._layers) and not certificates.counts
        recorded = Certificates(case.device, recorded=True)
        frozen(case, recorded)
        assert recorded.calls == 0 and recorded.read() == {}


def test_layers_that_do_not_run_on_fp4_are_not_found(rng):
    case = Case("tiny", rng, put, FP4)
    certificates = Certificates(case.device)
    run(case, certificates)
    whole = certificates.read()
    case.device.apply_route({"*resnets*": "bf16"} | FP4)
    run(case, certificates)
    fewer = certificates.read()
    assert 0 < len(fewer) < len(whole) and not any("resnets" in n for n in fewer)
    case.x[0, 0, 0, 0] = np.nan
    with np.errstate(all="ignore"):
        run(case, certificates)
    assert certificates.read()["conv_in.weight"].ratio == math.inf


def test_a_product_of_zeros_has_the_ratio_zero(rng):
    case = Case("tiny", rng, put, FP4)
    state = case.device.state_dict()
    case.device.load_state_dict(
        state | {f"conv_out.{n}": 0 * state[f"conv_out.{n}"] for n in ("weight", "bias")}
    )
    certificates = Certificates(case.device)
    run(case, certificates)
    found = certificates.read()["conv_out.weight"]
    assert found.product == 0 and found.ratio == 0 and found.weight < 1e-40


# ---- norms of the weights ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape, squarings", [((3, 5, 40), 5), ((2, 40, 5), 4), ((1, 1, 1), 3), ((4, 16, 16), 3)]
)
def test_spectral_norms_are_upper_bounds(shape, squarings, rng):
    w = rng.standard_normal(shape) * np.exp2(rng.integers(-60, 60, (shape[0], 1, 1)))
    got, want = spectral_norms(np, w, squarings), np.linalg.norm(w, 2, axis=(1, 2))
    most = min(shape[1:]) ** (0.25 / 2**squarings) * (1 + 2.0**-19)
    assert (want <= got).all() and (got <= most * want).all()
    assert not spectral_norms(np, 0 * w, 3).any()
    w[0, 0, 0] = np.nan
    up = rounded_up(Arrays(), spectral_norms(np, w, 3))
    assert up.dtype == np.float32 and up[0] == np.inf and (up[1:] >= want[1:]).all()


def numbers(x, dtype):
    """What lies at a device array's address, C order."""
    return np.array(memory(x.address, x.shape, dtype))


def twin_values(run, layer):
    """(W, W^) float64 (pieces, O, K), and the outer scales."""
    w8, scale = layer.eight(run)
    shape = layer.o, 4 if layer.how else 1, layer.kh * layer.kw, -1
    scales = numbers(scale, np.float32)
    used = E4M3[numbers(w8, np.uint8)].astype(np.float64).reshape(shape) * scales.reshape(*shape[:2], 1, 1)
    w = numbers(layer.sixteen(run), BFLOAT16).astype(np.float64).reshape(shape)
    both = (v[..., : layer.c].reshape(*shape[:2], -1).swapaxes(0, 1) for v in (w, used))
    return *both, scales


@pytest.mark.parametrize("name, phases", [("tiny", True), ("variants", False)])
def test_the_table_of_weights(name, phases, rng):
    """Upper bounds, within a few per cent, of every product's own weight; made anew with the weights."""
    case = Case(name, rng, put, FP4)
    case.device.upsample_by_phases(phases)
    layers = {}

    class Layers(watch.RunWatcher):
        def product(self, run, layer, feed, scale, d, finish):
            layers[run.weights.layout.row_of(layer)] = layer

    certificates = Certificates(case.device)
    for factor in (1.0, 64.0):
        state = case.device.state_dict()
        case.device.load_state_dict({n: factor * v for n, v in state.items()})
        flat = case.device.flat
        if factor == 1.0:
            run(case, certificates, Layers())
        table, on = device.to_host(flat.norms.table), case.device.network.run(flat, False)
        for row, layer in layers.items():
            w, used, scales = twin_values(on, layer)
            sigma = [np.sqrt((np.linalg.norm(v, 2, axis=(1, 2)) ** 2).sum()) for v in (w, used, w - used)]
            want = np.array([np.linalg.norm(w), np.linalg.norm(used), *sigma, scales.max()])
            ratio = table[row, :6] / want
            assert (ratio >= 1).all() and (ratio < [1.001, 1.001, 1.2, 1.05, 1.1, 1.001]).all(), layer.name
            assert (table[row, 6:] < 1e-40).all()
        assert len(layers) > 20 and (any(layer.how for layer in layers.values()) or not phases)
        assert np.isinf(table[len(flat.layout.rows) :]).all()


# ---- thresholds --------------------------------------------------------------------------------------------
def test_over_the_threshold_a_product_is_the_bf16_tracks(rng):
    """The bits of the route on which the redone layers are on BF16; never and always as well."""
    route = {"conv_out*": "bf16"} | FP4
    case = Case("variants", rng, put, route)
    case.device.upsample_by_phases(True)
    plain, certificates = frozen(case), Certificates(case.device)
    frozen(case, certificates)
    certificates.end(case.device.flat)
    ratios = sorted({of.ratio for of in certificates.read().values()})
    for threshold in (0.0, ratios[len(ratios) // 2] * 1.0001, math.inf):
        fallback = Fallback(case.device, threshold)
        y, names = frozen(case, fallback), set(certificates.read())
        redone = set(fallback.counts)
        assert fallback.calls == certificates.calls and set(fallback.counts.values()) <= {1}
        assert redone == names if threshold == 0 else len(redone) < len(names)
        assert bool(redone) == (threshold < math.inf)
        case.device.apply_route(dict.fromkeys(redone, "bf16") | route)
        np.testing.assert_array_equal(y, frozen(case))
        case.device.apply_route(route)
        np.testing.assert_array_equal(frozen(case), plain)


def test_sums_follow_the_product_that_was_kept(rng, monkeypatch):
    """Where norms read the sums of convolutions: of the BF16 form too, where it has as many parts."""
    monkeypatch.setattr(products, "SUMMED_IMAGE", 16)
    monkeypatch.setattr(products, "SUMMED_BATCH", 16)
    route = {"conv_out*": "bf16"} | FP4
    case = Case("tiny", rng, put, route)
    want = frozen(case)
    np.testing.assert_array_equal(frozen(case, Fallback(case.device, math.inf)), want)
    y = frozen(case, Fallback(case.device, 0.0))
    case.device.apply_route({"*": "bf16"})
    np.testing.assert_array_equal(y, frozen(case))
    real = cuda_conv.sum_parts
    monkeypatch.setattr(cuda_conv, "sum_parts", lambda *a, **how: real(*a, **how) + 1)
    case.device.apply_route(route)
    y, plain = frozen(case, Fallback(case.device, 0.0)), frozen(case)
    assert not np.array_equal(y, plain)  # statistics computed by the norms then, of what was kept
    case.device.apply_route({"*": "bf16"})
    assert relative(y, frozen(case)) < 0.02  # of 20 seeds 0.004 at most: last bits of BF16


def test_graphs_count_and_decide_at_each_replay(rng):
    """The threshold between the ratios of two inputs: each replay decides by its own."""
    case = Case("tiny", rng, put, {"conv_in*": "fp4", "*": "bf16"})
    certificates, x = Certificates(case.device), put(case.x)
    easy = np.where(np.arange(case.x.shape[-1]) % 2, 4.0, -4.0).astype(np.float32) * np.ones_like(case.x)
    seen = {}
    for kind, value in (("hard", case.x), ("easy", easy)):
        case.x = value
        run(case, certificates)
        seen[kind] = certificates.read()["conv_in.weight"].ratio
    threshold = math.sqrt(seen["hard"] * seen["easy"])
    assert seen["easy"] < 0.95 * threshold
    fallback, graph, t = Fallback(case.device, threshold), Graph(x), put(case.t)
    captions = put(case.more["captions"])

    def once(stream):
        with watch.watching(fallback), no_grad():
            return case.device(x, t, captions=captions).data

    x.array[...] = easy
    graph.capture(once)
    before = fallback.calls
    for redone in (1, 1, 0, 1, 0):
        x.array[...] = rng.standard_normal(x.shape) if redone else easy
        kept = fallback.counts["conv_in.weight"]
        y = graph.replay().array.copy()
        assert fallback.counts["conv_in.weight"] - kept == redone
        case.x = x.array.copy()
        case.device.apply_route({"*": "bf16"} if redone else {"conv_in*": "fp4", "*": "bf16"})
        np.testing.assert_array_equal(y, frozen(case))
        case.device.apply_route({"conv_in*": "fp4", "*": "bf16"})
    assert fallback.calls == before + 5


def test_products_of_arrays_in_a_graph(rng):
    """`matmul(threshold=)` captured: decided and counted at each replay, the certificate read afterwards."""
    x, w = put(rng.standard_normal((9, 64)).astype(np.float32)), rng.standard_normal((64, 24))
    w, found = put(w.astype(np.float32)), {}
    _, known = fb.matmul(x, w, track="fp4", certify="bound")
    threshold = known.relative * 1.05

    def once(stream):
        y, found["certificate"] = fb.matmul(x, w, track="fp4", threshold=threshold, certify="bound")
        return y

    graph = Graph(x)
    graph.capture(once)
    certify.fallbacks.reset()
    for redone in (False, True):
        x.array[...] = 1e-3 + redone * np.where(np.arange(64) % 2, 1.0, -1.0) * (1 + w.array[:, 0])
        y = graph.replay().array.copy()
        cert = found["certificate"]
        with fb.tracks("bf16" if cert.refused is not None else "fp4"):
            np.testing.assert_array_equal(y, fb.matmul(x, w).array)
    assert certify.fallbacks.calls == {"matmul": 2}


def test_what_is_refused(rng):
    case = Case("tiny", rng, put, FP4)
    with pytest.raises(ConfigError, match="Certificates: the model is on the CPU"):
        Certificates(case.host)
    for threshold in (-1, math.nan, "0.5", True):
        with pytest.raises(ConfigError, match="threshold is .* a number from 0 is needed"):
            Certificates(case.device, threshold)
    with pytest.raises(ConfigError, match="threshold is None"):
        Fallback(case.device, None)
    two = [Certificates(case.device) for _ in range(2)]
    with pytest.raises(ValueError, match="two of the watchers certify"), watch.watching(*two):
        pass


# ---- sketches ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("phases", [False, True])
def test_sketches_estimate_the_distance(phases, rng):
    """Of every product, and of some pictures of it: over the distance but for one in 1000, by less than 4."""
    case = Case("tiny", rng, put, FP4, batch=5)
    case.device.upsample_by_phases(phases)
    sketcher, distances, ratios = Sketcher(every=1, seed=3), Distances(), []
    certificates = Certificates(case.device)
    for step in range(3):
        sketcher.begin(step)
        sketches = Sketches(sketcher, recorded=False)
        run(case, certificates, distances, sketches)
        estimates, found = sketches.read(), certificates.read()
        assert sketcher.estimates == estimates and set(estimates) == set(distances.found)
        for layer, estimate in estimates.items():
            apart = distances.found[layer]
            alone = distances.sizes[layer]
            ratios.append(estimate * alone / apart)
            assert apart < found[layer].bound
    assert sketcher.sketches == sketcher.calls == 3 * len(certificates._layers)
    below = sum(r < 1 for r in ratios)
    assert below <= 2 and 1.5 < np.median(ratios) < 3 and max(ratios) < 4


def test_sketches_of_some_pictures_of_some_products(rng, monkeypatch):
    """One product in 20, two pictures of it: the same ones, and the same numbers, where it is run again."""
    monkeypatch.setattr(sketches_of, "PICTURES", 2)
    case, sketcher = Case("tiny", rng, put, FP4, batch=7), Sketcher(every=20, seed=1)
    estimates, plain = [], frozen(case)
    for step in (0, 1, 1):
        sketcher.begin(step)
        sketches = Sketches(sketcher, recorded=False)
        np.testing.assert_array_equal(frozen(case, sketches), plain)
        estimates.append(sketches.read())
    assert estimates[1] == estimates[2] and estimates[0] != estimates[1]
    assert all(1 <= len(e) <= 4 and 0.01 < min(e.values()) <= max(e.values()) < 1.5 for e in estimates)
    frozen(case, Sketches(sketcher))
    assert sketcher.sketches == sum(len({*e.values()}) for e in estimates) and sketcher.calls == 3 * 37
