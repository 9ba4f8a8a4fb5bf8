"""The benchmarks' PyTorch network is diffusers', and on the same weights it is ours."""

from __future__ import annotations

import importlib.util
import pathlib

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.nn.tape import no_grad

torch = pytest.importorskip("torch", reason="the extra 'peers' is not installed")

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
        (3, 8, 12, 3)),
    "no attention, one picture": (
        nn.UNetConfig.tiny(add_attention=False, downsample_padding=0), (1, 6, 8, 12)),
}  # fmt: skip


@pytest.fixture(scope="module")
def peer():
    path = pathlib.Path(__file__).resolve().parents[1] / "bench" / "torch_unet.py"
    spec = importlib.util.spec_from_file_location("torch_unet", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(2)
    return module


def filled(model, rng):
    """`model` with norms and biases moved from 1 and 0."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def inputs(config, shape, rng):
    x = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).permute(0, 3, 1, 2)
    t = torch.from_numpy(rng.integers(0, 1000, shape[0]))
    labels = torch.from_numpy(rng.integers(0, 4, shape[0])) if config.num_class_embeds else None
    return x, t, labels


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_our_network(name, peer, rng):
    config, shape = CONFIGS[name]
    theirs = filled(peer.TorchUNet(config), rng)
    ours = nn.load_diffusers(nn.UNet2D(config), theirs.state_dict())
    x, t, labels = inputs(config, shape, rng)
    with torch.no_grad():
        want = theirs(x, t, labels).permute(0, 2, 3, 1).numpy()
    with fb.tracks("reference"), no_grad():
        got = ours(x.permute(0, 2, 3, 1).numpy(), t.numpy(),
                   class_labels=None if labels is None else labels.numpy()).data  # fmt: skip
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", ["tiny", "variants", "no attention, one picture"])
def test_equals_diffusers(name, peer, rng):
    diffusers = pytest.importorskip("diffusers", reason="the extra 'peers' is not installed")
    config, shape = CONFIGS[name]
    arguments = config.to_dict()
    del arguments["caption_vocabulary"]
    theirs = filled(diffusers.UNet2DModel(**arguments), rng)
    x, t, labels = inputs(config, shape, rng)
    with torch.no_grad():
        want = theirs(x, t, class_labels=labels).sample
    for options in ({}, {"channels_last": True}, {"sdpa": False}):
        ours = peer.TorchUNet(config, **options).eval()
        ours.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            got = ours(x, t, labels)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()), msg=str(options))
    assert ours.conv_in.weight.is_contiguous()
    assert peer.TorchUNet(config, channels_last=True).conv_in.weight.is_contiguous(
        memory_format=torch.channels_last
    )


def test_gradients_equal_ours(peer, rng):
    config, shape = CONFIGS["tiny"]
    theirs = filled(peer.TorchUNet(config), rng)
    ours = nn.load_diffusers(nn.UNet2D(config), theirs.state_dict())
    x, t, _ = inputs(config, shape, rng)
    target = torch.randn(x.shape)
    torch.nn.functional.mse_loss(theirs(x, t), target).backward()
    want = nn.from_diffusers({k: p.grad for k, p in theirs.named_parameters()})
    with fb.tracks("reference"):
        nn.ops.mean_squared_error(
            ours(x.permute(0, 2, 3, 1).numpy(), t.numpy()), target.permute(0, 2, 3, 1).numpy()
        ).backward()
    for name, p in ours.named_parameters().items():
        # float32 sums in another order, through ten layers: 1e-4 of each gradient, 1e-7 where it vanishes
        assert np.linalg.norm(p.grad - want[name]) <= 1e-4 * np.linalg.norm(want[name]) + 1e-7, name


def test_captions_are_refused(peer):
    with pytest.raises(ValueError, match="caption_vocabulary is set"):
        peer.TorchUNet(nn.UNetConfig.tiny(caption_vocabulary=3))
