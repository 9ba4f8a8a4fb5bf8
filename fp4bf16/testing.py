"""Compare what the primitives compute with the NumPy reference, on the user's own arrays.

`check` runs one primitive and the same computation in `fp4bf16.python_ref` (float64 sums of the operands that
the track multiplies) and reports the distance. ``python -m fp4bf16 validate`` is a table of such checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import device
from .errors import nearest
from .formats import get_format
from .interop import wrap
from .tracks import check_track, tracks

#: Largest relative error, by the dtype of the result: its rounding, and that of the FP32 sums behind it.
ROUNDING = {"float64": 1e-12, "float32": 3e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Attention also rounds the probabilities (to BF16, or E4M3 on the FP4 track), and the FP32 exponential of
#: the kernel tips some of them to the other side of a rounding boundary.
PROBABILITIES = {"bf16": 3e-4, "fp4": 3e-3, "dual": 3e-3}
#: On the GPU attention's results are BF16 whatever the dtype asked for. On the way to gradients P and dS = P
#: (dP - sum P dP), which has less left than its terms, are BF16, too, and not every kernel rounds P where the
#: reference does: of 900 draws of ``validate``'s inputs the worst was 0.0075 away.
ATTENTION_ON_GPU = {"attention": 2.0**-8, "attention_vjp": 2.0**-6}
#: Relative error of sums on the GPU's tensor cores. FP8's keep about 14 bits, with ``accumulate="fast"`` for
#: the whole of K.
TENSOR_CORES = {"reference": 0.0, "bf16": 2e-5, "fp4": 1.4e-3, "dual": 1.4e-3, "fast": 1e-2}


@dataclass(frozen=True)
class Report:
    """Result of one `check`; true where it passed.

    Attributes:
        op, track, format: what was run; track and format are "" where the primitive has none.
        shapes: of the arrays. measure: what `error` counts: "differing bytes", "relative error" (the norm of
            the difference over that of the reference) or "distance / bound".
        error, bound: it passed if error <= bound. detail: where it differs most, "" where it does not.
    """

    op: str
    track: str
    format: str
    shapes: tuple[tuple[int, ...], ...]
    measure: str
    error: float
    bound: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.bound)  # NaN fails

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        shapes = " ".join(str(s).replace(" ", "") for s in self.shapes)
        head = " ".join(part for part in (self.op, self.track, self.format, shapes) if part)
        tail = f"; {self.detail}" if self.detail and not self.passed else ""
        verdict = "PASS" if self.passed else "FAIL"
        return f"{head}: {self.measure} {self.error:.3g}, bound {self.bound:.3g}: {verdict}{tail}"


def check(
    op: str, *arrays: Any, track: str | None = None, format: str = "nvfp4_exact", **options: Any
) -> Report:
    """Run the primitive `op` on `arrays` and compare it with the reference.

    Args:
        op: a name of `OPERATIONS`. The arrays are those of the primitive in its order: x for "quantize" and
            "dequantize"; a, b for "matmul", "certify" and "dual" (b becomes a `DualWeight`); x, weight for
            "linear"; x, w for "conv2d"; q, k, v for "attention"; for a "..._vjp" the gradient g of the result
            comes first.
        track: "fp4", "bf16" or "reference" ("dual" for attention); "bf16" unless given. Not for "quantize",
            "dequantize", "dual" and "certify", which are on one track by themselves.
        format: of operands that are quantised. options: further arguments of the primitive (stride=, causal=,
            ...).

    Returns:
        A `Report`, true where the error is within its bound.

    Raises:
        ValueError: unknown op, track or format (with the nearest name). TypeError: a wrong number of arrays.
        What the primitive itself raises.

    >>> import numpy as np, fp4bf16 as fb
    >>> x = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
    >>> bool(fb.testing.check("quantize", x)), bool(fb.testing.check("matmul", x, x.T, track="fp4"))
    (True, True)
    """
    if op not in OPERATIONS:
        raise ValueError(f"check: {op!r} is not an operation{nearest(op, OPERATIONS)}")
    names, function, tracked = OPERATIONS[op]
    if len(arrays) != len(names):
        raise TypeError(
            f"check: {op} takes {len(names)} arrays ({', '.join(names)}), but {len(arrays)} were given"
        )
    get_format(format)
    if tracked:
        track = check_track(track or "bf16")
    elif track is not None:
        raise ValueError(f"check: track is {track!r}, but {op} takes no track; leave it out")
    uses_format = not tracked or track in ("fp4", "dual")
    with tracks(track):  # over FP4BF16_TRACK and an outer block: the reference is on this track
        measure, error, bound, detail = function(arrays, track, format, options)
    shapes = tuple(tuple(a.shape) for a in arrays)
    return Report(op, track or "", format if uses_format else "", shapes, measure, error, bound, detail)


# ---- measures
def _numpy(x: Any) -> np.ndarray:
    return device.to_host(x) if device.is_device(x) else wrap(x, "result").array


def _values(x: Any) -> np.ndarray:
    """As the reference takes it: float32 of narrower dtypes, exactly; float64 stays."""
    x = _numpy(x)
    return x if x.dtype == np.float64 else x.astype(np.float32)


def _bytes_differ(pairs: list[tuple[str, Any, np.ndarray | None]]):
    count, detail = 0, ""
    for name, got, want in pairs:
        if got is None or want is None:
            count += (got is None) != (want is None)
            continue
        got, want = np.ascontiguousarray(_numpy(got)), np.ascontiguousarray(want)
        if got.shape != want.shape or got.dtype != want.dtype:
            return (
                "differing bytes",
                math.inf,
                0.0,
                f"{name} is {got.dtype} {got.shape}, not {want.dtype} {want.shape}",
            )
        differ = got.view(np.uint8) != want.view(np.uint8)
        if differ.any() and not detail:
            at = np.unravel_index(int(np.argmax(differ)) // got.itemsize, got.shape)
            detail = f"first in {name} at {tuple(map(int, at))}: {got[at]} instead of {want[at]}"
        count += int(differ.sum())
    return "differing bytes", float(count), 0.0, detail


def _relative(pairs: list[tuple[str, Any, np.ndarray, float]], bound: float | None, track: str,
              accumulate: str = "promoted"):  # fmt: skip
    """Largest of the relative errors of several results; a scale of the terms that were summed may be
    given."""
    worst: tuple[str, float, float, str] | None = None
    for name, got, want, scale in pairs:
        cores = TENSOR_CORES["fast" if accumulate == "fast" else track] if device.is_device(got) else 0.0
        got = _numpy(got)
        limit = bound or ROUNDING[str(got.dtype)]
        if track != "reference":  # sums in FP32 whatever the dtype of the result
            limit = max(limit, ROUNDING["float32"], cores)
        limit = max(limit, ROUNDING[str(got.dtype)])
        if got.shape != want.shape:
            return "relative error", math.inf, limit, f"{name} has shape {got.shape}, not {want.shape}"
        worst = worst or ("relative error", 0.0, limit, "")
        if not want.size:
            continue
        difference = np.abs(got.astype(np.float64) - want)
        scale = max(float(np.linalg.norm(want)), scale) or 1.0
        error = float(np.linalg.norm(difference)) / scale
        if not error / limit <= worst[1] / worst[2]:
            at = np.unravel_index(int(np.argmax(difference)), want.shape)
            where = tuple(map(int, at))
            worst = (
                "relative error",
                error,
                limit,
                f"most in {name} at {where}: {got[at]} instead of {want[at]:.9g}",
            )
    return worst


def _term_scale(
    product: Callable[[np.ndarray, np.ndarray], np.ndarray], a: np.ndarray, b: np.ndarray
) -> float:
    """Norm that a result of random signs would have: what rounding is relative to when the terms cancel."""
    return math.sqrt(float(product(np.square(a, dtype=np.float64), np.square(b, dtype=np.float64)).sum()))


# ---- one function a primitive: (arrays, track, format, options) -> (measure, error, bound, detail)
def _quantize(arrays, track, format, options):
    from .python_ref import quantize as ref
    from .quantize import quantize

    got, want = quantize(arrays[0], format, **options), ref.quantize(_numpy(arrays[0]), format, **options)
    fields = ("packed", "block_scale", "outer_scale")
    return _bytes_differ([(n, getattr(got, n), getattr(want, n)) for n in fields])


def _dequantize(arrays, track, format, options):
    from .python_ref import quantize as ref
    from .quantize import dequantize, quantize

    dtype = options.pop("dtype", "float32")
    got = dequantize(quantize(arrays[0], format, **options), dtype=dtype)
    want = ref.dequantize(ref.quantize(_numpy(arrays[0]), format, **options))
    return _bytes_differ([("x", got, want.astype(_numpy(got).dtype))])


def _matmul(arrays, track, format, options):
    from .gemm import matmul
    from .python_ref import gemm as ref

    got = matmul(*arrays, track=track, format=format, **options)
    a, b = map(_values, arrays)
    used = ref.operands(a, b, track, format)
    want = ref.epilogue(used[0].astype(np.float64) @ used[1].astype(np.float64), **_float64(options))
    return _relative([("y", got, want, _term_scale(np.matmul, *used))], None, track, **_summed(options))


def _linear(arrays, track, format, options):
    from .gemm import linear
    from .python_ref import gemm as ref

    got = linear(*arrays, track=track, format=format, **options)
    x, weight = map(_values, arrays)
    used = ref.operands(x, weight.T, track, format)
    want = ref.epilogue(used[0].astype(np.float64) @ used[1].astype(np.float64), **_float64(options))
    return _relative([("y", got, want, _term_scale(np.matmul, *used))], None, track, **_summed(options))


def _dual(arrays, track, format, options):
    from .gemm import DualWeight, matmul
    from .python_ref import gemm as ref

    weight = DualWeight(arrays[1], rank=options.pop("rank", 8), format=format)
    with tracks("dual"):
        got = matmul(arrays[0], weight, **options)
    down, up = _values(weight.down), _values(weight.up)
    if device.is_device(arrays[1]):  # W - D U is summed in another order there: a code may tip at a tie
        from .quantize import dequantize

        twin = _values(dequantize(weight.twin, dtype="float32"))
    else:
        twin = ref.fake_quantize(ref.round_bf16(_values(arrays[1])) - down @ up, format, 0)
    want = ref.dual_matmul(_values(arrays[0]), down, up, twin, format, np.float64, **_float64(options))
    # The hidden T is rounded to BF16: the FP32 sum of the kernel tips some of it to the other neighbour.
    return _relative([("y", got, want, 0.0)], 1e-4, "dual", **_summed(options))


def _conv2d(arrays, track, format, options):
    from .conv import conv2d
    from .python_ref import conv as ref

    got = conv2d(*arrays, track=track, format=format, **options)
    geometry = {k: options[k] for k in ("stride", "padding") if k in options}
    extra = {k: v for k, v in options.items() if k not in geometry}
    used = ref.operands(*map(_values, arrays), track, format)
    want = ref.epilogue(ref.conv2d(*used, **geometry), **_float64(extra))
    scale = _term_scale(lambda x, w: ref.conv2d(x, w, **geometry), *used)
    return _relative([("y", got, want, scale)], None, track, **_summed(options))


def _attention(arrays, track, format, options):
    from .attention import attention
    from .python_ref import attention as ref

    got = attention(*arrays, track=track, format=format, **options)
    want = ref.attention(*map(_values, arrays), track=track, fmt=format, **options)
    return _relative([("o", got, want, 0.0)], _of_attention("attention", got, track), track)


def _of_attention(op: str, got: Any, track: str) -> float | None:
    on_gpu = track != "reference" and device.is_device(got)
    return ATTENTION_ON_GPU[op] if on_gpu else PROBABILITIES.get(track)


def _gradients(names, got, want, bound, track):
    return _relative([(n, g, w, 0.0) for n, g, w in zip(names, got, want, strict=True)], bound, track)


def _matmul_vjp(arrays, track, format, options):
    from .gemm import matmul_vjp
    from .python_ref import gemm as ref

    got = matmul_vjp(*arrays, track=track, format=format, **options)
    want = ref.matmul_vjp(*map(_values, arrays), track=track, fmt=format, accumulate=np.float64)
    return _gradients(("da", "db"), got, want, None, track)


def _linear_vjp(arrays, track, format, options):
    from .gemm import linear_vjp
    from .python_ref import gemm as ref

    got = linear_vjp(*arrays, track=track, format=format, **options)
    want = ref.linear_vjp(*map(_values, arrays), track=track, fmt=format, accumulate=np.float64)
    return _gradients(("dx", "dw", "db"), got, want, None, track)


def _conv2d_vjp(arrays, track, format, options):
    """On the GPU decoded operands are BF16 numbers, to which outer scales of "nvfp4" and "fp8" round them."""
    from .conv import conv2d_vjp
    from .python_ref import conv as ref

    got = conv2d_vjp(*arrays, track=track, format=format, **options)
    want = ref.conv2d_vjp_track(*map(_values, arrays), track=track, fmt=format, **options)
    rounded = device.is_device(got[0]) and track == "fp4" and format in ("nvfp4", "fp8")
    return _gradients(("dx", "dw", "db"), got, want, ROUNDING["bfloat16"] if rounded else None, track)


def _attention_vjp(arrays, track, format, options):
    from .attention import attention_vjp
    from .python_ref import attention as ref

    got = attention_vjp(*arrays, track=track, format=format, **options)
    want = ref.attention_vjp(*map(_values, arrays), track=track, fmt=format, **options)
    return _gradients(("dq", "dk", "dv"), got, want, _of_attention("attention_vjp", got[0], track), track)


def _certify(arrays, track, format, options):
    """The measured distance between the FP4 and the BF16 result over what the certificate allows."""
    from .gemm import matmul

    with tracks("fp4"):
        fp4, certificate = matmul(*arrays, format=format, certify=True, **options)
    with tracks("bf16"):
        bf16 = matmul(*arrays, **options)
    distance = float(np.linalg.norm(_numpy(fp4).astype(np.float64) - _numpy(bf16).astype(np.float64)))
    allowed = certificate.bound + certificate.accumulation
    if distance == allowed == 0.0:
        return "distance / bound", 0.0, 1.0, ""
    detail = f"the results are {distance:.4g} apart, {allowed:.4g} was certified"
    return "distance / bound", distance / allowed if allowed else math.inf, 1.0, detail


def _summed(options: dict) -> dict:
    return {k: v for k, v in options.items() if k == "accumulate"}


def _float64(options: dict) -> dict:
    """Epilogue arguments for the reference: arrays as float64, names as they are."""
    kept = {k: options[k] for k in ("bias", "activation", "residual") if options.get(k) is not None}
    return {k: v if isinstance(v, str) else _numpy(v).astype(np.float64) for k, v in kept.items()}


#: name -> (names of its arrays, the comparison, whether it takes ``track=``)
OPERATIONS: dict[str, tuple[tuple[str, ...], Callable, bool]] = {
    "quantize": (("x",), _quantize, False),
    "dequantize": (("x",), _dequantize, False),
    "matmul": (("a", "b"), _matmul, True),
    "linear": (("x", "weight"), _linear, True),
    "dual": (("a", "b"), _dual, False),
    "conv2d": (("x", "w"), _conv2d, True),
    "attention": (("q", "k", "v"), _attention, True),
    "matmul_vjp": (("g", "a", "b"), _matmul_vjp, True),
    "linear_vjp": (("g", "x", "weight"), _linear_vjp, True),
    "conv2d_vjp": (("g", "x", "w"), _conv2d_vjp, True),
    "attention_vjp": (("g", "q", "k", "v"), _attention_vjp, True),
    "certify": (("a", "b"), _certify, False),
}

__all__ = ["OPERATIONS", "PROBABILITIES", "ROUNDING", "Report", "check"]
