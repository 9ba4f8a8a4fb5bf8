"""Modules: a tree of layers whose parameters live, under diffusers' names, as views of one flat buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from .. import device
from ..certify import WeightNorms, quantized_weight_norms
from ..dispatch import backend_for
from ..errors import ConfigError, ShapeError
from ..gemm import DualWeight
from ..quantize import quantize
from ..tracks import check_track, match_route, resolve_track
from . import fused
from .tape import Variable
from .xp import namespace

_ALIGN = 16  # elements: every parameter starts on a 64-byte line of the flat buffer
_next_version = count(1).__next__


class Parameter(Variable):
    """A leaf variable of a module. `version` changes with its data, so that what was made from it can be
    renewed.
    """

    __slots__ = ("version", "_twins")

    def __init__(self, data: Any, name: str | None = None):
        super().__init__(data, requires_grad=True, name=name)
        self.version, self._twins = _next_version(), {}

    def assign(self, array: Any) -> None:
        """Copy `array` (same shape) into the parameter. Raises `ShapeError` naming both shapes."""
        if tuple(array.shape) != self.shape:
            raise ShapeError(
                f"assign: {self.name} has shape {self.shape} but the array has shape {array.shape}"
            )
        self.data[...] = array
        self.touch()

    def touch(self) -> None:
        """Say that the data was written in place, so that twins are renewed."""
        self.version = _next_version()

    def dual(self, rank: int = 32) -> DualWeight:
        """FP4 twin and low-rank BF16 branch of this (N, K) or (O, kh, kw, I) weight, kept up to date."""
        held = self._twins.get(rank)
        if held is None or held[0] != self.version:
            held = self._twins[rank] = (
                self.version,
                DualWeight(self.data.T if self.ndim == 2 else self.data, rank),
            )
        return held[1]

    def twin(self, format: str = "nvfp4_exact") -> Any:
        """The FP4 copy of this weight (blocks along the last axis, one outer scale a row), made anew when
        it changed.
        """
        held = self._twins.get(format)
        if held is None or held[0] != self.version:
            held = (
                self.version,
                quantize(self.data, format, axis=-1, outer="image" if self.ndim > 2 else "row"),
            )
            self._twins[format] = held
        return held[1]

    def phases(self) -> Parameter:
        """`fused.phase_weights` of this (O, 3, 3, C) weight as a weight (4 O, 2, 2, C) with twins and norms
        of its own, made anew when this one changed. No gradient reaches it: `ops.upsample_conv` takes its
        numbers.
        """
        held = self._twins.get("phases")
        if held is None or held[0] != self.version:
            o, c = self.shape[0], self.shape[3]
            with np.errstate(over="ignore", invalid="ignore"):  # the quantiser says it
                kernels = fused.phase_weights(self.data).reshape(4 * o, 2, 2, c)
            held = self._twins["phases"] = (self.version, Parameter(kernels, self.name))
        return held[1]

    def twin_norms(self, format: str = "nvfp4_exact") -> WeightNorms:
        """Norms of this weight (in host memory) and of its FP4 copy for certificates, computed once a
        version.

        Every product with `twin` is certified with them from then on.
        """
        twin = self.twin(format)

        def decode() -> np.ndarray:
            return backend_for().dense(twin).reshape(self.shape[0], -1)

        return quantized_weight_norms(twin, decode, self.data)


class FlatParameters:
    """Parameters packed into `data` with gradients in `grad`: two 1-D arrays of one dtype.

    Entries lie in the `order` of these names (by default that of `named`) and start at multiples of 16
    elements; the gaps are zero and stay zero under any elementwise update.
    """

    def __init__(self, named: Mapping[str, Parameter], order: Sequence[str] | None = None):
        self.named = dict(named)
        self.offsets: dict[str, int] = dict.fromkeys(self.named, 0)
        size = 0
        for name in self.named if order is None else order:
            self.offsets[name] = size
            size += -(-self.named[name].size // _ALIGN) * _ALIGN
        first = next(iter(self.named.values()), None)
        xp, dtype = (np, np.float32) if first is None else (namespace(first.data), first.dtype)
        data = xp.zeros(size, dtype)
        for name, p in self.named.items():
            self._view(data, name)[...] = p.data
        self.grad = xp.zeros(size, dtype)
        self.bind(data)
        for name, p in self.named.items():
            p.grad = self._view(self.grad, name)

    def _view(self, flat: Any, name: str) -> Any:
        p, start = self.named[name], self.offsets[name]
        return flat[start : start + p.size].reshape(p.shape)

    def views(self, flat: Any) -> dict[str, Any]:
        """Named views of another flat array of the same layout (an average, a moment, a reference model)."""
        return {name: self._view(flat, name) for name in self.named}

    def bind(self, data: Any) -> None:
        """Make the parameters views of `data` (a flat array of this layout); nothing is copied."""
        for name, p in self.named.items():
            p.data = self._view(data, name)
        self.data = data
        self.touch()

    def touch(self) -> None:
        """Say that `data` was written in place."""
        for p in self.named.values():
            p.touch()

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        self.grad[...] = 0


class Module:
    """Base of layers and networks. Attributes that are parameters, modules or lists of modules form the tree.

    Call order: build the tree in ``__init__``, define ``forward``; ``module(x)`` calls it. The first use of
    `flat` packs the parameters.
    """

    track = "bf16"  #: track of this layer's products, set by `apply_route`
    key = ""  #: name of this layer in routes, set by `apply_route`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{type(self).__name__}: define forward(self, ...) to call this module")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Direct submodules with their names; a list gives ``name.0, name.1, ...`` (None entries are
        skipped).
        """
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, (list, tuple)):
                for i, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{i}", item

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module (name "") and all below it, in definition order."""
        yield prefix, self
        for name, child in self.children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self) -> dict[str, Parameter]:
        """Parameters by full name, in definition order."""
        found = {}
        for prefix, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Parameter):
                    found[f"{prefix}.{name}" if prefix else name] = value
        return found

    def parameters(self) -> list[Parameter]:
        """Parameters in definition order."""
        return list(self.named_parameters().values())

    def parameter_count(self) -> int:
        """Number of weights."""
        return sum(p.size for p in self.parameters())

    @property
    def flat(self) -> FlatParameters:
        """The flat buffers of this module's parameters, packed at first use. Ask the outermost module
        only.
        """
        held = self.__dict__.get("_flat")
        if held is None:
            named = self.named_parameters()
            for name, p in named.items():
                p.name = name
            held = self._flat = FlatParameters(named, self.flat_order(list(named)))
        return held

    def flat_order(self, names: list[str]) -> list[str]:
        """The names of the parameters in the order in which they lie in `flat`."""
        return names

    @contextmanager
    def using(self, flat: Any) -> Iterator[None]:
        """Run with the weights in `flat` (a 1-D array laid out as ``self.flat.data``), then with the former
        ones.

        For averaged weights and for the reference model of DPO. Nothing is copied. On the GPU `flat` is
        another `DeviceParameters`.
        """
        if self.on_device:
            with self._using_device(flat):
                yield
            return
        before = self.flat.data
        if flat.shape != before.shape:
            raise ShapeError(
                f"using: flat has shape {flat.shape} but the module's buffer has shape {before.shape}"
            )
        self.flat.bind(flat)
        try:
            yield
        finally:
            if self.on_device:
                raise ConfigError(
                    "using: the module was moved to the GPU inside, with the weights of using(...), which it "
                    "keeps; call cuda() outside"
                )
            self.flat.bind(before)

    @contextmanager
    def _using_device(self, weights: Any) -> Iterator[None]:
        if type(weights) is not type(self.flat) or weights.layout is not self.flat.layout:
            more = " of another module" if type(weights) is type(self.flat) else ""
            raise TypeError(
                f"using: flat is a {type(weights).__name__}{more}, but the module is on the GPU with its "
                "own; pass weights made with module.flat.clone()"
            )
        before = self.__dict__.get("_bound")
        self._bound = weights
        try:
            yield
        finally:
            self._bound = before

    @property
    def on_device(self) -> bool:
        """Whether the parameters are on a GPU (`UNet2D.cuda`)."""
        return not isinstance(self.flat, FlatParameters)

    @property
    def weights(self) -> Any:
        """The weights that the module runs with: `flat`, or those of ``using(...)`` on the GPU."""
        return self.__dict__.get("_bound") or self.flat

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        if self.on_device:
            zero = device.full((1,), 0, "float32", self.flat.grad)
            device.assign(self.flat.grad, device.broadcast(zero, self.flat.grad.shape))
            return
        self.flat.zero_grad()

    def to(self, dtype: Any) -> Module:
        """Convert the parameters (float32 or float64) and pack them anew; gradients are dropped."""
        dtype = np.dtype(dtype)
        if self.on_device:
            raise TypeError("to: the module is on the GPU, where parameters are float32; call cpu() first")
        if dtype.kind != "f" or dtype.itemsize < 4:
            raise TypeError(
                f"to: parameters are float32 or float64, not {dtype}; the BF16 track rounds by itself"
            )
        for p in self.parameters():
            p.data, p.grad = p.data.astype(dtype), None
        self.__dict__.pop("_flat", None)
        self.flat  # noqa: B018  (packs)
        return self

    def state_dict(self, flat: Any = None) -> dict[str, Any]:
        """Copies of the parameters by name (of the weights in `flat` if given), in our layouts (O, kh, kw,
        I). NumPy, wherever the parameters are.
        """
        if self.on_device:
            return self.flat.to_host() if flat is None else self.flat.state(flat)
        views = self.flat.views(self.flat.data if flat is None else flat)
        return {name: view.copy() for name, view in views.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy `state` into the parameters. Nothing is written unless everything fits.

        Raises `ShapeError` with the missing, the unexpected and the mis-shaped names (both shapes) in one
        sentence.
        """
        if self.on_device:
            self.flat.from_host(state)
            return
        views = self.flat.named
        wrong = [
            f"{k} has shape {tuple(state[k].shape)} instead of {p.shape}"
            for k, p in views.items()
            if k in state and tuple(state[k].shape) != p.shape
        ]
        parts = [
            ("missing: " + ", ".join(missing)) if (missing := [k for k in views if k not in state]) else "",
            ("unexpected: " + ", ".join(extra)) if (extra := [k for k in state if k not in views]) else "",
            "; ".join(wrong),
        ]
        if any(parts):
            raise ShapeError(
                "load_state_dict: the state does not fit this module: "
                + "; ".join(p for p in parts if p)
                + "; load it into a module of the configuration that it was saved from"
            )
        for name, p in views.items():
            p.data[...] = state[name]
        self.flat.touch()

    def apply_route(self, route: Mapping[str, str]) -> dict[str, str]:
        """Set every layer's track from ``{name pattern: track}``; the first pattern that matches decides.

        Patterns are matched against the weight's name ("conv_in.weight"; attention:
        "....attentions.0.to_q.weight" for its products, and the block's own name for softmax(QK)V). Returns
        the chosen track of each layer.
        """
        chosen = {}
        for name, module in self.named_modules():
            if not getattr(module, "routed", False):
                continue
            key = f"{name}.weight" if "weight" in vars(module) else name
            module.key = key
            module.track = chosen[key] = check_track(match_route(route, key))
        return chosen


def twin_of(weight: Parameter, track: str, certified: bool = False) -> Any:
    """What the forward multiplies in place of `weight` on its track: an FP4 copy, a dual weight, or None.

    `certified`: an FP4 copy comes with the norms of a certificate against this very weight.
    """
    track = resolve_track(track, "bf16")
    if track == "fp4":
        if certified and isinstance(weight.data, np.ndarray):
            weight.twin_norms()
        return weight.twin()
    return weight.dual() if track == "dual" else None
