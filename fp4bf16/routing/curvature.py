"""Curvature of a loss, layer by layer: Hessian-vector products on the tape and traces of Hessian blocks.

One random vector over all parameters serves every layer at once: the block trace of layer l is the sum of its
part of the Hessian's diagonal, and v_l . (H v)_l is an unbiased estimate of it, since the signs of different
layers are independent. What the other layers put into (H v)_l is noise, which `hutch_plus_plus` takes out
along the directions in which the Hessian is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..diffusion.noise import subseed, uniform
from ..errors import ConfigError, ShapeError, nearest
from ..nn.module import Parameter
from ..nn.tape import Variable, grad

#: What `layer_traces` may be asked for.
METHODS = ("hutchinson", "hutch++")

#: An array for each layer by name.
Arrays = dict[str, np.ndarray]
#: v -> H v, both with an array for each layer.
Product = Callable[[Arrays], Arrays]


@dataclass(frozen=True)
class Trace:
    """An estimate of the trace of a layer's Hessian block, in units of the loss over those of a weight
    squared.

    Attributes:
        value: the estimate, unbiased; it may be negative where the trace is small or the loss is not convex.
        error: its standard error, one standard deviation; infinite where a single random vector was used.
        products: Hessian-vector products that were made for it (and for all other layers).
    """

    value: float
    error: float
    products: int


# ---- Hessian-vector products -------------------------------------------------------------------------------


class Hessian:
    """The Hessian of a loss with respect to some parameters, known by its products with vectors.

    The graph of the gradient is recorded once and kept, about three times the memory of the forward; a
    product is one more walk over it. The weights may not change between products (`RuntimeError`).

    >>> x = Variable(np.array([1.0, 2.0]), requires_grad=True)
    >>> hessian = Hessian((x * x * x).sum(), [x])
    >>> hessian.product([np.array([1.0, 1.0])])
    [array([ 6., 12.])]
    """

    def __init__(self, loss: Variable, parameters: Sequence[Variable]):
        self.parameters = list(parameters)
        self._first = grad(loss, self.parameters, create_graph=True)

    def product(self, vectors: Sequence[Any]) -> list[Any]:
        """The Hessian times `vectors`, one of each parameter's shape: arrays of the same shapes and dtypes.

        `ShapeError` where number or shapes differ.
        """
        vectors, dot = self._checked(vectors), None
        for g, v in zip(self._first, vectors, strict=True):
            if g.requires_grad:  # else it is a constant, whose derivative is zero
                part = (g * v).sum()
                dot = part if dot is None else dot + part
        if dot is None:
            return [np.zeros_like(v) for v in vectors]
        return [h.data for h in grad(dot, self.parameters, retain_graph=True)]

    def _checked(self, vectors: Sequence[Any]) -> list[np.ndarray]:
        if len(vectors) != len(self.parameters):
            raise ShapeError(
                f"hvp: vectors has {len(vectors)} entries, but there are {len(self.parameters)} parameters; "
                f"pass one of its shape for each"
            )
        checked = []
        for i, (p, v) in enumerate(zip(self.parameters, vectors, strict=True)):
            v = np.asarray(v.data if isinstance(v, Variable) else v, dtype=p.dtype)
            if v.shape != p.shape:
                raise ShapeError(
                    f"hvp: the vector for {p.name or f'parameter {i}'} has shape {v.shape}, but the "
                    f"parameter has shape {p.shape}; they must be equal"
                )
            checked.append(v)
        return checked


def hvp(loss: Variable, parameters: Sequence[Variable], vectors: Sequence[Any]) -> list[Any]:
    """The Hessian of `loss` with respect to all of `parameters`, times `vectors` (Pearlmutter 1994): one
    array of each parameter's shape and dtype.

    Off-diagonal blocks count: the result for one parameter holds what the vectors of the others contribute.
    The graph of `loss` is kept, so that further products can be made of it; `Hessian` shares their first half
    as well. Derivatives run on the track of the forward: BF16 rounds them, the FP4 track's are straight
    through the quantiser, ``with fp4bf16.tracks("reference")`` rounds nothing. Raises `ShapeError` where a
    vector does not fit and `TypeError` for a parameter that takes no gradient.

    >>> x = Variable(np.array([1.0, 2.0]), requires_grad=True)
    >>> y = Variable(np.array([3.0]), requires_grad=True)
    >>> loss = (x * x * y).sum()                    # d2/dx2 = 2 y on the diagonal, d2/dxdy = 2 x
    >>> [h.tolist() for h in hvp(loss, [x, y], [np.array([1.0, 0.0]), np.array([1.0])])]
    [[8.0, 4.0], [2.0]]
    """
    return Hessian(loss, parameters).product(vectors)


# ---- random vectors, and vectors over layers ---------------------------------------------------------------


def rademacher(seed: int, purpose: str, number: int, shapes: Mapping[str, tuple], dtypes: Any) -> Arrays:
    """Random signs for each layer of `shapes`: a function of (seed, purpose, layer's name, number) alone, so
    that a layer has the same ones whatever other layers are asked for.

    dtypes: by layer's name.

    >>> signs = rademacher(0, "probe", 0, {"a": (3,), "b": (2, 2)}, {"a": np.float32, "b": np.float32})
    >>> signs["b"].shape, sorted(set(np.abs(signs["a"]).tolist()))
    ((2, 2), [1.0])
    """
    return {
        name: np.where(uniform(subseed(seed, "curvature", purpose, name), number, shape) < 0.5, 1, -1)
        .astype(dtypes[name]).reshape(shape)
        for name, shape in shapes.items()
    }  # fmt: skip


def _dots(a: Arrays, b: Arrays) -> np.ndarray:
    """The inner product of each layer, float64 (layers,)."""
    # einsum in float64 on this thread: BLAS would wake its own, and float32 sums of millions drift
    return np.array([
        np.einsum("i,i->", a[name].reshape(-1), b[name].reshape(-1), dtype=np.float64) for name in a
    ])  # fmt: skip


def _without(v: Arrays, basis: Sequence[Arrays]) -> Arrays:
    """(I - Q Q^T) v for the columns `basis` of Q, all of them at the v that was given."""
    v = {name: array.copy() for name, array in v.items()}
    for q, along in [(q, float(_dots(q, v).sum())) for q in basis]:
        for name, array in v.items():
            array -= array.dtype.type(along) * q[name]
    return v


def _orthonormal(columns: Iterator[Arrays]) -> list[Arrays]:
    """An orthonormal basis of the span of `columns` (Gram-Schmidt, each twice); those that depend on the
    earlier ones, to half of the digits, are left out.
    """
    basis: list[Arrays] = []
    for column in columns:
        size = math.sqrt(float(_dots(column, column).sum()))
        rest = _without(_without(column, basis), basis)
        left = math.sqrt(float(_dots(rest, rest).sum()))
        digits = max(math.sqrt(np.finfo(array.dtype).eps) for array in column.values())
        if math.isfinite(left) and left > digits * size:
            basis.append({name: (array / array.dtype.type(left)) for name, array in rest.items()})
    return basis


# ---- traces ------------------------------------------------------------------------------------------------


def hutchinson(
    product: Product, shapes: Mapping[str, tuple], probes: int, seed: int, dtypes: Any = None
) -> dict[str, Trace]:
    """Traces of the diagonal blocks of a symmetric matrix H, all from the same `probes` products
    (Hutchinson 1990).

    v_l . (H v)_l for random signs v over all layers has mean tr H_ll and variance
    2 (|H_ll|_F^2 - sum of H_ii^2) + sum over other layers m of |H_lm|_F^2; their average is returned, with
    the standard error that their spread shows.

    product: v -> H v, dicts of arrays. shapes: of each layer. dtypes: of each layer's vectors (float64
    unless given). Raises `ConfigError` for fewer than one probe.

    >>> H = np.diag([1.0, 2.0, 4.0])                        # without off-diagonal elements it is exact
    >>> def product(v):
    ...     x = H @ np.concatenate([v["a"], v["b"]])
    ...     return {"a": x[:2], "b": x[2:]}
    >>> found = hutchinson(product, {"a": (2,), "b": (1,)}, probes=2, seed=0)
    >>> found["a"], found["b"].value
    (Trace(value=3.0, error=0.0, products=2), 4.0)
    """
    _check_probes(probes, 1, "hutchinson")
    dtypes = _dtypes(shapes, dtypes)
    samples = []
    for number in range(probes):
        v = rademacher(seed, "probe", number, shapes, dtypes)
        samples.append(_dots(v, product(v)))
    return _traces(shapes, np.zeros(len(shapes)), np.array(samples), probes)


def hutch_plus_plus(
    product: Product, shapes: Mapping[str, tuple], probes: int, seed: int, dtypes: Any = None
) -> dict[str, Trace]:
    """As `hutchinson`, with the largest part of H taken out exactly first: Hutch++ (Meyer et al. 2021,
    algorithm 1), read out block by block.

    A third of the `probes` products finds a basis Q of the range of H (over all layers together), a third
    gives H Q, the rest are random vectors. With P = Q Q^T,
    H = P H + (I - P) H P + (I - P) H (I - P): the blocks of the first two parts follow from Q and H Q, and
    random signs estimate those of the last alone. This holds for any symmetric P, so rounding in Q does no
    harm; and since the large directions are those of the whole H, the noise from the other layers shrinks
    with the layer's own. The standard error is that of the random part, the only one for a given Q.

    Where the eigenvalues fall fast it needs far fewer products; where they do not, the products spent on Q
    are lost. Arguments as for `hutchinson`; at least 3 probes (`ConfigError`), 4 for a standard error.

    >>> u = np.array([3.0, 4.0, 12.0])
    >>> found = hutch_plus_plus(lambda v: {"a": u * (u @ v["a"])}, {"a": (3,)}, probes=6, seed=0)
    >>> abs(found["a"].value - 169) < 1e-9                          # H = u u^T: one direction is all of it
    True
    """
    _check_probes(probes, 3, "hutch++")
    dtypes, sketched = _dtypes(shapes, dtypes), probes // 3
    basis = _orthonormal(
        product(rademacher(seed, "sketch", number, shapes, dtypes)) for number in range(sketched)
    )
    known = _known_part(basis, [product(q) for q in basis], len(shapes))
    samples = []
    for number in range(probes - sketched - len(basis)):
        v = rademacher(seed, "probe", number, shapes, dtypes)
        samples.append(_dots(v, _without(product(_without(v, basis)), basis)))
    return _traces(shapes, known, np.array(samples), probes)


def _known_part(basis: list[Arrays], images: list[Arrays], layers: int) -> np.ndarray:
    """Block traces of P H + (I - P) H P, float64 (layers,), from the columns q of Q and `images` H q."""
    known = np.zeros(layers)
    for q, image in zip(basis, images, strict=True):
        known += 2 * _dots(q, image)
    for i, a in enumerate(basis):
        for j, b in enumerate(basis):  # less P H P, which both have
            inner = 0.5 * (_dots(a, images[j]).sum() + _dots(b, images[i]).sum())
            known -= inner * _dots(a, b)
    return known


def _traces(shapes: Mapping, known: np.ndarray, samples: np.ndarray, products: int) -> dict[str, Trace]:
    """`known` plus the mean of `samples` (probes, layers), with its standard error."""
    count = len(samples)
    value = known + samples.mean(0)
    error = samples.std(0, ddof=1) / math.sqrt(count) if count > 1 else np.full(len(shapes), math.inf)
    error = np.where(np.isfinite(value) & np.isfinite(error), error, math.inf)
    return {
        name: Trace(float(v), float(e), products) for name, v, e in zip(shapes, value, error, strict=True)
    }


def _check_probes(probes: Any, least: int, method: str) -> None:
    if isinstance(probes, bool) or not isinstance(probes, int | np.integer) or probes < least:
        raise ConfigError(
            f"{method}: probes is {probes!r}, but must be a whole number from {least} on: the number of "
            f"Hessian-vector products; 8 is a usual one"
        )


def _dtypes(shapes: Mapping[str, tuple], dtypes: Any) -> Mapping[str, Any]:
    return dict.fromkeys(shapes, np.float64) if dtypes is None else dtypes


def layer_traces(
    loss_fn: Callable[[], Variable],
    parameters: Mapping[str, Parameter],
    probes: int = 8,
    seed: int = 0,
    method: str = "hutchinson",
) -> dict[str, Trace]:
    """The trace of each parameter's Hessian block of a loss, from `probes` Hessian-vector products for all.

    Args:
        loss_fn: makes the loss, one element, on the tape; called once. On the BF16 track (the network's
            route is its matter) the curvature is that of the loss that FP4 is to be compared with.
        parameters: by the name under which each layer is reported. Those that take no gradient, as the base
            beside adapters, take one meanwhile; nothing is written to ``.grad``.
        probes: products, each two to three times the time of forward and backward. seed: of the vectors.
        method: "hutchinson" or "hutch++" (at least 3 probes).

    Not finite where loss or weights are not: then the error is infinite. Raises `ConfigError` for another
    method or too few probes.

    >>> from fp4bf16.nn import Linear
    >>> layer, x = Linear(4, 3, bias=False), np.eye(4, dtype=np.float32)
    >>> traces = layer_traces(lambda: (layer(x) ** 2).sum(), {"weight": layer.weight}, probes=4)
    >>> traces["weight"].value                                      # 12 weights, each with a 2
    24.0
    """
    if method not in METHODS:
        raise ConfigError(f"layer_traces: method is {method!r}, which is not known{nearest(method, METHODS)}")
    estimate, least = (hutchinson, 1) if method == "hutchinson" else (hutch_plus_plus, 3)
    _check_probes(probes, least, method)
    if not parameters:
        return {}
    with _differentiable(parameters.values()):
        hessian = Hessian(loss_fn(), list(parameters.values()))

        def product(v: Arrays) -> Arrays:
            return dict(zip(parameters, hessian.product([v[name] for name in parameters]), strict=True))

        shapes = {name: p.shape for name, p in parameters.items()}
        dtypes = {name: p.dtype for name, p in parameters.items()}
        return estimate(product, shapes, probes, seed, dtypes)


@contextmanager
def _differentiable(parameters: Any) -> Iterator[None]:
    """The parameters take gradients inside."""
    before = [(p, p.requires_grad) for p in parameters]
    try:
        for p, _ in before:
            p.requires_grad = True
        yield
    finally:
        for p, taken in before:
            p.requires_grad = taken
