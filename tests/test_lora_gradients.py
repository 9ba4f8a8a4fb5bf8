"""Gradients of adapters: right, and of the base none."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
from lora_cases import arguments, call, moved, network

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.diffusion.ema import EMA
from fp4bf16.nn import fused, ops_network
from fp4bf16.nn import ops as F
from fp4bf16.nn.lora import LoRA
from fp4bf16.nn.tape import no_grad


# ---- gradients ---------------------------------------------------------------------------------------------
def test_gradients_against_differences(rng):
    """Central differences along a random direction of each adapter, float64, no rounding."""
    unet = network().to(np.float64)
    lora = moved(LoRA(unet, rank=2, alpha=3, seed=4, targets="*"), rng)
    given, target = arguments(rng, 2, np.float64), rng.standard_normal((2, 8, 8, 3))

    def loss():
        return F.mean_squared_error(call(unet, given), target)

    with fb.tracks("reference"):
        loss().backward()
        for name, p in lora.named_parameters().items():
            direction, before, step = rng.standard_normal(p.shape), p.data.copy(), 1e-5
            found = []
            for sign in (1, -1):
                p.assign(before + sign * step * direction)
                with no_grad():
                    found.append(loss().item())
            p.assign(before)
            slope = (found[0] - found[1]) / (2 * step)
            want = np.vdot(p.grad, direction)
            assert abs(slope - want) < 1e-6 * (abs(slope) + np.linalg.norm(p.grad)) + 1e-10, name
            assert np.linalg.norm(p.grad) > 1e-8, name


@pytest.mark.parametrize("track", ("bf16", "fp4"))
def test_gradients_of_rounded_tracks_are_near(track, rng):
    """On the FP4 track those of the branch are as near as the activations that FP4 left it."""
    unet, given = network(attention_head_dim=None), arguments(rng)
    lora = moved(LoRA(unet, rank=4, alpha=4), rng, 0.05)
    found = {}
    for kind in ("reference", track):
        lora.zero_grad()
        with fb.tracks(kind):
            F.mul(call(unet, given), 1.0).sum().backward()
        found[kind] = lora.flat.grad.copy()
    distance = np.linalg.norm(found[track] - found["reference"]) / np.linalg.norm(found["reference"])
    assert 1e-5 < distance < (0.05 if track == "bf16" else 0.5)


def test_second_derivatives(rng):
    """A Hessian-vector product through the branch against a difference of gradients."""
    layer = nn.Conv2d(3, 4, 3, padding=1).to(np.float64)
    lora = moved(LoRA(layer, 2, 2.0), rng)
    x, parameters = rng.standard_normal((2, 4, 5, 3)), lora.parameters()
    v = [rng.standard_normal(p.shape) for p in parameters]

    def gradients(**how):
        y = layer(x)
        return nn.grad((y * y * y).sum(), parameters, **how)

    with fb.tracks("reference"):
        first = gradients(create_graph=True)
        total = sum(((g * w).sum() for g, w in zip(first[1:], v[1:], strict=True)), (first[0] * v[0]).sum())
        got = nn.grad(total, parameters)
        ends = []
        for step in (1e-5, -1e-5):
            for p, w in zip(parameters, v, strict=True):
                p.assign(p.data + step * w)
            ends.append([g.data.copy() for g in gradients()])
            for p, w in zip(parameters, v, strict=True):
                p.assign(p.data - step * w)
    for h, a, b in zip(got, *ends, strict=True):
        want = (a - b) / 2e-5
        assert np.linalg.norm(h.data - want) < 1e-6 * np.linalg.norm(want)


@contextlib.contextmanager
def counted(monkeypatch):
    """Counts of the shapes that products give inside, and of bias gradients."""
    shapes, biases = Counter(), []
    with monkeypatch.context() as patch:
        for name in ("conv2d_wgrad", "conv2d_dgrad", "matmul_primitive"):
            old = getattr(ops_network, name)

            def record(*args, _old=old, _name=name, **kwargs):
                out = _old(*args, **kwargs)
                shapes[_name, out.shape] += 1
                return out

            patch.setattr(ops_network, name, record)
        old_sums = fused.column_sums
        patch.setattr(fused, "column_sums", lambda x: biases.append(x.shape) or old_sums(x))
        yield shapes, biases


def test_no_gradient_of_the_base_is_computed_or_stored(rng, monkeypatch):
    """Counted: with the whole network trained each weight has one product for its gradient, beside adapters
    none has; and the base's gradient buffer, filled with NaN, is not touched.
    """
    unet, given = network(), arguments(rng, 7)
    weights = Counter(
        ("conv2d_wgrad" if m.weight.ndim == 4 else "matmul_primitive", m.multiplied(m.track).shape)
        for _, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)
    )  # fmt: skip
    y = call(unet, given)
    with counted(monkeypatch) as (shapes, biases):
        y.sum().backward()
    assert not weights - shapes and len(biases) == sum(weights.values())

    lora = moved(LoRA(unet, rank=5, alpha=3), rng)
    own = Counter(("conv2d_wgrad" if p.ndim == 4 else "matmul_primitive", p.shape) for p in lora.parameters())
    unet.flat.grad[...] = np.nan
    before = unet.flat.data.copy()
    y = call(unet, given)
    with counted(monkeypatch) as (shapes, biases):
        y.sum().backward()
    assert not weights.keys() & shapes.keys() and not biases
    assert not own - shapes
    assert np.isnan(unet.flat.grad).all()
    assert np.array_equal(unet.flat.data, before)
    assert np.isfinite(lora.flat.grad).all() and lora.flat.grad.any()
    assert not any(p.requires_grad for p in unet.parameters())


def test_the_way_back_ends_at_the_first_adapter(rng, monkeypatch):
    unet, given = network(), arguments(rng)
    LoRA(unet, rank=2, alpha=2, targets="up_blocks.1.resnets.1.conv2")
    y = call(unet, given)
    with counted(monkeypatch) as (shapes, _):
        y.sum().backward()
    # conv_out and the four products of the attention behind it, in their inputs; `up` in its input and its
    # weight; `down` in its weight
    want = {"matmul_primitive": 4, "conv2d_dgrad": 2, "conv2d_wgrad": 2}
    assert Counter(kind for kind, _ in shapes.elements()) == want


# ---- training ----------------------------------------------------------------------------------------------
def test_training_changes_the_adapters_alone(rng):
    """The flat parameters work with the optimizer, the average and the clipping that a network's work with;
    the loss falls; a second run repeats the bits.
    """
    given, target = arguments(rng), rng.standard_normal((3, 8, 8, 3)).astype(np.float32)

    def run():
        unet = network()
        base = unet.flat.data.copy()
        lora = LoRA(unet, rank=4, alpha=8, seed=7)
        optimizer, average = nn.AdamW(lora.flat.data, lr=1e-2), EMA(lora.flat.data, 0.9)
        losses = []
        for step in range(25):
            loss = F.mean_squared_error(call(unet, given), target)
            lora.zero_grad()
            loss.backward()
            assert nn.clip_norm(lora.flat.grad, 1.0) > 0
            optimizer.step(lora.flat.grad)
            lora.flat.touch()
            average.update(lora.flat.data, step)
            losses.append(loss.item())
        assert np.array_equal(unet.flat.data, base)
        return lora, losses, average.average

    lora, losses, average = run()
    assert losses[-1] < 0.8 * losses[0]
    again, repeated, _ = run()
    assert losses == repeated and np.array_equal(lora.flat.data, again.flat.data)
    assert lora.flat.views(average).keys() == lora.named_parameters().keys()
    used = np.zeros(lora.flat.data.size, bool)
    for view in lora.flat.views(used).values():
        view[...] = True
    assert not lora.flat.data[~used].any()  # the gaps stay zero
