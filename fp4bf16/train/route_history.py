"""What the metrics of a run say of its routes: which layer ran on which track, from when to when, and what
the loop measured. Nothing but the lines of ``metrics.jsonl`` is read, so that any run can be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Stages that train -> what a unit of their time is.
STAGES = {"base": "base training, step", "align": "alignment, iteration"}
GROUPS = ("conv_in", "time_embedding", "caption_embedding", "class_embedding", "down_blocks", "mid_block",
          "up_blocks", "conv_norm_out", "conv_out")  # fmt: skip


@dataclass(frozen=True)
class Change:
    """What holds from `at` of a stage on.

    training: layer -> track where all noise levels meet; buckets: layer -> one track a bucket of noise
    levels, least noise first, which is what draws pictures. line: the decision as it was written.
    """

    stage: str
    at: float
    training: Mapping[str, str]
    buckets: Mapping[str, tuple[str, ...]]
    line: Mapping[str, Any]

    def tracks(self, name: str, stage: str) -> tuple[str, ...]:
        """The tracks that a layer runs on in a stage: only the alignment draws pictures, level by level."""
        if stage == "base":
            return (self.training[name],) if name in self.training else ()
        return self.buckets.get(name, ())


@dataclass
class History:
    """What a run's metrics say of its routes.

    lengths: stage -> its last step; changes: in order; loops: (stage, step, numbers of that step); held:
    (stage, step, layer, reason), a layer kept on BF16 in that step; events: further lines of the router.
    """

    lengths: dict[str, float] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    loops: list[tuple[str, float, Mapping[str, Any]]] = field(default_factory=list)
    held: list[tuple[str, float, str, str]] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)

    def layers(self) -> list[str]:
        """Every layer that was ever routed, in the order of the network."""
        seen = list(dict.fromkeys(name for change in self.changes for name in change.buckets))
        return sorted(seen, key=lambda name: (group_rank(name), seen.index(name)))


def read(metrics: Sequence[Mapping[str, Any]]) -> History:
    """The history in the lines of ``metrics.jsonl``; empty where no router ran.

    >>> line = {"stage": "router", "holds_from": 0, "routes": [{"conv_in.weight": "bf16"}]}
    >>> read([line, {"stage": "base", "step": 1, "loss": 1.0, "loop": {"fp4_share": 0.0}}]).lengths
    {'base': 1.0}
    """
    history, stage = History(), _first_stage(metrics)
    for line in metrics:
        kind = line.get("stage")
        if kind in STAGES and isinstance(line.get("loop"), Mapping):
            stage, step = kind, finite(line.get("step")) or 0.0
            history.lengths[stage] = max(step, history.lengths.get(stage, 0.0))
            history.loops.append((stage, step, line["loop"]))
            history.held += [(stage, step, *held) for held in _held(line["loop"].get("held"))]
        elif kind == "router" and _routes(line):
            at = history.lengths.get(stage, 0.0)
            if stage == "base" and finite(line.get("holds_from")) is not None:
                at = float(line["holds_from"])  # the alignment counts updates, its lines are iterations
            if not history.changes and at > 0:
                history.changes += _before(stage, line)
            history.changes.append(_change(stage, at, _routes(line), line.get("training"), line))
        elif kind == "router":
            history.events.append(line)
    return history


def _change(stage: str, at: float, routes: Sequence[Mapping[str, str]], training: Any, line: Any) -> Change:
    names = dict.fromkeys(name for route in routes for name in route)
    buckets = {name: tuple(route[name] for route in routes if name in route) for name in names}
    if not isinstance(training, Mapping) or not _plain(training):
        training = {name: tracks[0] if len(set(tracks)) == 1 else "bf16" for name, tracks in buckets.items()}
    return Change(stage, at, training, buckets, line)


def _before(stage: str, line: Mapping[str, Any]) -> list[Change]:
    """What held until the first decision, which says so."""
    inputs = mapping(line.get("inputs"))
    routes = _routes({"routes": inputs.get("before")})
    return [_change(stage, 0.0, routes, inputs.get("before_training"), {})] if routes else []


def _first_stage(metrics: Sequence[Mapping[str, Any]]) -> str:
    """The stage that what stands before the first training line belongs to."""
    return next((m["stage"] for m in metrics if m.get("stage") in STAGES and m.get("loop")), "base")


def _routes(line: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """One {layer: track} a bucket; a line with a single route may hold it plainly."""
    routes = line.get("routes")
    routes = [routes] if isinstance(routes, Mapping) else routes if isinstance(routes, (list, tuple)) else []
    return [route for route in routes if isinstance(route, Mapping) and _plain(route)]


def _plain(route: Mapping[str, Any]) -> bool:
    return bool(route) and all(isinstance(track, str) for track in route.values())


def _held(held: Any) -> Iterator[tuple[str, str]]:
    """(layer, reason) of each layer held back, where the line names them and does not only count them."""
    if isinstance(held, Mapping):
        yield from ((str(name), str(reason)) for name, reason in held.items())
    elif isinstance(held, (list, tuple)):
        yield from ((str(name), "") for name in held)


def finite(value: Any) -> float | None:
    """`value` as a float where it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def group_of(name: str) -> str:
    """The block that a layer stands in.

    >>> group_of("down_blocks.0.resnets.1.conv1.weight"), group_of("conv_in.weight")
    ('down_blocks.0', 'conv_in')
    """
    head, _, rest = name.partition(".")
    return f"{head}.{rest.partition('.')[0]}" if head in ("down_blocks", "up_blocks") else head


def group_rank(name: str) -> tuple[int, int]:
    """Where its block stands in the network; what is not known stands last."""
    head, _, index = group_of(name).partition(".")
    return (GROUPS.index(head) if head in GROUPS else len(GROUPS), int(index) if index.isdigit() else 0)


def short(name: str) -> str:
    """A layer's name within its block.

    >>> short("mid_block.attentions.0.to_q.weight"), short("conv_in.weight")
    ('attentions.0.to_q', 'conv_in')
    """
    inner = name.removesuffix(".weight")
    return inner.removeprefix(group_of(name)).removeprefix(".") or inner
