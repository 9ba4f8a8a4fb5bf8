"""Low-rank adapters (LoRA, Hu et al. 2021): y = W x + (alpha / rank) up (down x) beside a frozen network.

The base weights are neither changed nor differentiated: what is trained are two narrow matrices a layer, and
without them the network is the base again, which serves as the reference model without a copy of it. The
branch runs on the BF16 track whatever the layer's product runs on, so that sampling in FP4 sees the adapters
at once: the FP4 twins of the base stay as they are.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import ConfigError, DTypeError, ShapeError, nearest
from ..tracks import resolve_track, tracks
from . import ops as F
from .layers import Conv2d, Linear, generator
from .module import Module, Parameter
from .tape import Op, Variable
from .xp import namespace

#: Layers without adapters unless `targets` names them: the two ends of the network, and the perceptron of the
#: timestep. The projections of the embedding in the residual blocks, by which captions enter, have them.
EXCLUDED = ("conv_in", "conv_out", "time_embedding.*")


def _beside(y: Any, z: Any) -> tuple:
    """y + z, where a z of zero leaves y as it is: IEEE's -0 + 0 is +0, and a product that underflowed is
    -0.
    """
    out = y + z
    if not out.all():
        namespace(out).copyto(out, y, where=(out == 0) & (y == 0))
    return out, None


_beside_op = Op(
    "add_branch",
    _beside,
    lambda g, inputs, node, needs: (g, g),
    lambda g, arrays, saved, needs: (g, g),
    keep=False,
)


class Adapter:
    """The branch of one layer. `lora` says whether it runs.

    down: (K, r) of a `Linear`, (r, kh, kw, I) of a `Conv2d`; up: (r, N), or (O, 1, 1, r).
    """

    __slots__ = ("lora", "down", "up")

    def __init__(self, lora: LoRA, layer: Linear | Conv2d, rng: np.random.Generator):
        self.lora = lora
        self.down, self.up = first_adapter(layer, lora.rank, rng)

    def linear(self, layer: Linear, x: Any, y: Variable) -> Variable:
        """y + (alpha / rank) (x down) up for x (..., K) and y (..., N)."""
        if not self.lora.enabled:
            return y
        with tracks(_branch_track(layer)):
            h = F.matmul(F.reshape(x, (-1, self.down.shape[0])), self.down)
            z = F.matmul(F.mul(h, self.lora.scale), self.up)
        return _beside_op(y, F.reshape(z, y.shape))

    def conv(self, layer: Conv2d, x: Any, y: Variable) -> Variable:
        """y + (alpha / rank) up * (down * x), pictures, `down` with the layer's stride and padding."""
        if not self.lora.enabled:
            return y
        with tracks(_branch_track(layer)):
            h = F.conv2d(layer.pictures(x), self.down, None, layer.stride, layer.padding)
            return _beside_op(y, F.conv2d(F.mul(h, self.lora.scale), self.up))

    def delta(self) -> np.ndarray:
        """What the branch adds to the weight, float64 in the weight's shape."""
        down, up = (p.data.astype(np.float64) for p in (self.down, self.up))
        product = (down @ up).T if down.ndim == 2 else np.tensordot(up[:, 0, 0], down, 1)
        return self.lora.scale * product


def first_adapter(layer: Linear | Conv2d, rank: int, rng: np.random.Generator) -> tuple[Parameter, Parameter]:
    """(down, up) of a new adapter, on the host: as PEFT's init_lora_weights="gaussian"
    (LoraLayer.reset_lora_parameters), normal of deviation 1 / rank, and zeros.
    """
    weight = layer.weight
    if isinstance(layer, Linear):
        down, up = (weight.shape[1], rank), (rank, weight.shape[0])
    else:
        down, up = (rank, *weight.shape[1:]), (weight.shape[0], 1, 1, rank)
    return (
        Parameter((rng.standard_normal(down) / rank).astype(weight.dtype)),
        Parameter(np.zeros(up, weight.dtype)),
    )


def _branch_track(layer: Module) -> str:
    """BF16 beside BF16, FP4 and dual products; unrounded where the layer is."""
    return "reference" if resolve_track(layer.track, "bf16") == "reference" else "bf16"


class LoRA(Module):
    """Adapters beside the `Linear` and `Conv2d` layers of a network, which is frozen as long as they are
    there.

    Args:
        unet: the network (any `Module`), on the CPU.
        rank: of every adapter, from 1 to the smaller side of the smallest weight that gets one.
        alpha: the branch is multiplied by alpha / rank; positive.
        seed: of the initial `down` (normal of deviation 1 / rank, as PEFT's "gaussian"), a number or a
            `generator`; `up` begins with zeros, so that the network's output is the base's to the bit.
        targets: patterns of layer names, whole ("down_blocks.0.*.conv1") or from any part on, as PEFT's
            target_modules ("to_q", "to_out.0"). By default all but `EXCLUDED`.

    Attributes: `flat` (`FlatParameters` of the adapters, named ``<layer>.lora_down`` and
    ``<layer>.lora_up``), rank, alpha, scale, adapted (names of the layers), attached, enabled. As of every
    module: ``named_parameters() parameter_count() zero_grad() state_dict() load_state_dict() to(dtype)``.
    ``backward()`` adds to ``lora.flat.grad``; the network's own parameters take no gradient, and none is
    computed of its weights.

    Raises `ConfigError` for a rank, alpha or pattern that cannot be, for a network that has adapters already,
    and for one on the GPU.

    >>> from fp4bf16.nn import UNet2D, UNetConfig
    >>> unet = UNet2D(UNetConfig.tiny())
    >>> x = np.ones((1, 8, 8, 12), np.float32)
    >>> before = unet(x, 10).data
    >>> lora = LoRA(unet, rank=4, alpha=8)
    >>> np.array_equal(unet(x, 10).data, before)
    True
    >>> lora.parameter_count(), unet.parameter_count()
    (53376, 657388)
    >>> unet(x, 10).sum().backward()
    >>> bool(lora.flat.grad.any()), bool(unet.flat.grad.any())
    (True, False)
    """

    def __init__(
        self, unet: Module, rank: int, alpha: float, seed: Any = 0, targets: Sequence[str] | None = None
    ):
        self.rank, self.alpha = check_settings(rank, alpha)
        self.scale = self.alpha / self.rank
        layers = adaptable(unet)
        for name, layer in layers.items():
            if layer.adapter is not None:
                raise ConfigError(
                    f"LoRA: {name or 'the layer'} has an adapter of rank {layer.adapter.lora.rank} already; "
                    f"train that one, or call its merge() or detach() before LoRA(unet, rank={rank}, ...)"
                )
        if unet.on_device:
            raise ConfigError(
                "LoRA: the network is on the GPU, where adapters are part of its weights "
                "(nn.cuda.lora.DeviceLoRA); call unet.cpu() first, or train with --device cuda"
            )
        self._layers = chosen(layers, targets, self.rank)
        self.adapted = tuple(self._layers)
        self.unet, self.enabled, self.attached, rng = unet, True, True, generator(seed)
        for layer in self._layers.values():
            layer.adapter = Adapter(self, layer, rng)
        self._frozen = [(p, p.requires_grad) for p in unet.parameters()]
        for p, _ in self._frozen:
            p.requires_grad = False
        self._adapters = {name: layer.adapter for name, layer in self._layers.items()}
        self.flat  # noqa: B018  (packs the parameters)

    # ---- as a module
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("LoRA: adapters run inside their network; call the network itself")

    def children(self) -> Iterator[tuple[str, Module]]:
        """None: the network is not part of its adapters."""
        return iter(())

    def named_parameters(self) -> dict[str, Parameter]:
        """``<layer>.lora_down`` and ``<layer>.lora_up`` of every adapter, in the order of the layers."""
        found = {}
        for name, adapter in self._adapters.items():
            found |= named_parts(name, (adapter.down, adapter.up))
        return found

    # ---- other adapters, or none
    @contextmanager
    def using(self, flat: Any) -> Iterator[None]:
        """Run with the adapters in `flat`, an array laid out and typed as ``lora.flat.data``: an old policy,
        an average. Nothing is copied; may be nested.

        What was recorded before can be differentiated afterwards: the former adapters come back as they were.
        Raises `ShapeError` and `DTypeError` for another layout.
        """
        self._check_attached("using")
        own = self.flat
        if getattr(flat, "shape", None) != own.data.shape:
            raise ShapeError(
                f"LoRA.using: flat has shape {getattr(flat, 'shape', None)} but the adapters' buffer has "
                f"shape {own.data.shape}; pass a copy of lora.flat.data, or of one laid out as it"
            )
        if flat.dtype != own.data.dtype:
            raise DTypeError(
                f"LoRA.using: flat is {flat.dtype} but the adapters are {own.data.dtype}; convert it"
            )
        parameters = list(own.named.values())
        before, held = own.data, [(p.data, p.version) for p in parameters]
        own.bind(flat)
        bound = [p.version for p in parameters]
        try:
            yield
        finally:
            untouched = bound == [p.version for p in parameters]
            own.data = before
            for p, (data, version) in zip(parameters, held, strict=True):
                p.data, p.version = data, version
            if not untouched:  # somebody stepped them inside: what was recorded before is out of date
                own.touch()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the base without its adapters: the reference model. May be nested."""
        self._check_attached("disabled")
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    # ---- into the base
    def merge(self) -> None:
        """Add (alpha / rank) up down to the base weights, in place, and leave the network, whose parameters
        take gradients again.

        On the BF16 track the outputs stay the same to rounding: W + d is rounded to BF16 once, where W, down,
        up and the r values between them were rounded alone. FP4 twins are made anew at their next use.
        """
        self._check_attached("merge")
        for name, layer in self._layers.items():
            layer.weight.assign(layer.weight.data + self._adapters[name].delta())
        self.detach()

    def merged_state(self, flat: Any = None) -> dict[str, np.ndarray]:
        """What ``unet.state_dict()`` would give after `merge`, copies; nothing is changed. `flat`: other
        adapters than the present ones, as in `using`.
        """
        self._check_attached("merged_state")
        if flat is not None:
            with self.using(flat):
                return self.merged_state()
        state = self.unet.state_dict()
        for name, adapter in self._adapters.items():
            weight = state[_named(name, "weight")]
            weight[...] = weight + adapter.delta()
        return state

    def detach(self) -> None:
        """Take the adapters out: the network is the base again, and its parameters take gradients."""
        self._check_attached("detach")
        for layer in self._layers.values():
            layer.adapter = None
        for p, before in self._frozen:
            p.requires_grad = before
        self.attached = False

    def _check_attached(self, method: str) -> None:
        if not self.attached:
            raise ConfigError(
                f"LoRA.{method}: these adapters have left their network by merge() or detach(); attach new "
                f"ones with LoRA(unet, rank={self.rank}, alpha={self.alpha:g})"
            )


def named_parts(layer: str, parts: tuple[Any, Any]) -> dict[str, Any]:
    """(down, up) of a layer by the names that they have among the parameters and in checkpoints."""
    return {_named(layer, part): x for part, x in zip(("lora_down", "lora_up"), parts, strict=True)}


def _named(layer: str, part: str) -> str:
    """The full name of a layer's parameter; a network that is one layer has the name ""."""
    return f"{layer}.{part}" if layer else part


def check_settings(rank: Any, alpha: Any) -> tuple[int, float]:
    """(rank, alpha); `ConfigError` for what cannot be."""
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 1:
        raise ConfigError(f"LoRA: rank is {rank!r}, but must be a whole number from 1 on; 8 is a usual one")
    try:
        value = float(alpha)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(
            f"LoRA: alpha is {alpha!r}, but must be a positive number: the adapters are multiplied by alpha "
            f"/ rank, and with 0 would neither run nor learn; twice the rank is a usual one"
        )
    return int(rank), value


def _check_rank(name: str, weight: Parameter, rank: int) -> None:
    outputs, inputs = weight.shape[0], math.prod(weight.shape[1:])
    if rank > min(outputs, inputs):
        raise ConfigError(
            f"LoRA: rank is {rank}, but {_named(name, 'weight')}, {outputs} outputs of {inputs} values, has "
            f"no more than rank {min(outputs, inputs)} itself; lower the rank, or leave the layer out of "
            f"targets"
        )


def adaptable(unet: Module) -> dict[str, Linear | Conv2d]:
    """The layers of a network that can have adapters, by name."""
    return {n: m for n, m in unet.named_modules() if isinstance(m, Linear | Conv2d)}


def chosen(layers: dict[str, Any], targets: Sequence[str] | None, rank: int) -> dict[str, Any]:
    """The layers that `targets` matches, in their order; each can have an adapter of that rank."""
    found = {name: layers[name] for name in _matched(layers, targets)}
    for name, layer in found.items():
        _check_rank(name, layer.weight, rank)
    return found


def _matched(layers: dict[str, Any], targets: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the layers that `targets` matches, in their order."""
    if targets is None:
        chosen = [n for n in layers if not any(fnmatch.fnmatchcase(n, p) for p in EXCLUDED)]
        if not chosen:
            raise ConfigError(
                f"LoRA: the network has no layer to adapt: its {len(layers)} Linear and Conv2d layers are "
                f"all of {', '.join(EXCLUDED)}; name them in targets"
            )
        return tuple(chosen)
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if not patterns:
        raise ConfigError("LoRA: targets is empty, but a layer is needed; name some, or pass None for all")
    found: set[str] = set()
    for pattern in patterns:
        matched = {n for n in layers if _matches(n, pattern)}
        if not matched:
            kinds = dict.fromkeys(_kind(n) for n in layers)
            raise ConfigError(
                f"LoRA: targets: {pattern!r} matches no Linear or Conv2d layer of the network"
                f"{nearest(pattern, layers if pattern.count('.') > 1 else kinds)}"
            )
        found |= matched
    return tuple(n for n in layers if n in found)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _kind(name: str) -> str:
    """The last part of a layer's name that is no number, and what follows: "to_q", "to_out.0"."""
    parts = name.split(".")
    last = max((i for i, part in enumerate(parts) if not part.isdigit()), default=0)
    return ".".join(parts[last:])
