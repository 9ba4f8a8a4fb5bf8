"""Noise, losses and sampler steps, emulated on host memory as fp4bf16.h says (see host_cuda.py)."""

from __future__ import annotations

import numpy as np
from host_cuda import memory

from fp4bf16.align.dpo import dpo_loss
from fp4bf16.backends.cuda_diffusion import DPO_STATS, PREDICTIONS
from fp4bf16.diffusion import losses
from fp4bf16.diffusion.noise import normal
from fp4bf16.diffusion.schedules import variance_preserving

F32, F64, I64 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64)
_NAMES = {number: name for name, number in PREDICTIONS.items()}


class _Emulation:
    """The functions; pointers become arrays by `view`."""

    def __init__(self, library):
        self.loaded = library

    def view(self, pointer, shape, dtype=F32) -> np.ndarray:
        return memory(self.loaded.at(pointer), shape, dtype)

    def normal(self, seeds, n, count, stream_word, step, out) -> None:
        number = int(self.view(step, (1,), np.uint32)[0])
        self.view(out, (n, count))[...] = normal(
            self.view(seeds, (n,), np.uint64), number, count, stream=stream_word
        )

    def add_noise(
        self, pictures, picture_count, index, eps, t, alpha_bar, steps, n, count, prediction, x_t, target
    ) -> None:
        times = self.view(t, (n,), I64)
        rows = self.view(index, (n,), I64) if self.loaded.at(index) else np.arange(n)
        known = (times >= 0) & (times < steps) & (rows >= 0) & (rows < picture_count)
        schedule = variance_preserving("given", self.view(alpha_bar, (steps,), F64))
        x0 = self.view(pictures, (picture_count, count))[rows[known]]
        e = self.view(eps, (n, count))[known]
        for pointer, wanted in (
            (x_t, lambda: schedule.add_noise(x0, e, times[known])),
            (target, lambda: schedule.target(x0, e, times[known], _NAMES[prediction])),
        ):
            if self.loaded.at(pointer):
                result = self.view(pointer, (n, count))
                result[...] = np.nan
                result[known] = wanted()

    def squared_error(self, output, target, n, count, errors) -> None:
        if n == 0:
            return
        with np.errstate(invalid="ignore"):
            mean, _ = losses.picture_errors(self.view(output, (n, count)), self.view(target, (n, count)))
        self.view(errors, (n,), F64)[...] = mean

    def squared_error_backward(self, output, target, weight, n, count, gradient) -> None:
        if n == 0 or count == 0:
            return
        a, b = self.view(output, (n, count)), self.view(target, (n, count))
        if self.loaded.at(weight):
            _, slope = losses.picture_errors(a, b)
            slope = slope * self.view(weight, (n,), F64).astype(F32)[:, None]
        else:
            _, slope = losses.squared_error(a, b)
        self.view(gradient, (n, count))[...] = slope

    def dpo(self, errors, reference, pairs, beta, weight, stats) -> None:
        e, r = (self.view(pointer, (2, pairs), F64) for pointer in (errors, reference))
        result = dpo_loss(e[0], e[1], r[0], r[1], beta)
        to = self.view(weight, (2, pairs), F64)
        to[0], to[1] = result.chosen_gradient, result.rejected_gradient
        self.view(stats, (9,), F64)[...] = [result.loss, *(result.stats[name] for name in DPO_STATS[1:])]

    def sampler_step(self, output, noise, coefficients, prediction, count, x) -> None:
        alpha, sigma, a, b, c, d, clip, _ = self.view(coefficients, (8,))
        out, xt = self.view(output, (count,)), self.view(x, (count,))
        name, eps = _NAMES[prediction], out
        if name == "v":
            x0, eps = alpha * xt - sigma * out, sigma * xt + alpha * out
        else:
            x0 = (xt - sigma * out) / alpha if name == "eps" else out
        if clip:
            x0 = np.clip(x0, -clip, clip)
        if clip or name == "x0":
            eps = (xt - alpha * x0) / sigma
        new = a * x0
        if b or not c:
            new = new + b * eps
        if c:
            new = new + c * xt
        if d:
            new = new + d * (self.view(noise, (count,)) if self.loaded.at(noise) else F32.type(np.nan))
        xt[...] = new


def define(library) -> None:
    """Adds the functions to a `HostCuda`."""
    e = _Emulation(library)
    for name, kinds in (
        ("normal", "const uint64_t*, int64_t, int64_t, uint32_t, const uint32_t*, float*, void*"),
        ("add_noise", "const float*, int64_t, const int64_t*, const float*, const int64_t*, const double*, "
         "int64_t, int64_t, int64_t, fp4bf16_prediction, float*, float*, void*"),
        ("squared_error", "const float*, const float*, int64_t, int64_t, double*, void*"),
        ("squared_error_backward", "const float*, const float*, const double*, int64_t, int64_t, float*, "
         "void*"),
        ("dpo", "const double*, const double*, int64_t, double, double*, double*, void*"),
        ("sampler_step", "const float*, const float*, const float*, fp4bf16_prediction, int64_t, float*, "
         "void*"),
    ):  # fmt: skip
        library._define(name, kinds, getattr(e, name))
