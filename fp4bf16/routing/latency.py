"""What each layer of a UNet costs on each track: operations counted, time modelled from them, time measured.

The names are those of `Module.apply_route`. Operations are multiplications and additions of products alone:
2 M N K each.
"""

from __future__ import annotations

import fnmatch
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ..backends.threads import num_threads
from ..errors import ConfigError, ShapeError
from ..nn.layers import Attention, BagEmbedding, Conv2d, Linear, UpsampledConv2d
from ..nn.tape import no_grad
from ..nn.unet import UNet2D
from ..nn.watch import Watcher, watching
from ..tracks import check_track
from ..tune import LatencyTable

#: Layers whose input a group norm writes, so that the quantiser is part of that kernel on a GPU.
AFTER_NORM = ("*.conv1.weight", "*.conv2.weight", "*.to_q.weight", "*.to_k.weight", "*.to_v.weight")


@dataclass(frozen=True)
class Work:
    """One layer's products of a call. op: "linear", "conv2d", "attention" or "captions".

    rows, columns, k: M, N and K. read: elements of the input; a convolution reads each kh kw times.
    """

    op: str
    rows: int
    columns: int
    k: int
    read: int

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.rows * self.columns * self.k

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K), the shape under which `LatencyTable` keeps its times."""
        return self.rows, self.columns, self.k


# ---- operations ----
def _picture(unet: UNet2D, shape: Sequence[int] | None) -> tuple[int, int, int]:
    """(batch, height, width) of `shape`, that of the network's input; None: one picture of its own size."""
    c = unet.config
    if shape is None:
        size = c.sample_size
        if size is None:
            raise ShapeError(
                "flops: the network has no sample_size; pass shape=(batch, height, width, channels)"
            )
        height, width = (size, size) if isinstance(size, int) else size
        shape = (1, height, width, c.in_channels)
    if len(shape) != 4 or shape[3] != c.in_channels or min(shape) < 1:
        raise ShapeError(
            f"flops: shape is {tuple(shape)}, but (batch, height, width, {c.in_channels}) is needed, each 1 "
            "or more"
        )
    halvings = 2 ** (len(c.block_out_channels) - 1)
    if shape[1] % halvings or shape[2] % halvings:
        raise ShapeError(
            f"flops: pictures of {shape[1]} x {shape[2]} pixels, but the {len(c.block_out_channels)} levels "
            f"need multiples of {halvings}; pad or resize"
        )
    return int(shape[0]), int(shape[1]), int(shape[2])


def _pictures(unet: UNet2D, height: int, width: int) -> dict[str, tuple[int, int]]:
    """Height and width of the pictures that each block reads, by the block's name; the rest reads the
    network's.
    """
    sizes, h, w = {}, height, width
    for i, block in enumerate(unet.down_blocks):
        sizes[f"down_blocks.{i}."] = (h, w)
        if block.downsamplers:
            h, w = h // 2, w // 2
    sizes["mid_block."] = (h, w)
    for i, block in enumerate(unet.up_blocks):
        sizes[f"up_blocks.{i}."] = (h, w)
        if block.upsamplers:
            h, w = 2 * h, 2 * w
    return sizes


def _convolution(layer: Conv2d, batch: int, h: int, w: int) -> Work:
    o, kh, kw, c = layer.weight.shape
    if isinstance(layer, UpsampledConv2d):
        if layer.by_phases(layer.track):
            return Work("conv2d", batch * h * w, 4 * o, 4 * c, batch * h * w * c)
        h, w = 2 * h, 2 * w
    pad = layer.padding
    (top, bottom), (left, right) = ((pad, pad), (pad, pad)) if isinstance(pad, int) else pad
    out = ((h + top + bottom - kh) // layer.stride + 1) * ((w + left + right - kw) // layer.stride + 1)
    return Work("conv2d", batch * out, o, kh * kw * c, batch * h * w * c)


def _layers(unet: UNet2D, batch: int, height: int, width: int) -> Iterator[tuple[str, Work]]:
    sizes = _pictures(unet, height, width)
    for name, module in unet.named_modules():
        if not getattr(module, "routed", False):
            continue
        block = next((b for b in sizes if name.startswith(b)), "")
        h, w = sizes.get(block, (height, width))
        if isinstance(module, Attention):
            channels = module.to_q.weight.shape[0]
            # Two products of a head: QK^T and its softmax times V
            yield name, Work("attention", batch * h * w, h * w, 2 * channels, 3 * batch * h * w * channels)
        elif isinstance(module, BagEmbedding):
            words, dim = module.weight.shape
            yield f"{name}.weight", Work("captions", batch, dim, words, batch * words)
        elif isinstance(module, Conv2d):
            yield f"{name}.weight", _convolution(module, batch, h, w)
        elif isinstance(module, Linear):
            n, k = module.weight.shape
            rows = batch * h * w if ".attentions." in name else batch
            yield f"{name}.weight", Work("linear", rows, n, k, rows * k)


def work(unet: UNet2D, shape: Sequence[int] | None = None) -> dict[str, Work]:
    """The products of each layer for pictures of `shape` (B, H, W, C), the network's input.

    Names and order are those of `Module.apply_route`; nothing is run, wherever the network is. The route that
    it is on decides whether an upsampling convolution is by phases, as in `flops`. shape: by default one
    picture of the configuration's sample_size. Raises `ShapeError` for a shape that the network does not
    take.

    >>> from fp4bf16.nn import UNet2D, UNetConfig
    >>> work(UNet2D(UNetConfig.tiny()))["conv_in.weight"]
    Work(op='conv2d', rows=64, columns=32, k=108, read=768)
    """
    if not isinstance(unet, UNet2D):
        raise TypeError(f"work: unet is a {type(unet).__name__}, but a UNet2D is needed")
    return dict(_layers(unet, *_picture(unet, shape)))


def flops(unet: UNet2D, shape: Sequence[int] | None = None) -> dict[str, float]:
    """Multiplications and additions of each layer for one picture; the batch of `shape` does not matter.

    Every layer that a route names is there: products, softmax(QK)V (without the softmax) and captions. As
    everywhere, positions of a convolution that fall on its padding count. What is multiplied counts, on the
    route that the network is on now: of an upsampling convolution by phases, which it is not on "dual", 4/9
    of what its 3x3 kernel would multiply.

    >>> from fp4bf16.nn import UNet2D, UNetConfig
    >>> unet = UNet2D(UNetConfig.ddpm_cifar10_32())
    >>> round(sum(flops(unet).values()) / 1e9, 2)
    11.56
    >>> round(sum(flops(unet.upsample_by_phases(False)).values()) / 1e9, 2)
    12.44
    """
    shape = None if shape is None else (1, *tuple(shape)[1:])
    return {name: w.flops for name, w in work(unet, shape).items()}


# ---- a model of the time ----
@dataclass(frozen=True)
class Rates:
    """What a device does, for `modelled`.

    flops: operations a second on each track, of large products. bandwidth: bytes a second. quantise: elements
    a second that a quantiser of its own does. launch: microseconds that the smallest kernel takes.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    quantise: float
    launch: float


#: Of `bench/results/nvidia-h200/conv.json`: medians of 3x3 convolutions of 128x32x32 and 256x16x16 pictures,
#: 256 channels (BF16 677 and 670 TFLOP/s; FP4 with promoted sums 1063 and 1042; "fp4 from bf16" 61 us more
#: for 33.5 million elements). Bandwidth: a copy of 2 GiB (4.27 TB/s). launch: what 64x4x4 pictures of 256
#: channels take (7.0 us) beyond their operations; it is the same on all tracks.
#: A dual product of rank 32 has been measured nowhere yet: the FP4 product's rate.
H200 = Rates("NVIDIA H200", {"bf16": 670e12, "fp4": 1050e12, "dual": 1050e12}, 4.27e12, 5.5e11, 5.0)

_ITEM = {"bf16": 2, "fp4": 1, "dual": 1}  # bytes of an operand's element, as the products read it


def modelled(
    unet: UNet2D,
    shape: Sequence[int] | None = None,
    rates: Rates = H200,
    tracks: Sequence[str] = ("bf16", "fp4"),
) -> dict[str, dict[str, float]]:
    """Microseconds of each product on each of `tracks`, from its operations and the stated `rates`.

    A roofline: the longer of operations and bytes, plus the launch; on FP4 a quantiser's pass over the input
    where no group norm writes it. `shape` (B, H, W, C) as in `work`. A model, for runs that must not depend
    on the clock: what a layer really takes is measured.

    >>> from fp4bf16.nn import UNet2D, UNetConfig
    >>> times = modelled(UNet2D(UNetConfig.ddpm_cifar10_32()), (1024, 32, 32, 3))
    >>> conv, linear = (times[f"down_blocks.0.resnets.0.{n}.weight"] for n in ("conv2", "time_emb_proj"))
    >>> conv["fp4"] < conv["bf16"], linear["fp4"] < linear["bf16"]
    (True, False)
    """
    for track in tracks:
        if track not in _ITEM or track not in rates.flops:
            raise ConfigError(f"modelled: the rates of {rates.name} have no track {check_track(track)!r}")
    found, phased = {}, unet.phased()
    for name, w in work(unet, shape).items():
        if w.op in ("linear", "conv2d"):
            quantised = _quantised(name, w, name in phased)
            found[name] = {track: _modelled(w, track, rates, quantised) for track in tracks}
    return found


def _quantised(name: str, w: Work, phased: bool) -> int:
    """Elements that a quantiser of its own reads before the product of a layer on FP4."""
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in AFTER_NORM):
        return 0
    # An upsampler quantises before it makes four pixels of each
    return w.read // 4 if ".upsamplers." in name and not phased else w.read


def _modelled(w: Work, track: str, rates: Rates, quantised: int) -> float:
    nbytes = _ITEM[track] * (w.read + w.columns * w.k) + 2 * w.rows * w.columns
    seconds = max(w.flops / rates.flops[track], nbytes / rates.bandwidth)
    if track != "bf16":
        seconds += quantised / rates.quantise
    return rates.launch + 1e6 * seconds


# ---- measured ----
def host_device() -> str:
    """The name under which `LatencyTable` keeps times of this host: machine and threads."""
    return f"cpu {platform.machine() or 'unknown'}, {num_threads()} threads"


class Stopwatch(Watcher):
    """Times every product on each of `tracks`, beside the one that runs; microseconds by layer in `.times`.

    The median of `repeats` runs, after one that prepares the weight's twin and compiles kernels. A layer that
    a forward calls several times has the sum. The network's result is not touched.
    """

    def __init__(self, tracks: Sequence[str] = ("bf16", "fp4"), repeats: int = 3, clock: Any = perf_counter):
        self.tracks = tuple(check_track(track) for track in tracks)
        if not (isinstance(repeats, int) and repeats >= 1):
            raise ValueError(f"Stopwatch: repeats is {repeats!r}, but a whole number from 1 is needed")
        self.repeats, self.clock = repeats, clock
        self.times: dict[str, dict[str, float]] = {}

    def product(self, layer: Any, x: Any, y: Any, run: Any, certificate: Any) -> Any:
        held = self.times.setdefault(layer.key, dict.fromkeys(self.tracks, 0.0))
        with no_grad():
            for track in self.tracks:
                run(track)
                held[track] += 1e6 * statistics.median(self._once(run, track) for _ in range(self.repeats))
        return y

    def _once(self, run: Any, track: str) -> float:
        start = self.clock()
        run(track)
        return self.clock() - start


def measure(
    unet: UNet2D,
    sample: Any,
    timesteps: Any,
    class_labels: Any = None,
    captions: Any = None,
    tracks: Sequence[str] = ("bf16", "fp4"),
    repeats: int = 3,
    table: LatencyTable | None = None,
) -> dict[str, dict[str, float]]:
    """Microseconds of each product of a forward on the CPU, on each of `tracks`, by layer.

    The inputs are those of ``unet(...)``; times are those of this batch. Layers keep their tracks. table:
    gets the times too, by operation and shape, and the averages that it then holds are returned (if it is
    frozen, what it held before, and measured times only of what it does not know). Raises `ConfigError` for
    a network on the GPU.

    >>> import numpy as np
    >>> from fp4bf16.nn import UNet2D, UNetConfig
    >>> unet = UNet2D(UNetConfig.tiny())
    >>> times = measure(unet, np.ones((1, 8, 8, 12), np.float32), 10, repeats=1)
    >>> sorted(times["conv_in.weight"]), min(min(t.values()) for t in times.values()) > 0
    (['bf16', 'fp4'], True)
    """
    if unet.on_device:
        raise ConfigError(
            "measure: the network is on the GPU, where its products are not seen one by one; use "
            "modelled(...) or call cpu() first"
        )
    names = _name_layers(unet)
    stopwatch = Stopwatch(tracks, repeats)
    with no_grad(), watching(stopwatch):
        unet(sample, timesteps, class_labels, captions)
    times = {name: stopwatch.times[name] for name in names if name in stopwatch.times}
    return times if table is None else _through_table(unet, tuple(sample.shape), times, table)


def _name_layers(unet: UNet2D) -> list[str]:
    """Names of the layers, given to those that no route has named yet; tracks stay as they are."""
    names = []
    for name, module in unet.named_modules():
        if getattr(module, "routed", False):
            names.append(f"{name}.weight" if "weight" in vars(module) else name)
            if not getattr(module, "key", ""):
                module.key = names[-1]
    return names


def _through_table(unet: UNet2D, shape: tuple, times: dict, table: LatencyTable) -> dict:
    """What the table holds of each time after all of them: layers of one shape share an entry."""
    device, sizes = host_device(), work(unet, shape)
    for name, by_track in times.items():
        for track, microseconds in by_track.items():
            table.update(sizes[name].op, sizes[name].shape, track, device, microseconds)
    found: dict[str, dict[str, float]] = {}
    for name, by_track in times.items():
        held = {t: table.get(sizes[name].op, sizes[name].shape, t, device) for t in by_track}
        found[name] = {t: by_track[t] if held[t] is None else held[t].microseconds for t in by_track}
    return found
