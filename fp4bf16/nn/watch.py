"""What looks at the products of a network while they run: certificates, probes, fallbacks, stopwatches.

    with watching(fallback, probe):
        loss = ...                       # every Linear and Conv2d asks them
        loss.backward()                  # and what they tapped runs on the way back

`Linear.forward` and `Conv2d.forward` consult the watchers in force; without any nothing changes, bit for bit.
A product on a GPU's UNet, which is one node of the tape, is not seen here: `nn.cuda.watch` has its watchers.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..certify import Certificate, sketching
from ..errors import NonFiniteError
from ..tracks import resolve_track, tracks
from .tape import Op, Variable

_watchers: contextvars.ContextVar[tuple[Watcher, ...]] = contextvars.ContextVar(
    "fp4bf16_watchers", default=()
)


class Estimate(NamedTuple):
    """A wish for the randomised estimate beside the bound; its sketch is drawn by Philox from these."""

    seed: int
    step: int
    call: int


class Watcher:
    """Looks at products; this one does nothing. Define what is needed.

    >>> from fp4bf16.nn import Linear
    >>> import numpy as np
    >>> class Names(Watcher):
    ...     def product(self, layer, x, y, run, certificate):
    ...         print(layer.key, y.shape)
    ...         return y
    >>> layer = Linear(16, 2)
    >>> _ = layer.apply_route({"*": "fp4"})
    >>> with watching(Names()):
    ...     y = layer(np.ones((3, 16), np.float32))
    .weight (3, 2)
    """

    def wants_certificate(self, layer: Any) -> bool | Estimate:
        """Asked before each product on the "fp4" or "dual" track: is `product` to get a `Certificate`?

        True: the bound, from the norms of that very quantisation. An `Estimate`: the randomised estimate as
        well. `layer` is a `Linear` or `Conv2d`; its ``key`` is the name that `apply_route` gave it ("" before
        that), ``track_of(layer)`` the track.
        """
        return False

    def product(
        self,
        layer: Any,
        x: Any,
        y: Variable,
        run: Callable[[str], Variable],
        certificate: Certificate | None,
    ) -> Variable:
        """Called after each product, on every track. Returns `y` or what replaces it (of its shape).

        layer: as above. x: input, array or `Variable`; that of an upsampling convolution is not upsampled
        yet. y: the product with bias and residual, before an
        adapter's branch is added. run: ``run(track)`` is the same product, bias, residual and all, on another
        track whatever ``with tracks(...)`` says; on the tape unless in `no_grad`; watchers do not see it.
        certificate: of `y`, if any watcher asked for one and the track is "fp4" or "dual"; else None.
        """
        return y

    def refused(
        self, layer: Any, x: Any, run: Callable[[str], Variable], error: NonFiniteError
    ) -> Variable | None:
        """Called where a product on the "fp4" or "dual" track refused NaN or Inf in its input or its weight:
        the result in its place, e.g. ``run("bf16")``, or None. Where all watchers give None it is raised.
        """
        return None


@contextmanager
def watching(*watchers: Watcher) -> Iterator[None]:
    """Put `watchers` in force inside, in this order, in place of those outside; none: nobody watches.

    Raises `TypeError` for what is no `Watcher`.
    """
    for watcher in watchers:
        if not isinstance(watcher, Watcher):
            raise TypeError(
                f"watching: {watcher!r} is a {type(watcher).__name__}, but a Watcher is needed; derive from "
                f"it"
            )
    token = _watchers.set(watchers)
    try:
        yield
    finally:
        _watchers.reset(token)


def current() -> tuple[Watcher, ...]:
    """The watchers in force."""
    return _watchers.get()


def track_of(layer: Any) -> str:
    """The track that a product of `layer` runs on here: its own, unless ``with tracks(...)`` overrides it."""
    return resolve_track(layer.track, "bf16")


def watched(layer: Any, x: Any, make: Callable[..., Variable], watchers: tuple[Watcher, ...]) -> Variable:
    """The product of `layer` with the watchers asked. ``make(track, certify)`` is the product on a track,
    certify None or (how, list) as in `ops.linear`.
    """
    certify, found, drawn = None, [], None
    fp4 = track_of(layer) in ("fp4", "dual")

    def run(track: str) -> Variable:
        with tracks(track):
            return make(track, None)

    if fp4:
        wishes = [watcher.wants_certificate(layer) for watcher in watchers]
        drawn = next((wish for wish in wishes if isinstance(wish, Estimate)), None)
        if any(wishes):
            certify = ("bound" if drawn is None else True), found
    try:
        with nullcontext() if drawn is None else sketching(*drawn, _on_host(layer.multiplied(layer.track))):
            y = make(layer.track, certify)
    except NonFiniteError as error:
        given = [watcher.refused(layer, x, run, error) for watcher in watchers] if fp4 else []
        instead = [y for y in given if y is not None]
        if not instead:
            raise
        return instead[0]
    for watcher in watchers:
        given = watcher.product(layer, x, y, run, found[0] if found else None)
        if not isinstance(given, Variable) or given.shape != y.shape:
            what = f"{type(given).__name__} of shape {getattr(given, 'shape', None)}"
            raise TypeError(
                f"{type(watcher).__name__}.product: a {what} came back for {layer.key or 'a layer'}, but a "
                f"Variable of shape {y.shape} is needed; return y or run(track)"
            )
        y = given
    return y


def _on_host(weight: Variable) -> np.ndarray | None:
    return weight.data if isinstance(weight.data, np.ndarray) else None


_tap_op = Op(
    "tap",
    lambda y, on_backward: (y, None),
    lambda g, inputs, node, needs, on_backward: (g,),
    lambda g, arrays, saved, needs, on_backward: (on_backward(g),),
    keep=False,
)


def tap(y: Variable, on_backward: Callable[[Any], Any]) -> Variable:
    """`y` itself; on the way back its gradient g goes on as what ``on_backward(g)`` returns.

    g is an array of y's shape that may be shared: return another one, do not write into it. A walk with
    ``create_graph=True`` (a Hessian-vector product) does not call it and passes its gradient unchanged; where
    nothing is recorded (`no_grad`, constants) it is never called.

    >>> import numpy as np
    >>> x = Variable(np.array([1.0, 2.0]), requires_grad=True)
    >>> tap(x * 3.0, lambda g: 10 * g).sum().backward()
    >>> x.grad
    array([30., 30.])
    """
    return _tap_op(y, on_backward=on_backward)
