"""Parameters in device memory on an emulated GPU: layout, views, copies, checkpoints; the optimizer against
the CPU's; what stands in for a graph.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from host_cuda import FakeArray, host_cuda, put  # noqa: F401  (host_cuda is a fixture)

import fp4bf16 as fb
from fp4bf16 import device
from fp4bf16.diffusion.ema import EMA
from fp4bf16.nn.cuda.graph import Graph
from fp4bf16.nn.cuda.optim import DeviceAdamW
from fp4bf16.nn.cuda.parameters import DeviceParameters
from fp4bf16.nn.module import FlatParameters, Parameter
from fp4bf16.nn.optim import AdamW, clip_norm
from fp4bf16.python_ref.quantize import expand, quantize

pytestmark = pytest.mark.usefixtures("host_cuda")
BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {
    "conv_in.weight": (32, 3, 3, 3), "conv_in.bias": (32,), "conv.weight": (48, 3, 3, 32), "conv.bias": (48,),
    "to_q.weight": (40, 64), "norm.weight": (7,), "conv_out.weight": (3, 3, 3, 32), "odd.weight": (5, 20),
    "one": (1,), "none.weight": (0, 16),
}  # fmt: skip
TWINS = {"conv.weight", "to_q.weight", "conv_out.weight", "none.weight"}


@pytest.fixture
def flat(rng):
    return FlatParameters({
        name: Parameter(rng.standard_normal(shape).astype(np.float32), name) for name, shape in SHAPES.items()
    })  # fmt: skip


@pytest.fixture
def like():
    return put(np.zeros(1, np.float32))


def host(x) -> np.ndarray:
    return x.owner.array


def same(got, want, what="") -> None:
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape, what
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=what)


def check_copies(found: DeviceParameters, state) -> None:
    """Every copy is that of `state` (host arrays by name)."""
    for name, x in state.items():
        same(host(found.data_of(name)), x, name)
        same(host(found.bf16_of(name)), x.astype(BF16), name)
        twin = found.twin_of(name)
        assert (twin is not None) == (name in TWINS), name
        if twin is not None and x.size:
            want = quantize(x.reshape(x.shape[0], -1), "nvfp4_exact", outer="row")
            same(host(twin[0]), expand(want).reshape(x.shape), name)
            same(host(twin[1]), want.outer_scale[:, 0], name)


# ---- layout and copies
def test_views_and_copies(flat, like):
    found = DeviceParameters(flat, like)
    assert not host(found.bf16).any() and not host(found.twin).any(), "the copies wait for refresh"
    found.refresh()
    check_copies(found, {name: p.data for name, p in flat.named.items()})
    for name, p in flat.named.items():
        for x in (found.data_of(name), found.bf16_of(name), found.grad_of(name)):
            assert x.shape == p.shape and x.c_contiguous
            assert x.address % 16 == 0 or not p.size
        for x, whole in ((found.data_of(name), found.data), (found.grad_of(name), found.grad)):
            assert x.address == whole.address + 4 * flat.offsets[name] or not p.size
        assert found.data_of(name) is found.data_of(name), "a view is made once"
        twin = found.twin_of(name)
        if twin is not None and twin[0].size:
            assert twin[0].address % 16 == 0 and twin[0].c_contiguous and twin[0].shape == p.shape
    assert not host(found.grad).any()


def test_twin_equals_the_public_quantiser(flat, like):
    found = DeviceParameters(flat, like)
    found.refresh()
    twin, scale = found.twin_of("conv.weight")
    want = fb.quantize(flat.named["conv.weight"].data, "nvfp4_exact", outer="image", expand=True)
    same(host(twin), want.expanded)
    same(host(scale), want.outer_scale.reshape(-1))


def test_the_host_keeps_its_own(flat, like, rng):
    before = flat.data.copy()
    found = DeviceParameters(flat, like)
    host(found.data)[:] = 0
    same(flat.data, before)


def test_quantised_by_name(flat, like):
    found = DeviceParameters(flat, like, quantised=lambda name: name.startswith("to_"))
    found.refresh()
    assert [n for n in SHAPES if found.twin_of(n) is not None] == ["to_q.weight"]
    same(host(found.bf16), flat.data.astype(BF16))


def test_gaps_are_zero(flat, like):
    found = DeviceParameters(flat, like)
    found.refresh()
    inside = np.zeros(flat.data.size, bool)
    for view in flat.views(inside).values():
        view[...] = True
    assert not host(found.bf16)[~inside].any() and not host(found.data)[~inside].any()


def test_padded_copies(flat, like):
    found = DeviceParameters(flat, like)
    wide = found.bf16_of("conv_in.weight", channels=8)
    odd = found.bf16_of("odd.weight", channels=24)
    for _ in range(2):
        for x, name in ((wide, "conv_in.weight"), (odd, "odd.weight")):
            data = host(found.data_of(name))
            want = np.zeros(x.shape, BF16)
            want[tuple(slice(n) for n in data.shape)] = data.astype(BF16)
            same(host(x), want, name)
        host(found.data)[:] *= np.float32(-1.7)
        found.refresh()
    assert wide.shape == (32, 3, 3, 8) and odd.shape[-1] == 24
    assert found.bf16_of("conv_in.weight", channels=8) is wide
    for name, sizes in (("conv_in.weight", {"channels": 2}), ("norm.weight", {"channels": 8})):
        with pytest.raises(fb.ShapeError, match=f"{name} has shape .* cannot be padded"):
            found.bf16_of(name, **sizes)


def test_padded_copies_in_another_shape(flat, like):
    """Of a convolution: the values of an output as one row."""
    found = DeviceParameters(flat, like)
    rows = found.bf16_of("conv_in.weight", channels=32, shape=(32, 27))
    for _ in range(2):
        same(host(rows)[:, :27], host(found.data_of("conv_in.weight")).astype(BF16).reshape(32, 27))
        assert not host(rows)[:, 27:].any()
        host(found.data)[:] *= np.float32(-1.7)
        found.refresh()
    assert found.bf16_of("conv_in.weight", channels=32, shape=(32, 27)) is rows
    with pytest.raises(fb.ShapeError, match=r"\(32, 3, 3, 3\), which cannot be seen as \(32, 28\)"):
        found.bf16_of("conv_in.weight", channels=32, shape=(32, 28))


def test_clones_are_their_own(flat, like):
    found = DeviceParameters(flat, like)
    found.refresh()
    other = found.clone()
    state = {name: p.data.copy() for name, p in flat.named.items()}
    assert other.layout is found.layout and other.grad is None
    host(found.data)[:] *= 2
    found.refresh()
    check_copies(other, state)
    check_copies(found, {name: 2 * x for name, x in state.items()})
    with pytest.raises(ValueError, match="conv.bias has no gradient"):
        other.grad_of("conv.bias")


def test_state_goes_and_comes(flat, like, rng):
    found = DeviceParameters(flat, like)
    state = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    found.from_host(state)
    check_copies(found, state)
    back = found.to_host()
    assert list(back) == list(SHAPES)
    for name, x in state.items():
        same(back[name], x, name)
    wrong = {**state, "conv.bias": np.zeros(49, np.float32), "other": np.zeros(1)}
    wrong.pop("one")
    sentence = r"one is missing; other is not known; conv.bias has shape \(49,\) instead of \(48,\)"
    with pytest.raises(fb.ShapeError, match=sentence):
        found.from_host(wrong)
    check_copies(found, state)


def test_refusals(flat, like):
    found = DeviceParameters(flat, like)
    for call in (found.data_of, found.bf16_of, found.twin_of, found.grad_of):
        with pytest.raises(KeyError, match="there is no parameter 'conv.wieght'"):
            call("conv.wieght")
    double = FlatParameters({"w": Parameter(np.zeros((2, 16)), "w")})
    with pytest.raises(fb.DTypeError, match="float64, but float32"):
        DeviceParameters(double, like)
    with pytest.raises(TypeError, match="an array on the GPU is needed"):
        DeviceParameters(flat, np.zeros(1, np.float32))


def test_no_parameters(like):
    found = DeviceParameters(FlatParameters({}), like)
    found.refresh()
    assert found.to_host() == {} and found.data.size == 0


def test_other_device_and_stream(flat, host_cuda):  # noqa: F811
    found = DeviceParameters(flat, put(np.zeros(1, np.float32), 1))
    assert {x.device for x in (found.data, found.bf16, found.twin, found.layout.table.tensors)} == {1}
    with device.on(found.data):
        found.refresh(77)
    assert host_cuda.streams[-1] == 77


# ---- the optimizer
@pytest.mark.parametrize("clip", [None, 0.7])
def test_optimizer_against_the_cpu(flat, like, rng, clip):
    """The CPU's bits without clipping; with it, the factor's rounding is the norm's: 2^-20 is generous."""
    found = DeviceParameters(flat, like)
    average = found.clone()
    ours = DeviceAdamW(found, 1e-3, weight_decay=0.02, clip=clip, average=average, decay=0.99)
    padded = found.bf16_of("conv_in.weight", channels=8)
    cpu, ema = AdamW(flat.data, 1e-3, weight_decay=0.02), EMA(flat.data, 0.99)
    inside = np.zeros(flat.data.size, np.float32)
    for view in flat.views(inside).values():
        view[...] = 1
    for step in range(4):
        g = rng.standard_normal(flat.data.size).astype(np.float32) * inside
        host(found.grad)[:] = g
        ours.prepare(1e-3 / (step + 1))
        ours.step()
        norm = clip_norm(g, clip)
        cpu.step(g, 1e-3 / (step + 1))
        ema.update(flat.data, step)
        np.testing.assert_allclose(host(ours.norm), norm, rtol=2.0**-20)
        if clip is None:
            same(host(found.data), flat.data)
            same(host(average.data), ema.average)
            same(host(ours.first), cpu.first)
            same(host(ours.second), cpu.second)
        np.testing.assert_allclose(host(found.data), flat.data, rtol=2.0**-20, atol=2.0**-26)
        check_copies(found, {n: x.copy() for n, x in found.layout.views(host(found.data)).items()})
        same(host(padded)[..., :3], host(found.data_of("conv_in.weight")).astype(BF16))
    assert ours.count == cpu.count == 4


def test_a_step_that_is_not_finite_changes_nothing(flat, like, rng):
    found = DeviceParameters(flat, like)
    average = found.clone()
    ours = DeviceAdamW(found, 1e-3, average=average)
    loss = device.operand(put(np.zeros(1)), "loss")

    def step(gradient, value):
        host(found.grad)[:], host(loss)[:] = gradient, value
        ours.prepare()
        ours.step(loss=loss)

    step(rng.standard_normal(flat.data.size).astype(np.float32), 1.0)
    arrays = (found.data, average.data, ours.first, ours.second, found.bf16, found.twin)
    before = [host(x).copy() for x in arrays]
    assert (before[0] != flat.data).any()
    for gradient, value in ((np.nan, 1.0), (np.inf, 1.0), (0.1, np.nan)):
        step(np.float32(gradient), value)
        for x, was in zip(arrays, before, strict=True):
            same(host(x), was)


def test_moments_go_and_come(flat, like, rng):
    found = DeviceParameters(flat, like)
    ours = DeviceAdamW(found, 1e-3)
    host(found.grad)[:] = 1
    ours.prepare()
    ours.step()
    state = ours.state()
    start = found.layout.offsets["to_q.weight"]
    same(state["first"]["to_q.weight"], host(ours.first)[start : start + 2560].reshape(40, 64))
    other = DeviceAdamW(found, 1e-3)
    other.load_state(state, ours.count)
    inside = found.layout.pack(state["second"])
    same(host(other.second), inside)
    assert other.count == 1
    with pytest.raises(fb.ShapeError, match="the state holds first, but first and second"):
        other.load_state({"first": state["first"]}, 1)
    with pytest.raises(fb.ShapeError, match="one is missing"):
        other.load_state({n: {k: v for k, v in s.items() if k != "one"} for n, s in state.items()}, 1)


# ---- in place of a graph
def test_where_there_is_no_cupy_the_function_is_called(like):
    graph, seen = Graph(like), []
    assert not graph.captured and graph.memory == 0
    with pytest.raises(ValueError, match="nothing is captured"):
        graph.replay()
    graph.capture(lambda stream: seen.append(stream) or len(seen), warmups=2)
    assert graph.captured and seen == [0, 0]
    assert [graph.replay(), graph.replay(5)] == [3, 4] and seen == [0, 0, 0, 5]
    graph.release()
    assert not graph.captured
    with pytest.raises(ZeroDivisionError):
        graph.capture(lambda stream: 1 // 0)
    assert not graph.captured
