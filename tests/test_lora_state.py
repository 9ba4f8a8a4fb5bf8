"""Adapters into the base, to a file and back, chosen by name; and what cannot be."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
from host_cuda import Arrays, host_cuda, put  # noqa: F401  (host_cuda is a fixture)
from lora_cases import arguments, bits, call, dense_state, moved, network

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.backends import cuda_math
from fp4bf16.errors import ConfigError, ShapeError
from fp4bf16.nn.lora import EXCLUDED, LoRA
from fp4bf16.nn.tape import no_grad

# ---- into the base -----------------------------------------------------------------------------------------
U16, U32 = 2.0**-8, 2.0**-24  # unit roundoff of BF16 and of float32


@pytest.mark.parametrize("kind", ("linear", "conv"))
def test_merged_output_within_its_bound(kind, rng):
    """x^ is rounded alike on both sides. Merged, W + s D is rounded once, D = down up; unmerged, W and down,
    s h and up are. With u the unit roundoff of BF16, for each output,

        |difference| <= u |x^| (|W| + |W + s D|) + ((1 + u)^3 - 1) s |x^| |down| |up|

    plus the sums in float32, of k terms on either side: k 2^-24 of all terms' magnitudes each.
    """
    if kind == "linear":
        layer, x = nn.Linear(48, 24, seed=1), rng.standard_normal((10, 48)).astype(np.float32)
    else:
        layer = nn.Conv2d(6, 10, 3, stride=2, padding=((0, 1), (1, 0)), seed=1)
        x = rng.standard_normal((2, 8, 6, 6)).astype(np.float32)
    base = layer(x).data
    lora = moved(LoRA(layer, rank=4, alpha=2, seed=3), rng)
    down, up = (np.abs(p.data.astype(np.float64)) for p in lora.parameters())
    unmerged = layer(x).data
    old = np.abs(layer.weight.data.astype(np.float64))
    expected = dense_state(layer, lora)["weight"]
    lora.merge()
    assert layer.adapter is None and layer.weight.requires_grad
    np.testing.assert_allclose(layer.weight.data, expected, rtol=1e-6, atol=1e-7)
    merged = layer(x).data
    both = old + np.abs(layer.weight.data.astype(np.float64))
    branch = 0.5 * ((down @ up).T if down.ndim == 2 else np.tensordot(up[:, 0, 0], down, 1))
    k = both[0].size + 8
    weights = U16 * both + ((1 + U16) ** 3 - 1) * branch + 2 * k * U32 * (both + branch)
    size = np.abs(x.astype(np.float64)) * (1 + U16)
    with fb.tracks("reference"):
        bound = fb.linear(size, weights) if kind == "linear" else fb.conv2d(
            size, weights, stride=layer.stride, padding=layer.padding)  # fmt: skip
    bound = bound + 2 * k * U32 * np.abs(layer.bias.data)
    error = np.abs(merged.astype(np.float64) - unmerged)
    assert (error <= bound).all() and error.max() > 0
    assert (np.abs(merged - base) > bound).mean() > 0.5  # what was merged is far more than the bound


def test_merge_of_a_network(rng):
    """Unrounded the same function; in BF16 as near as that track's own error; the FP4 twins follow; the base
    can be trained again, and new adapters attached.
    """
    unet, given = network(), arguments(rng)
    layer = unet.mid_block.resnets[0].conv1
    lora = moved(LoRA(unet, rank=3, alpha=6, seed=9), rng, 0.05)
    before, twin = unet.flat.data.copy(), layer.weight.twin()
    with no_grad():
        with fb.tracks("reference"):
            exact = call(unet, given).data
        unmerged = call(unet, given).data
        state = lora.merged_state()
        assert np.array_equal(unet.flat.data, before) and lora.attached
        assert layer.weight.twin() is twin
        lora.merge()
        with fb.tracks("reference"):
            assert np.linalg.norm(call(unet, given).data - exact) < 1e-5 * np.linalg.norm(exact)
        merged = call(unet, given).data
    error = np.linalg.norm(merged - unmerged)
    assert 0 < error < 2 * max(np.linalg.norm(y - exact) for y in (merged, unmerged))
    assert layer.weight.twin() is not twin
    for name, value in unet.state_dict().items():
        assert np.array_equal(value, state[name]), name
    assert set(state) == set(unet.state_dict())
    changed = {name for name, p in unet.flat.views(before).items() if not np.array_equal(p, state[name])}
    assert changed == {f"{name}.weight" for name in lora.adapted}
    unet.zero_grad()
    call(unet, given).sum().backward()
    assert all(p.grad.any() for n, p in unet.named_parameters().items() if n.endswith("conv1.weight"))
    again = LoRA(unet, rank=1, alpha=1)
    with no_grad():
        assert np.array_equal(bits(call(unet, given).data), bits(merged))
    again.detach()


def test_merged_state_of_other_adapters(rng):
    unet = network()
    lora = moved(LoRA(unet, rank=2, alpha=2), rng)
    own, zeros = lora.flat.data, np.zeros_like(lora.flat.data)
    for name, value in lora.merged_state(zeros).items():
        assert np.array_equal(value, unet.state_dict()[name])
    twice = lora.merged_state(own * np.float32(2))
    once, base = lora.merged_state(), unet.state_dict()
    for name in lora.adapted:
        key = f"{name}.weight"
        np.testing.assert_allclose(twice[key] - base[key], 4 * (once[key] - base[key]), atol=1e-5)
    assert lora.flat.data is own


def test_a_merged_or_detached_one_says_so(rng):
    unet = network()
    for leave in (lambda lora: lora.merge(), lambda lora: lora.detach()):
        lora = LoRA(unet, rank=2, alpha=4)
        leave(lora)
        uses = [lora.merge, lora.detach, lora.merged_state, lora.disabled().__enter__]
        for use in (*uses, lora.using(lora.flat.data).__enter__):
            with pytest.raises(ConfigError, match=r"have left their network.*LoRA\(unet, rank=2, alpha=4\)"):
                use()
        assert all(p.requires_grad for p in unet.parameters())


def test_detach_gives_back_what_was_frozen(rng):
    unet, given = network(), arguments(rng)
    frozen = unet.conv_in.weight
    frozen.requires_grad = False
    before = call(unet, given).data
    moved(LoRA(unet, rank=2, alpha=4), rng).detach()
    assert np.array_equal(call(unet, given).data, before)
    assert [p for p in unet.parameters() if not p.requires_grad] == [frozen]


# ---- parameters --------------------------------------------------------------------------------------------
def test_init_is_pefts_gaussian_and_of_the_seed_alone(rng):
    for rank in (1, 4, 16):
        found = [LoRA(nn.UNet2D(nn.UNetConfig.tiny()), rank, 8, seed=seed) for seed in (3, 3, 4)]
        for name, p in found[0].named_parameters().items():
            same, other = (lora.named_parameters()[name].data for lora in found[1:])
            assert np.array_equal(p.data, same) and p.dtype == np.float32
            if name.endswith("lora_up"):
                assert not p.data.any()
            else:
                assert not np.array_equal(p.data, other)
                values = p.data.ravel() * rank  # standard normal: mean and deviation within 5 of theirs
                assert abs(values.mean()) < 5 / np.sqrt(values.size)
                assert abs(values.std() - 1) < 5 / np.sqrt(2 * values.size)
    shared = nn.generator(3)
    first = LoRA(nn.Linear(8, 8), 2, 2, seed=shared).flat.data
    assert not np.array_equal(first, LoRA(nn.Linear(8, 8), 2, 2, seed=shared).flat.data)


def test_names_shapes_and_the_default_layers():
    unet = network()
    lora = LoRA(unet, rank=2, alpha=4)
    layers = {n: m for n, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    left_out = set(layers) - set(lora.adapted)
    assert left_out == {"conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"}
    assert EXCLUDED == ("conv_in", "conv_out", "time_embedding.*")
    want = {}
    for name in lora.adapted:
        shape = layers[name].weight.shape
        want[f"{name}.lora_down"] = (shape[1], 2) if len(shape) == 2 else (2, *shape[1:])
        want[f"{name}.lora_up"] = (2, shape[0]) if len(shape) == 2 else (shape[0], 1, 1, 2)
    assert {n: p.shape for n, p in lora.named_parameters().items()} == want
    assert list(lora.state_dict()) == list(want) == list(lora.flat.named)
    assert not any("lora" in name for name in unet.named_parameters())
    assert lora.parameter_count() == sum(int(np.prod(shape)) for shape in want.values())
    with pytest.raises(TypeError, match="call the network itself"):
        lora(np.zeros((1, 8, 8, 3)))


@pytest.mark.parametrize(
    "targets, want",
    (
        ("to_q", r"\.to_q$"),
        (["to_q", "to_out.0"], r"\.to_(q|out\.0)$"),
        (("down_blocks.0.*.conv?",), r"^down_blocks\.0\.resnets\.\d\.conv[12]$"),
        ("conv_in", "^conv_in$"),
        ("resnets.0.conv1", r"resnets\.0\.conv1$"),
        (["mid_block.*", "mid_block.attentions.0.to_q"], "^mid_block"),
    ),
)
def test_targets(targets, want):

    unet = network()
    lora = LoRA(unet, rank=2, alpha=4, targets=targets)
    names = [n for n, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert list(lora.adapted) == [n for n in names if re.search(want, n)] != []
    assert {n for n, m in unet.named_modules() if getattr(m, "adapter", None)} == set(lora.adapted)


def test_state_goes_out_and_comes_back(rng):
    one, two = network(), network()
    given = arguments(rng)
    source, target = moved(LoRA(one, 2, 4, seed=1), rng), LoRA(two, 2, 4, seed=2)
    state = source.state_dict()
    target.load_state_dict(state)
    assert np.array_equal(call(one, given).data, call(two, given).data)
    state["mid_block.resnets.0.conv1.lora_up"][...] = 9  # a copy
    assert not (source.flat.data == 9).any()
    scaled = source.state_dict(source.flat.data * np.float32(2))
    name = "mid_block.attentions.0.to_q.lora_up"
    assert np.array_equal(scaled[name], 2 * source.state_dict()[name])
    before = target.flat.data.copy()
    wrong = dict(LoRA(network(), 3, 4).state_dict(), extra=np.zeros(1))
    del wrong[name]
    with pytest.raises(ShapeError, match=r"missing: .*to_q.lora_up; unexpected: extra; .*instead of"):
        target.load_state_dict(wrong)
    assert np.array_equal(target.flat.data, before)
    with pytest.raises(ShapeError, match="unexpected: "):
        target.load_state_dict(two.state_dict())


def test_copies_keep_their_adapters(rng):
    unet, given = network(), arguments(rng)
    moved(LoRA(unet, rank=2, alpha=2), rng)
    want = call(unet, given).data
    for other in (copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))):
        assert np.array_equal(call(other, given).data, want)
        lora = other.mid_block.resnets[0].conv1.adapter.lora
        assert lora.unet is other
        with lora.disabled():
            assert not np.array_equal(call(other, given).data, want)
        assert np.array_equal(call(unet, given).data, want)


def test_base_weights_of_another_buffer(rng):
    """`unet.using` swaps the base under the adapters."""
    unet, given = network(), arguments(rng)
    lora = moved(LoRA(unet, rank=2, alpha=2), rng)
    other = unet.flat.data * np.float32(0.9)
    want = network()
    want.flat.data[...] = other
    moved(LoRA(want, rank=2, alpha=2), rng).load_state_dict(lora.state_dict())
    with no_grad(), unet.using(other):
        assert np.array_equal(call(unet, given).data, call(want, given).data)


# ---- what cannot be ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changes, sentence",
    (
        (dict(rank=0), "rank is 0, but must be a whole number from 1 on"),
        (dict(rank=-2), "rank is -2"),
        (dict(rank=2.0), "rank is 2.0"),
        (dict(rank=True), "rank is True"),
        (dict(rank="8"), "rank is '8'"),
        (dict(rank=9), "rank is 9, but down_blocks.0.*8 outputs of .* has no more than rank 8 itself; lower"),
        (dict(alpha=0), "alpha is 0, but must be a positive number.*neither run nor learn"),
        (dict(alpha=-1.0), "alpha is -1.0"),
        (dict(alpha=float("nan")), "alpha is nan"),
        (dict(alpha=float("inf")), "alpha is inf"),
        (dict(alpha=None), "alpha is None"),
        (dict(targets=["to_q", "to_w"]), r"targets: 'to_w' matches no .*did you mean 'to_"),
        (dict(targets="norm1"), "'norm1' matches no Linear or Conv2d layer"),
        (dict(targets="down_blocks.0.resnets.0.conv3"), "did you mean 'down_blocks.0.resnets.0.conv"),
        (dict(targets="caption_embedding"), "'caption_embedding' matches no"),
        (dict(targets=[]), "targets is empty"),
    ),
)
def test_bad_settings(changes, sentence):
    unet = network()
    with pytest.raises(ConfigError, match=sentence):
        LoRA(unet, **{**dict(rank=2, alpha=4), **changes})
    assert all(p.requires_grad for p in unet.parameters())
    assert not any(getattr(m, "adapter", None) for _, m in unet.named_modules())
    LoRA(unet, rank=8, alpha=1)  # as large as the smallest layer allows


def test_twice_is_refused(rng):
    unet = network()
    lora = LoRA(unet, rank=2, alpha=4, targets="to_q")
    for targets in (None, "to_k"):
        with pytest.raises(ConfigError, match=r"to_q has an adapter of rank 2 already.*merge\(\) or detach"):
            LoRA(unet, rank=3, alpha=4, targets=targets)
    with pytest.raises(ConfigError, match="already"):
        LoRA(unet.mid_block, rank=3, alpha=4)
    assert lora.attached and len(lora.adapted) == 4


def test_a_network_with_nothing_to_adapt():
    class Bare(nn.Module):
        def __init__(self):
            self.conv_in = nn.Conv2d(2, 2)

    with pytest.raises(ConfigError, match="no layer to adapt: its 1 .*name them in targets"):
        LoRA(Bare(), rank=1, alpha=1)
    assert LoRA(Bare(), rank=1, alpha=1, targets="conv_in").adapted == ("conv_in",)


def test_not_on_the_gpu(host_cuda, monkeypatch):  # noqa: F811
    """Neither way round: adapters would be left out there in silence."""
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())
    one = put(np.zeros(1, np.float32))
    unet = nn.UNet2D(nn.UNetConfig.tiny())
    lora = LoRA(unet, rank=2, alpha=4)
    with pytest.raises(ConfigError, match=r"conv1 has a low-rank adapter, .*merge\(\) or detach\(\) first"):
        unet.cuda(one)
    assert not unet.on_device
    lora.detach()
    unet.cuda(one)
    with pytest.raises(ConfigError, match=r"the network is on the GPU, .*unet.cpu\(\) first"):
        LoRA(unet, rank=2, alpha=4)
    LoRA(unet.cpu(), rank=2, alpha=4)
