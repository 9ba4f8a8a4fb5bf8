"""The UNet's device form, by the emulated library: against the CPU's network and tape; what memory it holds.

On the BF16 track the CPU rounds the operands of products, the device every activation that it stores: some
twice as many roundings of 2^-9. On the FP4 track such a rounding may carry a number over to the next code, so
that two right implementations part by nearly as much as FP4 does from BF16; what one FP4 layer does to a
network is compared instead.
"""

from __future__ import annotations

import weakref

import host_cuda as emulation
import numpy as np
import pytest
from host_cuda import Arrays, host_cuda, put  # noqa: F401  (host_cuda is a fixture)
from unet_cases import FP4, Case, distance, joined, relative

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.backends import cuda_math
from fp4bf16.errors import ConfigError, DTypeError, ShapeError
from fp4bf16.nn.cuda.graph import Graph
from fp4bf16.nn.tape import no_grad

CONFIGS = ("tiny", "variants", "no middle")


@pytest.fixture(autouse=True)
def _arithmetic(host_cuda, monkeypatch):  # noqa: F811
    """What is allocated holds NaN in every format, so that nothing unwritten is read unnoticed."""
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())
    monkeypatch.setattr(emulation, "POISON", 0xFF)


@pytest.fixture
def live(host_cuda, monkeypatch):  # noqa: F811
    """Bytes of device memory in use, as ``live[0]``."""
    used, make = [0], host_cuda.fake._make

    def tracked(shape, dtype, like):
        made = make(shape, dtype, like)
        used[0] += made.array.nbytes
        weakref.finalize(made, lambda n=made.array.nbytes: used.__setitem__(0, used[0] - n))
        return made

    monkeypatch.setattr(host_cuda.fake, "_make", tracked)
    return used


# ---- the BF16 track ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_is_the_cpus(name, rng):
    case = Case(name, rng, put)
    exact, _ = case.on_host("reference")
    theirs, _ = case.on_host()
    with no_grad():
        ours = case.forward()
    assert not ours.requires_grad and ours.data.dtype == np.float32
    error = relative(ours.data.array, exact)
    assert 1e-4 < error < 2.5 * relative(theirs, exact), error


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_the_cpus(name, rng):
    """Each parameter's error against the unrounded gradient, beside the CPU's own on this track. Some
    gradients are zero but for rounding (to_k.bias: softmax does not see it), others nearly cancel, so a
    parameter's error may reach that of its weight's gradient.
    """
    case = Case(name, rng, put)
    _, exact = case.on_host("reference")
    _, theirs = case.on_host()
    _, ours = case.on_device()
    assert ours.keys() == exact.keys()
    typical = np.median([relative(theirs[n], exact[n]) for n in exact])
    for n in exact:
        size = max(np.linalg.norm(exact[n]), np.linalg.norm(exact[n.replace(".bias", ".weight")]))
        assert distance(ours[n], exact[n]) < 4 * (distance(theirs[n], exact[n]) + typical * size), n
    assert relative(joined(ours), joined(exact)) < 2.5 * relative(joined(theirs), joined(exact))


def test_gradients_add_up(rng):
    case = Case("tiny", rng, put)
    _, once = case.on_device()
    case.forward().backward(put(case.g))
    twice = case.gradients()
    for n in once:  # float32 sums of two equal numbers are exact, those of a split sum nearly
        least = 1e-5 * np.abs(once[n]).max()
        np.testing.assert_allclose(twice[n], 2 * once[n], rtol=1e-5, atol=least, err_msg=n)


# ---- the FP4 track -----------------------------------------------------------------------------------------

LAYERS = [  # configuration, what runs on FP4, which weights are made large (`Case`)
    ("tiny", "conv_in*", None),
    ("tiny", "*norm*", None),  # none: the same bits as on the BF16 track
    ("tiny", "down_blocks.0.resnets.0.conv1*", None),
    ("tiny", "down_blocks.1.resnets.0.conv2*", "down_blocks.1.resnets.0.conv2"),  # with its shortcut
    ("tiny", "down_blocks.1.resnets.0.conv_shortcut*", "conv_shortcut"),
    ("tiny", "mid_block.attentions.0.to_[qkv]*", ".attentions."),
    ("tiny", "mid_block.attentions.0.to_v*", ".attentions."),  # q and k on BF16
    ("tiny", "mid_block.attentions.0.to_out*", ".attentions."),
    ("tiny", "up_blocks.0.upsamplers*", "upsamplers"),
    ("tiny", "time_embedding*", "time_emb"),
    ("tiny", "conv_out*", None),
    ("no middle", "down_blocks.0.downsamplers*", None),
    ("no middle", "down_blocks.1.resnets.0.conv1*", "resnets.0.conv1"),  # 24 channels: no whole blocks
]


@pytest.mark.parametrize("name, pattern, loud", LAYERS, ids=[p for _, p, _ in LAYERS])
def test_what_an_fp4_layer_does(name, pattern, loud, rng):
    """The difference that one FP4 layer makes, to prediction and gradients, is the CPU's. Both quantise
    nearly the same numbers: a few in a hundred end on another code, which is a third to a half of the layer's
    error, beside the roundings to BF16. An error of another layer would be 1.4 of it away, no error 1.
    """
    squares = np.zeros((2, 3))  # prediction, gradients: effect, rounding, distance of effects
    for _ in range(4):  # networks, each of many pictures: in one of them a few codes may weigh too much
        case = Case(name, rng, put, {pattern: "fp4"}, loud, batch=12)
        (y0, g0), (y1, g1) = case.on_host("bf16"), case.on_host()
        (z0, h0), (z1, h1) = case.on_device("bf16"), case.on_device()
        if pattern == "*norm*":
            assert np.array_equal(z0, z1)
            return
        g0, g1, h0, h1 = (joined(g) for g in (g0, g1, h0, h1))
        for i, (a0, a1, b0, b1) in enumerate(((y0, y1, z0, z1), (g0, g1, h0, h1))):
            found = distance(a1, a0), distance(b0, a0), distance(b1 - b0, a1 - a0)
            squares[i] += np.square(found) / np.square(found[0])
    effect, rounding, apart = np.sqrt(squares / 4).T
    assert (effect > 2.5 * rounding).all()
    assert (apart < 0.85 * effect).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_whole_network_on_fp4(name, rng):
    case = Case(name, rng, put, FP4)
    exact, exact_gradients = case.on_host("reference")
    theirs, their_gradients = case.on_host()
    ours, gradients = case.on_device()
    assert relative(ours, exact) < 1.4 * relative(theirs, exact)
    names = [n for n in exact_gradients if not n.endswith(("to_k.bias", "conv_out.bias"))]  # rounding; exact
    ratio = [relative(gradients[n], exact_gradients[n]) / relative(their_gradients[n], exact_gradients[n])
             for n in names]  # fmt: skip
    assert np.median(ratio) < 1.5 and max(ratio) < 4


@pytest.mark.parametrize("name", CONFIGS)
def test_ways_to_save_give_the_same_gradients(name, rng):
    seed = int(rng.integers(1 << 30))
    found = {}
    for save in ("packed", "bf16", "recompute"):
        case = Case(name, np.random.default_rng(seed), put, FP4, save=save)
        found[save] = (*case.on_device(), case.device.inventory())
    y, gradients, packed = found["packed"]
    for save in ("bf16", "recompute"):
        assert np.array_equal(found[save][0], y)
        for n, value in gradients.items():
            assert np.array_equal(found[save][1][n], value), (save, n)
    wide, least = (found[save][2] for save in ("bf16", "recompute"))
    assert packed["saved FP4"] > 0 and "saved FP4" not in wide | least
    assert packed["saved FP4"] + packed["saved BF16"] < wide["saved BF16"]
    if name != "no middle":  # whose channels are no whole blocks: their norms' results are kept in BF16
        assert least["saved BF16"] < packed["saved FP4"] + packed["saved BF16"]


def test_backward_with_the_master(rng):
    """dX = g W in place of g W^: another gradient, as near to the unrounded one."""
    seed = int(rng.integers(1 << 30))
    case = Case("tiny", np.random.default_rng(seed), put, FP4)
    _, exact = case.on_host("reference")
    _, twin = case.on_device()
    _, master = Case("tiny", np.random.default_rng(seed), put, FP4, backward="master").on_device()
    errors = [relative(joined(g), joined(exact)) for g in (twin, master)]
    assert not np.array_equal(joined(twin), joined(master))
    assert 0.5 < errors[0] / errors[1] < 2


# ---- passes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [{}, FP4], ids=["bf16", "fp4"])
def test_no_grad_gives_the_same_bits_and_keeps_nothing(route, rng, live):
    case = Case("tiny", rng, put, route)
    recorded = case.forward()
    before = live[0]
    with no_grad():
        silent = case.forward()
    assert np.array_equal(silent.data.array, recorded.data.array)
    assert live[0] - before == silent.data.array.nbytes
    del silent
    kinds = ("saved BF16", "saved FP4", "joined pictures", "statistics")
    held = sum(case.device.inventory().get(kind, 0) for kind in kinds)
    assert 0 < held <= before
    del recorded
    assert before - live[0] >= held


@pytest.mark.parametrize("route", [{}, FP4], ids=["bf16", "fp4"])
def test_memory_goes_back(route, rng, live):
    case = Case("variants", rng, put, route)
    case.on_device()
    before = live[0]
    y = case.forward()
    y.backward(put(case.g))
    assert live[0] - before == y.data.array.nbytes
    with pytest.raises(RuntimeError, match="already used and freed"):
        y.backward(put(case.g))


@pytest.mark.parametrize("route", [{}, FP4], ids=["bf16", "fp4"])
def test_pictures_do_not_see_each_other(route, rng):
    case = Case("tiny", rng, put, route)
    order = np.array([2, 0, 1])
    with no_grad():
        y = case.forward().data.array.copy()
        for a in ("x", "t"):
            setattr(case, a, np.ascontiguousarray(getattr(case, a)[order]))
        case.more["captions"] = np.ascontiguousarray(case.more["captions"][order])
        assert np.array_equal(case.forward().data.array, y[order])


def test_one_number_for_all_times(rng):
    case = Case("no middle", rng, put)
    case.t = np.array([7])
    with no_grad():
        one = case.forward().data.array
        assert np.array_equal(case.device(put(case.x), 7).data.array, one)
        assert not np.array_equal(case.device(put(case.x), 8).data.array, one)


def test_nothing_is_read_back(rng, host_cuda):  # noqa: F811
    case = Case("variants", rng, put, FP4)
    y = case.forward()
    y.backward(put(case.g))
    assert host_cuda.fake.moved == 0
    assert set(host_cuda.streams) == {0}


def test_work_goes_to_the_current_stream(rng, host_cuda):  # noqa: F811
    case = Case("tiny", rng, put)
    case.forward()  # makes the padded weight
    host_cuda.streams.clear()
    host_cuda.fake.stream = 7
    y = case.forward()
    assert set(host_cuda.streams) == {7}
    host_cuda.fake.stream = 9
    host_cuda.streams.clear()
    y.backward(put(case.g))
    assert set(host_cuda.streams) == {9}
    assert host_cuda.fake.followed == [(7, 9)], "what the forward kept is freed there, and was read here"
    case.forward().backward(put(case.g))
    assert len(host_cuda.fake.followed) == 1


def test_through_a_graph(rng):
    """What a graph captures, forward and backward, is what is run without one."""
    case = Case("tiny", rng, put, FP4)
    y, gradients = case.on_device()
    case.device.zero_grad()
    x, t, g, bag = (put(a) for a in (case.x, case.t, case.g, case.more["captions"]))

    def step(stream):
        out = case.device(x, t, captions=bag)
        out.backward(g)
        return out.data

    graph = Graph(x)
    graph.capture(step)
    case.device.zero_grad()
    assert np.array_equal(graph.replay().array, y)
    for n, value in case.gradients().items():
        assert np.array_equal(value, gradients[n]), n


# ---- weights -----------------------------------------------------------------------------------------------


def test_other_weights(rng):
    case, other = Case("tiny", rng, put), Case("tiny", rng, put)
    case.host.load_state_dict(other.host.state_dict())
    theirs, _ = case.on_host()
    average = case.device.flat.clone()
    average.from_host(other.device.state_dict())
    with no_grad():
        y = case.forward().data.array.copy()
        with case.device.using(average):
            z = case.forward().data.array.copy()
        assert relative(z, theirs) < 0.03 < relative(z, y)
        assert np.array_equal(case.forward().data.array, y)
    with pytest.raises(TypeError, match="using: flat is a ndarray.*flat.clone"), case.device.using(case.x):
        pass


def test_there_and_back(rng):
    case = Case("tiny", rng, put)
    state = case.host.state_dict()
    assert all(np.array_equal(value, state[n]) for n, value in case.device.state_dict().items())
    _, gradients = case.on_device()
    with no_grad():
        y = case.forward().data.array.copy()
        case.device.load_state_dict({n: 0 * v for n, v in state.items()})
        assert not case.forward().data.array.any()
        case.device.load_state_dict(state)
        assert np.array_equal(case.forward().data.array, y)
    model, theirs = case.device.cpu(), case.on_host()[0]
    with no_grad():
        assert np.array_equal(model(case.x, case.t, **case.more).data, theirs)
    assert all(np.array_equal(p.grad, gradients[n]) for n, p in model.named_parameters().items())
    model.cuda(put(np.zeros(1, np.float32)))
    with no_grad():
        assert np.array_equal(case.forward().data.array, y)


def test_inventory(rng):
    case = Case("tiny", rng, put)
    held = case.device.inventory()
    assert case.device.flat.grad.nbytes == held["gradients"] > 4 * case.host.parameter_count()
    with pytest.raises(ConfigError, match="inventory: the model is on the CPU"):
        case.host.inventory()


# ---- what is refused ---------------------------------------------------------------------------------------


def test_gradients_reach_parameters_by_backward_alone(rng):
    case = Case("tiny", rng, put)
    weight = case.device.conv_in.weight
    for call in (
        lambda y: nn.grad(y, [weight], g=put(case.g)),
        lambda y: y.backward(put(case.g), retain_graph=True),
    ):
        with pytest.raises(RuntimeError, match=r"'unet2d' ran on the GPU.*loss.backward\(\) alone"):
            call(case.forward())
    y = case.forward()
    other = nn.Variable(np.ones(2), requires_grad=True)
    assert np.array_equal(nn.grad((other * other).sum(), [other])[0].data, [2, 2])
    with pytest.raises(ShapeError, match="backward: g has shape"):
        y.backward(put(case.g[:1]))


def test_tracks_that_are_not_of_the_device(rng):
    case = Case("tiny", rng, put)
    for track in ("dual", "reference"):
        with fb.tracks(track), pytest.raises(ConfigError, match=f"'{track}'.*keep it on the CPU"):
            case.forward()


def test_bad_calls(rng):
    case = Case("tiny", rng, put)
    x, t, bag = put(case.x), put(case.t), put(case.more["captions"])
    model, plain = case.device, nn.UNet2D(nn.UNetConfig.tiny()).cuda(put(np.zeros(1, np.float32)))
    odd = nn.UNet2D(nn.UNetConfig.tiny(block_out_channels=(36, 64), norm_num_groups=4))
    for call, error, message in [
        (lambda: model(case.x, t, captions=bag), TypeError, "sample: is a numpy array on the host"),
        (lambda: model(x, case.t, captions=bag), TypeError, "timesteps are on the host"),
        (lambda: model(x, put(case.t.astype(np.int32)), captions=bag), DTypeError, "int32, but int64"),
        (lambda: model(x, t, captions=put(case.more["captions"][:, :4])), ShapeError, r"\(3, 4\).*6 words"),
        (lambda: model(x, t, captions=put(case.more["captions"][:2])), ShapeError, "captions has 2 rows"),
        (lambda: model(x, put(case.t[:2]), captions=bag), ShapeError, "timesteps has shape"),
        (lambda: model(put(case.x[..., :3]), t, captions=bag), ShapeError, r"\(B, H, W, 12\)"),
        (lambda: model(x, t), ConfigError, "captions is missing"),
        (lambda: plain(x, t, captions=bag), ConfigError, "captions is given"),
        (lambda: model(put(case.x, place=1), t, captions=bag), TypeError, "cuda:1"),
        (lambda: plain.cuda(x), ConfigError, "on the GPU already"),
        (lambda: plain.to("float64"), TypeError, "the module is on the GPU"),
        (lambda: nn.UNet2D(nn.UNetConfig.tiny()).cuda(x, save="all"), ConfigError, "save is 'all'.*packed"),
        (lambda: odd.cuda(x), ConfigError, "block_out_channels holds 36.*multiples of 8"),
        (lambda: nn.UNet2D(nn.UNetConfig.tiny()).cuda(case.x), TypeError, "like: is a numpy array"),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_an_empty_batch(rng):
    case = Case("tiny", rng, put)
    for a in ("x", "t", "g"):
        setattr(case, a, getattr(case, a)[:0])
    case.more = {n: v[:0] for n, v in case.more.items()}
    y, gradients = case.on_device()
    assert y.shape == (0, 8, 8, 12) and not joined(gradients).any()
