"""What follows a product, and the certified form of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from . import certify as certificates
from . import device
from .certify import ActivationNorms, Certificate, WeightNorms
from .dispatch import backend_for
from .dual import DualWeight
from .errors import ShapeError, nearest
from .formats import Format, QuantizedArray
from .interop import BFLOAT16
from .operands import Arg, as_arg, branch, check_plain, left_matrix, on_device, right_matrix
from .quantize import quantize
from .tracks import tracks

# ---- epilogue ----------------------------------------------------------------------------------------------


class Epilogue:
    """activation(y + bias) + residual on panels of float32 (float64 on the reference track) accumulators."""

    def __init__(self, op, bias, activation, residual, shape, exact, kernels):
        self.args = [as_arg(x, name) for x, name in ((bias, "bias"), (residual, "residual")) if x is not None]
        self.activation = self.bias = self.residual = None
        self.name = activation
        columns = shape[-1] if shape else 1
        if activation is not None:
            if activation not in list(kernels.ACTIVATIONS):
                raise ValueError(f"{op}: activation: {activation!r} is not an activation"
                                 f"{nearest(activation, kernels.ACTIVATIONS)}")  # fmt: skip
            self.activation = kernels.ACTIVATIONS[activation]
        for arg in self.args:
            want = (columns,) if arg.name == "bias" else shape
            if on_device(arg):
                where = f"a {arg.framework} array on cuda:{arg.place.device}"
                raise TypeError(f"{op}: {arg.name} is {where} but the operands are host arrays; move one of "
                                f"them so that all are in one place")  # fmt: skip
            check_plain(op, arg)
            if arg.shape != want:
                raise ShapeError(f"{op}: {arg.name} has shape {arg.shape} but must be {want}, "
                                 f"{'one number a column of' if arg.name == 'bias' else 'the shape of'} "
                                 f"the result; broadcast it to that shape first")  # fmt: skip
            if arg.name == "bias":
                self.bias = arg.array.astype(np.float64 if exact else np.float32)
            else:
                self.residual = arg.array.reshape(math.prod(shape[:-1]), columns)
        self.empty = not self.args and activation is None

    def __call__(self, y: np.ndarray, rows: slice, columns: slice) -> None:
        if self.bias is not None:
            y += self.bias[columns]
        if self.activation is not None:
            self.activation(y)
        if self.residual is not None:
            y += self.residual[rows, columns]


def with_branch(hidden: np.ndarray, up: np.ndarray, epilogue: Callable) -> Callable:
    """`epilogue` after the low-rank branch: FP4 products first, T @ up into the same accumulators."""
    add_product = backend_for().add_product

    def finish(y: np.ndarray, rows: slice, columns: slice) -> None:
        add_product(y, hidden[rows], up[:, columns])
        epilogue(y, rows, columns)

    return finish


class Squares:
    """`then` after noting the norm of the panels of a product, whatever thread they are made on.

    Squares are added in float32 within a row and in float64 over rows, a row's 512 at a time.
    """

    def __init__(self, then: Callable):
        self.then, self.parts = then, {}

    def __call__(self, y: np.ndarray, rows: slice, columns: slice) -> None:
        self.parts[rows.start, columns.start] = squares(y)
        self.then(y, rows, columns)

    @property
    def norm(self) -> float:
        """Of all panels, in their order."""
        return math.sqrt(math.fsum(self.parts[at] for at in sorted(self.parts)))


def squares(y: np.ndarray) -> float:
    """Sum of squares of y, two axes."""
    if y.dtype == np.float32 and y.flags.c_contiguous and y.shape[-1] <= 512:
        found = float(np.einsum("mn,mn->m", y, y).sum(dtype=np.float64))
        if 1e-20 * y.size < found < 1e30:  # neither overflowed nor made of what float32 loses
            return found
    return float(np.einsum("mn,mn->", y, y, dtype=np.float64))


# ---- a threshold -------------------------------------------------------------------------------------------


def within(op: str, x: Any, threshold: Any, certify: bool | str, run: Callable[..., Any]) -> Any:
    """``run(certify)``, redone on the BF16 track where its certificate's `relative` is over `threshold`.

    A GPU that holds `x` decides itself, ``run(certify, threshold)``, unless that gives None.
    """
    number = isinstance(threshold, int | float | np.number) and not isinstance(threshold, bool)
    if not number or not threshold >= 0:
        raise ValueError(
            f"{op}: threshold is {threshold!r}, but a number from 0 is needed, the largest certified "
            f"distance over the norm of the result; pass e.g. 0.5"
        )
    if certify is not True and device.is_device(x) and (decided := run(certify, threshold)) is not None:
        return decided
    result, found = run(certify or "bound")
    refused = not found.ok(threshold)
    certificates.fallbacks.count(op, refused)
    if refused:
        with tracks("bf16"):
            result, same = run(certify or "bound")
        found = replace(same, refused=found.relative)
    return (result, found) if certify else result


# ---- certified ---------------------------------------------------------------------------------------------


def _activation(kernels, a: Arg, track: str, fmt: Format, k: int) -> tuple[Arg, ActivationNorms]:
    """(what is multiplied, its norms): a plain operand is quantised here, for the quantiser's sums."""
    if track == "reference":
        x = left_matrix(kernels, a, track, fmt).whole()
        return a, certificates.plain_norms(x, rounded=False)
    if a.array is not None:
        a = as_arg(quantize(a.value, fmt, search="fast"), a.name)
    q = a.value
    if q.stats is None:  # loaded or made by hand: the decoded operand stands for itself
        return a, certificates.plain_norms(left_matrix(kernels, a, track, fmt).whole(), rounded=True)
    return a, certificates.activation_norms(q.stats, k)


def sketched_weight(w: WeightNorms, decoded: np.ndarray) -> tuple[WeightNorms, np.ndarray]:
    """(norms, weight (O, k) for a sketch to compare with): the master, where `sketching` knows it, else what
    was decoded, and then the norms say so.
    """
    master = certificates.sketched_master.get()
    if master is None or not w.decoded or w.reference != "master" or master.size != decoded.size:
        return w, decoded
    values = master.astype(BFLOAT16).astype(np.float32).reshape(decoded.shape)
    return replace(w, decoded=False), values


def _weight(kernels, b: Arg, weight, track: str, fmt: Format) -> tuple[Arg, WeightNorms, np.ndarray]:
    """(what is multiplied, its norms, the weight of the BF16 track as (K, N) float array)."""
    if isinstance(weight, DualWeight):
        return b, weight.norms(track), weight.master_values()
    if isinstance(weight, QuantizedArray):
        decoded = right_matrix(kernels, b, track, fmt).whole()
        norms = certificates.quantized_weight_norms(weight, lambda: decoded)
        norms, w = sketched_weight(norms, decoded.T)
        return b, norms, w.T
    w = right_matrix(kernels, b, "bf16", fmt).whole()
    if track != "reference":
        b = as_arg(quantize(b.value, fmt, axis=max(-2, -len(b.shape))), b.name)
    return b, certificates.weight_norms(w, right_matrix(kernels, b, track, fmt).whole()), w


def certified_product(op, kernels, a: Arg, b: Arg, weight, track, fmt, out, epilogue, certify) -> Certificate:
    """out (M, N) = the product with its epilogue, and its certificate."""
    if certify not in (True, "bound"):
        raise ValueError(f"{op}: certify is {certify!r}, but True, False or 'bound' is needed; pass one")
    if len(b.shape) > 2:
        raise ShapeError(f"{op}: {b.name} has shape {b.shape}, but a certificate is for one matrix; "
                         f"call it for each of the leading axes")  # fmt: skip
    if track == "fp4" and certify == "bound" and a.array is not None and isinstance(weight, QuantizedArray):
        return _prepared(kernels, a, b, weight, fmt, out, epilogue)
    everything = slice(0, out.shape[0]), slice(0, out.shape[1])
    exact = track == "reference" and "float64" in (str(a.dtype), str(b.dtype))
    y = np.empty(out.shape, np.float64 if exact else np.float32)
    if track == "bf16":
        kernels.product(left_matrix(kernels, a, track, fmt), right_matrix(kernels, b, track, fmt), y)
        found = certificates.same()
    else:
        found = _linear(kernels, a, b, weight, track, fmt, y, out.dtype, epilogue, certify)
    epilogue(y, *everything)
    kernels.store_rows(y, out)
    return found


def quantized_values(kernels, x: Arg, fmt: Format, k: int, outer: str) -> tuple[np.ndarray, ActivationNorms]:
    """(what the FP4 track multiplies in place of a plain x, float32 of its shape, its norms), in one pass.

    outer: "image" or "row", as in `fake_quantize`.
    """
    found, sums, counts = kernels.fake_quantize_sums(kernels.values(x.array), fmt, "fast", outer)
    stats = certificates.quant_stats(sums, counts, str(x.dtype))
    return found, certificates.activation_norms(stats, k)


def _prepared(kernels, a: Arg, b: Arg, weight, fmt, out, epilogue) -> Certificate:
    """The product of a plain a and a prepared weight, as it is without a certificate, and its bound."""
    k = a.shape[-1]
    rows = a.array.reshape(out.shape[0], k)
    outer = "row" if fmt.default_outer == "row" else "tensor"
    x, norms = quantized_values(kernels, as_arg(rows, a.name), fmt, k, outer)
    w = right_matrix(kernels, b, "fp4", fmt)
    found = Squares(epilogue)
    kernels.product(kernels.plain_matrix(x, rounding=False), w, out, found)
    return certificates.certificate(
        norms, certificates.quantized_weight_norms(weight, lambda: w.whole()), k=k, columns=out.shape[1],
        dtype=str(out.dtype), activation=epilogue.name, epilogue=not epilogue.empty,
        added=certificates.added_norms(out.shape[0], epilogue.bias, epilogue.residual),
        product_norm=found.norm,
    )  # fmt: skip


def _linear(kernels, a: Arg, b: Arg, weight, track, fmt, y, dtype, epilogue, certify) -> Certificate:
    """y = the product alone, and the certificate of what the epilogue will make of it."""
    k, finish, parts = a.shape[-1], None, {}
    plain = a
    if track == "dual":
        a, hidden, up = branch(kernels, a, weight)
        finish = with_branch(hidden, up, lambda *_: None)
        parts["hidden"] = certificates.row_norms(hidden)
    a, x_norms = _activation(kernels, a, track, fmt, k)
    b, w_norms, w = _weight(kernels, b, weight, track, fmt)
    kernels.product(left_matrix(kernels, a, track, fmt), right_matrix(kernels, b, track, fmt), y, finish)
    x = left_matrix(kernels, plain, "bf16", fmt).whole()
    if track == "dual" and weight.outlier_index.size:  # the quantiser did not see the outlier columns
        outliers = certificates.plain_norms(x[:, weight.outlier_index], rounded=True).rows
        x_norms = ActivationNorms(np.hypot(x_norms.rows, outliers), x_norms.rows_used, x_norms.rows_error,
                                  x_norms.overflow)  # fmt: skip
    if certify is True:
        # a quantised a is known by its decoded values; what was lost before them is bounded
        unseen = 0.0 if plain.array is not None else x_norms.error * w_norms.sigma
        parts |= {"estimate": certificates.sketch(x, w, y) + unseen, "confidence": 1 - 1e-3}
    bias = None if epilogue.bias is None else epilogue.bias
    return certificates.certificate(
        x_norms, w_norms, k=k, columns=y.shape[1], dtype=str(dtype), activation=epilogue.name,
        added=certificates.added_norms(y.shape[0], bias, epilogue.residual), epilogue=not epilogue.empty,
        product_norm=certificates.norm(y), **parts,
    )  # fmt: skip
