"""`UNet2D` on the device: one forward and one backward over the compiled kernels, one node of the tape.

The network is a chain of steps. Joining a skip with the features of the way up costs nothing: the array of
both (N, H, W, Cx + Cs) is made on the way down, the skip is written to its last channels, read from there by
the next step, and the features are later written to the first ones. In the backward the gradients of both
are channel ranges of one array as well. Every norm reads what convolutions have written, and these sum it on
the way: a step hands its result on with the sums, a skip keeps its own until it is joined.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ... import device
from ...adapters import DeviceArray
from ...backends import cuda_math
from ...backends.cuda_attention import MOST_CHANNELS
from ...backends.cuda_gemm import ACCUMULATE
from ...errors import ConfigError, DTypeError, ShapeError
from ..layers import Attention
from ..tape import Node, Op, Variable, grad_enabled
from .attention_block import AttentionBlock
from .blocks import Copy, Downsample, Scale, Scaled
from .edges import First, Last
from .embedding import Embedding, Projections
from .parameters import DeviceParameters
from .phases import PhasedUpsample
from .products import Layer, Norm
from .resnet import ResnetBlock
from .watch import current
from .workspace import GRADIENTS, SAVES, Pictures, Run, beside, part, shaped

_MULTIPLE = 8  # of all channels inside the network: 16 bytes of BF16


class Step(NamedTuple):
    """One step of the chain. skip: its result is one; joins: the channels that it reads before the skip's."""

    block: Any
    skip: bool = False
    joins: int | None = None


class Network:
    """The device form of a `UNet2D`, made by its `cuda`. `save` and `backward`: see `Run`.

    held: bytes that the last recorded forward kept for its backward, by kind.
    """

    def __init__(self, model: Any, weights: DeviceParameters, save: str = "packed", backward: str = "twin",
                 accumulate: str = "fast"):  # fmt: skip
        self.model, self.like, self.layout = model, weights.data, weights.layout
        self.save, self.backward_with, self.accumulate = save, backward, accumulate
        self.names = {id(module): name for name, module in model.named_modules()}
        self.parameters = model.parameters()
        self.projections: list[Layer] = []
        self.chain = self._chain(model)
        self.embedding = Embedding(model, Projections(self.projections, self.layout))
        self.skips = self._places()
        self.sums = [step.skip or following.block.reads_sums for step, following in pairwise(self.chain)]
        self.sums.append(False)  # of the prediction
        self.held: Counter = Counter()

    @staticmethod
    def check(model: Any, save: str, backward: str, accumulate: str) -> None:
        """`ConfigError` for what a network on the device cannot have."""
        choices = (("save", save, SAVES), ("backward", backward, GRADIENTS),
                   ("accumulate", accumulate, ACCUMULATE))  # fmt: skip
        for name, value, known in choices:
            if value not in known:
                raise ConfigError(f"UNet2D.cuda: {name} is {value!r}, but must be one of {', '.join(known)}")
        c = model.config
        for name, values in (
            ("block_out_channels", c.block_out_channels),
            ("time_embedding_dim", (c.time_dim,)),
        ):
            for value in values:
                if value % _MULTIPLE or value < 1:
                    raise ConfigError(f"UNet2D.cuda: {name} holds {value}, but on the GPU a network's inner "
                                      f"channels are multiples of {_MULTIPLE}; widen it, or keep the network "
                                      f"on the CPU")  # fmt: skip

        for name, module in model.named_modules():
            if getattr(module, "adapter", None) is not None:
                raise ConfigError(f"UNet2D.cuda: {name} has a low-rank adapter, which does not run on the "
                                  f"GPU; call its merge() or detach() first, or keep the network on the "
                                  f"CPU")  # fmt: skip
            channels = module.to_q.weight.shape[0] // module.heads if isinstance(module, Attention) else 0
            if channels > MOST_CHANNELS:
                raise ConfigError(f"UNet2D.cuda: {name} has heads of {channels} channels, but on the GPU at "
                                  f"most {MOST_CHANNELS} are taken; set attention_head_dim, or keep the "
                                  f"network on the CPU")  # fmt: skip

    def prepare(self, weights: DeviceParameters) -> None:
        """Make what `weights` otherwise makes at the first request: not while a graph is captured."""
        for name in self.model.phased():
            weights.phases_of(name, self.stream())

    # ---- the chain
    def _layer(self, module: Any) -> Layer:
        return Layer(self.names[id(module)], module)

    def _block(self, kind: type, module: Any) -> Any:
        if kind is AttentionBlock:
            block, channels = (
                AttentionBlock(self.names[id(module)], module, self.layout),
                module.to_q.weight.shape[0],
            )
        else:
            block, channels = ResnetBlock(self.names[id(module)], module), module.conv2.weight.shape[0]
            self.projections += [block.projection] if block.projection is not None else []
        return block if module.scale == 1.0 else Scaled(block, Scale(module.scale, channels, self.like))

    def _chain(self, model: Any) -> list[Step]:
        steps = [Step(First(self._layer(model.conv_in)), skip=True)]
        for block in model.down_blocks:
            for i, resnet in enumerate(block.resnets):
                steps.append(Step(self._block(ResnetBlock, resnet), skip=not block.attentions))
                if block.attentions:
                    steps.append(Step(self._block(AttentionBlock, block.attentions[i]), skip=True))
            steps += [Step(Downsample(self._layer(d.conv)), skip=True) for d in block.downsamplers]
        steps += self._middle(model.mid_block)
        channels = model.config.block_out_channels[-1]
        for block in model.up_blocks:
            for i, resnet in enumerate(block.resnets):
                steps.append(Step(self._block(ResnetBlock, resnet), joins=channels))
                channels = resnet.conv2.weight.shape[0]
                if block.attentions:
                    steps.append(Step(self._block(AttentionBlock, block.attentions[i])))
            steps += [Step(PhasedUpsample(self._layer(u.conv))) for u in block.upsamplers]
        norm = Norm(self.names[id(model.conv_norm_out)], model.conv_norm_out)
        return [*steps, Step(Last(norm, self._layer(model.conv_out)))]

    def _middle(self, block: Any) -> list[Step]:
        if block is None:
            return [Step(Copy())]
        first, second = (Step(self._block(ResnetBlock, r)) for r in block.resnets)
        return [first, *(Step(self._block(AttentionBlock, a)) for a in block.attentions), second]

    def _places(self) -> list[int]:
        """For each skip, in the order in which they are made, the channels that stand before its own."""
        return [step.joins for step in reversed(self.chain) if step.joins is not None]

    # ---- forward
    def stream(self) -> int:
        """The stream that is current on the network's device."""
        return device.launch("unet2d", None, (self.like,))

    def run(self, weights: Any, recording: bool) -> Run:
        return Run(weights, self.model.flat, self.like, recording, self.save, self.backward_with,
                   self.accumulate, current())  # fmt: skip

    def forward(self, run: Run, x: DeviceArray, t: DeviceArray, labels, captions) -> tuple[DeviceArray, list]:
        """(prediction, what each step kept), the embedding's first."""
        kept = [self.embedding.forward(run, x.shape[0], t, labels, captions)]
        places, joined, x = iter(self.skips), [], Pictures(x)  # joined: arrays of both, sums of the skips
        for i, step in enumerate(self.chain):
            if step.joins is not None:
                x = beside(x, joined.pop())
            shape, whole = step.block.output(x.array.shape), None
            if step.skip:
                before = next(places)
                whole = run.empty((*shape[:3], before + shape[3]), hold="joined pictures")
                out = part(whole, before, shape[3])
            elif i + 1 < len(self.chain) and self.chain[i + 1].joins is not None:
                out = part(joined[-1].array, 0, shape[3])
            else:
                out = run.empty(shape, "bfloat16" if i + 1 < len(self.chain) else "float32")
            x, of_step = step.block.forward(run, x, out, self.sums[i])
            kept.append(of_step)
            if step.skip:
                joined.append(Pictures(whole, x.sums))
        if run.recording:
            self.held = run.held
        return x.array, kept

    # ---- backward
    def backward(self, run: Run, kept: list, g: DeviceArray) -> None:
        """Adds to `run.gradients`; empties `kept`, newest first, so that memory goes back on the way."""
        skips: list[DeviceArray] = []
        for i in reversed(range(len(self.chain))):
            step = self.chain[i]
            add = skips.pop() if i and self.chain[i - 1].skip else None
            g = step.block.backward(run, kept.pop(), g, add)
            if step.joins is not None:
                skips.append(part(g, step.joins, g.shape[3] - step.joins))
                g = part(g, 0, step.joins)
        self.embedding.backward(run, kept.pop())


# ---- at the door -------------------------------------------------------------------------------------------
def _whole_numbers(x: Any, name: str) -> DeviceArray:
    found = device.operand(x, name)
    if found.dtype != "int64":
        raise DTypeError(f"UNet2D: {name} has dtype {found.dtype}, but int64 is needed on the GPU; convert "
                         f"it with {name}.astype('int64')")  # fmt: skip
    return device.contiguous(found)


def _whole(timestep: Any) -> int:
    """One timestep; `DTypeError` for what is no whole number, which the CPU takes and the kernels do not."""
    value = timestep.item() if isinstance(timestep, np.generic | np.ndarray) else timestep
    if not isinstance(value, int | float) or not -(2**63) <= value < 2**63 or value != int(value):
        raise DTypeError(f"UNet2D: timesteps is {timestep!r}, but a whole number of int64 is needed on the "
                         f"GPU; round it, or keep the network on the CPU")  # fmt: skip
    return int(value)


def _times(timesteps: Any, batch: int, like: DeviceArray) -> DeviceArray:
    """(B,) or (1,) int64 on the device."""
    if not device.is_device(timesteps):
        if getattr(timesteps, "ndim", 0) == 0 and not isinstance(timesteps, list | tuple):
            return device.full((1,), _whole(timesteps), "int64", like)
        raise TypeError("UNet2D: timesteps are on the host but sample is on the GPU; pass one number, or an "
                        "int64 array on the sample's device")  # fmt: skip
    found = _whole_numbers(timesteps, "timesteps")
    if found.shape not in ((), (1,), (batch,)):
        raise ShapeError(f"UNet2D: timesteps has shape {found.shape} but sample has {batch} pictures; pass "
                         f"one number or one for each")  # fmt: skip
    return found if found.shape else shaped(found, (1,))


def _captions(captions: Any, count: int) -> DeviceArray:
    found = device.float_operand(captions, "captions")
    if len(found.shape) != 2 or found.shape[1] != count:
        raise ShapeError(f"captions: shape {found.shape} given, but there are {count} words; pass (batch, "
                         f"{count})")  # fmt: skip
    return device.contiguous(device.astype(found, "float32"))


def call(model: Any, network: Network, sample, timesteps, class_labels, captions) -> Variable:
    """`UNet2D.forward` of arrays on the device; the arguments' shapes are checked."""
    if isinstance(sample, Variable):
        if sample.requires_grad:
            raise TypeError("UNet2D: sample takes a gradient, but on the GPU gradients reach the parameters "
                            "alone; pass sample.detach(), or keep the network on the CPU")  # fmt: skip
        sample = sample.data
    x = device.float_operand(sample, "sample")
    with device.on(x):
        x = device.contiguous(device.astype(x, "float32"))
        batch, c = x.shape[0], model.config
        t = _times(timesteps, batch, x)
        labels = None if class_labels is None else _whole_numbers(class_labels, "class_labels")
        if labels is not None and labels.shape != (batch,):
            raise ShapeError(f"UNet2D: class_labels has shape {labels.shape}, but ({batch},) is needed, one "
                             f"for each picture; reshape it")  # fmt: skip
        bag = None if captions is None else _captions(captions, c.caption_vocabulary)
        given = (("sample", x), ("timesteps", t), ("class_labels", labels), ("captions", bag))
        device.check_together("UNet2D", [("weights", network.like), *given])
        if c.center_input_sample:
            x = cuda_math.wrapped(cuda_math.of(x).raw(x) * 2.0 - 1.0, x)
        run = network.run(model.weights, grad_enabled())
        out, kept = network.forward(run, x, t, labels, bag)
    if not run.recording:
        return Variable._of(out.owner, None)
    return Variable._of(out.owner, Node(_UNET, network.parameters, None, (run, kept), {"network": network}))


def _backward(g: Any, arrays: None, saved: tuple, needs: list[bool], network: Network) -> list[None]:
    run, kept = saved
    gradient = device.operand(g, "g")
    device.check_together("UNet2D: backward", [("weights", network.like), ("g", gradient)])
    if run.gradients is not network.model.flat:
        raise RuntimeError("UNet2D: backward: the model has left the GPU since this forward, and its "
                           "gradients with it; call backward before cpu()")  # fmt: skip
    if run.version != run.weights.version:
        raise RuntimeError("UNet2D: backward: the weights have changed since this forward; call backward "
                           "before they are stepped or loaded, or run the forward again")  # fmt: skip
    gradient, forward = device.contiguous(gradient), run.stream
    with device.on(gradient):
        network.backward(run.on_this_stream(), kept, gradient)
        device.follow(forward, gradient)  # to which the memory of `kept` goes back
    return [None] * len(needs)


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("UNet2D on the GPU has no second derivatives; keep the network on the CPU for them")


_UNET = Op("unet2d", _refuse, _refuse, _backward, keep=False, direct=True)


# ---- to the device and back --------------------------------------------------------------------------------
def _array_of(like: Any) -> DeviceArray:
    """`like` as an array on the GPU; of a module such as cupy, a new one."""
    if isinstance(like, ModuleType) and hasattr(like, "zeros"):
        like = like.zeros(1, "float32")
    return device.operand(like, "like")


def move(model: Any, like: Any, save: str, backward: str, accumulate: str) -> Network:
    """Put `model`'s parameters on the device; its device form."""
    like = _array_of(like)
    Network.check(model, save, backward, accumulate)
    with device.on(like):
        weights = DeviceParameters(model.flat, like)
        network = Network(model, weights, save, backward, accumulate)
        weights.refresh(network.stream())
        network.prepare(weights)
    _point(model, weights)
    return network


def _point(model: Any, weights: DeviceParameters) -> None:
    """Make `weights` the model's parameters, and each parameter a view of them."""
    for name, p in model.flat.named.items():
        p.data, p.grad = weights.data_of(name).owner, weights.grad_of(name).owner
    model._flat = weights


def bring_back(model: Any) -> None:
    """Parameters and gradients as host arrays again."""
    weights = model.flat
    values, gradients = weights.to_host(), weights.state(weights.grad)
    named = model.named_parameters()
    for name, p in named.items():
        p.data = np.array(values[name])
    model._flat = None
    model.flat  # noqa: B018  (packs)
    for name, p in named.items():
        p.grad[...] = gradients[name]


def _nbytes(*arrays: DeviceArray | None) -> int:
    return sum(a.nbytes for a in arrays if a is not None)


def inventory(network: Network, weights: DeviceParameters) -> dict[str, int]:
    """Bytes on the device by kind: of the weights and gradients, and of what the last forward that was
    recorded kept for its backward.
    """
    found = {
        "weights": _nbytes(weights.data), "gradients": _nbytes(weights.grad),
        "weights in BF16": _nbytes(weights.bf16), "FP4 twins": _nbytes(weights.twin, weights.twin_scale),
    }  # fmt: skip
    if weights.phase_bytes():
        found["weights by phases"] = weights.phase_bytes()
    return found | dict(network.held)
