"""The part of ``report.html`` on the routes of a run: a sentence, the figure, and what each layer's track was
chosen for. Everything comes from the lines of ``metrics.jsonl``.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from .chart import number
from .route_chart import figure, said
from .route_history import History, finite, group_rank, mapping, read

CURVES = (
    "The curves show the share of the network’s multiplications that runs on FP4, how far FP4 outputs were "
    "from BF16’s, and how far at most they are proven to be."
)
INTRO = (
    "Each strip is a layer, in the order of the network, over the whole training. The curves under it share "
    "its time axis: the share of the network’s multiplications that runs on FP4, the budget that the router "
    "may spend, how far FP4 outputs were from BF16’s, and how far at most they are proven to be."
)


def route_section(
    metrics: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
    heading: str = "Routes over time",
) -> str:
    """HTML with heading, figure and table; "" where no router ran.

    metrics: the lines of ``metrics.jsonl``. config: the run's configuration (`Config.to_dict`), whose limits
    are drawn in.

    >>> route_section([{"stage": "base", "step": 1, "loss": 0.5}])
    ''
    """
    history = read(metrics)
    svg = figure(history, marks_of(config), summary(history))
    if not svg:
        return ""
    return (
        f"<h2>{html.escape(heading)}</h2><p>{html.escape(summary(history))}</p>"
        f"<p class=lead>{INTRO if history.changes else CURVES}</p>"
        f'<div class="scroll"><div style="min-width:52rem">{svg}</div></div>'
        f"{_events(history)}{_table(history) if history.changes else ''}"
    )


def routes_svg(metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None = None) -> str:
    """The figure alone, as a file of its own on white; "" where no router ran."""
    history = read(metrics)
    return figure(history, marks_of(config), summary(history), margin=20)


def marks_of(config: Mapping[str, Any] | None) -> dict[str, float]:
    """What the numbers are compared with: the limit of the certified ratio, the target of the consistency."""
    loop = mapping((config or {}).get("loop"))
    aims = loop.get("feedback") and loop.get("forward") != "fp4"  # a given route has no budget to move
    found = {"certified_max": loop.get("limit"), "consistency": loop.get("target") if aims else None}
    return {key: float(value) for key, value in found.items() if finite(value)}


def summary(history: History) -> str:
    """What the figure shows, in a few sentences.

    >>> line = {"stage": "router", "holds_from": 0, "routes": [{"a": "fp4", "b": "bf16"}]}
    >>> summary(read([line, {"stage": "base", "step": 9, "loop": {"fp4_share": 0.75}}]))
    'At the end 1 of 2 layers run on FP4, with 75 % of the FLOPs. The routes never changed.'
    """
    shares = [s for *_, loop in history.loops if (s := finite(loop.get("fp4_share"))) is not None]
    share = shares[-1] if shares else None
    said = _decided(history, share)
    if held := len({(stage, name) for stage, _, name, _ in history.held}):
        said.append(f"{_count(held, 'layer')} {'was' if held == 1 else 'were'} held on BF16 for a while.")
    again = int(sum(finite(loop.get("fallbacks")) or 0 for _, _, loop in history.loops))
    if again:
        said.append(f"Steps were made again with {_count(again, 'layer')} on BF16, summed over the steps.")
    return " ".join(said)


def _decided(history: History, share: float | None) -> list[str]:
    """What runs on FP4 in the end, and how often that was decided anew."""
    percent = "" if share is None else f"{number(100 * share)} %"
    if not history.changes:
        return [f"The route was given and stayed as it was, with {percent or 'some'} of the FLOPs on FP4."]
    last, decisions, moved = history.changes[-1].training, len(history.changes) - 1, moves(history)
    some = sum(track in ("fp4", "dual") for track in last.values())
    flops = f", with {percent} of the FLOPs" if percent else ""
    changed = f"{_count(decisions, 'decision')} changed {_count(moved, 'track')}."
    return [
        f"At the end {some} of {len(last)} layers run on FP4{flops}.",
        changed if moved else "The routes never changed.",
    ]


def moves(history: History) -> int:
    """Changes of a layer's track in training, from one decision to the next."""
    pairs = zip(history.changes, history.changes[1:], strict=False)
    return sum(
        before.training[name] != track
        for before, after in pairs
        for name, track in after.training.items()
        if name in before.training
    )


def _count(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def _events(history: History) -> str:
    """The events as a list, the newest last; the first and last ones of many."""
    rows = [_event(line) for line in history.events]
    if not rows:
        return ""
    shown = (
        rows
        if len(rows) <= 40
        else [
            *rows[:20],
            f"<tr><td></td><td class=word>… {len(rows) - 40} more</td><td></td></tr>",
            *rows[-20:],
        ]
    )
    return (
        f"<details><summary>{_count(len(rows), 'event')}</summary><div class=scroll><table><tr><th>step</th>"
        f"<th class=word>layer</th><th class=word>what happened</th></tr>{''.join(shown)}</table></div>"
        "</details>"
    )


def _event(line: Mapping[str, Any]) -> str:
    kind, reason = (str(line.get(key) or "") for key in ("event", "reason"))
    words = ": ".join(part for part in (kind.replace("_", " "), reason) if part)
    layer = str(line.get("layer") or line.get("name") or "").removesuffix(".weight")
    return (f"<tr><td>{number(finite(line.get('step')))}</td><td class=word>{html.escape(layer)}</td>"
            f"<td class=word>{html.escape(words)}</td></tr>")  # fmt: skip


def _table(history: History) -> str:
    """Every layer's track after the last decision, why, and what it costs."""
    last = history.changes[-1]
    inputs, reasons = (mapping(last.line.get(key)) for key in ("inputs", "reasons"))
    known, several = mapping(inputs.get("layers")), any(len(set(t)) > 1 for t in last.buckets.values())
    unit = {"us": "µs"}.get(str(inputs.get("unit")), str(inputs.get("unit") or ""))
    columns = {"predicted rise of the loss": "all", f"saved, {unit}".rstrip(", "): "saved", "FLOPs": "flops"}
    rows = []
    for name in sorted(last.training, key=group_rank):
        of = mapping(known.get(name))
        cells = "".join(f"<td>{_cell(key, of.get(key))}</td>" for key in columns.values())
        tracks = said((last.training[name],)) + (f" ({said(last.buckets[name])})" if several else "")
        rows.append(
            f"<tr><td>{html.escape(name.removesuffix('.weight'))}</td><td class=word>{html.escape(tracks)}"
            f"</td>{cells}<td class=word>{html.escape(str(reasons.get(name, '')))}</td></tr>"
        )
    head = "".join(f"<th>{html.escape(title)}</th>" for title in columns)
    by_level = (
        "<p>In brackets: the tracks that pictures are drawn on, least noise first.</p>" if several else ""
    )
    return (
        f"<details><summary>The last route, layer by layer</summary>{by_level}<div class=scroll><table><tr>"
        f"<th>layer</th><th class=word>track</th>{head}<th class=word>why</th></tr>{''.join(rows)}"
        "</table></div></details>"
    )


def _cell(key: str, value: Any) -> str:
    """A number of the router's inputs, blank where it had none."""
    if finite(value) is None:
        return ""
    return f"{number(value / 1e6)} M" if key == "flops" else number(value)
