"""The network on the device called in ways nobody should: the result is right or one sentence says what is
wrong. Emulated; `tests/test_unet_device.py` has the right calls.
"""

from __future__ import annotations

import json

import host_cuda as emulation
import numpy as np
import pytest
from host_cuda import Arrays, FakeArray, host_cuda, put  # noqa: F401  (host_cuda is a fixture)
from unet_cases import Case, relative

from fp4bf16 import nn
from fp4bf16.backends import cuda_math
from fp4bf16.errors import CheckpointError, ConfigError, DTypeError, ShapeError
from fp4bf16.interop import BFLOAT16
from fp4bf16.nn.cuda.optim import DeviceAdamW
from fp4bf16.nn.tape import no_grad

ONE = np.zeros(1, np.float32)


@pytest.fixture(autouse=True)
def _arithmetic(host_cuda, monkeypatch):  # noqa: F811
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())
    monkeypatch.setattr(emulation, "POISON", 0xFF)


@pytest.fixture
def case(rng):
    return Case("tiny", rng, put)


def refused(calls) -> None:
    for call, error, sentence in calls:
        with pytest.raises(error, match=sentence):
            call()


# ---- the call ----------------------------------------------------------------------------------------------
def test_a_timestep_is_a_whole_number(case):
    """The kernel reads int64: 7.5 must not silently become 7."""
    model, x, bag = case.device, put(case.x), put(case.more["captions"])
    with no_grad():
        want = model(x, 7, captions=bag).data.array
        for t in (7.0, np.float32(7), np.array(7), np.int8(7)):
            assert np.array_equal(model(x, t, captions=bag).data.array, want)
        for t in (7.5, np.float32(7.5), np.array(7.5), float("nan"), float("inf"), None, "7", 1j, 2**63):
            with pytest.raises(DTypeError, match="timesteps is .*, but a whole number of int64 .*round"):
                model(x, t, captions=bag)


def test_pictures_that_are_none(case):
    bag, t = put(case.more["captions"]), put(case.t)
    for shape in ((3, 0, 8, 12), (3, 8, 0, 12), (3, 0, 0, 12)):
        x = np.zeros(shape, np.float32)
        refused([
            (lambda x=x: case.device(put(x), t, captions=bag), ShapeError, "0 .*need multiples of 2"),
            (lambda x=x: case.host(x, case.t, captions=case.more["captions"]), ShapeError, "multiples of 2"),
        ])  # fmt: skip
    for x, kind in (([1], "list"), (None, "NoneType"), ("x", "str")):
        for model in (case.device, case.host):
            with pytest.raises(TypeError, match=f"sample is a {kind}, but an array of pictures is needed"):
                model(x, t, captions=bag)


def test_conditions_that_are_none(case, rng):
    x, t = put(case.x), put(case.t)
    refused([
        (lambda given=given: case.device(x, t, captions=given), ShapeError, "captions is .*3 pictures is")
        for given in (put(np.ones(())), "word", 5)
    ])  # fmt: skip
    other = Case("variants", rng, put)
    x, t = put(other.x), put(other.t)
    refused([
        (lambda: other.device(x, t, class_labels=1), ShapeError, "class_labels is 1, but one for each"),
        (lambda: other.device(x, t, class_labels=put(np.zeros((2, 1), np.int64))), ShapeError,
         r"class_labels has shape \(2, 1\), but \(2,\) is needed"),
    ])  # fmt: skip


@pytest.mark.parametrize("channels", [1, 2, 3, 13, 17])
@pytest.mark.parametrize("size", [(2, 2), (2, 10)])
def test_few_pixels_and_odd_channels(channels, size, rng):
    """In and out of the network any number of channels; on its lowest level one pixel."""
    config = nn.UNetConfig.tiny(in_channels=channels, out_channels=channels)
    host, model = nn.UNet2D(config), nn.UNet2D(config).cuda(put(ONE))
    # Enough pictures for a mean: of four outputs that cancel, BF16's roundings are some per cent at times.
    x = rng.standard_normal((128 // (size[0] * size[1]), *size, channels)).astype(np.float32)
    g = rng.standard_normal(x.shape).astype(np.float32)
    y, z = model(put(x), 3), host(x, 3)
    y.backward(put(g))
    z.backward(g)
    assert relative(y.data.array, z.data) < 0.03
    assert relative(model.flat.grad.owner.array, host.flat.grad) < 0.05


def test_networks_that_no_kernel_takes(rng):
    tiny = nn.UNetConfig.tiny
    for config, sentence in (
        (tiny(block_out_channels=(8, 520)), "heads of 520 channels, but on the GPU at most 512"),
        (tiny(block_out_channels=(0, 8)), "block_out_channels holds 0, but"),
        (tiny(block_out_channels=(12, 24), norm_num_groups=4), "holds 12, but .*multiples of 8"),
    ):
        model = nn.UNet2D(config)
        with pytest.raises(ConfigError, match=sentence):
            model.cuda(put(ONE))
        assert not model.on_device
    with pytest.raises(TypeError, match="like: is a .*but an array on the GPU is needed"):
        nn.UNet2D(tiny()).cuda(json)


# ---- backward ----------------------------------------------------------------------------------------------
def test_gradients_of_another_place(case):
    g = case.g
    refused([
        (lambda: case.forward().backward(put(g, 1)), TypeError, "weights is .*cuda:0 but g is .*cuda:1"),
        (lambda: case.forward().backward(put(g.astype(BFLOAT16))), TypeError,
         "g is a FakeArray of bfloat16 but the loss is a FakeArray of float32; convert"),
        (lambda: case.forward().backward(g), TypeError, "g is a ndarray of float32 but the loss is a FakeA"),
        (lambda: case.forward().backward([1]), TypeError, "g is a list of no dtype but"),
        (lambda: case.forward().backward(), ShapeError, "loss has shape .*pass g"),
    ])  # fmt: skip
    repeated = np.broadcast_to(g[:1], g.shape)
    for given in (FakeArray(repeated), put(np.array(repeated))):
        y = case.forward()
        case.device.zero_grad()
        y.backward(given)
        found = case.gradients()
        want = found if given.array is repeated else want  # noqa: F821  (of the first round)
        assert all(np.array_equal(found[n], want[n]) for n in found)


def test_backward_after_the_weights_have_changed(case):
    """dX is made of weights: those of the forward, or nothing at all."""
    model, sentence = case.device, "the weights have changed since this forward; call backward before"
    optimizer = DeviceAdamW(model.flat, 1e-3)

    def step():
        optimizer.prepare()
        optimizer.step()

    for change in (step, model.flat.refresh, lambda: model.load_state_dict(case.host.state_dict())):
        y = case.forward()
        change()
        model.zero_grad()
        with pytest.raises(RuntimeError, match=sentence):
            y.backward(put(case.g))
        assert not model.flat.grad.owner.array.any()
    y, z = case.forward(), case.forward()  # sums of several are taken before a step
    y.backward(put(case.g))
    z.backward(put(case.g))
    step()
    frozen = model.flat.clone()
    with model.using(frozen):
        y = case.forward()
    step()  # of other weights
    y.backward(put(case.g))


def test_backward_after_the_model_has_left(case):
    for come_back in (False, True):
        y = case.forward()
        model = case.device.cpu()
        if come_back:
            model.cuda(put(ONE))
        with pytest.raises(RuntimeError, match="the model has left the GPU since this forward.*before cpu"):
            y.backward(put(case.g))
        if not come_back:
            model.cuda(put(ONE))


# ---- weights -----------------------------------------------------------------------------------------------
def test_weights_of_another_module(case, rng):
    twin = Case("tiny", rng, put)
    with pytest.raises(TypeError, match="a DeviceParameters of another module.*clone"):
        case.device.using(twin.device.flat).__enter__()
    model = nn.UNet2D(nn.UNetConfig.tiny())
    with pytest.raises(ConfigError, match="using: the module was moved to the GPU inside.*cuda.. outside"):
        with model.using(model.flat.data.copy()):
            model.cuda(put(ONE))
    assert model.on_device
    other = Case("variants", rng, put).device.flat
    refused([
        (lambda: case.device.state_dict(other.data), ShapeError, "flat has shape .*but this layout has"),
        (lambda: case.device.state_dict(other), TypeError, "a DeviceParameters, but one flat.*its data"),
    ])  # fmt: skip


def test_states_that_do_not_fit_change_nothing(case):
    model, state = case.device, case.device.state_dict()
    name = "conv_in.weight"
    value = state[name]
    for wrong, error, sentence in (
        (None, TypeError, "the state is a NoneType, but arrays by name"),
        (state | {name: "x"}, DTypeError, f"{name} has dtype .*but real numbers"),
        (state | {name: value * 1j}, DTypeError, f"{name} has dtype complex64, but real numbers"),
        (state | {name: value.astype(str)}, DTypeError, f"{name} has dtype <U"),
        (state | {name: [1, 2]}, ShapeError, rf"{name} has shape \(2,\) instead of"),
        (state | {name: put(value)}, TypeError, f"{name} is an array on the GPU, but"),
    ):
        with pytest.raises(error, match=sentence):
            model.load_state_dict(wrong)
        assert all(np.array_equal(a, state[n]) for n, a in model.state_dict().items())
    model.load_state_dict(state | {name: value.astype(BFLOAT16)})
    assert np.array_equal(model.state_dict()[name], value.astype(BFLOAT16).astype(np.float32))


def test_optimizers_that_do_not_fit(case, rng):
    flat, other = case.device.flat, Case("variants", rng, put).device.flat
    optimizer = DeviceAdamW(flat, 1e-3)
    state = optimizer.state()
    refused([
        (lambda: DeviceAdamW(flat, 1e-3, average=other), ShapeError, "average is laid out as another"),
        (lambda: DeviceAdamW(flat, 1e-3, average=flat), ShapeError, "average is parameters itself, but"),
        (lambda: DeviceAdamW(flat, 1e-3, average=flat.data), TypeError, "average is a DeviceArray, but"),
        (lambda: DeviceAdamW(flat.clone(), 1e-3), ValueError, "parameters have no gradient; .*grad=True"),
        (lambda: DeviceAdamW(case.host.flat, 1e-3), TypeError, "parameters is a FlatParameters, but"),
        (lambda: DeviceAdamW(None, 1e-3), TypeError, "parameters is a NoneType, but"),
        (lambda: DeviceAdamW(flat, 1e-3, betas=(0.9, 1)), ValueError, r"betas is \(0.9, 1\), but two"),
        (lambda: DeviceAdamW(flat, 1e-3, betas=(0.9,)), ValueError, r"betas is \(0.9,\), but two"),
        (lambda: optimizer.prepare(float("nan")), ValueError, "lr is nan, but a finite number"),
        (lambda: optimizer.load_state(None, 0), ShapeError, "the state holds neither, but first and second"),
        (lambda: optimizer.load_state({}, 0), ShapeError, "the state holds neither, but first and second"),
        (lambda: optimizer.load_state(state, -1), ValueError, "count is -1, but the number of updates"),
        (lambda: optimizer.load_state(state, "3"), ValueError, "count is '3', but the number of updates"),
    ])  # fmt: skip
    assert optimizer.count == 0


# ---- files of weights --------------------------------------------------------------------------------------
@pytest.fixture
def start(tmp_path):
    """A function that writes a base file with this in its header, and reads it as ``--from`` does."""
    pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
    from fp4bf16 import io
    from fp4bf16.train import weights
    from fp4bf16.train.config import get_preset, override

    config = override(get_preset("ci"), ["model.block_out_channels=[8,16]"]).to_dict()
    known = {"format": weights.FORMAT, "config": config, "words": ["a", "b"]}
    path = tmp_path / "base.safetensors"

    def function(changes, value=1.0, dtype=np.float32, recipe=None):
        text = changes if isinstance(changes, str) else json.dumps(known | changes)
        with np.errstate(over="ignore"):
            io.save(path, {"conv_in.weight": np.full((8, 3), value, dtype)}, {weights._KEY: text})
        if recipe is not None:
            path.with_suffix(".json").write_text(recipe)
        return weights.load_start(str(path), "ci")

    return function


def test_a_base_file_that_lies(start):
    assert start({}).words == ("a", "b")
    deep = "[" * 100_000
    for changes, sentence in (
        ({"config": None}, "weights of a base model"), ({"config": [1]}, "weights of a base model"),
        ({"words": [["a"]]}, "its words are no list of words"), ({"words": "ab"}, "its words are no list"),
        ({"words": ["a", "b", "a"]}, "1 of its 3 words stand there twice"), (deep, "weights of a base model"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=f"--from .*{sentence}.*name another file"):
            start(changes)
    with pytest.raises(CheckpointError, match="conv_in.weight has dtype int32, but one of float64, float32"):
        start({}, 1, np.int32)
    found = start({}, 1e200, np.float64)  # without a warning; `fit` refuses it
    assert np.isinf(found.arrays["conv_in.weight"]).all()
    with pytest.raises(CheckpointError, match="base.json cannot be read .*fetch both files anew"):
        start({}, recipe=deep)


def test_what_the_trainer_refuses_before_it_trains(monkeypatch, tmp_path, capsys):
    pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
    pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")
    from test_base_weights import ARGUMENTS, denoiser, tiny

    from fp4bf16 import device
    from fp4bf16.__main__ import main
    from fp4bf16.train import device_sampler

    monkeypatch.setattr(device_sampler, "place", lambda: device.operand(put(ONE), "device"))
    route, out = tmp_path / "route.json", tmp_path / "run"
    route.write_text('{"conv_in*": "dual"}')
    assert main([*ARGUMENTS, "--device", "cuda", "--route", str(route), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "--route: conv_in* is on 'dual', but on the GPU" in said and said.count("\n") == 1
    assert not out.exists()
    sampler = device_sampler.CudaSampler(denoiser(tiny()))
    with pytest.raises(ShapeError, match="draw: there are 1 captions but 2 seeds"):
        sampler.draw([1, 2], ["angry face"], 1)


def test_sample_to_where_no_file_can_be(tmp_path, capsys):
    pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
    pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")
    from test_base_weights import denoiser, tiny

    from fp4bf16.__main__ import main
    from fp4bf16.train import weights

    model, path = denoiser(tiny()), tmp_path / "base.safetensors"
    weights.write_base(path, model.unet.state_dict(), model.config, model.vocabulary.words, {})
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "x.png")
    assert main(["sample", "--from", str(path), "--n", "1", "--steps", "1", "--out", out]) == 2
    said = capsys.readouterr().err
    assert f"--out {out}: " in said and "cannot be made a folder" in said and said.count("\n") == 1
