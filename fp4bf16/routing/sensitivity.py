"""What a layer's product on the FP4 track costs: predicted rise of the loss, gradient noise, demotion.

All Omega are in units of the loss and are second-order terms of Taylor's expansion, 1/2 d^T H d with the 1/2,
of a change d: that of a weight, Q(W) - W, or of a product, y_fp4 - y_bf16. The first-order term g^T d is left
out, since rounding errors have no preferred direction. The difference of a product holds the error of both
its operands: a weight's Omega may be added to that of the activations alone
(``ActivationProbe(operands="activations")``); added to that of the whole product it would count twice. For
the dual track, whose errors are smaller, they are those of FP4: on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np

from ..averages import Averages
from ..errors import ConfigError, NonFiniteError, ShapeError, nearest
from ..nn import fused
from ..nn import ops as F
from ..nn.layers import Conv2d
from ..nn.module import Parameter
from ..nn.tape import Variable, grad_enabled, no_grad
from ..nn.watch import Watcher, tap, track_of
from ..quantize import dequantize
from ..tracks import tracks
from .curvature import Trace

#: What an `ActivationProbe` measures the error of.
OPERANDS = ("both", "activations")

# ---- of a weight -------------------------------------------------------------------------------------------


def quantisation_error(parameter: Parameter, phases: bool = False) -> float:
    """|Q(W) - W|^2 of a weight and its FP4 twin, from the quantiser's own sums; float64, no second pass.

    The twin is made if the weight has changed since the last one. phases: the weight (O, 3, 3, C) is
    multiplied by phases; then a quarter of |Q(K) - K|^2 of the kernels K (4 O, 2, 2, C), which is to a layer
    by phases what the other is to one of upsampled pictures, where each tap stands in four kernels (see
    `fisher_omega`). Raises `NonFiniteError` as `quantize` does.

    >>> w = Parameter(np.full((2, 16), 3.0, np.float32))                      # on the grid: 3 = 6 * 1/2
    >>> quantisation_error(w)
    0.0
    """
    if phases:
        return parameter.phases().twin().stats.error_norm_sq / 4
    return parameter.twin().stats.error_norm_sq


def curvature_omega(trace: Trace | float, parameter: Parameter, phases: bool = False) -> float:
    """1/2 (tr H / n) |Q(W) - W|^2, clamped at 0: the mean of 1/2 d^T H d over directions d of that length.

    HAWQ-V2 (Dong et al. 2020, eq. 8) with the 1/2 of Taylor's term, which makes it a rise of the loss.
    trace: of the Hessian block of this weight (`curvature.layer_traces`), n its number of elements. Infinite
    where the trace is not finite: nothing is known then. phases: as in `quantisation_error`. The kernels are
    K = S w with 36 O C taps in all, so that tr S^T H_K S = 36 O C h and tr H / n = 4 h where the Hessian in
    the kernels is h times the identity in the mean, the assumption that the formula rests on anyway.

    >>> w = Parameter(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32))
    >>> curvature_omega(128.0, w) == quantisation_error(w), curvature_omega(-1.0, w)
    (True, 0.0)
    """
    value = trace.value if isinstance(trace, Trace) else float(trace)
    if not math.isfinite(value):
        return math.inf
    return max(0.0, 0.5 * value * quantisation_error(parameter, phases) / max(1, parameter.size))


def fisher_omega(
    v_hat: Any, parameter: Parameter, batch: int, scale: float = 1.0, phases: bool = False
) -> float:
    """1/2 scale batch sum v_hat (Q(w) - w)^2: the Hessian's diagonal replaced by the empirical Fisher's.

    Adam's second moment averages g^2 of the *batch-mean* gradient: E[v] = |mean|^2 + Var / batch for single
    pictures' gradients of variance Var. Times `batch` that is the pictures' own mean square, E[g_1^2], as
    long as the mean gradient is small beside its noise; where it is not, early in training, Omega is too
    large by batch |mean|^2. Gradients count as the optimizer got them: where their norm was clipped, Omega is
    too small by the square of the factor, for all layers alike. E[g_1^2] equals the Hessian's diagonal where
    the loss is a negative log-likelihood that the model fits (log-sigmoid preference losses are); for a
    squared error `scale` makes up for the units (`squared_error_scale`).

    Args:
        v_hat: Adam's second moment of this weight (its shape), divided by 1 - beta_2^count.
        batch: pictures that the gradient was a mean over.
        phases: whether the weight (O, 3, 3, C) is multiplied by phases. What is quantised are then its
            kernels, each a sum of taps, and a tap's gradient is the sum of those in the four kernels that it
            is in, one of each phase, which see other pixels: with equal squares and no correlation a quarter
            of the tap's moment is the kernel's, the mean over its taps where it has several.

    Infinite where a moment is not finite. Raises `ShapeError` and `ConfigError` for what does not fit.

    >>> w = Parameter(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32))
    >>> omega = fisher_omega(np.full((2, 32), 0.25, np.float32), w, batch=8)
    >>> abs(omega - quantisation_error(w)) < 1e-6 * omega
    True
    """
    moment = np.asarray(v_hat, np.float64)
    if moment.shape != parameter.shape:
        raise ShapeError(
            f"fisher_omega: v_hat has shape {moment.shape}, but {parameter.name or 'the parameter'} has "
            f"shape {parameter.shape}; pass the second moment of this very weight"
        )
    _check_positive("fisher_omega", batch=batch, scale=scale)
    if not np.isfinite(moment).all():
        return math.inf
    if phases:
        taps = fused.phase_weights(np.ones((1, 3, 3, 1)))
        moment, parameter = fused.phase_weights(moment) / (4 * taps), parameter.phases()
    error = dequantize(parameter.twin()).astype(np.float64).reshape(parameter.shape) - parameter.data
    return float(0.5 * scale * batch * np.einsum("i,i,i->", moment.ravel(), error.ravel(), error.ravel()))


def squared_error_scale(loss: float, outputs: int) -> float:
    """What makes an empirical Fisher a Hessian where the loss is a mean squared error: outputs / (2 loss).

    With d outputs a picture and residuals of variance s^2 (the loss itself), the Hessian of a mean squared
    error is (2/d) E[J^T J] and E[g^2] = (2/d)^2 s^2 E[J^T J] (Gauss-Newton, residuals independent of J). A
    common factor of all layers: rankings do not need it, budgets do.

    loss: mean over all outputs, as it stands. outputs: a picture's. 0 for a loss of 0: its Fisher is 0 too.

    >>> squared_error_scale(0.5, 192)
    192.0
    """
    _check_positive("squared_error_scale", outputs=outputs)
    if not 0 <= loss < math.inf:
        raise ConfigError(f"squared_error_scale: loss is {loss}, but must be a finite number from 0 on")
    return outputs / (2 * loss) if loss else 0.0


def _check_positive(where: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{where}: {name} is {value}, but must be a positive finite number")


# ---- of a product ------------------------------------------------------------------------------------------


class ActivationProbe(Watcher):
    """Omega of products: 1/2 E[sum (dL/dy)^2 (y_fp4 - y_bf16)^2] on sampled steps, activations included.

    Each chosen product is run on the other track as well, and its gradient is looked at on the way back;
    neither output nor gradient is changed. The expectation is over pictures, whose own gradients are N dL/dy
    for a loss that is their mean: so the sum is multiplied by N, the length of y's first axis. As in
    `fisher_omega` the square of the gradient stands for the second derivative.

    names: of the layers (`Module.key`), None for all that `apply_route` has named. `scale`: factor on every
    Omega (`squared_error_scale`), read when `omega` is; it may be set after the forward. operands: "both", or
    "activations" for y(Q(x), W) - y(x, W) alone, which belongs beside a weight's Omega; it costs one product
    either way. Raises `ConfigError` for another word.

        probe.begin()
        with watching(probe):
            loss = ...
            loss.backward()
        probe.omega                                             # {name: float}

    Put it before watchers that replace products. Under `no_grad` it does nothing.

    >>> from fp4bf16.nn import Linear, watching
    >>> layer, x = Linear(64, 8, seed=1), np.linspace(-1, 1, 256, dtype=np.float32).reshape(4, 64)
    >>> layer.key, probe = "layer", ActivationProbe()                 # in a network apply_route names them
    >>> with watching(probe):
    ...     (layer(x) ** 2).mean().backward()
    >>> list(probe.omega), 0 < probe.omega["layer"] < 0.01
    (['layer'], True)
    """

    def __init__(self, names: Container[str] | None = None, scale: float = 1.0, operands: str = "both"):
        if operands not in OPERANDS:
            raise ConfigError(
                f"ActivationProbe: operands is {operands!r}, which is not known{nearest(operands, OPERANDS)}"
            )
        self.names, self.scale, self.operands = names, scale, operands
        self.begin()

    def begin(self, passes: int = 1) -> None:
        """Forget what was measured. `passes`: losses that will be walked back before `omega` is read, each a
        mean over pictures of its own (micro-batches); Omega is their mean.
        """
        _check_positive("ActivationProbe", passes=passes)
        self._passes, self._sums = passes, {}

    @property
    def omega(self) -> dict[str, float]:
        """By layer; those that no gradient has reached are not in it. Infinite where an input, a product or a
        gradient was not finite.
        """
        return {
            name: 0.5 * self.scale * value / self._passes if math.isfinite(value) else math.inf
            for name, value in self._sums.items()
        }

    def product(
        self, layer: Any, x: Any, y: Variable, run: Callable[[str], Variable], certificate: Any
    ) -> Variable:
        name = layer.key
        if not grad_enabled() or not name or (self.names is not None and name not in self.names):
            return y
        try:
            with no_grad():
                if self.operands == "both":
                    error = _difference(y, run, track_of(layer))
                else:
                    error = _from_activations(layer, x)
        except NonFiniteError:  # of the quantiser: what FP4 would make of this is unknown
            self._sums[name] = math.inf
            return y

        def measure(g: Any) -> Any:
            product = (np.asarray(g) * error).reshape(-1)
            with np.errstate(over="ignore", invalid="ignore"):
                found = len(y.data) * float(np.einsum("i,i->", product, product, dtype=np.float64))
            self._sums[name] = self._sums.get(name, 0.0) + found
            return g

        if not y.requires_grad:  # a frozen layer on constant pictures: its gradient is wanted all the same
            y = Variable(y.data, requires_grad=True)
        return tap(y, measure)


def _difference(y: Variable, run: Callable[[str], Variable], track: str) -> Any:
    """y_fp4 - y_bf16, of which `y` is one already where its track is."""
    low = y.data if track == "fp4" else run("fp4").data
    high = y.data if track in ("bf16", "reference") else run("bf16").data
    return low - high


def _from_activations(layer: Any, x: Any) -> Any:
    """The product of Q(x) - x with the layer's own weight; bias and residual are the same on both sides."""
    x = x.data if isinstance(x, Variable) else np.asarray(x)
    conv = isinstance(layer, Conv2d)
    error = F.through_quantiser(x, "image" if conv else "row").data - x
    with tracks("bf16"):
        return (layer.product(error, "bf16") if conv else F.linear(error, layer.weight)).data


# ---- gradients ---------------------------------------------------------------------------------------------


def squared_norms(gradients: Mapping[str, Any]) -> dict[str, float]:
    """|g|^2 of each layer, summed in float64.

    >>> squared_norms({"a": np.array([3.0, 4.0], np.float32)})
    {'a': 25.0}
    """
    return {name: _square(g) for name, g in gradients.items()}


def _square(array: Any) -> float:
    flat = np.asarray(array).reshape(-1)
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))


class GradientVariance:
    """tr Sigma of each layer: the variance of single pictures' gradients, summed over the layer's elements.

    With mean gradients over B_small and B_big pictures, E|G_B|^2 = |G|^2 + tr Sigma / B, so that
    tr Sigma = (|G_small|^2 - |G_big|^2) / (1/B_small - 1/B_big) and
    |G|^2 = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small) are unbiased (McCandlish et al. 2018,
    appendix A.1). Either is noisy in one step, so numerators and denominators are averaged on their own, over
    about 1 / (1 - decay) steps, and divided when asked for.

    >>> rng = np.random.default_rng(0)
    >>> noise = GradientVariance(decay=0.99)
    >>> for _ in range(500):                                 # 4 micro-batches of 2 pictures, variance 3
    ...     noise.observe([{"w": 1 + rng.normal(0, (3 / 2) ** 0.5, 10)} for _ in range(4)], batch=2)
    >>> 20 < noise.trace("w") < 40, 5 < noise.signal("w") < 15         # 10 elements: 10 x 3, 10 x 1
    (True, True)
    """

    def __init__(self, decay: float = 0.9):
        self._averages = Averages("GradientVariance", decay, 4)

    def update(
        self, small: Mapping[str, float], big: Mapping[str, float], b_small: float, b_big: float
    ) -> None:
        """small: {layer: mean of |G|^2 over i.i.d. micro-batches of `b_small` pictures}; big: {layer: |G|^2
        of the mean gradient of `b_big` pictures}, of the same layers. Layers with a number that is not finite
        are left out of this update and counted in `skipped`. Raises `ConfigError` where sizes or names do not
        fit.
        """
        _check_positive("GradientVariance", b_small=b_small, b_big=b_big)
        if not b_small < b_big:
            raise ConfigError(
                f"GradientVariance: b_small is {b_small} and b_big {b_big}, but b_small must be the lesser; "
                f"give at least two micro-batches and their mean"
            )
        _check_same("GradientVariance", "small", small, "big", big)
        for name in small:
            s, b = float(small[name]), float(big[name])
            noise, signal = (s - b, 1 / b_small - 1 / b_big), (b_big * b - b_small * s, b_big - b_small)
            self._averages.add(name, (*noise, *signal))

    def observe(self, gradients: Sequence[Mapping[str, Any]], batch: int) -> None:
        """`update` from the mean gradients of at least two i.i.d. micro-batches of `batch` pictures each."""
        if len(gradients) < 2:
            raise ConfigError(
                f"GradientVariance: gradients holds {len(gradients)} micro-batch(es), but variance needs two"
            )
        for other in gradients[1:]:
            _check_same("GradientVariance", "gradients[0]", gradients[0], "another micro-batch", other)
        small, big = {}, {}
        for name in gradients[0]:
            parts = [np.asarray(g[name]) for g in gradients]
            small[name] = math.fsum(_square(p) for p in parts) / len(parts)
            big[name] = _square(np.mean(parts, axis=0, dtype=np.float64))
        self.update(small, big, batch, batch * len(gradients))

    @property
    def skipped(self) -> dict[str, int]:
        """How often a layer was left out because its gradient was not finite."""
        return dict(self._averages.skipped)

    def trace(self, name: str) -> float:
        """tr Sigma of one picture's gradient, at least 0; `KeyError` for a layer not seen yet."""
        noise, per_noise, _, _ = self._averages.means(name)
        return max(0.0, noise / per_noise)

    def signal(self, name: str) -> float:
        """|G|^2 of the true gradient, at least 0; trace / signal is the critical batch size."""
        _, _, signal, per_signal = self._averages.means(name)
        return max(0.0, signal / per_signal)

    def traces(self) -> dict[str, float]:
        """`trace` of every layer seen."""
        return {name: self.trace(name) for name in self._averages}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON-able; `restore` takes it back bit for bit."""
        return self._averages.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self._averages.restore(state)


class Demotion:
    """Which layers learn nothing more through an FP4 forward: |g| < sqrt(3) n, n = |g(FP4) - g(BF16)|.

    Both norms are moving averages over sampled steps, each from the same pictures. The threshold is that of
    Chmiel et al. 2025 (arXiv 2505.19115, for noise of quantised gradients), adapted: n is the difference that
    the FP4 forward makes to this layer's gradient. |g| is that of the BF16 forward, and holds the noise of
    the pictures too; so the rule is slow to demote where batches are small.

    least: updates that a layer must have seen first.

    >>> rule = Demotion()
    >>> g = {"a": np.ones(4), "b": np.ones(4)}
    >>> rule.update({"a": g["a"] + 0.5, "b": g["b"] + 0.6}, g)              # n = 1 and 1.2, |g| = 2
    >>> {name: (norm, round(noise, 6)) for name, (norm, noise) in rule.demoted().items()}
    {'b': (2.0, 1.2)}
    """

    def __init__(self, decay: float = 0.9, least: int = 1):
        _check_positive("Demotion", least=least)
        self._averages, self.least = Averages("Demotion", decay, 2), least
        self._count: dict[str, int] = {}

    def update(self, g4: Mapping[str, Any], g16: Mapping[str, Any]) -> None:
        """Gradients of the same micro-batch through the FP4 and the BF16 forward, by layer, of equal shapes.

        Layers whose gradients are not finite are left out and counted in `skipped`. `ConfigError` for other
        names, `ShapeError` for other shapes.
        """
        _check_same("Demotion", "g4", g4, "g16", g16)
        for name in g16:
            a, b = np.asarray(g4[name]), np.asarray(g16[name])
            if a.shape != b.shape:
                raise ShapeError(
                    f"Demotion: the gradients of {name} have shape {a.shape} (FP4) and {b.shape} (BF16); "
                    f"they must be equal"
                )
            with np.errstate(invalid="ignore", over="ignore"):
                row = math.sqrt(_square(b)), math.sqrt(_square(np.subtract(a, b, dtype=np.float64)))
            if self._averages.add(name, row):
                self._count[name] = self._count.get(name, 0) + 1

    @property
    def skipped(self) -> dict[str, int]:
        """How often a layer was left out because a gradient was not finite."""
        return dict(self._averages.skipped)

    def norms(self) -> dict[str, tuple[float, float]]:
        """{layer: (|g|, n)}, the moving averages."""
        return {name: tuple(self._averages.means(name)) for name in self._averages}

    def demoted(self) -> dict[str, tuple[float, float]]:
        """{layer: (|g|, n)} of those with |g| < sqrt(3) n."""
        return {
            name: (size, noise) for name, (size, noise) in self.norms().items()
            if self._count[name] >= self.least and size < math.sqrt(3) * noise
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON-able; `restore` takes it back bit for bit."""
        return {**self._averages.state(), "count": dict(self._count)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self._averages.restore(state)
        self._count = {str(k): int(v) for k, v in state["count"].items()}


def _check_same(where: str, one: str, a: Mapping[str, Any], other: str, b: Mapping[str, Any]) -> None:
    if different := sorted(set(a) ^ set(b)):
        holder = one if different[0] in a else other
        raise ConfigError(
            f"{where}: {different[0]!r} is in {holder} alone, but {one} and {other} must hold the same layers"
        )
