"""Gradients of `matmul` and `linear`: BF16 products with FP32 sums, straight through the quantiser.

dA = g B'^T and dB = A'^T g, with A' and B' the operands that the forward pass multiplied and g rounded to
bfloat16 (Bengio et al., arXiv:1308.3432).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .dispatch import backend_for, check_stream
from .dual import DualWeight
from .errors import ShapeError, nearest
from .formats import Format, QuantizedArray
from .interop import output, outputs
from .operands import (
    Arg,
    as_arg,
    branch,
    check_axis,
    check_frameworks,
    choose_format,
    choose_track,
    left_matrix,
    linear_weight,
    memory_of,
    on_device,
    part_of_dual,
    right_matrix,
    shapes,
    whole_operand,
)


def _unbroadcast(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes that broadcasting added to or stretched in an operand of `shape`."""
    extra = gradient.ndim - len(shape)
    if extra:
        gradient = gradient.sum(tuple(range(extra)))
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and gradient.shape[i] != 1)
    return gradient.sum(stretched, keepdims=True) if stretched else gradient


class Backward:
    """What one backward call multiplies: checked operands, the track, and which form of a and b it uses."""

    def __init__(self, op, g, a: Arg, b: Arg, track, save, backward, format, stream=None):
        self.op, self.g, self.a, self.b = op, as_arg(g, "g") if not isinstance(g, Arg) else g, a, b
        self.place(stream)
        if self.g.array is None:
            raise TypeError(f"{op}: g is a {type(self.g.value).__name__}, but a gradient is a plain float "
                            f"array; pass that of the product")  # fmt: skip
        for name, value, known in (
            ("save", save, ("fp4", "bf16")),
            ("backward", backward, ("track", "master")),
        ):
            if value not in known:
                raise ValueError(f"{op}: {name}: {value!r} is not known{nearest(value, known)}")
        self.track, self.fmt = choose_track(op, track, a, b), choose_format(format, a, b)
        shape, self.lead = shapes(op, a, b)
        if self.g.shape != shape:
            raise ShapeError(
                f"{op}: g has shape {self.g.shape} but the product of {a.name} {a.shape} and {b.name} "
                f"{b.shape} has shape {shape}; pass the gradient of that product"
            )
        self.rounding = self.track != "reference"
        quantized = self.track in ("fp4", "dual")
        self.track_a = "bf16" if quantized and save == "bf16" else self.track
        self.track_b = "bf16" if quantized and backward == "master" else self.track
        self.used_b = part_of_dual(b, self.track_b)
        self.dual = b.value if self.track_b == "dual" else None
        if self.track_b == "bf16" and self.track != "bf16" and isinstance(b.value, QuantizedArray):
            raise TypeError(f"{op}: backward is 'master' but {b.name} is a QuantizedArray, which has none; "
                            f"pass the BF16 weight or a DualWeight")  # fmt: skip
        if self.track_a == "bf16" and self.track != "bf16" and isinstance(a.value, QuantizedArray):
            raise TypeError(
                f"{op}: save is 'bf16' but {a.name} is a QuantizedArray; pass the input unquantised"
            )
        check_axis(op, a, False, self.track)
        check_axis(op, self.used_b, True, self.track_b)
        self.prepare(a.shape[-2] if len(a.shape) > 1 else 1, b.shape[-1] if len(b.shape) > 1 else 1)

    def place(self, stream: Any) -> None:
        """Where it is computed: checks that the operands belong together."""
        check_stream(self.op, stream)
        self.kernels = backend_for(self.a, self.b)

    def prepare(self, m: int, n: int) -> None:
        self.framework = check_frameworks(self.op, [self.g, self.a, self.b])
        self.full = self.g.array.reshape(*self.lead, m, n)

    def outputs(self, out: Any, names: tuple[str, ...]) -> tuple:
        return outputs(self.op, out, names)

    def g_rows(self):
        rows = self.full.reshape(math.prod(self.full.shape[:-1]), self.full.shape[-1])
        return self.kernels.plain_matrix(rows, rounding=self.rounding, exact=not self.rounding)

    def g_whole(self) -> np.ndarray:
        return self.g_rows().whole().reshape(self.full.shape)

    def result(self, arg: Arg, shape=None, out: Any = None) -> tuple[np.ndarray, np.ndarray, Any]:
        """(contiguous memory to compute in, the gradient's own, what is returned) of the gradient of `arg`,
        in its dtype (that of g where it is quantised)."""
        dtype = arg.dtype if arg.dtype is not None else self.g.dtype
        shape, used = arg.shape if shape is None else shape, memory_of(self.g, self.a, self.b)
        target, result = output(self.op, out, shape, dtype, self.framework, used)
        return target if target.flags.c_contiguous else np.empty(shape, dtype), target, result

    def dbias(self, out: Any = None) -> Any:
        """Sum of the rounded g over all its rows."""
        rows = self.g_rows().whole()
        _, dbias, result = self.result(self.g, rows.shape[-1:], out)
        dbias[...] = rows.sum(0)
        return result

    def masked(self) -> Arg:
        """a as the FP4 products saw it: on the dual track without the outlier columns."""
        w = self.b.value
        if self.track != "dual" or not w.outlier_index.size or self.track_a == "bf16":
            return self.a
        return branch(self.kernels, self.a, w)[0]

    # ---- the two products ----------------------------------------------------------------------------------
    def grad_a(self, out: Any = None):
        array, target, result = self.result(self.a, out=out)
        self._grad_a(array)
        if array is not target:
            target[...] = array
        return result

    def _grad_a(self, array: np.ndarray) -> None:
        if len(self.b.shape) > 2:
            w = np.swapaxes(whole_operand(self.kernels, self.used_b, self.track_b, self.fmt, True), -1, -2)
            self._batched(self.g_whole(), w, array, (1, self.a.shape[0]) if len(self.a.shape) == 1 else None)
            return
        rows, finish = array.reshape(math.prod(self.a.shape[:-1]), self.a.shape[-1]), None
        if self.dual is not None:  # da = g twin^T + (g up^T) down^T
            down, up = self.dual.branch_factors()
            through = self._through(up)

            def finish(y, rows, columns):
                self.kernels.add_product(y, through[rows], down[columns].T)

        right = right_matrix(self.kernels, self.used_b, self.track_b, self.fmt)
        self.kernels.product(self.g_rows(), right.T, rows, finish)

    def _through(self, up: np.ndarray) -> np.ndarray:
        """bf16(g up^T), (rows, r)."""
        through = np.empty((math.prod(self.full.shape[:-1]), up.shape[0]), np.float32)
        self.kernels.product(self.g_rows(), self.kernels.plain_matrix(up, rounding=False).T, through)
        self.kernels.round_bf16(through, through)
        return through

    def grad_b(self, out: Any = None, transposed: bool = False):
        """The gradient of b; `transposed` gives it as (N, K), the shape of a `linear` weight."""
        shape = self.b.shape[::-1] if transposed else self.b.shape
        array, target, result = self.result(self.b, shape, out)
        self._grad_b(array, transposed)
        if array is not target:
            target[...] = array
        return result

    def _grad_b(self, array: np.ndarray, transposed: bool) -> None:
        if len(self.b.shape) > 2:
            x = whole_operand(self.kernels, self.a, self.track_a, self.fmt, False)
            x = x[None] if x.ndim == 1 else x
            self._batched(np.swapaxes(x, -1, -2), self.g_whole(), array, None)
            return
        target = array.T if transposed else array.reshape(self.b.shape[0], self.full.shape[-1])
        left = left_matrix(self.kernels, self.masked(), self.track_a, self.fmt)
        self.kernels.product(left.T, self.g_rows(), target)
        if self.track == "dual" and self.track_a != "bf16" and self.b.value.outlier_index.size:
            index = self.b.value.outlier_index  # these rows met a in BF16
            columns = self.a.array.reshape(-1, self.a.shape[-1])[:, index]
            part = np.empty((index.size, target.shape[1]), np.float32)
            self.kernels.product(self.kernels.plain_matrix(columns, rounding=True).T, self.g_rows(), part)
            target[index] = part

    def branch_gradients(self, w: DualWeight) -> tuple[Any, Any]:
        """(ddown, dup) of `branch_vjp`."""
        kernels, rank = self.kernels, w.rank
        _, hidden, _ = branch(kernels, self.a, w)
        _, up = w.branch_factors()
        through = kernels.plain_matrix(self._through(up[:rank]), rounding=False)
        ddown, _, down_result = self.result(self.b, (w.shape[0], rank))
        dup, _, up_result = self.result(self.b, (rank, w.shape[1]))
        left = left_matrix(kernels, self.masked(), self.track_a, self.fmt)
        kernels.product(left.T, through, ddown)
        ddown[w.outlier_index] = 0
        kernels.product(kernels.plain_matrix(hidden[:, :rank], rounding=False).T, self.g_rows(), dup)
        return down_result, up_result

    def _batched(self, x, y, array, shape) -> None:
        """array = x @ y summed over the broadcast axes."""
        lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        full = np.empty((*lead, x.shape[-2], y.shape[-1]), np.result_type(x, y))
        self.kernels.batched(x, y, full)
        array[...] = _unbroadcast(full, shape or array.shape).reshape(array.shape)


def _backward(op, g, a: Arg, b: Arg, *options) -> Any:
    """`Backward` for where the operands lie."""
    g = as_arg(g, "g")
    if on_device(g, a, b):
        from .gemm_vjp_cuda import DeviceBackward

        return DeviceBackward(op, g, a, b, *options)
    return Backward(op, g, a, b, *options)


def matmul_vjp(
    g: Any,
    a: Any,
    b: Any,
    *,
    track: str | None = None,
    save: str = "fp4",
    backward: str = "track",
    format: str | Format | None = None,
    out: Any = None,
    stream: Any = None,
):
    """Gradients ``(da, db)`` of ``matmul(a, b)`` for the gradient `g` of its result.

    Args:
        g: gradient, of the product's shape. a, b, track, format: as for `matmul`; `a` may be the quantised
            input that the forward pass kept (4.5 bits an element is all that db needs).
        save: "fp4": db uses the decoded FP4 input on the FP4 and dual tracks; "bf16": the input itself.
        backward: "track": da uses the decoded FP4 weight (and the branch); "master": the BF16 weight.
        out: pair of arrays for da and db, either of them None for a new one. stream: None for host arrays,
            else as for `matmul`. On the GPU decoded "fp8", and "nvfp4" with several outer scales, are rounded
            to BF16 before they are multiplied.

    Returns:
        da and db in the shapes of a and b, summed over broadcast axes, in their dtypes (that of g for a
        quantised operand). For a `DualWeight` db is the gradient of the master, dequantize(a)^T g. On the
        "reference" track they are exact to the operands' own precision.

    Raises:
        ShapeError: g, a or b do not fit. TypeError: mixed frameworks, a quantised g, or ``save="bf16"``,
            ``backward="master"`` of an operand whose BF16 form is not there. What `matmul` raises.

    >>> import numpy as np, fp4bf16 as fb
    >>> a, b = np.ones((2, 16), np.float32), np.ones((16, 3), np.float32)
    >>> da, db = fb.matmul_vjp(np.ones((2, 3), np.float32), a, b)
    >>> float(da[0, 0]), float(db[0, 0])
    (3.0, 2.0)
    """
    call = _backward("matmul_vjp", g, as_arg(a, "a"), as_arg(b, "b"), track, save, backward, format, stream)
    out = call.outputs(out, ("da", "db"))
    return call.grad_a(out[0]), call.grad_b(out[1])


def linear_vjp(
    g: Any,
    x: Any,
    weight: Any,
    *,
    track: str | None = None,
    save: str = "fp4",
    backward: str = "track",
    format: str | Format | None = None,
    out: Any = None,
    stream: Any = None,
):
    """Gradients ``(dx, dweight, dbias)`` of ``linear(x, weight, bias)``; `g` (..., N) is its result's.

    dweight has the shape of `weight`: (N, K), or (K, N) for a `DualWeight`. dbias (N,) is the sum of the
    rounded g. Arguments and errors as for `matmul_vjp`; `out` has three arrays.

    >>> import numpy as np, fp4bf16 as fb
    >>> g, x, weight = np.ones((4, 8)), np.ones((4, 32)), np.ones((8, 32))
    >>> dx, dw, db = fb.linear_vjp(g, x, weight)
    >>> dx.shape, dw.shape, db[0]
    ((4, 32), (8, 32), np.float64(4.0))
    """
    x = as_arg(x, "x")
    w = linear_weight("linear_vjp", x, weight)
    call = _backward("linear_vjp", g, x, w, track, save, backward, format, stream)
    out = call.outputs(out, ("dx", "dweight", "dbias"))
    dbias = call.dbias(out[2])
    return call.grad_a(out[0]), call.grad_b(out[1], not isinstance(weight, DualWeight)), dbias


def branch_vjp(g: Any, a: Any, w: DualWeight, *, save: str = "fp4"):
    """Gradients ``(ddown (K, r), dup (r, N))`` of the low-rank factors of ``matmul(a, w)`` on the dual track.

    ddown = X^T (g up^T), X being the decoded FP4 input (an approximation that spares the BF16 input) or with
    ``save="bf16"`` the input itself; dup = T^T g with T = bf16(a down). Outlier columns of ddown are zero.
    g is (..., N), a (..., K); the gradients have g's dtype. Raises what `matmul_vjp` raises.

    >>> import numpy as np, fp4bf16 as fb
    >>> w = fb.DualWeight(np.eye(16, 8, dtype=np.float32), rank=4)
    >>> ddown, dup = branch_vjp(np.ones((2, 8), np.float32), np.ones((2, 16), np.float32), w)
    >>> ddown.shape, dup.shape
    ((16, 4), (4, 8))
    """
    call = _backward("branch_vjp", g, as_arg(a, "a"), as_arg(w, "w"), "dual", save, "track", None)
    return call.branch_gradients(w)
