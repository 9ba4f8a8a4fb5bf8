"""Captured graphs of CuPy: replays, memory, and what is left behind by a function that cannot be captured."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import device
from fp4bf16.adapters import DeviceArray
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


# ---- on a GPU
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

    results = graph.capture(work)
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


# ---- without a GPU: the order of what is asked of CuPy
class Refused(RuntimeError):
    """In place of CUDARuntimeError."""


def toy_stream(toy, log):
    class Stream:
        ptr = 4096

        def __init__(self, non_blocking=False):
            self.capturing = False

        def __enter__(self):
            log.append("stream")

        def __exit__(self, *error):
            log.append("stream left")

        def record(self):
            return "event"

        def wait_event(self, event):
            log.append("wait")

        def synchronize(self):
            if self.capturing:
                raise Refused("capturing")
            log.append("synchronize")

        def begin_capture(self, mode):
            log.append(f"begin {mode}")
            self.capturing = True

        def end_capture(self):
            log.append("end")
            self.capturing = False
            if "end" in toy.refuse:
                raise Refused("invalidated")
            return SimpleNamespace(launch=lambda stream: log.append("launch"))

    return Stream


def toy_memory(toy, log):
    class Memory:
        ptr = 8192

        def __init__(self, size):
            if "memory" in toy.refuse:
                raise Refused("out of memory")
            weakref.finalize(self, log.append, "freed")

    class MemoryPool:
        def __init__(self, allocator):
            self.malloc = allocator

        def total_bytes(self):
            return 12345

        def free_all_blocks(self):
            log.append("give back")

    return Memory, MemoryPool


class Toy:
    """So much of CuPy as a capture needs; `log` is what was asked of it."""

    def __init__(self):
        self.log, self.refuse = [], set()
        Stream, (Memory, MemoryPool) = toy_stream(self, self.log), toy_memory(self, self.log)

        @contextmanager
        def using_allocator(malloc):
            self.malloc = malloc
            yield
            self.malloc = None

        @contextmanager
        def place(index):
            yield

        self.stream = Stream()
        self.cuda = SimpleNamespace(
            Stream=Stream, Memory=Memory, MemoryPointer=lambda memory, offset: memory, MemoryPool=MemoryPool,
            UnownedMemory=lambda ptr, size, owner, place: owner,
            Device=place, using_allocator=using_allocator, get_current_stream=lambda: self.stream,
            runtime=SimpleNamespace(CUDARuntimeError=Refused, streamCaptureModeRelaxed="relaxed"),
        )  # fmt: skip


@pytest.fixture
def toy(monkeypatch):
    made = Toy()
    adapter = SimpleNamespace(
        cupy=made, pooled=set(), name="cupy", current_device=lambda: 0, current_stream=lambda place: 0
    )
    monkeypatch.setitem(device._FRAMEWORKS, "cupy", adapter)
    made.adapter = adapter
    made.like = DeviceArray(64, (1,), (1,), "float32", 0, "cupy", None, "x")
    return made


def test_order_of_a_capture(toy):
    seen = []

    def work(stream):
        seen.append((stream, set(toy.adapter.pooled), toy.malloc is not None))
        return len(seen)

    graph = Graph(toy.like)
    assert graph.capture(work) == 2 and seen == [(4096, set(), True), (4096, {4096}, True)]
    warm_up = ["wait", "stream", "synchronize", "stream left"]
    assert toy.log == [*warm_up, "wait", "stream", "begin relaxed", "end", "stream left"]
    assert graph.replay() == 2 and toy.log[-1] == "launch" and graph.memory == 12345
    assert not toy.adapter.pooled and toy.malloc is None


@pytest.mark.parametrize("released", [True, False])
def test_the_last_that_has_the_pool_gives_it_back(toy, released):
    graph = Graph(toy.like)
    kept = graph.capture(lambda stream: [toy.malloc(512) for _ in range(2)])
    toy.log.clear()
    if released:
        graph.release()
        assert toy.log == ["give back"]  # what the results are not
    del graph
    del kept[0]
    assert toy.log == ["give back", "freed"]
    del kept
    assert toy.log == ["give back", "freed", "freed", "give back"]  # the block goes to the pool before


@pytest.mark.parametrize("kind", ["raises", "refused", "refused by CuPy", "refused at the end", "no memory"])
def test_a_capture_that_fails_is_ended(toy, kind):
    graph, runs = Graph(toy.like), []

    def work(stream):
        runs.append(stream)
        if len(runs) == 1:
            return None
        if kind == "raises":
            raise KeyError("mine")
        if kind == "refused":
            toy.refuse.add("end")
            raise Refused("not permitted")
        if kind == "refused by CuPy":
            raise RuntimeError("the current stream is capturing, so D2H transfers are disallowed")
        if kind == "no memory":
            toy.refuse.add("memory")
            toy.malloc(512)
        toy.refuse.add("end")

    wanted, sentence = {
        "raises": (KeyError, "mine"), "refused": (fb.CudaError, r"cannot be captured \(not permitted\)"),
        "refused by CuPy": (fb.CudaError, r"cannot be captured \(the current stream is capturing, so D2H"),
        "refused at the end": (fb.CudaError, r"cannot be captured \(invalidated\)"),
        "no memory": (fb.CudaError, "the device has no 512 bytes left"),
    }[kind]  # fmt: skip
    with pytest.raises(wanted, match=sentence):
        graph.capture(work)
    assert toy.log[-2:] == ["end", "stream left"] and not graph.captured and not toy.adapter.pooled


def test_memory_before_the_capture_is_the_pools_affair(toy):
    """CuPy's pool frees what it can and asks again, so it must see the error itself."""
    toy.refuse.add("memory")
    with pytest.raises(Refused, match="out of memory"):
        Graph(toy.like).capture(lambda stream: toy.malloc(512))
