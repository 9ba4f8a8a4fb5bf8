"""Emulation of the certificate's kernel for `host_cuda`: `certify.certificate` of what the arguments say."""

from __future__ import annotations

import math

import numpy as np
from host_cuda import memory

from fp4bf16 import certify
from fp4bf16.python_ref import certify as formulas

OUTPUTS = ("float32", "bfloat16", "float16")


def define(library) -> None:
    """Add the kernel to a `HostCuda`."""
    library._define(
        "certificate", "const fp4bf16_certificate_args*, void*", Certificates(library).certificate
    )


def up(value: float) -> np.float32:
    """The least float32 that is at least `value`."""
    with np.errstate(over="ignore"):
        near = np.float32(value)
    return near if not near < value else np.nextafter(near, np.float32(np.inf))


class Certificates:
    def __init__(self, library):
        self.at = library.at

    def _activations(self, a) -> tuple[float, float, float]:
        """Norms of x, of what is multiplied, of the difference; upper bounds."""
        if self.at(a.norms):
            assert not self.at(a.sums) and a.norm_parts > 0, "norms and sums, or no parts"
            error, used = memory(self.at(a.norms), (a.norm_parts, 2), np.float32).astype(np.float64).sum(0)
            used, error = math.sqrt(used), math.sqrt(error)
            return used + error, used, error
        assert a.sum_rows >= 0
        sums = memory(self.at(a.sums), (a.sum_rows, 3), np.float64)
        return tuple(math.sqrt(s) for s in sums.sum(0))

    def certificate(self, a) -> None:
        full, used, error = (np.array([n]) for n in self._activations(a))
        w = memory(self.at(a.weight), (8,), np.float32).astype(np.float64)
        x = certify.ActivationNorms(full, used, error)
        weight = certify.WeightNorms(*w[:5])
        product = 0.0
        if self.at(a.squares):
            steps = memory(self.at(a.squares), (a.square_count,), np.float32, (a.square_stride,))
            product = math.sqrt(steps.astype(np.float64).sum())
        with np.errstate(all="ignore"):
            found = certify.certificate(
                x, weight, k=a.k, columns=a.elements, dtype=OUTPUTS[a.output], factor=a.factor,
            )  # fmt: skip
            bound = a.slope * (found.bound - found.terms["rounding"]) + found.terms["rounding"]
            bound = bound if math.isfinite(found.bound) else math.inf
            accumulation = a.slope * (found.accumulation + self._tensor_cores(a, used[0], w))
        accumulation = accumulation if math.isfinite(accumulation) else math.inf
        both = bound + accumulation
        ratio = both / product if 0 < product < math.inf else math.inf
        ratio = math.nan if math.isnan(product) else ratio
        memory(self.at(a.out), (4,), np.float32)[:] = [up(v) for v in (bound, accumulation, ratio, product)]
        over = int(a.threshold >= 0 and not up(ratio) <= a.threshold)
        if self.at(a.flag):
            memory(self.at(a.flag), (1,), np.int32)[0] = over
        if self.at(a.counts):
            memory(self.at(a.counts), (2,), np.int32)[:] += [1, over]

    def _tensor_cores(self, a, used: float, w: np.ndarray) -> float:
        x, w_used = a.factor * used, w[1]
        if self.at(a.outer_scale):
            outer = float(memory(self.at(a.outer_scale), (1,), np.float32)[0])
            x = formulas.subnormal_norm(x, outer, a.k * a.elements / a.columns)
        w_used = formulas.subnormal_norm(w_used, w[5], a.k * a.columns)
        return a.gain * x * w_used * formulas.accumulated_rounding(OUTPUTS[a.output])
