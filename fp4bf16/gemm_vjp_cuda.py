"""Gradients of products of device arrays: BF16 products of the rounded g and the decoded operands.

The decoded operands are BF16 numbers: exact in "nvfp4_exact" and "mxfp4", and in "nvfp4" with one outer scale
for the tensor, which multiplies the result; with other outer scales, and in "fp8", they are rounded to BF16.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from . import device
from .backends import cuda_gemm as kernels
from .backends import cuda_math
from .backends.cuda_gemm import Finish, Matrices
from .device import DeviceArray
from .formats import Format
from .gemm_cuda import (
    bf16_side,
    decoded_side,
    exact,
    float32,
    hidden_product,
    multiply,
    quantiser_multiplies,
    result_matrices,
    writable,
)
from .gemm_vjp import Backward
from .interop import outputs
from .operands import Arg, memory_of, places


def _flat(x: Matrices, stream: int) -> Matrices:
    """One matrix with all the rows, readable by the kernels; a copy where its steps do not allow it."""
    x = kernels.bf16(x, stream)
    return kernels.folded(x) or kernels.folded(kernels.copied(x, "bfloat16", stream))


def used(arg: Arg, right: bool, track: str, fmt: Format, stream: int, **fields) -> Matrices:
    """The BF16 form of what `track` multiplied; `fields` as in `kernels.quantize`."""
    if track == "bf16":
        return bf16_side(arg, right, stream)
    if arg.array is not None:
        x = (kernels.right if right else kernels.left)(float32(arg.array))
        return kernels.quantized(x, fmt, "full" if right else "fast", stream, "values", **fields)
    return decoded_side(arg.value, right, stream)


def _turned(x: Matrices) -> Matrices:
    """Rows and contraction exchanged; the scale, one for all, stays."""
    return replace(x.T, scale=x.scale, scale_steps=(0,) * len(x.lead))


def _unbroadcast(x: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
    """Sum over the axes that broadcasting added to or stretched in an operand of `shape`."""
    extra = x.ndim - len(shape)
    if extra:
        x = cuda_math.total(x, range(extra))
    stretched = [i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1]
    return cuda_math.total(x, stretched, keepdims=True) if stretched else x


def device_outputs(op: str, out: Any, names: tuple[str, ...]) -> tuple:
    """`out` of a call with several results, one array or None for each of `names`."""
    if out is None:
        return (None,) * len(names)
    if not isinstance(out, tuple | list) or len(out) != len(names):
        return outputs(op, out, names)  # which says so
    given = [(n, x) for n, x in zip(names, out, strict=True) if x is not None]
    arrays = [(n, device.operand(x, f"out: {n}")) for n, x in given]
    for i, (name, array) in enumerate(arrays):
        for other, memory in arrays[:i]:
            if device.overlap(array, memory):
                raise ValueError(f"{op}: out: {other} and {name} overlap in memory; pass arrays that do not")
    return tuple(out)


class DeviceBackward(Backward):
    """`Backward` of device arrays; inside `ordered` the stream is the framework's current one."""

    def place(self, stream: Any) -> None:
        device.check_together(self.op, places(self.g, self.a, self.b))
        self.stream_arg = stream

    def outputs(self, out: Any, names: tuple[str, ...]) -> tuple:
        return device_outputs(self.op, out, names)

    def ordered(self):
        return device.ordered(self.op, self.stream_arg, [self.g.place, self.a.place, self.b.place])

    def prepare(self, m: int, n: int) -> None:
        self.flags = len(self.a.shape) > 1, len(self.b.shape) > 1

    def g_sides(self, stream: int) -> Matrices:
        return kernels.bf16(result_matrices(float32(self.g.array), *self.flags), stream)

    def target(self, arg: Arg, shape=None, out: Any = None) -> DeviceArray:
        """Memory of the gradient of `arg`, in its dtype (that of g where it is quantised)."""
        dtype = str(arg.dtype if arg.dtype is not None else self.g.dtype)
        shape, inputs = arg.shape if shape is None else shape, memory_of(self.g, self.a, self.b)
        return device.out_operand(self.op, out, shape, dtype, replace(self.g.place, name="g"), inputs)

    # ---- the gradient of a ---------------------------------------------------------------------------------
    def grad_a(self, out: Any = None) -> Any:
        with self.ordered() as stream:
            d = self.target(self.a, out=out)
            if self.track == "reference":
                return self._store(d, self._exact(stream, of_a=True))
            g = self.g_sides(stream)
            w = _turned(kernels.bf16(used(self.used_b, True, self.track_b, self.fmt, stream), stream))
            if len(self.b.shape) > 2 and self.lead != self.a.shape[:-2]:
                full = device.empty((*self.lead, g.rows, w.rows), "float32", like=d)
                multiply(kernels.left(full), stream, None, (g, w))
                shape = self.a.shape if self.flags[0] else (1, *self.a.shape)
                return self._store(d, _unbroadcast(full, shape))
            found = writable(d, self.flags[0], True)
            finish, through = self._branch_of_a(g, stream)
            multiply(found, stream, None, (g, w), finish)
            if through is not None:
                w = self.dual
                columns = slice(w.rank, w.rank + w.branch.outliers)
                part = cuda_math.part(through, slice(None), columns)
                cuda_math.put_columns(found.array, w.branch.index, part)
            return self._store(d, found.array)

    def _branch_of_a(self, g: Matrices, stream: int) -> tuple[Finish, DeviceArray | None]:
        """(g up^T) down^T as the residual; and bf16(g up^T) where outlier rows need their columns of it."""
        if self.dual is None or self.dual.rank + self.dual.branch.outliers == 0:
            return Finish(), None
        branch = self.dual.branch
        through = self._through(g, branch.up, stream)
        outliers = through if branch.outliers else None
        if branch.rank == 0:
            return Finish(), outliers
        rows, k = through.shape[0], branch.k
        added = device.empty((*g.lead, g.rows, k), "float32", like=through)
        left = Matrices(through, (), (), rows, through.shape[1], branch.rank, 1)
        down = branch.down.T
        kernels.product(Matrices(added, (), (), rows, k, k, 1), stream, sixteen=(left, down))
        return Finish(residual=kernels.left(added)), outliers

    def _through(self, g: Matrices, up: Matrices, stream: int) -> DeviceArray:
        """bf16(g up^T), (rows, columns of up^T rounded up to 8)."""
        flat = _flat(g, stream)
        new = device.empty((flat.rows, kernels.round_up(up.k, 8)), "bfloat16", like=up.array)
        d = Matrices(new, (), (), flat.rows, new.shape[1], up.k, 1)
        kernels.product(d, stream, sixteen=(flat, up.T))
        return new

    # ---- the gradient of b ---------------------------------------------------------------------------------
    def grad_b(self, out: Any = None, transposed: bool = False) -> Any:
        """The gradient of b; `transposed` gives it as (N, K), the shape of a `linear` weight."""
        with self.ordered() as stream:
            d = self.target(self.b, self.b.shape[::-1] if transposed else self.b.shape, out)
            if self.track == "reference":
                y = self._exact(stream, of_a=False)
                return self._store(d, device.permute(y, (1, 0)) if transposed else y)
            g, fields, hidden = self.g_sides(stream), {}, None
            if self._masked():
                hidden, fields = self._outlier_columns()
            x = used(self.a, False, self.track_a, self.fmt, stream, **fields)
            if len(self.b.shape) > 2:
                return self._store(d, self._batched_grad_b(g, kernels.bf16(x, stream), d, stream))
            found = writable(d, True, transposed or self.flags[1])
            x, g = _turned(_flat(x, stream)), _flat(g, stream).T
            kernels.product(found, stream, sixteen=(g, x) if transposed else (x, g))
            if hidden is not None:
                self._put_outliers(found.array, hidden, g, transposed, stream)
            return self._store(d, found.array)

    def _batched_grad_b(self, g: Matrices, x: Matrices, d: DeviceArray, stream: int) -> DeviceArray:
        pair = _turned(x), g.T
        if self.lead == self.b.shape[:-2]:
            found = writable(d, True, True)
            multiply(found, stream, None, pair)
            return found.array
        full = device.empty((*self.lead, x.k, g.k), "float32", like=d)
        multiply(kernels.left(full), stream, None, pair)
        return _unbroadcast(full, self.b.shape)

    def _masked(self) -> bool:
        """Whether the products saw a without the outlier columns."""
        w = self.b.value
        return self.track == "dual" and self.track_a != "bf16" and w.branch.outliers > 0

    def _outlier_columns(self) -> tuple[DeviceArray, dict[str, int]]:
        """(bf16(a[:, outliers]) when the quantiser has run, its arguments)."""
        branch = self.b.value.branch
        width = kernels.round_up(branch.outliers, 8)
        rows = math.prod(self.a.shape[:-1])
        hidden = device.empty((rows, width), "bfloat16", like=branch.up_t)
        return hidden, {
            "hidden": hidden.address, "hidden_stride": width, "outlier_index": branch.index32.address,
            "outliers": branch.outliers,
        }  # fmt: skip

    def _put_outliers(self, target, hidden, g: Matrices, transposed: bool, stream: int) -> None:
        """The outlier rows of the gradient, which met a in BF16."""
        branch = self.b.value.branch
        shape = (g.rows, branch.outliers) if transposed else (branch.outliers, g.rows)
        part = device.empty(shape, "float32", like=hidden)
        x = Matrices(hidden, (), (), hidden.shape[0], hidden.shape[1], branch.outliers, 1).T
        kernels.product(kernels.left(part), stream, sixteen=(g, x) if transposed else (x, g))
        if transposed:
            cuda_math.put_columns(target, branch.index, part)
        else:
            cuda_math.put_rows(target, branch.index, part)

    # ---- what both need ------------------------------------------------------------------------------------
    def _exact(self, stream: int, of_a: bool) -> DeviceArray:
        """The gradient on the "reference" track, by the framework."""
        double = any(str(x.dtype) == "float64" for x in (self.g, self.a, self.b))
        dtype = "float64" if double else "float32"
        m = self.a.shape[-2] if self.flags[0] else 1
        n = self.b.shape[-1] if self.flags[1] else 1
        g = cuda_math.reshaped(exact(self.g, dtype, stream), (*self.lead, m, n))
        if of_a:
            w = exact(self.used_b, dtype, stream)
            w = w if self.flags[1] else cuda_math.reshaped(w, (*w.shape, 1))
            y = cuda_math.matmul(g, _swapped(w))
            shape = self.a.shape if self.flags[0] else (1, *self.a.shape)
        else:
            x = exact(self.a, dtype, stream)
            x = x if self.flags[0] else cuda_math.reshaped(x, (1, *x.shape))
            y = cuda_math.matmul(_swapped(x), g)
            shape = self.b.shape if self.flags[1] else (*self.b.shape, 1)
        return _unbroadcast(y, shape)

    def _store(self, d: DeviceArray, y: DeviceArray) -> Any:
        if y is not d:
            device.assign(d, cuda_math.reshaped(y, d.shape))
        return d.owner

    def dbias(self, out: Any = None) -> Any:
        """Sum of the rounded g over all its rows, in float32."""
        with self.ordered():
            d = self.target(self.g, self.g.shape[-1:], out)
            g = self.g.array
            if self.rounding:
                g = device.astype(device.astype(g, "bfloat16"), "float32")
            elif g.dtype != "float64":
                g = device.astype(g, "float32")
            rows = cuda_math.reshaped(g, (math.prod(g.shape[:-1]), g.shape[-1]))
            return self._store(d, cuda_math.total(rows, (0,)))

    def branch_gradients(self, w: Any) -> tuple[Any, Any]:
        """(ddown, dup) of `branch_vjp`."""
        branch = w.branch
        with self.ordered() as stream:
            ddown = self.target(self.b, (w.shape[0], w.rank))
            dup = self.target(self.b, (w.rank, w.shape[1]))
            if w.rank == 0:
                return ddown.owner, dup.owner
            g = self.g_sides(stream)
            n, width = branch.up_t.shape
            up = Matrices(branch.up_t, (), (), n, width, w.rank, 1)
            through = self._through(g, up, stream)
            hidden, x = self._hidden_and_input(branch, stream)
            rows = through.shape[0]
            t = Matrices(hidden, (), (), rows, hidden.shape[1], w.rank, 1)
            p = Matrices(through, (), (), rows, through.shape[1], w.rank, 1)
            found = writable(ddown, True, True), writable(dup, True, True)
            kernels.product(found[0], stream, sixteen=(_turned(_flat(x, stream)), p.T))
            kernels.product(found[1], stream, sixteen=(t.T, _flat(g, stream).T))
            if branch.outliers:
                cuda_math.zero_rows(found[0].array, branch.index)
            return tuple(self._store(d, y.array) for d, y in zip((ddown, dup), found, strict=True))

    def _hidden_and_input(self, branch: Any, stream: int) -> tuple[DeviceArray, Matrices]:
        """(bf16(a down), a as the products saw it)."""
        rows, width = math.prod(self.a.shape[:-1]), branch.up_t.shape[1]
        hidden = device.empty((rows, width), "bfloat16", like=branch.up_t)
        if self.track_a == "bf16" or not (branch.outliers or quantiser_multiplies(self.a, branch.rank)):
            hidden_product(self.a, branch, hidden, stream)
            return hidden, used(self.a, False, self.track_a, self.fmt, stream)
        fields = branch.fields() | {"hidden": hidden.address, "hidden_stride": width}
        return hidden, used(self.a, False, self.track_a, self.fmt, stream, **fields)


def _swapped(x: DeviceArray) -> DeviceArray:
    axes = list(range(x.ndim))
    axes[-2:] = axes[:-3:-1]
    return device.permute(x, axes)
