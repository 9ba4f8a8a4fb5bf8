"""Low-rank adapters: equal to the base at first, to dense weights always; others in their place, or none."""

from __future__ import annotations

import numpy as np
import pytest
from lora_cases import TRACKS, arguments, bits, call, dense_state, moved, network

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.errors import DTypeError, ShapeError
from fp4bf16.nn import lora as lora_module
from fp4bf16.nn import module
from fp4bf16.nn.lora import LoRA
from fp4bf16.nn.tape import no_grad


# ---- the first output --------------------------------------------------------------------------------------
@pytest.mark.parametrize("track", TRACKS)
def test_first_output_is_the_bases_to_the_bit(track, rng):
    for unet, given in (
        (network(), arguments(rng)),
        (
            nn.UNet2D(nn.UNetConfig.tiny(caption_vocabulary=5)),
            (rng.standard_normal((2, 8, 8, 12)).astype(np.float32), 7, np.ones((2, 5), np.float32)),
        ),
    ):
        with fb.tracks(track):
            before = call(unet, given).data
            lora = LoRA(unet, rank=3, alpha=5, seed=1, targets="*")
            assert len(lora.adapted) == sum(isinstance(m, nn.Linear | nn.Conv2d) for _, m in
                                            unet.named_modules())  # fmt: skip
            after = call(unet, given)
        assert after.requires_grad
        assert np.array_equal(bits(after.data), bits(before))


@pytest.mark.parametrize("track", ("bf16", "fp4", "reference"))
@pytest.mark.parametrize("inputs, outputs", ((1, 1), (16, 2), (16, 4), (3, 5)))
def test_negative_zero_stays_negative(inputs, outputs, track):
    """A product that underflows may be -0, and -0 + 0 is +0: what BLAS makes of it stays."""
    x = np.full((2, 3, 2, inputs), 1e-30, np.float32)
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    linear = nn.Linear(inputs, outputs)
    for layer in (conv, linear):
        layer.weight.assign(np.full(layer.weight.shape, -1e-30))
    linear.bias.assign(np.full(outputs, -0.0))
    residual = np.full((2, 3, 2, outputs), -0.0, np.float32)
    for layer, more in ((conv, {"residual": residual}), (conv, {}), (linear, {})):
        with fb.tracks(track):
            before = layer(x, **more).data
            lora = LoRA(layer, rank=1, alpha=1)
            after = layer(x, **more).data
        lora.detach()
        assert np.array_equal(bits(after), bits(before))


def test_sum_with_a_zero_branch_keeps_every_bit(rng):
    values = np.array([-0.0, 0.0, 1.5, -1.5, 1e-45, -1e-45, np.inf, -np.inf, np.nan], np.float32)
    for zero in (0.0, -0.0):
        y = np.concatenate([values, rng.standard_normal(20).astype(np.float32)])
        out, _ = lora_module._beside(y, np.full_like(y, zero))
        assert np.array_equal(bits(out), bits(y))
    y, z = (v.ravel() for v in np.meshgrid(values[:-1], values[:-1]))
    with np.errstate(invalid="ignore"):
        out, _ = lora_module._beside(y, z)
        assert np.array_equal(out, y + z, equal_nan=True)


# ---- against dense weights ---------------------------------------------------------------------------------
@pytest.mark.parametrize("rank, alpha", ((1, 3.0), (2, 2.0), (3, 0.7)))
def test_equals_the_network_of_dense_weights(rank, alpha, rng):
    unet, other = network().to(np.float64), network().to(np.float64)
    lora = moved(LoRA(unet, rank, alpha, seed=2, targets="*"), rng)
    other.load_state_dict(dense_state(unet, lora))
    given = arguments(rng, dtype=np.float64)
    with fb.tracks("reference"), no_grad():
        got, want = call(unet, given).data, call(other, given).data
        with lora.disabled():
            base = call(unet, given).data
    assert np.abs(got - want).max() < 1e-12 * np.abs(want).max()
    assert np.abs(got - base).max() > 0.05 * np.abs(want).max()


def test_no_path_of_the_network_goes_past_an_adapter(rng):
    """Each alone changes what the network predicts, the one beside a residual as the one beside a norm."""
    unet, given = network(), arguments(rng)
    lora = LoRA(unet, rank=2, alpha=4)
    assert set(lora.adapted) >= {
        "down_blocks.0.resnets.0.conv1", "down_blocks.0.resnets.0.time_emb_proj",
        "down_blocks.0.attentions.0.to_q", "down_blocks.0.attentions.0.to_out.0",
        "down_blocks.0.downsamplers.0.conv", "down_blocks.1.resnets.0.conv_shortcut",
        "mid_block.attentions.0.to_v", "up_blocks.0.upsamplers.0.conv", "up_blocks.1.resnets.1.conv2",
    }  # fmt: skip
    named = lora.named_parameters()
    with no_grad():
        base = call(unet, given).data
        for name in lora.adapted:
            up = named[f"{name}.lora_up"].data
            up[...] = rng.standard_normal(up.shape)
            assert np.linalg.norm(call(unet, given).data - base) > 1e-5 * np.linalg.norm(base), name
            up[...] = 0
        assert np.array_equal(call(unet, given).data, base)


@pytest.mark.parametrize("track", ("fp4", "dual", "bf16"))
def test_branch_runs_in_bf16_beside_any_track(track, rng, monkeypatch):
    """Whether route or context say FP4: the base's product and nothing else is quantised, and once."""
    x = rng.standard_normal((2, 6, 5, 32)).astype(np.float32)
    linear, conv = nn.Linear(32, 8, seed=1), nn.Conv2d(32, 8, 3, stride=2, padding=1, seed=2)
    for layer in (linear, conv):
        layer.flat.touch()  # packs, as networks do when they are made
        layer.track = track
    base = [layer(x).data for layer in (linear, conv)]
    loras = [moved(LoRA(layer, 3, 6.0, seed=3), rng) for layer in (linear, conv)]
    made = []
    for name in ("quantize", "DualWeight"):
        old = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _old=old, **k: made.append(1) or _old(*a, **k))
    (ld, lu), (cd, cu) = ([p.data for p in lora.parameters()] for lora in loras)
    with fb.tracks("bf16"):
        h = fb.matmul(x.reshape(-1, 32), ld) * np.float32(2)
        want = [fb.matmul(h, lu).reshape(2, 6, 5, 8)]
        want.append(fb.conv2d(fb.conv2d(x, cd, stride=2, padding=1) * np.float32(2), cu))
    for override in (None, track):
        with fb.tracks(override):
            for layer, own, added in zip((linear, conv), base, want, strict=True):
                assert np.array_equal(layer(x).data, own + added)
                assert np.abs(added).max() > 0.1
    assert not made


def test_pictures_do_not_see_each_other(rng):
    unet, (x, t, bag) = network(), arguments(rng, 6)
    moved(LoRA(unet, rank=3, alpha=3), rng)
    order = rng.permutation(6)
    for track in ("bf16", "fp4"):
        with fb.tracks(track), no_grad():
            whole = call(unet, (x, t, bag)).data
            assert np.array_equal(call(unet, (x[order], t[order], bag[order])).data, whole[order])


def test_odd_shapes(rng):
    """One row, none, a vector; one pixel; a kernel as large as the picture."""
    linear, conv = nn.Linear(7, 5, seed=1), nn.Conv2d(3, 5, 3, seed=2)
    one, two = moved(LoRA(linear, 2, 1.0), rng), moved(LoRA(conv, 2, 1.0), rng)
    with fb.tracks("reference"):
        for shape in ((7,), (1, 7), (0, 7), (2, 3, 7), (0, 3, 7)):
            x = rng.standard_normal(shape).astype(np.float32)
            y, (down, up) = linear(x), (p.data for p in one.parameters())
            want = x @ linear.weight.data.T + linear.bias.data + 0.5 * (x @ down) @ up
            assert y.shape == want.shape
            np.testing.assert_allclose(y.data, want, atol=1e-5)
            one.zero_grad()
            y.backward(np.ones(y.shape, np.float32))
            rows = x.reshape(-1, 7)
            want = 0.5 * np.outer(rows.sum(axis=0), up.sum(axis=1))
            np.testing.assert_allclose(one.named_parameters()["lora_down"].grad, want, atol=1e-5)
        x = rng.standard_normal((1, 3, 3, 3)).astype(np.float32)
        got, own = conv(x).data, np.einsum("nhwc,ohwc->no", x, conv.weight.data) + conv.bias.data
        down, up = (p.data for p in two.parameters())
        want = own + 0.5 * np.einsum("nhwc,rhwc->nr", x, down) @ up[:, 0, 0].T
        np.testing.assert_allclose(got[:, 0, 0], want, atol=1e-5)


# ---- other adapters, or none -------------------------------------------------------------------------------
def test_using_and_disabled_nest_and_come_back(rng):
    unet, given = network(), arguments(rng)
    base = call(unet, given).data
    lora = moved(LoRA(unet, rank=2, alpha=2), rng)
    own, zeros = lora.flat.data, np.zeros_like(lora.flat.data)
    other = own + np.float32(0.1) * (own != 0)
    with no_grad():
        policy = call(unet, given).data
        with lora.using(other):
            old = call(unet, given).data
            with lora.disabled():
                assert np.array_equal(call(unet, given).data, base)
                with lora.using(zeros), lora.disabled():
                    assert np.array_equal(call(unet, given).data, base)
                assert np.array_equal(call(unet, given).data, base)
            with lora.using(zeros):
                assert np.array_equal(call(unet, given).data, base)
            assert np.array_equal(call(unet, given).data, old)
            assert lora.flat.data is other
        assert np.array_equal(call(unet, given).data, policy)
        assert not np.array_equal(old, policy) and not np.array_equal(policy, base)
        for context in (lambda: lora.using(other), lora.disabled):
            with pytest.raises(ZeroDivisionError), context():
                call(unet, given)
                1 / 0  # noqa: B018
            assert np.array_equal(call(unet, given).data, policy)
    assert lora.flat.data is own and lora.enabled
    with lora.disabled():  # nothing to differentiate: the base is the reference
        assert not call(unet, given).requires_grad


def test_backward_after_another_policy_has_run(rng):
    """The order of an objective with an old policy and a reference: current, old, reference, backward."""
    unet, given = network(), arguments(rng)
    lora = moved(LoRA(unet, rank=2, alpha=2), rng)
    call(unet, given).sum().backward()
    want = lora.flat.grad.copy()
    lora.zero_grad()
    loss = call(unet, given).sum()
    with no_grad(), lora.using(np.zeros_like(lora.flat.data)):
        call(unet, given)
    with lora.disabled():
        call(unet, given)
    loss.backward()
    assert np.array_equal(lora.flat.grad, want)
    loss = call(unet, given).sum()
    with lora.using(lora.flat.data.copy()):
        lora.flat.touch()  # a step of the policy inside is noticed as one outside is
    with pytest.raises(RuntimeError, match="weights have changed since this forward .*lora_"):
        loss.backward()


def test_using_refuses_another_layout(rng):
    lora = LoRA(network(), rank=2, alpha=2)
    own = lora.flat.data
    for flat, error, sentence in (
        (own[:-1], ShapeError, rf"flat has shape \({own.size - 1},\) but .* \({own.size},\)"),
        (own.reshape(1, -1), ShapeError, "pass a copy of lora.flat.data"),
        (None, ShapeError, "flat has shape None"),
        (own.astype(np.float64), DTypeError, "flat is float64 but the adapters are float32; convert"),
    ):
        with pytest.raises(error, match=sentence), lora.using(flat):
            pass
        assert lora.flat.data is own
