"""A route as a text table: of each layer its track, what that costs and saves, and why."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decision import Decision
    from .router import Router


def explain(router: Router, step: int, bucket: int | None = None) -> str:
    """What `Router.explain` returns."""
    route, decision = router.route(step, bucket), router.in_force(step)
    total = math.fsum(info.flops for info in router.layers.values()) or 1.0
    head = ["layer", "track", "omega", "saved us", "% FLOPs", "why"]
    rows = [head]
    for name, info in router.layers.items():
        omega = router.omega(name, bucket)
        omega = router.omega(name) if omega is None else omega
        saved = router.saved_us(name)
        rows.append([
            name, route[name], "-" if omega is None else f"{omega:.3g}",
            "-" if saved is None else f"{saved:.4g}", f"{100 * info.flops / total:.2f}",
            reason(router, step, name, bucket),
        ])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(w) if i in (2, 3, 4) else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    about = [*_about(decision, bucket), *(f"warning: {sentence}" for sentence in router.unmatched)]
    return "\n".join([_summary(router, step, bucket), *lines, *about]) + "\n"


def reason(router: Router, step: int, name: str, bucket: int | None = None) -> str:
    """Why a layer runs on its track at `step`."""
    pinned = router.pinned(name)
    if pinned is not None:
        return pinned
    held = router.held(step)
    if name in held:
        return f"held on BF16: {held[name]}"
    decision = router.in_force(step)
    if decision is None:
        return "no decision yet"
    return decision.reasons_of(bucket)[name]


def _summary(router: Router, step: int, bucket: int | None) -> str:
    which = "training" if bucket is None else f"noise levels {bucket + 1} of {router.buckets}"
    return f"step {step}, {which}: {100 * router.fp4_share(step, bucket):.1f} % of the FLOPs not on BF16"


def _about(decision: Decision | None, bucket: int | None) -> list[str]:
    if decision is None:
        return []
    spent, saved = decision.totals(bucket)
    lines = [f"decided at step {decision.step}, in force from step {decision.holds_from}"]
    if decision.budget is not None:
        lines[0] += (
            f"; predicted rise of the loss {spent:.3g} of a budget of {decision.budget:.3g} "
            f"({100 * decision.inputs['budget']:.3g} % of the loss x {decision.inputs['factor']:.3g})"
        )
        # The threshold is that of training's route
        told = decision.threshold is not None and bucket is None
        edge = f"; threshold {decision.threshold:.3g} {decision.unit} a unit of loss" if told else ""
        lines.append(f"saves {saved:.4g} {decision.unit} a call{edge}")
    return lines
