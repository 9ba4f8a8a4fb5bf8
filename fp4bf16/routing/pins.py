"""The layers that a router decides about, and what a user's route means to it."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..nn.unet import UNet2D
from .latency import work

FAST = ("fp4", "dual")  #: tracks that leave BF16
#: What a run is routed by where its user says nothing. Not every network has layers of all of these names.
DEFAULT_ROUTE = {"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"}
_SAID = 3  # patterns that a sentence is said of: routes of another network can have hundreds


@dataclass(frozen=True)
class LayerInfo:
    """A layer that a route names: its weights, and operations for a picture. certified: whether its products
    have a certificate; those without (softmax(QK)V, captions) run as pinned, else on BF16.
    """

    parameters: int
    flops: float
    certified: bool = True


def layers_of(unet: UNet2D, shape: Sequence[int] | None = None) -> dict[str, LayerInfo]:
    """The layers of a UNet for `Router`, in the order and under the names of `Module.apply_route`.

    shape: (B, H, W, C) of the network's input, by default its own size; the batch does not matter.

    >>> from fp4bf16.nn import UNet2D, UNetConfig
    >>> layers_of(UNet2D(UNetConfig.tiny()))["conv_in.weight"]
    LayerInfo(parameters=3456, flops=442368.0, certified=True)
    """
    shape = None if shape is None else (1, *tuple(shape)[1:])
    sizes = {name: p.size for name, p in unet.named_parameters().items()}
    return {
        name: LayerInfo(sizes.get(name, 0), w.flops, w.op in ("linear", "conv2d"))
        for name, w in work(unet, shape).items()
    }


def free_track(pins: Mapping[str, str], name: str) -> tuple[str | None, str, str]:
    """(pinned track or None, track that it may go to, reason) of a layer: what a user's route means here.

    The first pattern that matches decides, as everywhere, and pins its layers. The pattern "*" is the rest:
    with "fp4" or "dual" the router chooses between that track and BF16; with "bf16" the rest is pinned too. A
    layer that nothing matches is free.

    >>> free_track({"conv_in*": "bf16", "*": "fp4"}, "conv_in.weight")
    ('bf16', 'fp4', "pinned by 'conv_in*'")
    >>> free_track({"conv_in*": "bf16", "*": "fp4"}, "conv_out.weight")[0] is None
    True
    """
    fast = pins.get("*", "fp4")
    fast = fast if fast in FAST else "fp4"
    for pattern, track in pins.items():
        if fnmatch.fnmatchcase(name, pattern):
            free = pattern == "*" and track in FAST
            return (None if free else track), fast, f"pinned by {pattern!r}"
    return None, fast, ""


def unmatched(routes: Iterable[Mapping[str, str]], names: Iterable[str]) -> list[str]:
    """A sentence for each pattern of the routes, in their order, that matches no layer of `names`: it would
    do nothing. None for the patterns of `DEFAULT_ROUTE`; those after the third are counted.

    >>> unmatched([{"conv_on*": "bf16", "*": "fp4"}], ["conv_in.weight", "conv_out.weight"])[0]
    "route: 'conv_on*' (bf16) matches no layer and does nothing; near are 'conv_in.weight', 'conv_out.weight'"
    """
    names = list(names)
    given = {pattern: track for route in routes for pattern, track in route.items()}
    lost = [
        pattern for pattern in given
        if pattern not in DEFAULT_ROUTE and not any(fnmatch.fnmatchcase(name, pattern) for name in names)
    ]  # fmt: skip
    said = []
    for pattern in lost[:_SAID]:
        what = f"{pattern!r} ({given[pattern]}) matches no layer and does nothing"
        near = ", ".join(map(repr, difflib.get_close_matches(pattern, names, cutoff=0.0)))
        said.append(f"route: {what}; near are {near}")
    if more := len(lost) - len(said):
        said.append(f"route: so do {more} more of its {len(given)} patterns; is it another network's?")
    return said
