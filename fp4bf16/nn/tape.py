"""Reverse-mode differentiation: variables, the graph that operations leave behind, the walk back through it.

Every operation has two derivatives of the same function. `vjp` is written in tape operations, so that the
walk can itself be differentiated (``create_graph=True``: Hessian-vector products). `fused` works on plain
arrays in as few passes as possible and is used for first-order gradients; a test holds that both agree.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from ..errors import DTypeError, ShapeError
from .xp import as_array, namespace

_grad_enabled: contextvars.ContextVar[bool] = contextvars.ContextVar("fp4bf16_grad", default=True)
_next_id = count(1).__next__


@contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    token = _grad_enabled.set(enabled)
    try:
        yield
    finally:
        _grad_enabled.reset(token)


def no_grad():
    """Context in which operations record nothing: the same values, bit for bit, and no memory kept.

    >>> import numpy as np
    >>> w = Variable(np.ones(2), requires_grad=True)
    >>> with no_grad():
    ...     y = w * 3.0
    >>> y.requires_grad
    False
    """
    return _grad_mode(False)


def grad_enabled() -> bool:
    """Whether operations are recorded here."""
    return _grad_enabled.get()


class Op:
    """One differentiable operation.

    forward: ``(*arrays, **attrs) -> (array, saved)``, saved is any object that `fused` or `vjp` needs.
    vjp: ``(g, inputs, out, needs, **attrs) -> gradients`` on `Variable` objects, made of tape operations.
    fused: ``(g, arrays, saved, needs, **attrs) -> gradients`` on arrays, or None to run `vjp` unrecorded.
    keep: whether the input arrays are needed on the way back (False frees them early; `inputs` is then None
    and attributes carry the shapes).
    direct: `fused` adds to the gradients of the leaves itself and uses up what was saved; `backward` alone
    can run it, once.
    """

    __slots__ = ("name", "forward", "vjp", "fused", "keep", "direct")

    def __init__(
        self,
        name: str,
        forward: Callable,
        vjp: Callable,
        fused: Callable | None = None,
        keep: bool = True,
        direct: bool = False,
    ):
        self.name, self.forward, self.vjp, self.fused, self.keep = name, forward, vjp, fused, keep
        self.direct = direct

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __call__(self, *inputs: Any, **attrs: Any) -> Variable:
        arrays, edges, record = [], [], False
        for x in inputs:
            if isinstance(x, Variable):
                arrays.append(x.data)
                edge = x._node or (x if x.requires_grad else None)
                record = record or edge is not None
                edges.append(edge)
            else:
                arrays.append(x)
                edges.append(None)
        out, saved = self.forward(*arrays, **attrs)
        result = Variable.__new__(Variable)
        result.data, result.grad, result.name = out, None, None
        if record and _grad_enabled.get():
            result._node = Node(self, edges, arrays if self.keep else None, saved, attrs)
            result.requires_grad = True
        else:
            result._node, result.requires_grad = None, False
        return result


class Node:
    """One recorded call. `edges` lead to the nodes or leaf variables that the inputs came from; `versions`
    are those of the parameters among them, None of other edges.
    """

    __slots__ = ("op", "edges", "arrays", "saved", "attrs", "versions", "id", "freed", "__weakref__")

    def __init__(self, op: Op, edges: list, arrays: list | None, saved: Any, attrs: dict):
        self.op, self.edges, self.arrays, self.saved, self.attrs = op, edges, arrays, saved, attrs
        self.versions = [getattr(edge, "version", None) for edge in edges]
        self.id, self.freed = _next_id(), False

    def check_weights(self) -> None:
        """`RuntimeError` where a parameter has changed: this call's derivative is taken at its old values."""
        for edge, version in zip(self.edges, self.versions, strict=True):
            if version is not None and edge.version != version:
                raise RuntimeError(
                    f"backward: the weights have changed since this forward ({edge.name or 'a parameter'}, "
                    f"in {self.op.name!r}); call backward before they are stepped or loaded, or run the "
                    f"forward again"
                )

    def free(self) -> None:
        self.arrays = self.saved = None
        self.edges, self.freed = (), True

    def inputs(self) -> list[Variable | None] | None:
        """The inputs as variables of the graph, for a `vjp` that is itself recorded."""
        if self.arrays is None:
            return None
        return [_attach(array, edge) for array, edge in zip(self.arrays, self.edges, strict=True)]


def _attach(array: Any, edge: Any) -> Any:
    if edge is None:
        return array
    if isinstance(edge, Node):
        return Variable._of(array, edge)
    if edge.data is not array:
        raise RuntimeError(
            f"grad: the data of {edge.name or 'a leaf variable'} was replaced after the forward; "
            "call grad(create_graph=True) before loading or swapping weights"
        )
    return edge


class Variable:
    """An array with a place in the graph.

    data: array of float32 or float64, any shape (0-d for losses). requires_grad: gradients flow to it.
    grad: after `backward`, the accumulated array of data's shape, or None.
    Arithmetic (``+ - * / ** @``), comparison-free indexing with slices and the methods below are recorded.

    >>> import numpy as np
    >>> x = Variable(np.array([1.0, 2.0]), requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    array([2., 4.])
    """

    __slots__ = ("data", "requires_grad", "grad", "name", "_node", "__weakref__")
    __array_ufunc__ = None  # NumPy arrays on the left leave the operation to us

    def __init__(self, data: Any, requires_grad: bool = False, name: str | None = None):
        self.data = as_array(data)
        self.requires_grad, self.grad, self.name, self._node = requires_grad, None, name, None
        if requires_grad and self.data.dtype.kind not in "fV":
            raise TypeError(
                f"Variable: data has dtype {self.data.dtype}, but only floating-point data takes gradients; "
                "convert it with .astype(np.float32)"
            )

    @classmethod
    def _of(cls, data: Any, node: Node | None) -> Variable:
        self = cls.__new__(cls)
        self.data, self.grad, self.name, self._node = data, None, None, node
        self.requires_grad = node is not None
        return self

    shape = property(lambda self: self.data.shape)
    ndim = property(lambda self: self.data.ndim)
    dtype = property(lambda self: self.data.dtype)
    size = property(lambda self: self.data.size)

    def __repr__(self) -> str:
        source = f" from {self._node.op.name}" if self._node else ""
        return f"Variable({self.data!r}, requires_grad={self.requires_grad}){source}"

    def __len__(self) -> int:
        return len(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __float__(self) -> float:
        return float(self.data)

    def item(self) -> float:
        """The value of a one-element variable."""
        return self.data.item()

    def numpy(self) -> Any:
        """The array itself (no copy)."""
        return self.data

    def detach(self) -> Variable:
        """The same array outside the graph."""
        return Variable._of(self.data, None)

    def backward(self, g: Any = None, retain_graph: bool = False) -> None:
        """See `backward`."""
        backward(self, g, retain_graph)


def _reachable(root: Any) -> list[Node]:
    """Nodes below `root`, newest first (an input is always older than what was made from it)."""
    if not isinstance(root, Node):
        return []
    seen, stack, order = {root}, [root], []
    while stack:
        node = stack.pop()
        order.append(node)
        if node.freed:
            raise RuntimeError(
                f"backward: the graph through {node.op.name!r} was already used and freed; "
                "pass retain_graph=True (or create_graph=True) to the first call"
            )
        for edge in node.edges:
            if isinstance(edge, Node) and edge not in seen:
                seen.add(edge)
                stack.append(edge)
    order.sort(key=lambda node: node.id, reverse=True)
    return order


def _wanted(order: list[Node], targets: set) -> set:
    """Of the nodes in `order`, those through which a target is reached."""
    wanted = set()
    for node in reversed(order):
        if node in targets or any(e in targets or e in wanted for e in node.edges if e is not None):
            wanted.add(node)
    return wanted


class _Sums:
    """Gradients by node or leaf. A sum that we allocated is added to in place; a borrowed array never is."""

    def __init__(self, taped: bool):
        self.value: dict[Any, Any] = {}
        self.owned: set = set()
        self.taped = taped

    def add(self, key: Any, g: Any) -> None:
        old = self.value.get(key)
        if old is None:
            self.value[key] = g
        elif self.taped:
            self.value[key] = old + g
        elif key in self.owned:
            old += g
        else:
            self.value[key] = old + g
            if self.value[key].ndim:
                self.owned.add(key)

    def pop(self, key: Any) -> Any:
        self.owned.discard(key)
        return self.value.pop(key, None)


def _as_the_loss(g: Any, loss: Variable) -> Any:
    """`g` as an array of the loss's framework and dtype."""
    try:
        xp = namespace(loss.data)
    except TypeError:
        own, other = (f"{type(x).__name__} of {getattr(x, 'dtype', 'no dtype')}" for x in (g, loss.data))
        raise DTypeError(f"backward: g is a {own} but the loss is a {other}; convert g to that") from None
    return xp.asarray(g, dtype=loss.dtype)


def _start(loss: Variable, g: Any, taped: bool) -> Any:
    if g is None:
        if math.prod(loss.shape) != 1:
            raise ShapeError(
                f"backward: the loss has shape {loss.shape}, but only a loss of one element needs no g; "
                "pass g of the loss's shape or reduce it with .mean() or .sum()"
            )
        g = namespace(loss.data).ones(loss.shape, loss.dtype)
    data = g.data if isinstance(g, Variable) else g
    if type(data) is not type(loss.data) or data.dtype != loss.dtype:
        data = _as_the_loss(data, loss)
    if data.shape != loss.shape:
        raise ShapeError(
            f"backward: g has shape {data.shape} but the loss has shape {loss.shape}; they must be equal"
        )
    return (g if isinstance(g, Variable) else Variable._of(data, None)) if taped else data


def _step(node: Node, g: Any, needs: list[bool], taped: bool) -> Sequence:
    """Gradients of one node's inputs: variables if taped, arrays if not."""
    op = node.op
    if not taped and op.fused is not None:
        return op.fused(g, node.arrays, node.saved, needs, **node.attrs)
    if taped:
        return op.vjp(g, node.inputs(), node, needs, **node.attrs)
    inputs = None if node.arrays is None else [Variable._of(a, None) for a in node.arrays]
    grads = op.vjp(Variable._of(g, None), inputs, node, needs, **node.attrs)
    return [None if x is None else x.data for x in grads]


def _walk(loss: Variable, g: Any, targets: set | None, create_graph: bool, retain: bool) -> dict:
    """Gradients by leaf (and by target node). Frees each node after its use unless `retain`."""
    root = loss._node or loss
    order = _reachable(root)
    wanted = None if targets is None else _wanted(order, targets)
    sums, results = _Sums(create_graph), {}
    sums.add(root, _start(loss, g, create_graph))
    with _grad_mode(create_graph):
        for node in order:
            g_node = sums.pop(node)
            if targets is not None and node in targets and g_node is not None:
                results[node] = g_node
            if g_node is None or (wanted is not None and node not in wanted):
                continue
            edges = node.edges
            if node.op.direct and (wanted is not None or create_graph or retain):
                raise RuntimeError(
                    f"grad: {node.op.name!r} ran on the GPU, where gradients reach the parameters by "
                    f"loss.backward() alone, once a forward; call that, or keep the network on the CPU"
                )
            if wanted is None:
                needs = [e is not None for e in edges]
            else:
                needs = [e is not None and (e in targets or e in wanted) for e in edges]
            if any(needs):
                if not node.op.direct:  # which looks itself
                    node.check_weights()
                for edge, need, g_in in zip(
                    edges, needs, _step(node, g_node, needs, create_graph), strict=True
                ):
                    if need and g_in is not None:
                        sums.add(edge, g_in)
            if not retain:
                node.free()
    results.update(sums.value)
    return results


def grad(
    loss: Variable,
    variables: Sequence[Variable],
    g: Any = None,
    create_graph: bool = False,
    retain_graph: bool = False,
) -> list[Variable]:
    """Gradients of `loss` (one element, or any shape with `g` of that shape) with respect to `variables`.

    Returns one `Variable` for each, of its shape and dtype (zeros where the loss does not depend on it). With
    ``create_graph=True`` the results are part of the graph, so that they can be differentiated again. The
    graph is freed on the way unless ``retain_graph`` or ``create_graph``. Nothing is written to ``.grad``.
    Raises `ShapeError` for a loss of several elements without `g`, `RuntimeError` for a graph that was freed.

    >>> import numpy as np
    >>> x = Variable(np.array([1.0, 2.0]), requires_grad=True)
    >>> (g,) = grad((x * x * x).sum(), [x], create_graph=True)
    >>> grad((g * np.array([1.0, 0.0])).sum(), [x])[0].data         # the Hessian times (1, 0)
    array([6., 0.])
    """
    keys = []
    for v in variables:
        if not isinstance(v, Variable) or not v.requires_grad:
            raise TypeError(f"grad: {v!r} takes no gradient; make it with Variable(data, requires_grad=True)")
        keys.append(v._node or v)
    found = _walk(loss, g, set(keys), create_graph, retain_graph or create_graph)
    result = []
    for v, key in zip(variables, keys, strict=True):
        value = found.get(key)
        if value is None:
            value = namespace(v.data).zeros(v.shape, v.dtype)
        result.append(value if isinstance(value, Variable) else Variable._of(value, None))
    return result


def backward(loss: Variable, g: Any = None, retain_graph: bool = False) -> None:
    """Add the gradients of `loss` to ``.grad`` of every leaf variable that it depends on, then free the
    graph.

    A leaf whose ``.grad`` is already an array (parameters of a module: a view of one flat buffer) is added to
    in place. Raises as `grad` does.

    >>> import numpy as np
    >>> w = Variable(np.ones(3, np.float32), requires_grad=True)
    >>> backward((w * 2.0).sum()); w.grad
    array([2., 2., 2.], dtype=float32)
    """
    if not loss.requires_grad:
        raise RuntimeError(
            "backward: the loss depends on no variable with requires_grad=True, or was computed inside "
            "no_grad()"
        )
    for leaf, value in _walk(loss, g, None, False, retain_graph).items():
        if leaf.grad is None:
            xp = namespace(value)
            leaf.grad = xp.array(xp.broadcast_to(value, leaf.shape), dtype=leaf.dtype)
        else:
            leaf.grad += value
