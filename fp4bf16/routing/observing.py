"""What the sampled steps of a closed loop measure, on its way to the router. A mixin of `loop.ClosedLoop`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .feedback import Feedback
from .router import Router
from .sensitivity import Demotion, GradientVariance, curvature_omega, fisher_omega, squared_error_scale

_MICRO = 4  # a micro-batch is this part of a batch
_LEAST_SEEN = 3  # sampled steps before a layer is taken to BF16 for the noise of its gradient


class Observing:
    """The part of `ClosedLoop` that takes in measurements and makes sensitivities of them."""

    unet: Any
    settings: Any
    router: Router
    feedback: Feedback
    variance: GradientVariance
    demotion: Demotion
    traces: dict[str, float]  # of the loss's Hessian, by layer, as last measured
    _at: int  # the present step
    _weights: list[dict[str, Any]]  # what `observe` was given in it

    @property
    def free(self) -> list[str]:
        """Names of the layers that the router decides about; none with ``forward="fp4"``."""
        return self.router.free

    @property
    def operands(self) -> str:
        """What the `ActivationProbe` is to quantise: by ``sensitivity="outputs"`` it sees the weight's error
        in the product; else that has an Omega of its own.
        """
        return "both" if self.settings.sensitivity == "outputs" else "activations"

    def renew(self) -> None:
        """Another objective begins, or other parameters are trained: what the gradients of the last ones have
        shown is forgotten, for their norms do not compare. Omegas stay: they are of the network's own loss.
        """
        self.variance, self.demotion = GradientVariance(), Demotion(least=_LEAST_SEEN)
        self.router.forget_gradients()

    def parts(self, count: int) -> list[slice]:
        """Two micro-batches of a batch of `count` entries, a quarter of it each; one where there is one
        entry, none of none.
        """
        size = max(1, count // _MICRO)
        return [slice(i * size, (i + 1) * size) for i in range(min(2, count // size))]

    def observe(
        self,
        number: int | None = None,
        *,
        loss: float | None = None,
        batch: int = 1,
        outputs: int = 1,
        small: Sequence[Mapping[str, Any]] = (),
        fast: Mapping[str, Any] | None = None,
        activation: Mapping[str, float] | None = None,
        squares: Mapping[str, Any] | None = None,
        bucket: int | None = None,
        traces: Mapping[str, Any] | None = None,
        latency: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Take in what a sampled step has measured, before `after`; once more for each bucket of noise
        levels.

        Args:
            loss: mean squared error of the network's prediction, of which the budget is a share; that of
                policy training too, whose own objectives may be 0. outputs: elements of a picture.
            batch: pictures of a micro-batch.
            small: {layer: gradient} of two i.i.d. micro-batches with the layers decided about on BF16; fast:
                of the first of them with these layers on the fast track.
            activation: Omega of the products (`ActivationProbe` of `operands`, with `squared_error_scale`).
            squares: {layer: squares of the micro-batch's gradient}, where `after` gets no moments.
            traces: {layer: Trace or its value} of the loss's Hessian (`layer_traces`).
            latency: {layer: {track: microseconds}}.

        What is not finite is left out. Raises as `Router.observe`.
        """
        number = self._at if number is None else number
        if traces:
            self.traces = {n: float(getattr(t, "value", t)) for n, t in traces.items()}
        known = loss is not None and math.isfinite(loss)
        told = {"loss": loss if known and bucket is None else None, "latency": latency}
        if len(small) > 1:
            self.variance.observe(small, batch)
            told["variance"] = {n: v for n, v in self.variance.traces().items() if n in self.router.layers}
        if fast is not None and small:
            self.demotion.update(fast, small[0])
            norms = self.demotion.norms()
            # FP4 disturbs each picture's gradient in its own way: a whole batch's noise is as much smaller
            whole = math.sqrt(min(1.0, batch / self.router.batch))
            told["noise"] = {n: whole * noise for n, (_, noise) in norms.items() if n in self.router.layers}
            told["demoted"] = {n: v for n, v in self.demotion.demoted().items() if n in self.free}
        self.router.observe(number, **told)
        if known:
            self._weights.append(
                {"loss": loss, "batch": batch, "outputs": outputs, "bucket": bucket, "squares": squares,
                 "activation": dict(activation or {})}
            )  # fmt: skip

    def _omegas(self, of: Mapping[str, Any], moments: Any, batch: int) -> dict[str, float]:
        """Omega of each layer that is decided about: that of its weight plus that of its input, or of both by
        what they change in the product.
        """
        scale = squared_error_scale(of["loss"], of["outputs"])
        if self.settings.sensitivity == "fisher" and of["squares"] is not None:
            moments, batch = of["squares"], of["batch"]
        found = {}
        for name in self.free:
            weight = self._weight_omega(name, moments, batch, scale)
            product = of["activation"].get(name)
            if weight is not None or product is not None:
                found[name] = (weight or 0.0) + (product or 0.0)
        return found

    def _weight_omega(self, name: str, moments: Any, batch: int, scale: float) -> float | None:
        parameter = self.parameter(name)
        if parameter is None:
            return None
        if not np.isfinite(parameter.data).all():  # no FP4 copy can be made
            return math.inf
        if self.settings.sensitivity == "outputs":
            return None
        phases = name in self.unet.phased(self.router.fast)
        if self.settings.sensitivity != "fisher":
            return curvature_omega(self.traces[name], parameter, phases) if name in self.traces else None
        if moments is None or name not in moments or scale == 0:
            return None
        return fisher_omega(moments[name], parameter, batch, scale, phases)

    def parameter(self, name: str) -> Any:
        """The weight of a layer on the host; an engine whose network is elsewhere puts its own in place."""
        return self.unet.flat.named.get(name)
