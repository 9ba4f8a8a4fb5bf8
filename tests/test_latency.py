"""What layers cost: operations against what a forward really multiplies, the model's roofline, the clock."""

from __future__ import annotations

import numpy as np
import pytest

from fp4bf16 import ConfigError, ShapeError, tracks
from fp4bf16.nn import Conv2d, UNet2D, UNetConfig, no_grad, ops
from fp4bf16.nn.watch import Watcher, watching
from fp4bf16.routing import Rates, Stopwatch, flops, layers_of, measure, modelled, work
from fp4bf16.routing.latency import host_device
from fp4bf16.tune import LatencyTable

SMALL = dict(block_out_channels=(8, 16), norm_num_groups=4)
CONFIGS = {
    "tiny": UNetConfig.tiny(**SMALL, caption_vocabulary=9),
    "classes": UNetConfig.tiny(**SMALL, num_class_embeds=3, layers_per_block=2),
    "attention": UNetConfig.tiny(
        block_out_channels=(8, 16, 16), norm_num_groups=4, attention_head_dim=8, mid_block_type=None,
        down_block_types=("AttnDownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D"),
    ),
    "padding 0": UNetConfig.tiny(**SMALL, downsample_padding=0),
    "one level": UNetConfig.tiny(
        block_out_channels=(8,), down_block_types=("DownBlock2D",), up_block_types=("AttnUpBlock2D",),
        norm_num_groups=4, in_channels=3, out_channels=3,
    ),
}  # fmt: skip


def inputs(config: UNetConfig, shape: tuple, rng) -> tuple:
    captions = classes = None
    if config.caption_vocabulary:
        captions = rng.integers(0, 2, (shape[0], config.caption_vocabulary)).astype(np.float32)
    if config.num_class_embeds:
        classes = rng.integers(0, config.num_class_embeds, shape[0])
    return rng.standard_normal(shape).astype(np.float32), 7, classes, captions


class Shapes(Watcher):
    """M, N, K and the elements read, of every product that runs."""

    def __init__(self):
        self.seen = {}

    def product(self, layer, x, y, run, certificate):
        w = layer.multiplied(layer.track)
        if isinstance(layer, Conv2d) and w is layer.weight:
            x = layer.pictures(x)
        self.seen[layer.key] = (y.size // w.shape[0], w.shape[0], w.size // w.shape[0], x.size)
        return y


@pytest.mark.parametrize("phases", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_work_is_what_a_forward_multiplies(name, phases, rng, monkeypatch):
    config = CONFIGS[name]
    size = 2 ** (len(config.block_out_channels) - 1)
    shape = (int(rng.integers(1, 4)), size * 3, size * 2, config.in_channels)
    unet = UNet2D(config).upsample_by_phases(phases)
    names = list(unet.apply_route({"*": "bf16"}))
    cores = []
    plain = ops.attention

    def spy(q, k, v, **how):
        cores.append(4 * q.shape[0] * q.shape[1] * k.shape[1] * q.shape[2] * q.shape[3])
        return plain(q, k, v, **how)

    monkeypatch.setattr(ops, "attention", spy)
    watcher = Shapes()
    with no_grad(), watching(watcher):
        unet(*inputs(config, shape, rng))
    found = work(unet, shape)
    assert list(found) == names
    products = {n: (*w.shape, w.read) for n, w in found.items() if w.op in ("linear", "conv2d")}
    assert products == watcher.seen
    assert [w.flops for w in found.values() if w.op == "attention"] == cores
    captions = [w for w in found.values() if w.op == "captions"]
    assert [w.shape for w in captions] == (
        [(shape[0], config.time_dim, 9)] if config.caption_vocabulary else []
    )
    assert flops(unet, shape) == pytest.approx({n: w.flops / shape[0] for n, w in found.items()})


def test_the_published_network_has_its_12_44_gflop_and_every_weight_a_layer():
    unet = UNet2D(UNetConfig.ddpm_cifar10_32()).upsample_by_phases(False)
    whole = flops(unet)
    assert sum(whole.values()) == pytest.approx(12.44e9, rel=5e-4)  # its four digits
    counts = flops(unet.upsample_by_phases())
    assert {n for n in counts if counts[n] != whole[n]} == set(unet.phased()) != set()
    assert all(9 * counts[n] == 4 * whole[n] for n in unet.phased())
    layers = layers_of(unet)
    weights = {n: p.size for n, p in unet.named_parameters().items() if n in layers}
    assert {n: i.parameters for n, i in layers.items() if i.parameters} == weights
    assert [n for n, i in layers.items() if not i.certified] == [n for n in layers if "weight" not in n]
    assert {n: i.flops for n, i in layers.items()} == counts


def test_shapes_that_the_network_does_not_take():
    unet = UNet2D(CONFIGS["tiny"])
    for shape in ((1, 8, 8), (1, 8, 8, 3), (0, 8, 8, 12), (1, 0, 8, 12)):
        with pytest.raises(ShapeError, match=r"\(batch, height, width, 12\) is needed"):
            work(unet, shape)
    with pytest.raises(ShapeError, match="9 x 8 pixels, but the 2 levels need multiples of 2"):
        flops(unet, (1, 9, 8, 12))
    with pytest.raises(ShapeError, match="no sample_size"):
        flops(UNet2D(UNetConfig.tiny(**SMALL, sample_size=None)))
    with pytest.raises(TypeError, match="unet is a dict"):
        work({})
    assert work(UNet2D(UNetConfig.tiny(**SMALL, sample_size=(4, 8))))["conv_in.weight"].rows == 32


# ---- the model ----
@pytest.mark.parametrize("phases", [True, False])
def test_the_model_is_a_roofline(phases, rng):
    unet = UNet2D(CONFIGS["attention"]).upsample_by_phases(phases)
    shape = (2, 8, 12, 12)
    rates = Rates("a device", {"bf16": 1e9, "fp4": 4e9}, 1e8, 1e7, 3.0)
    times, sizes = modelled(unet, shape, rates), work(unet, shape)
    assert list(times) == [n for n, w in sizes.items() if w.op in ("linear", "conv2d")]
    for name, part in (
        ("down_blocks.0.resnets.0.conv2.weight", 0), ("down_blocks.0.attentions.0.to_out.0.weight", 1),
        ("up_blocks.0.upsamplers.0.conv.weight", 1 if phases else 0.25),
        ("down_blocks.0.downsamplers.0.conv.weight", 1),
    ):  # fmt: skip
        w = sizes[name]
        for track, item in (("bf16", 2), ("fp4", 1)):
            operations = 2 * w.rows * w.columns * w.k / rates.flops[track]
            read = (item * (w.read + w.columns * w.k) + 2 * w.rows * w.columns) / 1e8
            own = part * w.read / 1e7 if track == "fp4" else 0.0
            expected = 3.0 + 1e6 * (max(operations, read) + own)
            assert times[name][track] == pytest.approx(expected, rel=1e-12)


def test_the_model_finds_what_was_measured_on_the_device():
    """`bench/results/nvidia-h200/conv.json`: us of 3x3 convolutions, BF16 and FP4 with promoted sums."""
    measured = {
        (256, 16, 256): (115.3, 74.2),
        (1024, 16, 256): (460.4, 293.6),
        (128, 32, 256): (228.4, 145.5),
    }
    for (batch, size, channels), (bf16, fp4) in measured.items():
        config = UNetConfig.tiny(
            block_out_channels=(channels,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
            in_channels=3, out_channels=3, mid_block_type=None,
        )  # fmt: skip
        times = modelled(UNet2D(config), (batch, size, size, 3))["down_blocks.0.resnets.0.conv2.weight"]
        assert times["bf16"] == pytest.approx(bf16, rel=0.1) and times["fp4"] == pytest.approx(fp4, rel=0.1)


def test_the_model_parts_the_layers_as_measuring_did():
    """The route of `bench/results/nvidia-h200/network.json` was found on the device, one kind of layer after
    another: without a norm before it to quantise, a layer of few products a pixel lost on FP4.
    """
    slow = ("time_emb", "conv_shortcut", "downsamplers", "to_out")
    times = modelled(UNet2D(UNetConfig.ddpm_cifar10_32()), (1024, 32, 32, 3))
    for name, by_track in times.items():
        if not name.startswith(("conv_in", "conv_out")):  # which have kernels of their own on BF16
            assert (by_track["fp4"] >= by_track["bf16"]) is any(kind in name for kind in slow), name


def test_tracks_without_rates():
    unet = UNet2D(CONFIGS["one level"])
    with pytest.raises(ConfigError, match="rates of NVIDIA H200 have no track 'reference'"):
        modelled(unet, tracks=("reference",))
    with pytest.raises(ValueError, match="'fp3' is not a track"):
        modelled(unet, tracks=("fp3",))


# ---- the clock ----
class Clock:
    """Advances by a fixed time a look."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.5e-6
        return self.now


def test_every_product_is_timed_and_none_is_changed(rng):
    config = CONFIGS["tiny"]
    unet = UNet2D(config, seed=int(rng.integers(1 << 30)))
    given = inputs(config, (2, 8, 8, 12), rng)
    route = unet.apply_route({"conv_in*": "bf16", "*": "fp4"})
    with no_grad():
        before = unet(*given).data
    times = measure(unet, *given, repeats=1)
    products = [n for n, w in work(unet).items() if w.op in ("linear", "conv2d")]
    assert list(times) == products
    for by_track in times.values():
        assert set(by_track) == {"bf16", "fp4"} and all(0 < t < 60e6 for t in by_track.values())
    stopwatch = Stopwatch(("dual",), 2, Clock())
    with no_grad(), watching(stopwatch):
        assert np.array_equal(unet(*given).data, before)
    assert all(t["dual"] == pytest.approx(0.5) for t in stopwatch.times.values())  # of two looks
    assert unet.apply_route(route) == route
    with no_grad():
        assert np.array_equal(unet(*given).data, before)


def test_a_layer_that_runs_twice_has_the_sum(rng):
    unet = UNet2D(CONFIGS["tiny"])
    unet.apply_route({})
    given = inputs(CONFIGS["tiny"], (1, 8, 8, 12), rng)
    stopwatch = Stopwatch(repeats=1, clock=Clock())
    with no_grad(), watching(stopwatch):
        unet(*given)
        unet(*given)
    assert stopwatch.times["conv_in.weight"] == pytest.approx({"bf16": 1.0, "fp4": 1.0})


def test_measuring_needs_no_route_before_and_sees_through_an_override(rng):
    unet = UNet2D(CONFIGS["one level"])
    given = inputs(CONFIGS["one level"], (1, 4, 4, 3), rng)
    with tracks("reference"):
        times = measure(unet, *given, repeats=1)
    assert set(times) == {n for n, i in layers_of(unet).items() if i.certified}


def test_more_work_takes_longer(rng):
    """512 times the operations of a layer: far more than what a busy machine makes of either."""
    unet = UNet2D(UNetConfig.tiny())
    few, many = (
        measure(unet, rng.standard_normal((n, s, s, 12)).astype(np.float32), 3, tracks=("bf16",))
        for n, s in ((1, 4), (32, 16))
    )
    name = "up_blocks.1.resnets.0.conv1.weight"
    assert many[name]["bf16"] > 2 * few[name]["bf16"]


def test_times_go_through_the_table(rng):
    unet = UNet2D(CONFIGS["tiny"])
    given = inputs(CONFIGS["tiny"], (1, 8, 8, 12), rng)
    table = LatencyTable()
    times = measure(unet, *given, repeats=1, table=table)
    shapes = {n: (w.op, w.shape) for n, w in work(unet).items() if n in times}
    held = {n: table.get(*shapes[n], "fp4", host_device()).microseconds for n in times}
    assert held == {n: t["fp4"] for n, t in times.items()}
    counts = [value.count for _, value in table]
    assert sum(counts) == 2 * len(times) and len(counts) < 2 * len(times)  # some layers are alike
    table.frozen = True
    assert measure(unet, *given, repeats=1, table=table) == times


def test_bad_settings():
    with pytest.raises(ValueError, match="repeats is 0"):
        Stopwatch(repeats=0)
    with pytest.raises(ValueError, match="'fp3' is not a track"):
        Stopwatch(("fp3",))

    class OnDevice(UNet2D):
        on_device = True

    with pytest.raises(ConfigError, match="on the GPU"):
        measure(OnDevice(CONFIGS["one level"]), np.zeros((1, 4, 4, 3), np.float32), 0)
