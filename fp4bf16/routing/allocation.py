"""Which layers are worth FP4: most microseconds saved with the predicted rise of the loss under a budget.

A 0-1 knapsack, solved greedily in the order of microseconds saved a unit of predicted loss (Dantzig 1957):
what it saves is short of the best possible by less than what the first layer that does not fit would save.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A layer that may run on FP4.

    name: of the layer. omega: predicted rise of the loss, in its units (an estimate below 0 counts as 0).
    saved_us: microseconds that FP4 saves a call (negative: FP4 is slower); any unit, if it is that of all.
    flops: of a picture, which break ties: the larger layer first.
    """

    name: str
    omega: float
    saved_us: float
    flops: float = 0.0

    @property
    def ratio(self) -> float:
        """saved_us a unit of loss; infinite for a layer that costs no loss."""
        if self.saved_us <= 0:
            return 0.0
        return self.saved_us / self.omega if self.omega > 0 else math.inf


@dataclass(frozen=True)
class Allocation:
    """What `allocate` chose.

    fp4: names of the layers on FP4. reasons: why, for every candidate. spent: sum of their omega. saved_us:
    sum of theirs. threshold: the least microseconds a unit of loss that a layer on FP4 has; None where no
    layer had to be left out for the budget, so that there is none.
    """

    fp4: frozenset[str]
    reasons: dict[str, str]
    spent: float
    saved_us: float
    threshold: float | None


def allocate(
    candidates: Iterable[Candidate],
    budget: float,
    keep: Collection[str] = (),
    hysteresis: float = 0.25,
    unit: str = "us",
) -> Allocation:
    """Choose the layers for FP4: greedy by `Candidate.ratio` while the sum of omega is under `budget`.

    Layers that are on FP4 now (`keep`) do not flap: put in order, their ratio counts 1 + hysteresis times,
    and they may stay until the sum passes the budget by the same factor. So a layer drives another out only
    if its ratio is better by more than 1 + hysteresis, and a layer that came in at the budget's edge leaves
    only when omegas or budget have moved by more than that. Where a layer that costs any loss comes in, the
    sum is within the budget: those that are worse than it make room. A layer that FP4 does not make faster
    stays on BF16 whatever it costs.

    Args:
        candidates: with different names; the result does not depend on their order.
        budget: in units of the loss, from 0; infinite for no limit.
        keep: names on FP4 now; those that are no candidates are ignored.
        hysteresis: from 0. unit: of `saved_us`, for the reasons.

    Raises `ValueError` for a negative or NaN budget or hysteresis, two candidates of one name, and an omega
    or saving that is not finite.

    >>> layers = [Candidate("a", 1e-3, 10.0), Candidate("b", 2e-3, 10.0), Candidate("c", 1e-2, 20.0)]
    >>> chosen = allocate(layers, budget=5e-3)
    >>> sorted(chosen.fp4), round(chosen.spent, 6), chosen.saved_us, chosen.threshold
    (['a', 'b'], 0.003, 20.0, 5000.0)
    >>> print(chosen.reasons["c"])
    0.01 of loss for 20 us: the budget of 0.005 has 0.002 left
    """
    layers = _checked(candidates, budget, hysteresis)
    fp4, reasons, spent, refused = _filled(layers, budget, set(keep), 1.0 + hysteresis, unit)
    ratios = [c.ratio for c in fp4 if math.isfinite(c.ratio)]
    return Allocation(
        frozenset(c.name for c in fp4), {c.name: reasons[c.name] for c in layers}, spent,
        math.fsum(c.saved_us for c in fp4), min(ratios) if refused and ratios else None,
    )  # fmt: skip


def _filled(
    layers: list[Candidate], budget: float, kept: set[str], factor: float, unit: str
) -> tuple[list[Candidate], dict[str, str], float, bool]:
    """(layers on FP4, reasons, what is spent, whether the budget left any out)."""
    # Names last, so that equal layers come in the same order whatever order they were given in
    order = sorted(
        layers, key=lambda c: (-c.ratio * (factor if c.name in kept else 1.0), -c.flops, c.name)
    )  # fmt: skip
    fp4: list[Candidate] = []
    reasons: dict[str, str] = {}
    spent, refused, entered = 0.0, False, False
    for c in order:
        cost, stays = max(0.0, c.omega), c.name in kept
        # Past the budget only those stay that were there already, and only as long as nothing new came in
        most = budget * factor if stays and not entered else budget
        if c.saved_us <= 0:
            reasons[c.name] = f"FP4 saves nothing here ({c.saved_us:.4g} {unit})"
        elif spent + cost <= most:
            over = spent + cost > budget
            spent += cost
            entered |= cost > 0 and not stays
            fp4.append(c)
            reasons[c.name] = f"{_trade(c, unit)}: " + (
                f"stays, within the hysteresis of the budget of {budget:.3g}" if over else "within the budget"
            )
        else:
            refused, left = True, max(0.0, most - spent)
            reasons[c.name] = f"{_trade(c, unit)}: the budget of {budget:.3g} has {left:.3g} left"
    return fp4, reasons, spent, refused


def _trade(c: Candidate, unit: str) -> str:
    if c.omega <= 0:
        return f"no loss for {c.saved_us:.3g} {unit}"
    return f"{c.omega:.3g} of loss for {c.saved_us:.3g} {unit}"


def _checked(candidates: Iterable[Candidate], budget: float, hysteresis: float) -> list[Candidate]:
    for what, value in (("budget", budget), ("hysteresis", hysteresis)):
        if not value >= 0:
            raise ValueError(f"allocate: {what} is {value!r}, but a number from 0 is needed")
    if math.isinf(hysteresis):
        raise ValueError(
            "allocate: hysteresis is infinite, but then nothing would ever change; use e.g. 0.25"
        )
    layers = sorted(candidates, key=lambda c: c.name)
    for one, other in zip(layers, layers[1:], strict=False):
        if one.name == other.name:
            raise ValueError(f"allocate: two candidates are named {one.name!r}; name each layer once")
    for c in layers:
        for what, value in (("omega", c.omega), ("saved_us", c.saved_us)):
            if not math.isfinite(value):
                raise ValueError(
                    f"allocate: {what} of {c.name} is {value}, but a finite number is needed; leave the "
                    "layer out to keep it on BF16"
                )
    return layers
