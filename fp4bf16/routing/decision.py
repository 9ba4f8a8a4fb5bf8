"""One decision of the router: what it was made from, and the routes that follow. A pure function of data.

`settle` turns the inputs of a decision into routes. The inputs are plain values, so that a decision that is
written down can be made again, to the bit, without a clock and without a measurement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import ConfigError
from .allocation import Allocation, Candidate, allocate

SLOW = "bf16"  #: the track of layers that are not worth FP4


@dataclass(frozen=True)
class Decision:
    """Routes from a step on, and why.

    step: at which it was made. holds_from: first step that runs on it. routes: of each bucket of noise
    levels, least noise first: {layer: track}. training: where all levels meet. reasons: of each layer, in
    training. changes: what differs from before: {"name", "bucket" (None: training), "from", "to", "reason"}.
    budget: the rise of the loss that was allowed, in its units; None where no loss was known. threshold:
    least microseconds saved a unit of loss of a layer on FP4 in training; None if the budget left none out.
    spent, saved: predicted rise of the loss and what is saved (in `unit`) by training's route. inputs: what
    `settle` was given.
    """

    step: int
    holds_from: int
    routes: list[dict[str, str]]
    training: dict[str, str]
    reasons: dict[str, str]
    bucket_reasons: list[dict[str, str]]
    changes: list[dict[str, Any]]
    budget: float | None
    threshold: float | None
    spent: float
    saved: float
    unit: str
    inputs: dict[str, Any]

    def reasons_of(self, bucket: int | None = None) -> dict[str, str]:
        """Why each layer runs on its track in a bucket; None: in training."""
        return self.bucket_reasons[bucket] if bucket is not None and self.bucket_reasons else self.reasons

    def totals(self, bucket: int | None = None) -> tuple[float, float]:
        """(predicted rise of the loss, what is saved) by the route of a bucket; None: by training's."""
        if bucket is None or not self.bucket_reasons:
            return self.spent, self.saved
        route, layers = self.routes[bucket], self.inputs["layers"]
        fast = [known for name, known in layers.items() if route[name] == self.inputs["fast"]]
        costs = [max(0.0, cost) for known in fast if (cost := _cost(known, bucket)) is not None]
        return math.fsum(costs), math.fsum(known["saved"] for known in fast)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` takes them back to the bit."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Decision:
        """What `to_dict` gave; other keys are skipped, so that a line of a journal will do. Raises
        `ConfigError` naming what is missing.
        """
        names = [f.name for f in fields(cls)]
        missing = [n for n in names if n not in data]
        if missing:
            raise ConfigError(
                f"route: a decision lacks {', '.join(missing)}; pass what Decision.to_dict() gave"
            )
        held = cls(**json.loads(json.dumps({n: data[n] for n in names})))
        if not (isinstance(held.step, int) and isinstance(held.holds_from, int) and held.routes):
            raise ConfigError(
                f"route: a decision at step {held.step!r} from {held.holds_from!r} on holds "
                f"{held.routes!r}; pass what Decision.to_dict() gave"
            )
        if held.holds_from <= held.step:
            raise ConfigError(
                f"route: a decision of step {held.step} holds from {held.holds_from}, but from the step "
                "after at the earliest"
            )
        return held


def settle(inputs: Mapping[str, Any]) -> Decision:
    """The decision that follows from `inputs` and nothing else.

    inputs, all of them plain values:

    - step, holds_from, hysteresis; budget (a share of the loss), factor (on the budget), loss (or None).
    - fast: the track of layers that leave BF16. unit: of what is saved.
    - fixed: {layer: [track, reason]} of layers that are not decided about.
    - layers: {layer: {"omega": [of each bucket, or None], "all": omega at all levels or None, "saved",
      "flops", "disturbance"}} of the others, in the routes' order.
    - held: {layer: reason}: those that stay on BF16 whatever they save.
    - order: names of all layers. before: routes in force, of each bucket; before_training.

    A layer's cost is its omega times max(1, disturbance), disturbance = n^2 / (tr Sigma / B): how much more
    FP4 disturbs the gradient of a step than drawing another batch would. Noise under that of sampling costs
    nothing extra; the rule is this package's own. A cost that is no finite number leaves its layer on BF16.

    Raises `ValueError` as `allocate` does.
    """
    loss = inputs["loss"]
    # The magnitude: objectives of policies may be negative
    budget = None if loss is None else inputs["budget"] * inputs["factor"] * abs(loss)
    parts = [_allocated(inputs, budget, i, before) for i, before in enumerate(inputs["before"])]
    # With one bucket its levels are all levels: one allocation
    whole = parts[0] if len(parts) == 1 else _allocated(inputs, budget, None, inputs["before_training"])
    routes, training = [_route(inputs, p.fp4) for p in parts], _route(inputs, whole.fp4)
    changes = _changes(None, inputs["before_training"], training, whole.reasons)
    several = parts if len(parts) > 1 else []
    for i, part in enumerate(several):
        changes += _changes(i, inputs["before"][i], routes[i], part.reasons)
    return Decision(
        inputs["step"], inputs["holds_from"], routes, training, _reasons(inputs, whole),
        [_reasons(inputs, part) for part in several], changes, budget, whole.threshold, whole.spent,
        whole.saved_us, inputs["unit"], json.loads(json.dumps(inputs, allow_nan=False)),
    )  # fmt: skip


def _reasons(inputs: Mapping[str, Any], part: Allocation) -> dict[str, str]:
    fixed = {name: reason for name, (_, reason) in inputs["fixed"].items()}
    return {name: fixed.get(name) or part.reasons[name] for name in inputs["order"]}


def _cost(known: Mapping[str, Any], bucket: int | None) -> float | None:
    """What a layer costs at the noise levels of a bucket (None: at all), None where that is not known."""
    omega = known["all"] if bucket is None or known["omega"][bucket] is None else known["omega"][bucket]
    return None if omega is None else omega * max(1.0, known["disturbance"] or 1.0)


def _allocated(
    inputs: Mapping[str, Any], budget: float | None, bucket: int | None, before: Mapping[str, str]
) -> Allocation:
    candidates, reasons = [], {}
    for name, known in inputs["layers"].items():
        cost = _cost(known, bucket)
        if name in inputs["held"]:
            reasons[name] = inputs["held"][name]
        elif cost is None:
            reasons[name] = "its sensitivity has not been measured yet"
        elif budget is None:
            reasons[name] = "no loss has been observed yet, of which the budget is a share"
        elif not math.isfinite(cost):
            reasons[name] = f"its predicted rise of the loss is {cost}"
        else:
            candidates.append(Candidate(name, cost, known["saved"], known["flops"]))
    keep = {name for name, track in before.items() if track == inputs["fast"]}
    chosen = allocate(candidates, budget or 0.0, keep, inputs["hysteresis"], inputs["unit"])
    order = {name: chosen.reasons.get(name) or reasons[name] for name in inputs["layers"]}
    return Allocation(chosen.fp4, order, chosen.spent, chosen.saved_us, chosen.threshold)


def _route(inputs: Mapping[str, Any], fp4: frozenset[str]) -> dict[str, str]:
    fixed, fast = inputs["fixed"], inputs["fast"]
    return {
        name: fixed[name][0] if name in fixed else (fast if name in fp4 else SLOW) for name in inputs["order"]
    }


def _changes(bucket: int | None, before: Mapping, after: Mapping, reasons: Mapping) -> list[dict[str, Any]]:
    return [
        {"name": n, "bucket": bucket, "from": before[n], "to": t, "reason": reasons.get(n, "pinned")}
        for n, t in after.items()
        if n in before and before[n] != t
    ]
