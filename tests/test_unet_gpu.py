"""The UNet on a GPU with CuPy: against the CPU's network and tape, and against itself in a captured graph.

Tolerances as in test_unet_device.py, which runs the same code by the emulated library.
"""

from __future__ import annotations

import numpy as np
import pytest
from unet_cases import CONFIGS, FP4, Case, distance, joined, relative

from fp4bf16 import device, nn
from fp4bf16.nn.cuda.graph import Graph
from fp4bf16.nn.tape import no_grad

pytestmark = pytest.mark.gpu
ROUTES = {"bf16": {}, "fp4": FP4}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_bf16_track_is_the_cpus(name, cupy, rng):
    """Prediction and gradients: errors beside those of the CPU's BF16 track."""
    case = Case(name, rng, cupy.asarray)
    exact, exact_gradients = case.on_host("reference")
    theirs, their_gradients = case.on_host()
    ours, gradients = case.on_device()
    assert 1e-4 < relative(ours, exact) < 2.5 * relative(theirs, exact)
    typical = np.median([relative(their_gradients[n], g) for n, g in exact_gradients.items()])
    for n, g in exact_gradients.items():
        size = max(np.linalg.norm(g), np.linalg.norm(exact_gradients[n.replace(".bias", ".weight")]))
        least = distance(their_gradients[n], g) + typical * size
        assert distance(gradients[n], g) < 4 * least, n
    want = joined(exact_gradients)
    assert relative(joined(gradients), want) < 2.5 * relative(joined(their_gradients), want)


@pytest.mark.parametrize("name", ["tiny", "variants", "no middle"])
def test_the_fp4_track_is_as_far_as_the_cpus(name, cupy, rng):
    case = Case(name, rng, cupy.asarray, FP4)
    exact, exact_gradients = case.on_host("reference")
    theirs, their_gradients = case.on_host()
    ours, gradients = case.on_device()
    assert relative(ours, exact) < 1.4 * relative(theirs, exact)
    want = joined(exact_gradients)
    assert relative(joined(gradients), want) < 1.4 * relative(joined(their_gradients), want)


@pytest.mark.parametrize(
    "pattern, loud",
    [
        ("conv_in*", None),
        ("down_blocks.1.resnets.0.conv2*", "down_blocks.1.resnets.0.conv2"),
        ("mid_block.attentions.0.to_[qkv]*", ".attentions."),
        ("up_blocks.0.upsamplers*", "upsamplers"),
    ],
)
def test_what_an_fp4_layer_does(pattern, loud, cupy, rng):
    case = Case("tiny", rng, cupy.asarray, {pattern: "fp4"}, loud)
    (y0, g0), (y1, g1) = case.on_host("bf16"), case.on_host()
    (z0, h0), (z1, h1) = case.on_device("bf16"), case.on_device()
    g0, g1, h0, h1 = (joined(g) for g in (g0, g1, h0, h1))
    for a0, a1, b0, b1 in ((y0, y1, z0, z1), (g0, g1, h0, h1)):
        effect, rounding = distance(a1, a0), distance(b0, a0)
        assert effect > 2.5 * rounding
        assert distance(b1 - b0, a1 - a0) < 0.85 * effect


def test_ways_to_save_give_the_same_gradients(cupy, rng):
    seed, found = int(rng.integers(1 << 30)), []
    for save in ("packed", "bf16", "recompute"):
        found.append(Case("variants", np.random.default_rng(seed), cupy.asarray, FP4, save=save).on_device())
    for y, gradients in found[1:]:
        assert np.array_equal(y, found[0][0])
        for n, value in gradients.items():
            assert np.array_equal(value, found[0][1][n]), n


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["variants", "ddpm-cifar10-32"])
def test_twice_and_in_a_graph_the_same_bits(name, route, cupy, rng):
    case = Case(name, rng, cupy.asarray, ROUTES[route])
    y, gradients = case.on_device()
    again, gradients_again = case.on_device()
    assert np.array_equal(y, again)
    assert all(np.array_equal(gradients_again[n], g) for n, g in gradients.items())
    more = {n: cupy.asarray(v) for n, v in case.more.items()}
    x, t, g = cupy.zeros(case.shape, np.float32), cupy.zeros(len(case.t), np.int64), cupy.asarray(case.g)

    def step(stream):
        out = case.device(x, t, **more)
        out.backward(g)
        return out.data

    graph = Graph(x)
    out = graph.capture(step)
    x[...], t[...] = cupy.asarray(case.x), cupy.asarray(case.t)
    for _ in range(2):
        case.device.zero_grad()
        out[...] = np.nan
        graph.replay()
        assert np.array_equal(cupy.asnumpy(out), y)
        found = case.gradients()
        for n, value in gradients.items():
            assert np.array_equal(found[n], value), n


def test_no_grad_in_a_graph_on_other_weights(cupy, rng):
    case = Case("tiny", rng, cupy.asarray, FP4)
    with no_grad():
        y = case.fetch(case.forward().data)
    average = case.device.flat.clone()
    x, t, bag = (cupy.asarray(a) for a in (case.x, case.t, case.more["captions"]))

    def step(stream):
        with no_grad(), case.device.using(average):
            return case.device(x, t, captions=bag).data

    graph = Graph(x)
    out = graph.capture(step)
    graph.replay()
    assert np.array_equal(cupy.asnumpy(out), y)
    average.from_host({n: 0 * v for n, v in case.host.state_dict().items()})
    graph.replay()
    assert not out.any()


def test_memory_goes_back(cupy, rng):
    case = Case("variants", rng, cupy.asarray, FP4)
    case.on_device()
    pool = cupy.get_default_memory_pool()
    x, t, g, labels = (cupy.asarray(a) for a in (case.x, case.t, case.g, case.more["class_labels"]))
    before = pool.used_bytes()
    y = case.device(x, t, class_labels=labels)
    assert pool.used_bytes() - before > sum(
        case.device.inventory()[kind] for kind in ("saved FP4", "saved BF16", "joined pictures")
    )
    y.backward(g)
    del y
    assert pool.used_bytes() == before


def test_a_loss_on_the_tape(cupy, rng):
    """What the tape computes of the prediction with CuPy's own arrays leads into the network's node."""
    case = Case("tiny", rng, cupy.asarray)
    target, count = cupy.asarray(case.g), case.g.size
    y = case.forward()
    nn.ops.mean_squared_error(y, target).backward()
    found = case.gradients()
    case.device.zero_grad()
    y = case.forward()
    y.backward((y.data - target) * np.float32(2 / count))
    assert relative(joined(case.gradients()), joined(found)) < 1e-3
    with pytest.raises(TypeError, match="sample takes a gradient"):
        case.device(
            nn.Variable(cupy.asarray(case.x), requires_grad=True), 3, captions=case.put(case.more["captions"])
        )


def test_there_and_back(cupy, rng):
    case = Case("tiny", rng, cupy.asarray)
    y, gradients = case.on_device()
    model = case.device.cpu()
    assert not model.on_device
    assert all(np.array_equal(v, case.host.state_dict()[n]) for n, v in model.state_dict().items())
    assert all(np.array_equal(p.grad, gradients[n]) for n, p in model.named_parameters().items())
    model.cuda(cupy)
    with no_grad():
        assert np.array_equal(device.to_host(case.forward().data), y)


def test_the_forwards_stream_waits_for_a_backward_on_another(cupy, rng):
    """Else what the forward kept, freed and made again there, is written while the backward still reads."""
    case = Case("tiny", rng, cupy.asarray)
    case.on_device()  # makes what is made once
    one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    wide, g = cupy.zeros(1 << 28, np.float32), cupy.asarray(case.g)
    cupy.cuda.Device().synchronize()
    with one:
        y = case.forward()
    one.synchronize()
    with two:
        for _ in range(400):  # 200 ms, many times what a backward takes to be queued
            wide += 1
        y.backward(g)
    assert not two.done and not one.done
    one.synchronize()
    assert two.done and one.done
