"""Diffusion on a GPU: noise, noisy pictures, losses, one step of a sampler, all in float32 and float64.

The functions fill device arrays that the caller made, on the stream with that handle, and return nothing.
`normal`, `add_noise`, `squared_error_backward` and `sampler_step` give the bits of `fp4bf16.diffusion` on the
CPU; sums (`squared_error`, `dpo`) differ from it by the order of float64 additions. Checked here are shapes
and dtypes alone, which the library cannot know.
"""

from __future__ import annotations

import math

from .. import device
from ..device import DeviceArray
from ..errors import ConfigError, ShapeError, nearest
from .cuda_elementwise import whole

#: fp4bf16_prediction of the header.
PREDICTIONS = {"eps": 0, "v": 1, "x0": 2}
#: Order of `dpo`'s statistics; the names are those of `align.dpo`.
DPO_STATS = (
    "loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "errors/chosen",
    "errors/rejected", "errors/reference_chosen", "errors/reference_rejected",
)  # fmt: skip
#: Order of `sampler_step`'s coefficients (`diffusion.coefficients`): x = a x0 + b eps + c x + d noise.
COEFFICIENTS = ("alpha", "sigma", "a", "b", "c", "d", "clip", "unused")


def _prediction(op: str, name: str) -> int:
    if name not in PREDICTIONS:
        raise ConfigError(f"{op}: prediction {name!r} is not known{nearest(name, PREDICTIONS)}")
    return PREDICTIONS[name]


def _optional(op: str, name: str, x: DeviceArray | None, shape, dtype: str) -> int:
    return 0 if x is None else whole(op, name, x, shape, dtype)


def normal(
    seeds: DeviceArray, step: DeviceArray, out: DeviceArray, stream: int, *, stream_word: int = 1
) -> None:
    """out (n, ...) float32 = ``diffusion.noise.normal(seeds, step, ...)``; seeds (n,) uint64, step (1,)
    uint32.
    """
    n = out.shape[0]
    arguments = (whole("normal", "seeds", seeds, (n,), "uint64"), n, math.prod(out.shape[1:]), stream_word)
    step_at = whole("normal", "step", step, (1,), "uint32")
    device.call("normal", *arguments, step_at, whole("normal", "out", out, out.shape, "float32"), stream)


def add_noise(
    pictures: DeviceArray,
    index: DeviceArray | None,
    eps: DeviceArray,
    t: DeviceArray,
    alpha_bar: DeviceArray,
    prediction: str,
    stream: int,
    *,
    x_t: DeviceArray | None = None,
    target: DeviceArray | None = None,
) -> None:
    """``Schedule.add_noise`` to x_t and ``Schedule.target`` to target, each (n, ...) float32 or None.

    x0 is row index[i] of `pictures` (count, ...), or row i without an index; eps (n, ...), index and t (n,)
    int64, alpha_bar float64 (T,). A t or an index out of range makes its row NaN.
    """
    op, n, shape = "add_noise", eps.shape[0], eps.shape
    kind = _prediction(op, prediction)
    device.call(
        op, whole(op, "pictures", pictures, (pictures.shape[0], *shape[1:]), "float32"), pictures.shape[0],
        _optional(op, "index", index, (n,), "int64"), whole(op, "eps", eps, shape, "float32"),
        whole(op, "t", t, (n,), "int64"),
        whole(op, "alpha_bar", alpha_bar, (alpha_bar.size,), "float64"), alpha_bar.size,
        n, math.prod(shape[1:]), kind, _optional(op, "x_t", x_t, shape, "float32"),
        _optional(op, "target", target, shape, "float32"), stream,
    )  # fmt: skip


def squared_error(output: DeviceArray, target: DeviceArray, errors: DeviceArray, stream: int) -> None:
    """errors (n,) float64 = the mean squared error of each picture, as ``losses.picture_errors``."""
    n, op = output.shape[0], "squared_error"
    device.call(
        op, whole(op, "output", output, output.shape, "float32"),
        whole(op, "target", target, output.shape, "float32"), n, math.prod(output.shape[1:]),
        whole(op, "errors", errors, (n,), "float64"), stream,
    )  # fmt: skip


def squared_error_backward(
    output: DeviceArray, target: DeviceArray, weight: DeviceArray | None, gradient: DeviceArray, stream: int
) -> None:
    """gradient = weight (n,) float64 times d error / d output; without a weight that of the mean over all
    pictures (``losses.squared_error``).
    """
    n, op, shape = output.shape[0], "squared_error_backward", output.shape
    device.call(
        op, whole(op, "output", output, shape, "float32"), whole(op, "target", target, shape, "float32"),
        _optional(op, "weight", weight, (n,), "float64"), n, math.prod(shape[1:]),
        whole(op, "gradient", gradient, shape, "float32"), stream,
    )  # fmt: skip


def dpo(
    errors: DeviceArray, reference: DeviceArray, beta: float, weight: DeviceArray, stats: DeviceArray,
    stream: int,
) -> None:  # fmt: skip
    """Diffusion-DPO of errors (2 * pairs,) float64, chosen then rejected: weight (2 * pairs,) = d loss / d
    error, stats (9,) as `DPO_STATS` names them.
    """
    if errors.size % 2:
        raise ShapeError(f"dpo: errors has {errors.size} elements, but two for each pair are needed; pass "
                         f"the chosen ones, then the rejected ones")  # fmt: skip
    shape = (errors.size,)
    device.call(
        "dpo", whole("dpo", "errors", errors, shape, "float64"),
        whole("dpo", "reference", reference, shape, "float64"), errors.size // 2, beta,
        whole("dpo", "weight", weight, shape, "float64"),
        whole("dpo", "stats", stats, (len(DPO_STATS),), "float64"), stream,
    )  # fmt: skip


def sampler_step(
    output: DeviceArray, noise: DeviceArray | None, coefficients: DeviceArray, prediction: str,
    x: DeviceArray, stream: int,
) -> None:  # fmt: skip
    """x = the next x of DDIM or of ancestral sampling, in place; coefficients (8,) float32 (`COEFFICIENTS`).

    `noise` may be None where its factor d is 0.
    """
    op, shape = "sampler_step", x.shape
    device.call(
        op, whole(op, "output", output, shape, "float32"), _optional(op, "noise", noise, shape, "float32"),
        whole(op, "coefficients", coefficients, (len(COEFFICIENTS),), "float32"), _prediction(op, prediction),
        x.size, whole(op, "x", x, shape, "float32"), stream,
    )  # fmt: skip
