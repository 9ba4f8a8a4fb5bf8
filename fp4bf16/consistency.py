"""The two tracks held together: the consistency term, the constraint before each step, fallbacks, sketches.

Four watchers of a network's products (`nn.watching`):

    Consistency   adds lambda mean |f_fp4 - sg f_bf16|^2 / |sg f_bf16|^2 over sampled layers to the loss
    Constraint    says before an optimizer step which layers may not run on FP4, and keeps them off it
    Fallback      redoes a product on BF16 at once where its certified ratio is over a threshold
    Sketcher      estimates on sampled products how far they are from BF16, more sharply than the bound

The certified ratio of a product is what its certificate proves of |y_fp4 - y_bf16|_F, over the norm of y as
computed, before bias and residual; `docs/certificate.md` has the proof. These watch networks on the CPU; for
those on a GPU there are `nn.cuda.certificates` and `nn.cuda.sketches`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .averages import Average
from .certify import Certificate
from .diffusion.noise import integers, permutation, subseed
from .errors import ConfigError
from .nn.tape import Variable, grad_enabled, no_grad
from .nn.watch import Estimate, Watcher, tap, track_of

__all__ = ["Consistency", "Constraint", "Fallback", "Sketcher", "certified_ratio"]

_FP4 = ("fp4", "dual")
#: Steps that a moving average needs before jumps are measured against it, and the share of the past in it.
_WARM_UP, _KEEP = 5, 0.9
#: Squares of outputs under this, an element, have no ratio with a gradient that float32 can hold.
_VANISHES = 1e-30
#: Norms of zeros are what rounding under the normal range may have hidden; times another they are under this.
_NOTHING = 2.0**-100


def certified_ratio(certificate: Certificate) -> float:
    """(bound + accumulation) / |y|, without the estimate, so that it is a proof; not finite where none is.

    A product of zeros alone (a layer that begins with zero weights, no caption) has the ratio 0.

    >>> certified_ratio(Certificate(0.5, 0.1, terms={"product": 2.0}))
    0.3
    """
    terms, bound = certificate.terms, certificate.bound + certificate.accumulation
    if not terms:  # of a call that ran on the BF16 track
        return 0.0
    if terms["product"] == 0:
        return 0.0 if terms["x"] * terms["w"] < _NOTHING else math.inf
    return bound / terms["product"]


def _checked(owner: str, **settings: tuple[Any, float | int]) -> None:
    """`ConfigError` for a setting that is no number from its least value on; whole where that is an int."""
    for name, (value, least) in settings.items():
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        whole = isinstance(least, int)
        if not number or not least <= value < math.inf or (whole and value % 1):
            kind = "whole number" if whole else "number"
            raise ConfigError(f"{owner}: {name} is {value!r}, but a {kind} from {least:g} is needed")


# ---- the term ----------------------------------------------------------------------------------------------
class Consistency(Watcher):
    """The term weight * mean over sampled layers of |f_fp4 - sg f_bf16|^2 / |sg f_bf16|^2 (squares of
    Frobenius norms; f: a layer's output, sg: a constant for the gradient).

    Its gradient in f_fp4, weight * 2 (f_fp4 - f_bf16) / (|f_bf16|^2 layers calls), is added where the loss's
    own passes, so that the tape is walked once; from there it goes straight through the quantiser. A layer
    that runs several times a step counts with the mean of its calls; run all of them before `backward`.
    Products outside the tape (`no_grad`: frozen networks) are not looked at.

    Args:
        weight: lambda; 0 measures and leaves the gradient alone. layers_per_step: how many layers each step
            samples; each costs a product on BF16. seed: of the choice, a function of (seed, step).

    Attributes: `term`, the mean without `weight`, and `by_layer`, {name: ratio of squares}, of the step so
    far; 0.0 and {} before a sampled layer has run.

    Raises `ConfigError` for a negative or non-finite weight and for less than one layer a step.

    >>> from fp4bf16 import nn
    >>> layer = nn.Linear(32, 8)
    >>> names = list(layer.apply_route({"*": "fp4"}))
    >>> consistency = Consistency(weight=1.0, layers_per_step=1)
    >>> consistency.begin(0, names)
    >>> with nn.watching(consistency):
    ...     y = layer(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32))
    >>> y.sum().backward()
    >>> 0 < consistency.term < 0.1, list(consistency.by_layer)
    (True, ['.weight'])
    """

    def __init__(self, weight: float, layers_per_step: int = 4, seed: int = 0):
        _checked("Consistency", weight=(weight, 0.0), layers_per_step=(layers_per_step, 1))
        self.weight, self.layers_per_step = float(weight), int(layers_per_step)
        self._seed = subseed(seed, "consistency")
        self._chosen: frozenset[str] = frozenset()
        self._ratios: dict[str, list[float]] = {}

    def begin(self, step: int, names: Iterable[str]) -> None:
        """Forget the last step and choose layers among `names`, those that are on FP4 or dual."""
        names = sorted(names)
        order = permutation(self._seed, step, len(names))[: self.layers_per_step]
        self._chosen, self._ratios = frozenset(names[i] for i in order), {}

    @property
    def chosen(self) -> frozenset[str]:
        """Names of the layers that this step samples."""
        return self._chosen

    @property
    def by_layer(self) -> dict[str, float]:
        return {name: math.fsum(r) / len(r) for name, r in self._ratios.items()}

    @property
    def term(self) -> float:
        ratios = self.by_layer.values()
        return math.fsum(ratios) / len(ratios) if ratios else 0.0

    def product(self, layer, x, y, run, certificate) -> Variable:
        name = layer.key
        if name not in self._chosen or track_of(layer) not in _FP4 or not grad_enabled():
            return y
        with no_grad():
            other = run("bf16").data
        difference, square = y.data - other, _square(other)
        ratio = 0.0 if square == 0 else _square(difference) / square
        calls = self._ratios.setdefault(name, [])
        calls.append(ratio)
        usable = math.isfinite(ratio) and square > _VANISHES * y.size
        if self.weight == 0 or not usable or not y.requires_grad:
            return y
        ratios, scale = self._ratios, 2 * self.weight / square

        def add(g: Any) -> Any:
            return g + difference * difference.dtype.type(scale / (len(ratios) * len(calls)))

        return tap(y, add)


def _square(x: Any) -> float:
    flat = np.ascontiguousarray(x).reshape(-1)
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))


# ---- the constraint ----------------------------------------------------------------------------------------
def _average(total: Any, count: Any) -> Average:
    """Of norms, from a state; `ValueError` for what is none."""
    if float(total) < 0:
        raise ValueError(f"{total!r} is no average of norms, for it is negative")
    return Average.of(_KEEP, total, count)


def _jump(average: Average, x: float) -> float:
    """x / average or its inverse, whichever is over 1; 1 while too little is known."""
    if average.count < _WARM_UP or not (average.value > 0 and x > 0):
        return 1.0
    return max(x / average.value, average.value / x)


class Constraint(Watcher):
    """Before each optimizer step: which layers may not run on FP4 in it.

        constraint.begin(step)
        run forward and backward with the layers of constraint.held(step) on BF16
        while found := constraint.violations(gradients):
            constraint.punish(step, found)
            run forward and backward again with held(step) on BF16
        step the optimizer

    A layer violates it where its certified ratio is over `limit` or not finite (NaN or Inf met the quantiser,
    or a block overflowed), where the RMS of its product or the norm of its weight is more than `jump` times
    its moving average, or less by that factor, or where its gradient is not finite. Averages are of past
    steps, need 5 of them, and take up no violation. Products outside the tape are not looked at.

    Args:
        limit: largest certified ratio; 0: no limit. jump: over 1; 0: jumps are allowed. cooldown: for how
            many steps after the one in which it was found a violating layer stays on BF16.

    Attributes: `ratios`, {name: largest certified ratio of its calls} of the step so far.

    Raises `ConfigError` for settings that cannot be.

    >>> constraint = Constraint(limit=2.0, jump=8.0, cooldown=3)
    >>> constraint.begin(10)
    >>> constraint.punish(10, {"conv_in.weight": "certified ratio 3.1 is over 2"})
    >>> sorted(constraint.held(13)), constraint.held(14)
    (['conv_in.weight'], {})
    """

    def __init__(self, limit: float, jump: float = 8.0, cooldown: int = 50):
        _checked("Constraint", limit=(limit, 0.0), jump=(jump, 0.0), cooldown=(cooldown, 0))
        if 0 < jump <= 1:
            raise ConfigError(f"Constraint: jump is {jump}, but a factor over 1 is needed, or 0 for none")
        self.limit, self.jump, self.cooldown = float(limit), float(jump), int(cooldown)
        self._step: int | None = None
        self._held: dict[str, tuple[int, str]] = {}  # the last step on BF16, and why
        self._averages: dict[str, dict[str, Average]] = {}
        self._clear()

    def _clear(self) -> None:
        self.ratios: dict[str, float] = {}
        self._seen: dict[str, list[float]] = {}  # squares of the product, its elements, norm of the weight
        self._refused: dict[str, str] = {}

    def begin(self, step: int) -> None:
        """A step begins, or the same one again: what was measured in the last one goes into the averages."""
        if step != self._step:
            bad = self.violations(None)
            for name, values in self._sizes().items():
                if name not in bad:
                    for what, value in values.items():
                        self._averages.setdefault(name, {}).setdefault(what, Average(_KEEP)).update(value)
            self._held = {name: held for name, held in self._held.items() if held[0] >= step}
        self._step = step
        self._clear()

    def held(self, step: int) -> dict[str, str]:
        """{name: reason} of the layers that stay on BF16 in this step."""
        return {name: reason for name, (last, reason) in self._held.items() if step <= last}

    def punish(self, step: int, violations: Mapping[str, str]) -> None:
        """Keep these layers on BF16 in this step and for `cooldown` more; their averages begin anew then.

        What was measured of this attempt at the step is forgotten.
        """
        for name, reason in violations.items():
            self._held[name] = (step + self.cooldown, reason)
            self._averages.pop(name, None)
        if violations:
            self._clear()

    # ---- what is looked at
    def wants_certificate(self, layer) -> bool:
        return grad_enabled()

    def product(self, layer, x, y, run, certificate) -> Variable:
        if certificate is not None and grad_enabled():
            name, terms = layer.key, certificate.terms
            ratio = certified_ratio(certificate)
            self.ratios[name] = _worst(self.ratios.get(name, 0.0), ratio)
            if terms:
                seen = self._seen.setdefault(name, [0.0, 0.0, 0.0])
                seen[0] += terms["product"] ** 2
                seen[1] += y.size
                seen[2] = terms["w"]
        return y

    def refused(self, layer, x, run, error) -> Variable | None:
        """The quantiser met NaN or Inf: the product runs on BF16, and the layer violates the constraint."""
        if not grad_enabled():
            return None
        self._refused[layer.key] = "NaN or Inf in its input or weight"
        return run("bf16")

    def _sizes(self) -> dict[str, dict[str, float]]:
        return {
            name: {"product": math.sqrt(square / max(1.0, size)), "weight": weight}
            for name, (square, size, weight) in self._seen.items()
        }

    # ---- what is found
    def violations(self, gradients: Mapping[str, Any] | None = None) -> dict[str, str]:
        """{name: reason} of the layers that may not step as they ran; {}: the optimizer may step.

        gradients: of weights by name, arrays, after `backward`. Layers that were not on FP4 are not judged,
        nor are their gradients.
        """
        found: dict[str, str] = dict(self._refused)
        for name, ratio in self.ratios.items():
            if not math.isfinite(ratio):
                found.setdefault(name, f"certified ratio is {ratio}: nothing is proven of its product")
            elif 0 < self.limit < ratio:
                found.setdefault(name, f"certified ratio {ratio:.4g} is over {self.limit:g}")
        if self.jump:
            for name, values in self._sizes().items():
                for what, value in values.items():
                    average = self._averages.get(name, {}).get(what)
                    if average is not None and _jump(average, value) > self.jump:
                        found.setdefault(
                            name,
                            f"norm of its {what} is {value:.4g}, {self.jump:g} times over or under its "
                            f"average of {average.value:.4g}",
                        )
        for name in (*self.ratios, *self._refused) if gradients is not None else ():
            g = gradients.get(name)
            if g is not None and not np.isfinite(g).all():
                found.setdefault(name, "its gradient is not finite")
        return found

    # ---- checkpoints
    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on as if nothing had been interrupted: dicts, lists, numbers, words."""
        averages = {
            name: {what: a.state() for what, a in of.items()} for name, of in self._averages.items()
        }
        return {
            "step": self._step,
            "held": {name: list(held) for name, held in self._held.items()},
            "averages": averages,
            "ratios": {name: _plain(ratio) for name, ratio in self.ratios.items()},
            "seen": {name: [_plain(v) for v in seen] for name, seen in self._seen.items()},
            "refused": dict(self._refused),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave; `ConfigError` where it is none."""
        try:
            held = {str(n): (_whole(last), str(reason)) for n, (last, reason) in state["held"].items()}
            averages = {
                name: {what: _average(*parts) for what, parts in of.items()}
                for name, of in state["averages"].items()
            }
            ratios = {name: float(ratio) for name, ratio in state["ratios"].items()}
            seen = {name: [float(v) for v in (a, b, c)] for name, (a, b, c) in state["seen"].items()}
            refused = {str(name): str(reason) for name, reason in state["refused"].items()}
            step = None if state["step"] is None else _whole(state["step"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"Constraint: the state lacks what is needed or holds something else ({error!r}); pass what "
                f"state() gave"
            ) from None
        self._held, self._averages, self._step = held, averages, step
        self.ratios, self._seen, self._refused = ratios, seen, refused


def _whole(x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise ValueError(f"{x!r} is no whole number")
    return int(x)


def _plain(x: float) -> float | str:
    """JSON has no infinity and no NaN: these by name."""
    return x if math.isfinite(x) else str(x)


def _worst(a: float, b: float) -> float:
    return b if math.isnan(b) or b > a else a


# ---- fallbacks and sketches --------------------------------------------------------------------------------
class Fallback(Watcher):
    """``threshold=`` for a whole network: a product whose certified ratio is over it is redone on BF16, with
    the BF16 weight, as is one that NaN or Inf kept from FP4.

    Attributes: `calls`, how many products were certified; `counts`, {name: how many were redone}.

    >>> from fp4bf16 import nn
    >>> layer = nn.Linear(32, 8)
    >>> _ = layer.apply_route({"*": "fp4"})
    >>> fallback = Fallback(threshold=1e-3)
    >>> with nn.watching(fallback):
    ...     y = layer(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32))
    >>> dict(fallback.counts), fallback.calls
    ({'.weight': 1}, 1)
    """

    def __init__(self, threshold: float):
        _checked("Fallback", threshold=(threshold, 0.0))
        self.threshold, self.calls, self.counts = float(threshold), 0, Counter()

    def wants_certificate(self, layer) -> bool:
        return True

    def product(self, layer, x, y, run, certificate) -> Variable:
        if certificate is None:
            return y
        self.calls += 1
        if certified_ratio(certificate) <= self.threshold:
            return y
        self.counts[layer.key] += 1
        return run("bf16")

    def refused(self, layer, x, run, error) -> Variable:
        self.calls += 1
        self.counts[layer.key] += 1
        return run("bf16")


class Sketcher(Watcher):
    """On one FP4 product in `every` an estimate of its distance from BF16, by a Gaussian sketch.

    Which ones, and the sketch itself, are functions of (seed, step, number of the call in the step), so that
    a resumed run draws the same and no two calls share a sketch, which the confidence of 0.999 a call rests
    on.

    Attributes: `estimates`, {name: upper estimate of |y_fp4 - y_bf16| / |y|} of the sampled products since
    `begin`, the largest of a layer's, without what FP32 sums may add (`Certificate.accumulation`); `calls`
    and `sketches`, how many FP4 products and how many estimates there have been in all.

    >>> from fp4bf16 import nn
    >>> layer = nn.Linear(32, 8)
    >>> _ = layer.apply_route({"*": "fp4"})
    >>> sketcher = Sketcher(every=1)
    >>> sketcher.begin(0)
    >>> with nn.watching(sketcher):
    ...     y = layer(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32))
    >>> 0.01 < sketcher.estimates[".weight"] < 1
    True
    """

    def __init__(self, every: int = 20, seed: int = 0):
        _checked("Sketcher", every=(every, 1))
        self.every, self._seed = int(every), subseed(seed, "sketch")
        self.calls = self.sketches = 0
        self.begin(0)

    def begin(self, step: int) -> None:
        """A step begins: calls count from 0, and the first to be sampled is drawn."""
        self._step, self._call, self.estimates = int(step), -1, {}
        self._first = int(integers(self._seed, self._step, 1, 0, self.every)[0])

    def wants_certificate(self, layer) -> bool | Estimate:
        self._call += 1
        self.calls += 1
        if self._call % self.every != self._first:
            return False
        return Estimate(self._seed, self._step, self._call)

    def product(self, layer, x, y, run, certificate) -> Variable:
        sampled = self._call % self.every == self._first
        if sampled and certificate is not None and certificate.estimate is not None:
            self.sketches += 1
            size, found = certificate.terms["product"], certificate.estimate
            ratio = found / size if size > 0 else certified_ratio(certificate)
            self.estimates[layer.key] = _worst(self.estimates.get(layer.key, 0.0), ratio)
        return y
