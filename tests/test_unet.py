"""The UNet: equal to diffusers' on the same weights, near itself on the other tracks, independent of the
batch.
"""

from __future__ import annotations

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.errors import ConfigError, ShapeError
from fp4bf16.nn.tape import no_grad

CONFIGS = {
    "ddpm-cifar10-32": (nn.UNetConfig.ddpm_cifar10_32(), (1, 32, 32, 3)),
    "tiny": (nn.UNetConfig.tiny(), (2, 8, 8, 12)),
    "variants": (
        nn.UNetConfig.tiny(
            in_channels=3, out_channels=5, center_input_sample=True, freq_shift=1, attention_head_dim=8,
            down_block_types=("AttnDownBlock2D", "DownBlock2D", "AttnDownBlock2D"), layers_per_block=2,
            up_block_types=("AttnUpBlock2D", "UpBlock2D", "AttnUpBlock2D"), block_out_channels=(16, 16, 32),
            mid_block_scale_factor=1.4, num_class_embeds=4, downsample_padding=1, attn_norm_num_groups=4,
            time_embedding_dim=40, norm_eps=1e-3),
        (2, 8, 12, 3)),
    "no attention": (nn.UNetConfig.tiny(add_attention=False, downsample_padding=0), (1, 6, 8, 12)),
}  # fmt: skip


def diffusers_model(config, seed):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    arguments = config.to_dict()
    del arguments["caption_vocabulary"]
    model = diffusers.UNet2DModel(**arguments).eval()
    with torch.no_grad():  # norms and biases start at 1 and 0: move them
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
    return torch, model


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_diffusers(name, rng):
    config, shape = CONFIGS[name]
    torch, theirs = diffusers_model(config, int(rng.integers(1 << 30)))
    ours = nn.load_diffusers(nn.UNet2D(config), theirs.state_dict())
    assert ours.parameter_count() == sum(p.numel() for p in theirs.parameters())
    assert set(ours.named_parameters()) == set(theirs.state_dict())
    x = rng.standard_normal(shape).astype(np.float32)
    t = rng.integers(0, 1000, shape[0])
    labels = rng.integers(0, 4, shape[0]) if config.num_class_embeds else None
    with torch.no_grad():
        want = theirs(torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(t),
                      class_labels=None if labels is None else torch.from_numpy(labels)).sample  # fmt: skip
        want = want.permute(0, 2, 3, 1).numpy()
    with fb.tracks("reference"), no_grad():
        got = ours(x, t, class_labels=labels).data
    scale = np.abs(want).max()
    assert got.dtype == np.float32 and got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=1e-4 * scale)
    assert np.linalg.norm(got - want) < 2e-5 * np.linalg.norm(want)
    with no_grad():
        bf16 = ours(x, t, class_labels=labels).data
    assert 1e-5 < np.linalg.norm(bf16 - want) / np.linalg.norm(want) < 0.03


def test_gradients_equal_diffusers(rng):
    config = nn.UNetConfig.tiny()
    torch, theirs = diffusers_model(config, int(rng.integers(1 << 30)))
    ours = nn.load_diffusers(nn.UNet2D(config), theirs.state_dict())
    x, target = (rng.standard_normal((2, 8, 8, 12)).astype(np.float32) for _ in range(2))
    loss = ((theirs(torch.from_numpy(x).permute(0, 3, 1, 2), torch.tensor([3, 900])).sample
             - torch.from_numpy(target).permute(0, 3, 1, 2)) ** 2).mean()  # fmt: skip
    loss.backward()
    want = nn.from_diffusers({k: p.grad for k, p in theirs.named_parameters()})
    with fb.tracks("reference"):
        nn.ops.mean_squared_error(ours(x, np.array([3, 900])), target).backward()
    for name, p in ours.named_parameters().items():
        error = np.linalg.norm(p.grad - want[name])
        assert error <= 1e-4 * np.linalg.norm(want[name]) + 1e-7, name


def test_published_configuration_has_its_size():
    model = nn.UNet2D(nn.UNetConfig.ddpm_cifar10_32())
    assert model.parameter_count() == 35_746_307
    assert model.down_blocks[0].downsamplers[0].conv.padding == ((0, 1), (0, 1))
    assert model.mid_block.attentions[0].heads == 1


def make(**changes):
    return nn.UNet2D(nn.UNetConfig.tiny(caption_vocabulary=6, **changes), seed=2)


def arguments(rng, batch=4):
    bag = (rng.random((batch, 6)) < 0.5).astype(np.float32)
    return rng.standard_normal((batch, 8, 8, 12)).astype(np.float32), rng.integers(0, 1000, batch), bag


@pytest.mark.parametrize("track", ["bf16", "fp4", "reference"])
def test_no_grad_gives_the_same_bits(track, rng):
    model, (x, t, bag) = make(), arguments(rng)
    model.apply_route({"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"})
    with fb.tracks(None if track == "fp4" else track):
        with no_grad():
            silent = model(x, t, captions=bag).data
        recorded = model(x, t, captions=bag)
    assert recorded.requires_grad
    assert np.array_equal(silent, recorded.data)


@pytest.mark.parametrize("track", ["bf16", "fp4"])
def test_pictures_do_not_see_each_other(track, rng):
    """In a batch of one size a picture gets the same bits whatever surrounds it, and wherever it stands."""
    model, (x, t, bag) = make(), arguments(rng, 6)
    model.apply_route({"*": track})
    with no_grad():
        whole = model(x, t, captions=bag).data
        order = rng.permutation(6)
        assert np.array_equal(model(x[order], t[order], captions=bag[order]).data, whole[order])
        y, s, other = rng.standard_normal(x.shape).astype(np.float32), t.copy(), bag.copy()
        s[0], other[0], y[2] = 999, 1, x[2]
        assert np.array_equal(model(y, s, captions=other).data[2], whole[2])


def test_batch_size_changes_no_more_than_rounding(rng):
    """Another batch size may change the order of BLAS's sums: rounding errors in float32, and in BF16 no more
    than that track's own distance from the unrounded result.
    """
    model, (x, t, bag) = make(), arguments(rng, 6)
    with no_grad(), fb.tracks("reference"):
        exact = model(x, t, captions=bag).data[2]
        alone = model(x[2:3], t[2:3], captions=bag[2:3]).data[0]
    size = np.linalg.norm(exact)
    assert np.linalg.norm(alone - exact) < 1e-5 * size
    with no_grad():
        whole = model(x, t, captions=bag).data[2]
        alone = model(x[2:3], t[2:3], captions=bag[2:3]).data[0]
    assert (
        np.linalg.norm(alone - whole)
        < 2 * max(np.linalg.norm(y - exact) for y in (alone, whole))
        < 0.06 * size
    )


def test_fp4_is_near_bf16(rng):
    model, (x, t, bag) = make(), arguments(rng)
    with no_grad():
        bf16 = model(x, t, captions=bag).data
        model.apply_route({"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"})
        fp4 = model(x, t, captions=bag).data
    # about 0.28 on unfit weights: some twenty layers with 9 % in each operand
    assert 0.05 < np.linalg.norm(fp4 - bf16) / np.linalg.norm(bf16) < 0.45


def test_captions(rng):
    model, (x, t, bag) = make(), arguments(rng, 2)
    bag[0], bag[1] = [1, 0, 1, 0, 0, 0], 0
    with fb.tracks("reference"), no_grad():
        y = model(x, t, captions=bag).data
        model.caption_embedding.weight.data[0] = model.caption_embedding.weight.data[2] = (
            model.caption_embedding.weight.data[[0, 2]].mean(0)
        )
        np.testing.assert_allclose(model(x, t, captions=bag).data, y, atol=1e-4)  # the mean of the words
        model.caption_embedding.weight.data[:] = 0
        z = model(x, t, captions=bag).data
    np.testing.assert_allclose(z[1], y[1], atol=1e-5)  # an all-zero row adds nothing
    assert np.abs(z[0] - y[0]).max() > 1e-3


def test_timesteps_may_be_one_number(rng):
    model, (x, _, bag) = make(), arguments(rng, 2)
    with no_grad():
        one = model(x, 7, captions=bag).data
        assert np.array_equal(one, model(x, np.array([7, 7]), captions=bag).data)
        assert not np.array_equal(one, model(x, 8, captions=bag).data)


def test_pixel_unshuffle(rng):
    x = rng.standard_normal((2, 4, 6, 3)).astype(np.float32)
    y = nn.pixel_unshuffle(x)
    assert y.shape == (2, 2, 3, 12)
    assert np.array_equal(nn.pixel_shuffle(y), x)
    assert y[1, 1, 2, 2 * 4 + 1 * 2 + 0] == x[1, 3, 4, 2]  # channel c, row 1, column 0
    v = nn.Variable(x, requires_grad=True)
    assert np.array_equal(nn.pixel_shuffle(nn.pixel_unshuffle(v)).data, x)
    torch = pytest.importorskip("torch")
    want = torch.nn.functional.pixel_unshuffle(torch.from_numpy(x).permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
    assert np.array_equal(y, want.numpy())


# ---- loader ----


def test_layouts_and_old_names(rng):
    state = {"conv_in.weight": rng.standard_normal((4, 3, 5, 2)), "mid.attentions.0.query.weight": np.eye(2),
             "mid.attentions.0.proj_attn.bias": np.ones(2), "time.weight": np.ones((4, 3))}  # fmt: skip
    ours = nn.from_diffusers(state)
    assert ours["conv_in.weight"].shape == (4, 5, 2, 3) and ours["conv_in.weight"].flags.c_contiguous
    assert ours["conv_in.weight"][1, 2, 0, 2] == np.float32(state["conv_in.weight"][1, 2, 2, 0])
    assert {
        "mid.attentions.0.to_q.weight",
        "mid.attentions.0.to_out.0.bias",
        "time.weight",
    } < set(ours)
    assert np.array_equal(nn.to_diffusers(ours)["conv_in.weight"], state["conv_in.weight"].astype(np.float32))


def test_checkpoint_file(tmp_path, rng):
    pytest.importorskip("safetensors")
    from safetensors.numpy import save_file

    model, (x, t, bag) = make(), arguments(rng)
    file = tmp_path / "model.safetensors"
    save_file(nn.to_diffusers(model.state_dict()), str(file))
    other = nn.load_diffusers(nn.UNet2D(model.config, seed=77), file)
    with no_grad():
        assert np.array_equal(model(x, t, captions=bag).data, other(x, t, captions=bag).data)


def test_foreign_checkpoint_is_refused(rng):
    model = make()
    state = nn.to_diffusers(model.state_dict())
    state["conv_in.weight"] = state["conv_in.weight"][:, :3]
    state["unknown.weight"] = state.pop("conv_out.bias")
    with pytest.raises(ShapeError) as error:
        nn.load_diffusers(model, state)
    for part in (
        "missing: conv_out.bias",
        "unexpected: unknown.weight",
        "conv_in.weight has shape (32, 3, 3, 3)",
    ):
        assert part in str(error.value)


# ---- configuration and bad input ----


def test_config_round_trip():
    config = nn.UNetConfig.ddpm_cifar10_32(num_class_embeds=10)
    published = {"_class_name": "UNet2DModel", "_diffusers_version": "0.1", **config.to_dict()}
    assert nn.UNetConfig.from_dict(published) == config


BAD = [
    (dict(act_fn="gelu"), "act_fn is 'gelu', but must be one of 'silu'"),
    (dict(time_embedding_type="fourier"), "time_embedding_type is 'fourier'"),
    (
        dict(down_block_types=("SkipDownBlock2D", "DownBlock2D")),
        "down_block_types.*DownBlock2D and AttnDownBlock2D",
    ),
    (dict(up_block_types=("UpBlock2D",)), "one entry for each of block_out_channels"),
    (dict(norm_num_groups=7), "norm_num_groups is 7.*divisor of the 32 channels"),
    (dict(layers_per_block=0), "layers_per_block is 0.*positive"),
    (dict(downsample_padding=2), "downsample_padding is 2"),
    (dict(dropout=0.1), "dropout is 0.1"),
    (dict(resnet_time_scale_shift="scale_shift"), "resnet_time_scale_shift"),
    (dict(block_out_channels=()), "block_out_channels"),
]


@pytest.mark.parametrize("changes, message", BAD, ids=[next(iter(c)) for c, _ in BAD])
def test_unsupported_configurations(changes, message):
    with pytest.raises(ConfigError, match=message):
        nn.UNetConfig.tiny(**changes)


def test_unknown_argument_names_the_nearest():
    with pytest.raises(ConfigError, match="'sample_sise' is not an argument.*did you mean 'sample_size'"):
        nn.UNetConfig.from_dict({"sample_sise": 8})


def test_bad_calls(rng):
    model, (x, t, bag) = make(), arguments(rng, 2)
    plain = nn.UNet2D(nn.UNetConfig.tiny())
    for call, error, message in [
        (lambda: model(x[..., :3], t, captions=bag), ShapeError, r"\(2, 8, 8, 3\).*12"),
        (lambda: model(x[:, :7], t, captions=bag), ShapeError, "7 x 8 pixels.*multiples of 2"),
        (lambda: model(x, t), ConfigError, "captions is missing.*caption_vocabulary is 6"),
        (lambda: plain(x, t, captions=bag), ConfigError, "captions is given.*caption_vocabulary is None"),
        (lambda: plain(x, t, class_labels=[0, 1]), ConfigError, "class_labels is given"),
        (lambda: model(x, t, captions=bag[:1]), ShapeError, "captions has 1 rows but sample has 2"),
        (lambda: model(x, np.arange(3), captions=bag), ShapeError, "timesteps has shape"),
        (lambda: nn.pixel_unshuffle(x[:, :7]), ShapeError, "7 x 8 pixels"),
        (lambda: nn.pixel_shuffle(x[..., :3]), ShapeError, "3 channels"),
    ]:
        with pytest.raises(error, match=message):
            call()
