"""What looks at the products of the device's UNet, by the emulated library, beside what looks at the CPU's.

Both measure differences of the two tracks on nearly the same numbers; those that a rounding to BF16 carries
over to another FP4 code differ by as much as FP4 itself, so that single layers are compared by factors.
"""

from __future__ import annotations

import numpy as np
import pytest
from host_cuda import Arrays, host_cuda, put  # noqa: F401  (host_cuda is a fixture)
from unet_cases import FP4, Case, distance, joined

from fp4bf16 import dequantize, device, nn, quantize
from fp4bf16.backends import cuda_math
from fp4bf16.consistency import Consistency
from fp4bf16.nn.cuda import watch
from fp4bf16.nn.tape import no_grad
from fp4bf16.routing import ActivationProbe, work


@pytest.fixture(autouse=True)
def _arithmetic(host_cuda, monkeypatch):  # noqa: F811
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())


def products(case) -> dict[str, str]:
    """Track of each product of a network."""
    layers = [m for _, m in case.host.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    return {m.key: m.track for m in layers}


MIXED = {"*resnets.0*": "fp4", "*to_v*": "fp4", "*upsamplers*": "fp4", "conv_in*": "fp4"}


@pytest.mark.parametrize("operands", ["both", "activations"])
@pytest.mark.parametrize(
    "name, route", [("tiny", FP4), ("tiny", MIXED), ("variants", {}), ("no middle", FP4)]
)
def test_probe_measures_what_the_cpus_watchers_do(name, route, operands, rng):
    """Omega of every product, whatever its track, and the ratio of those on FP4. Of 100 cases the factors of
    Omega lay between 0.23 and 4.9, those of the ratios between 0.3 and 3.9, medians within 0.81 and 1.34.
    """
    case = Case(name, rng, put, route)
    fast = [n for n, track in products(case).items() if track == "fp4"]
    probe, consistency = ActivationProbe(operands=operands), Consistency(0.0, 1000)
    consistency.begin(0, fast)
    with nn.watching(probe, consistency):
        case.on_host()
    ours = watch.Probe(None, fast, operands=operands)
    plain = case.on_device()
    with watch.watching(ours):
        y, gradients = case.on_device()
    ours.read()
    np.testing.assert_array_equal(y, plain[0])  # nothing is changed by looking
    for n, g in gradients.items():
        np.testing.assert_array_equal(g, plain[1][n], err_msg=n)
    assert set(ours.omega) == set(probe.omega) == set(products(case))
    assert set(ours.ratios) == set(consistency.by_layer) == set(fast)
    omega = np.array([ours.omega[n] / probe.omega[n] for n in probe.omega])
    assert 0.02 < omega.min() and omega.max() < 50 and 0.5 < np.median(omega) < 2
    if fast:
        ratio = np.array([ours.ratios[n] / consistency.by_layer[n] for n in fast])
        assert 0.05 < ratio.min() and ratio.max() < 20 and 0.8 < np.median(ratio) < 1.25


def test_omega_of_the_input_alone_leaves_the_weight_out(rng):
    """Where a weight is on the grid, quantising it changes nothing: then both measures are one."""
    case, name = Case("tiny", rng, put, {}), "conv_out.weight"
    for on_grid in (False, True):
        state = case.device.state_dict()
        if on_grid:
            state[name] = dequantize(quantize(state[name], "nvfp4_exact", outer="image"), dtype="float32")
            case.device.load_state_dict(state)
        probes = {kind: watch.Probe([name], operands=kind) for kind in ("both", "activations")}
        with watch.watching(*probes.values()):
            case.on_device()
        for probe in probes.values():
            probe.read()
        both, alone = (probe.omega[name] for probe in probes.values())
        # Off the grid the weight's error is about as large as the input's, and independent of it
        assert both == pytest.approx(alone, rel=1e-3) if on_grid else both > 1.2 * alone


@pytest.mark.parametrize("track", ["fp4", "bf16"])
def test_omega_is_its_formula(track, rng):
    """Of the last layer, whose gradient and results are at hand: 1/2 N sum g^2 (y_fp4 - y_bf16)^2. The
    gradient of what goes on is rounded to BF16, the probed one is not; results of the other track are made by
    another kernel, whose sums differ in their last bits.
    """
    case, name = Case("tiny", rng, put, {}), "conv_out.weight"
    last = case.device.conv_out
    found = {}
    for last.track in ("bf16", "fp4"):
        with no_grad():
            found[last.track] = case.fetch(case.forward().data)
    last.track, probe = track, watch.Probe([name], [name])
    with watch.watching(probe):
        case.on_device()
    probe.read()
    off = found["fp4"].astype(np.float64) - found["bf16"]
    want = 0.5 * len(off) * np.sum(np.square(case.g * off))
    assert probe.omega == {name: pytest.approx(want, rel=1e-3)}
    if track == "fp4":
        ratio = np.sum(off**2) / np.sum(np.square(found["bf16"], dtype=np.float64))
        assert probe.ratios == {name: pytest.approx(ratio, rel=1e-3)}
    else:
        assert probe.ratios == {}


@pytest.mark.parametrize(
    "pattern, loud",
    [
        ("conv_in*", None),
        ("down_blocks.0.resnets.0.conv1*", None),
        ("down_blocks.1.resnets.0.conv2*", "down_blocks.1.resnets.0.conv2"),  # with its shortcut
        ("down_blocks.1.resnets.0.conv_shortcut*", "conv_shortcut"),
        ("down_blocks.0.downsamplers*", None),
        ("mid_block.attentions.0.to_[qkv]*", ".attentions."),
        ("mid_block.attentions.0.to_v*", ".attentions."),
        ("mid_block.attentions.0.to_out*", ".attentions."),
        ("up_blocks.0.upsamplers*", "upsamplers"),
        ("time_embedding*", "time_emb"),
        ("*time_emb_proj*", None),
        ("conv_out*", None),
    ],
)
def test_gradient_of_the_term_is_the_cpus(pattern, loud, rng):
    """What the term adds to all gradients, with a weight that drowns the rest. Another layer's would be 1.4
    of it away, none 1; of 3 networks at 12 patterns the worst were 0.45, and for the ratio of norms 0.07.
    """
    squares = np.zeros(3)  # ours - theirs, theirs, ours
    for _ in range(3):
        case, added = Case("tiny", rng, put, {pattern: "fp4"}, loud), []
        fast = [n for n, track in products(case).items() if track == "fp4"]
        for run, watching, make in (
            (case.on_host, nn.watching, lambda w: Consistency(w, 1000)),
            (case.on_device, watch.watching, lambda w: watch.Probe((), fast, w)),  # noqa: B023
        ):
            found = []
            for weight in (1e5, 0.0):
                watcher = make(weight)
                if isinstance(watcher, Consistency):
                    watcher.begin(0, fast)
                with watching(watcher):
                    found.append(run()[1])
            added.append({n: found[0][n] - found[1][n] for n in found[0]})
        theirs, ours = added
        assert [n for n in theirs if theirs[n].any()] == [n for n in ours if ours[n].any()]
        a, b = joined(theirs), joined(ours)
        size = np.linalg.norm(a)
        squares += np.square([distance(b, a) / size, 1, np.linalg.norm(b) / size])
    apart, _, size = np.sqrt(squares / 3)
    assert apart < 0.75 and 0.8 < size < 1.25


def test_only_chosen_products_are_run_again(rng, host_cuda):  # noqa: F811
    case = Case("tiny", rng, put, FP4)
    calls = {}
    for names in ((), ("conv_out.weight", "mid_block.resnets.0.conv1.weight")):
        before, probe = host_cuda.calls["conv2d"] + host_cuda.calls["conv2d_few"], watch.Probe(names)
        with watch.watching(probe):
            case.on_device()
        probe.read()
        assert set(probe.omega) == set(names) and probe.ratios == {}
        calls[names] = host_cuda.calls["conv2d"] + host_cuda.calls["conv2d_few"] - before
    few, more = calls.values()
    assert more - few == 3  # the first of the two with a time embedding, alone on both tracks


def test_frozen_passes_are_not_watched(rng):
    case = Case("tiny", rng, put, FP4)
    probe = watch.Probe()
    with watch.watching(probe), no_grad():
        case.forward()
    probe.read()
    assert probe.omega == {} and not probe._kept


def test_what_is_no_watcher_is_refused():
    with pytest.raises(TypeError, match="Watcher, but a RunWatcher is needed"), watch.watching(nn.Watcher()):
        pass
    assert watch.current() == ()


def test_infinities_are_said(rng):
    case = Case("tiny", rng, put, FP4)
    case.x[0, 0, 0, 0] = np.inf
    probe = watch.Probe(None, ["conv_in.weight"])
    with watch.watching(probe), np.errstate(all="ignore"):
        case.on_device()
        probe.read()
    assert probe.omega["conv_in.weight"] == np.inf and not np.isfinite(probe.ratios["conv_in.weight"])


# ---- products by phases ------------------------------------------------------------------------------------
class Again(watch.RunWatcher):
    """Makes the product of the upsampling again, on both tracks; keeps its results and its gradient."""

    def __init__(self):
        self.d, self.again, self.shapes, self.g = None, {}, {}, None

    def product(self, run, layer, feed, scale, d, finish):
        if "upsamplers" not in layer.name:
            return
        self.d = self.numbers(run, d)
        for track in ("fp4", "bf16"):
            with run.aside():
                other, of = feed.other(run, track)
                y = watch.alone(run, layer if of is None else of, other, track, d)
            self.again[track] = self.numbers(run, y)
            self.shapes[track] = other.x.shape

    @staticmethod
    def numbers(run, x):
        return np.array(device.to_host(watch.converted(run, x, x.shape[3], "float32")))

    def gradient(self, run, layer, g):
        if "upsamplers" in layer.name:
            self.g = g.shape
        return g


@pytest.mark.parametrize("phases", [True, False])
def test_a_watched_upsampling_multiplies_what_an_unwatched_one_does(phases, rng):
    """The same bits on its own track, and on the other one those of a network on that track for the same
    input; of the small pictures by phases.
    """
    found = {}
    state = rng.bit_generator.state
    for track in ("fp4", "bf16"):
        rng.bit_generator.state = state
        case = Case("tiny", rng, put, {"*upsamplers*": track, "*": "bf16"})
        for model in (case.host, case.device):
            model.upsample_by_phases(phases)
        plain, plain_gradients = case.on_device()
        watcher = found[track] = Again()
        with watch.watching(watcher):
            y, gradients = case.on_device()
        np.testing.assert_array_equal(y, plain)
        for n, g in gradients.items():
            np.testing.assert_array_equal(g, plain_gradients[n], err_msg=n)
        np.testing.assert_array_equal(watcher.again[track], watcher.d)
        side = 4 if phases else 8
        assert watcher.shapes[track][1:3] == (side, side) and watcher.g[1:3] == (8, 8)
    one, two = found.values()  # all before the upsampling runs on BF16: its input is the same
    for track, watcher in found.items():
        for other in (one, two):
            np.testing.assert_array_equal(other.again[track], watcher.d)


# ---- the clock ---------------------------------------------------------------------------------------------
def test_clock_times_every_product(rng):
    """By a clock that counts: equal products are timed once, those of a group share its time."""
    case, ticks = Case("variants", rng, put, MIXED), iter(range(10**6))
    clock = watch.Clock(repeats=1, clock=lambda: float(next(ticks)))
    plain = case.on_device()
    with watch.watching(clock):
        y, gradients = case.on_device()
    np.testing.assert_array_equal(y, plain[0])
    assert all(np.array_equal(g, plain[1][n]) for n, g in gradients.items())
    sizes = {n for n, w in work(case.host, case.shape).items() if w.op in ("linear", "conv2d")}
    assert set(clock.times) == sizes
    assert all(set(t) == {"bf16", "fp4"} and t["bf16"] == t["fp4"] > 0 for t in clock.times.values())
    whole = [clock.times[f"mid_block.attentions.0.to_{n}.weight"]["fp4"] for n in "qk"]
    assert whole[0] == whole[1] <= 1e6
    assert next(ticks) < 4 * len(sizes)
