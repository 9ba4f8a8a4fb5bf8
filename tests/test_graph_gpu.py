"""Captured graphs of CuPy: replays, memory, and what is left behind by a function that cannot be captured."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from test_graph import fragmenting

import fp4bf16 as fb
from fp4bf16 import device
from fp4bf16.backends import cuda
from fp4bf16.nn.cuda.graph import Graph
from fp4bf16.nn.cuda.optim import DeviceAdamW
from fp4bf16.nn.cuda.parameters import DeviceParameters
from fp4bf16.nn.module import FlatParameters, Parameter
from fp4bf16.python_ref import quantize as reference


@pytest.fixture
def cupy():
    module = pytest.importorskip("cupy")
    if not cuda.devices():
        pytest.skip("no GPU")
    return module


@pytest.fixture
def allocated(cupy, monkeypatch):
    """A function that gives the bytes of the device that graphs' pools hold: of what they asked CuPy for and
    CuPy has not freed. What the device itself says moves with every module that is loaded.
    """
    alive = weakref.WeakSet()

    class Memory(cupy.cuda.Memory):
        def __init__(self, size):
            super().__init__(size)
            alive.add(self)

    monkeypatch.setattr(cupy.cuda, "Memory", Memory)
    return lambda: sum(memory.size for memory in alive)


@pytest.mark.gpu
def test_replays_read_what_lies_there_by_then(cupy, rng):
    x = cupy.asarray(rng.standard_normal((96, 320)).astype(np.float32))
    graph = Graph(x)
    xq, y = graph.capture(lambda stream: (lambda q: (q, fb.dequantize(q)))(fb.quantize(x[:, ::-1])))
    stream = cupy.cuda.Stream(non_blocking=True)
    for handle in (0, stream.ptr, 0):
        new = rng.standard_normal((96, 320)).astype(np.float32)
        x.set(new)
        cupy.cuda.Device().synchronize()
        others = [cupy.full((96, 320), 7, np.float32) for _ in range(8)]
        found = graph.replay(handle)
        cupy.cuda.Device().synchronize()
        assert found[0] is xq and all((cupy.asnumpy(o) == 7).all() for o in others)
        want = reference.quantize(new[:, ::-1])
        np.testing.assert_array_equal(cupy.asnumpy(xq.packed), want.packed)
        np.testing.assert_array_equal(cupy.asnumpy(y), reference.dequantize(want))


@pytest.mark.gpu
def test_begins_after_the_current_stream(cupy, rng):
    """The warm-up, on a stream that does not wait for the default one, sees what is queued there."""
    x, y = cupy.zeros(1 << 24, np.float32), cupy.zeros(1 << 24, np.float32)
    cupy.cuda.Device().synchronize()
    for _ in range(50):  # still running when the warm-up begins
        x += 1
    graph = Graph(x)
    graph.capture(lambda stream: cupy.copyto(y, x))
    assert float(y.min()) == float(y.max()) == 50
    x += 1
    graph.replay()
    assert float(y.min()) == float(y.max()) == 51


@pytest.mark.gpu
def test_memory_is_the_graphs_and_goes_with_it(cupy, allocated):
    x = cupy.arange(1 << 20, dtype=np.float32)
    graph = Graph(x)
    adapter = device._FRAMEWORKS["cupy"]
    held, pool = len(adapter.held), cupy.get_default_memory_pool()
    cupy.cuda.Device().synchronize()
    gc.collect()
    used = pool.used_bytes()

    def work(stream):
        y = x
        for _ in range(20):  # 20 intermediate arrays, two of which live at a time
            y = device.full(x.shape, 1, "float32", like=device.operand(x, "x")).owner + y
        return y

    y = graph.capture(work)
    assert 2 * x.nbytes <= graph.memory <= 5 * x.nbytes, "intermediate memory is used again"
    assert pool.used_bytes() == used and len(adapter.held) == held and not adapter.pooled
    for _ in range(2):
        graph.replay()
        np.testing.assert_array_equal(cupy.asnumpy(y), np.arange(1 << 20, dtype=np.float32) + 20)
    assert allocated() == graph.memory
    graph.release()
    assert allocated() == x.nbytes, "all but the result's memory is the device's again"
    np.testing.assert_array_equal(cupy.asnumpy(y[:4]), np.arange(4, dtype=np.float32) + 20)
    del y
    assert allocated() == 0, "the pool's memory is the device's again"


@pytest.mark.gpu
@pytest.mark.parametrize("graph_first", [True, False])
def test_parts_of_a_block_go_with_the_last_of_them(cupy, allocated, graph_first):
    """Results that are parts of one block of the pool: whoever goes last frees it."""
    x = cupy.ones(1 << 20, np.float32)
    graph, half = Graph(x), x.size // 2

    def work(stream):
        whole = x + x  # makes the block that the next two arrays divide
        del whole
        return [x[:half] + i for i in range(2)]

    work(0)  # compiles what it launches
    results = graph.capture(work, warmups=0)  # so that nothing is laid out before
    assert graph.memory == allocated() == x.nbytes
    graph.replay()
    if graph_first:
        graph.release()
    while results:
        assert allocated() == x.nbytes
        assert float(results.pop()[-1]) == 1 + len(results)
    del graph
    assert allocated() == 0


@pytest.mark.gpu
def test_memory_is_little_more_than_what_lives_at_once(cupy, allocated):
    x = cupy.zeros(12, np.float32)
    x += 1  # compiles
    peaks = []

    def work(stream):
        total = cupy.zeros(12, np.float32)

        def use(array, value):
            array.fill(value + 1)
            total[value % 12] += array[-1] * x[0]

        peaks.append(max(fragmenting(lambda size: cupy.empty(size // 4, np.float32), use)))
        return total

    graph = Graph(x)
    total = graph.capture(work)
    assert len(peaks) == 2 and graph.memory == allocated() <= 1.1 * peaks[0]
    want = np.array([2 * (i + 1) for i in range(12)], np.float32)
    want[99 % 12] += 100
    for factor in (1, 3):
        x.fill(factor)
        graph.replay()
        np.testing.assert_array_equal(cupy.asnumpy(total), factor * want)
    graph.release()
    assert allocated() == 512, "the result's memory is its own"
    del total
    assert allocated() == 0


@pytest.mark.gpu
def test_a_capture_that_differs_from_the_warm_up(cupy, allocated, rng):
    """Arrays that the warm-up did not make, makes in another order or freed earlier: results are right, and
    nothing overlaps.
    """
    x = cupy.asarray(rng.integers(0, 1000, 1 << 18).astype(np.float32))
    runs = []

    def work(stream):
        runs.append(stream)
        held, total = [], cupy.zeros_like(x)
        for i in range(10):
            part = x[: x.size // (1 + i % 3)] * (i + 1)
            if len(runs) > 1:
                held.append(part)  # lives longer in the capture
                if i % 4 == 0:
                    held.append(x * 0 + i)
            total[: part.size] += part
        for part in held:
            total[: part.size] += part * 0
        return total

    graph = Graph(x)
    total = graph.capture(work)
    new = rng.integers(0, 1000, x.size).astype(np.float32)
    x.set(new)
    graph.replay()
    want = np.zeros_like(new)
    for i in range(10):
        want[: x.size // (1 + i % 3)] += new[: x.size // (1 + i % 3)] * (i + 1)
    np.testing.assert_array_equal(cupy.asnumpy(total), want)
    del total, graph
    assert allocated() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["raises", "synchronises", "reads back", "bad argument", "unjoined"])
def test_a_failed_capture_leaves_nothing_behind(cupy, kind):
    x, side = cupy.ones((64, 64), np.float32), cupy.cuda.Stream(non_blocking=True)
    runs = []

    def work(stream):
        y = fb.dequantize(fb.quantize(x))
        runs.append(cupy.cuda.get_current_stream())
        assert stream == runs[-1].ptr
        if len(runs) == 1:
            return y
        if kind == "raises":
            raise KeyError("mine")
        if kind == "synchronises":
            cupy.cuda.get_current_stream().synchronize()
        if kind == "reads back":
            cupy.asnumpy(y)
        if kind == "bad argument":
            device.call("quantize", cuda.load().ffi.new("fp4bf16_quantize_args*", {"rows": -1}), stream)
        side.wait_event(runs[-1].record())
        with side:
            cupy.add(x, 1, out=x)
        return y

    graph = Graph(x)
    wanted = {"raises": KeyError, "bad argument": ValueError}.get(kind, fb.CudaError)
    with pytest.raises(wanted) as caught:
        graph.capture(work)
    if wanted is fb.CudaError:
        assert "cannot be captured" in str(caught.value)
    assert not graph.captured and graph.memory == 0
    assert len(runs) == 2 and not runs[1].is_capturing() and not side.is_capturing()
    cupy.cuda.Device().synchronize()  # raises an error that was left
    assert not device._FRAMEWORKS["cupy"].pooled
    y = graph.capture(lambda stream: x + x)  # and the next one works
    graph.replay()
    cupy.cuda.Device().synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(y), 2 * cupy.asnumpy(x))
    np.testing.assert_array_equal(cupy.asnumpy(fb.dequantize(fb.quantize(x))), cupy.asnumpy(x))


@pytest.mark.gpu
def test_optimizer_in_a_graph_has_the_bits_of_the_eager_one(cupy, rng):
    """`prepare` outside, `step` inside: eight steps, one with a gradient that is not finite."""
    shapes = {"conv.weight": (64, 3, 3, 48), "conv.bias": (64,), "in.weight": (32, 3, 3, 3), "q": (40, 64)}
    flat = FlatParameters({
        n: Parameter(rng.standard_normal(s).astype(np.float32), n) for n, s in shapes.items()
    })  # fmt: skip
    like = cupy.zeros(1, np.float32)
    sets = [DeviceParameters(flat, like) for _ in range(2)]
    averages = [s.clone() for s in sets]
    optimizers = [
        DeviceAdamW(s, 1e-3, weight_decay=0.01, clip=1.0, average=a, decay=0.99)
        for s, a in zip(sets, averages, strict=True)
    ]
    for s in sets:
        s.bf16_of("in.weight", channels=8)
    graph = Graph(like)
    for step in range(8):
        g = cupy.asarray(rng.standard_normal(flat.data.size).astype(np.float32))
        if step == 5:
            g[17] = np.inf
        for s, o in zip(sets, optimizers, strict=True):
            s.grad.owner[...] = g
            o.prepare(1e-3 / (1 + step))
        optimizers[1].step()
        if step == 0:
            graph.capture(optimizers[0].step)  # whose warm-up is the first step
        else:
            graph.replay()
        pairs = [(a.data, b.data) for a, b in (sets, averages)]
        pairs += [(getattr(sets[0], n), getattr(sets[1], n)) for n in ("bf16", "twin", "twin_scale")]
        pairs += [tuple(getattr(o, n) for o in optimizers) for n in ("first", "second", "norm")]
        pairs.append(tuple(s.bf16_of("in.weight", channels=8) for s in sets))
        for i, (a, b) in enumerate(pairs):
            a, b = (np.ascontiguousarray(device.to_host(x)).reshape(-1).view(np.uint8) for x in (a, b))
            np.testing.assert_array_equal(a, b, err_msg=f"step {step}, array {i}")
