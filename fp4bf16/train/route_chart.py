"""The figure of a run's routes: a strip of cells for each layer over time, and what steered them below it.

One time axis for all: where a strip changes, the budget, the consistency and the certified ratio of that
moment stand straight under it. It reads the lines of ``metrics.jsonl`` and nothing else.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from .chart import COLOURS, INK, MUTED, RULE, number, smooth, ticks
from .chart import _text as placed_text
from .route_history import STAGES, History, finite, group_of, short

WIDTH, LEFT, RIGHT, GAP = 1100, 236, 96, 26
FP4, BF16, OTHER, HELD = COLOURS[0], "#e7e9ec", "#8fb0c9", COLOURS[1]
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
NAMED = 48  # layers: up to so many have their name beside the strip, more have it as a tooltip alone


# ------------------------------------------------------------------------------------------------- the axis


@dataclass(frozen=True)
class Piece:
    """One stage's part of the time axis: steps 0 to `last` over `width` pixels from `left`."""

    stage: str
    last: float
    left: float
    width: float

    def px(self, at: float) -> float:
        return self.left + min(max(at, 0.0), self.last) / self.last * self.width


def pieces(history: History) -> list[Piece]:
    """The axis: the base training takes three fifths where there is an alignment, too."""
    stages = [stage for stage in STAGES if history.lengths.get(stage)]
    room = WIDTH - LEFT - RIGHT - GAP * (len(stages) - 1)
    shares = {"base": 0.6, "align": 0.4} if len(stages) > 1 else dict.fromkeys(stages, 1.0)
    found, left = [], float(LEFT)
    for stage in stages:
        width = room * shares[stage]
        found.append(Piece(stage, history.lengths[stage], left, width))
        left += width + GAP
    return found


def spans(history: History, piece: Piece, name: str) -> list[tuple[float, float, tuple[str, ...]]]:
    """(from, to, tracks) of a layer within a piece; neighbours with the same tracks are one."""
    before = [c for c in history.changes if list(STAGES).index(c.stage) < list(STAGES).index(piece.stage)]
    inside = [c for c in history.changes if c.stage == piece.stage]
    found: list[tuple[float, float, tuple[str, ...]]] = []
    marks = [(0.0, c) for c in before[-1:]] + [(c.at, c) for c in inside]
    for (at, change), (until, _) in zip(marks, [*marks[1:], (piece.last, None)], strict=True):
        tracks = change.tracks(name, piece.stage)
        if not tracks or until <= at or at >= piece.last:
            continue
        if found and found[-1][2] == tracks and found[-1][1] == at:
            found[-1] = (found[-1][0], until, tracks)
        else:
            found.append((at, until, tracks))
    return found


def colour(tracks: Sequence[str]) -> str:
    """Of a cell: darker, the more of the noise levels run on FP4; dual counts as FP4 with a lighter hand.

    >>> colour(["fp4", "fp4"]) == FP4, colour(["bf16"]) == BF16
    (True, True)
    """
    share = sum({"fp4": 1.0, "dual": 0.75}.get(track, 0.0) for track in tracks) / max(1, len(tracks))
    a, b = (int(BF16[i : i + 2], 16) for i in (1, 3, 5)), (int(FP4[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(a, b, strict=True))


# ----------------------------------------------------------------------------------------------- the figure


def figure(
    history: History,
    marks: Mapping[str, float] | None = None,
    description: str = "Tracks of all layers over time",
    margin: float = 0.0,
) -> str:
    """SVG of the strips and, under them, what steered them; "" where there is nothing to draw. Where nothing
    was decided, on a route that a user gave, there are no strips.

    marks: lines to compare with, by the key of the numbers: ``consistency`` (its target) and
    ``certified_max`` (the limit). margin: white around it, in its pixels, for a file of its own.
    """
    axis = pieces(history)
    below = panels(history, marks or {}) if axis else []
    if not axis or not (history.changes or below):
        return ""
    body, y = [], -26.0
    if history.changes:
        body, y = _strips(history, axis, 34.0)
        body += _legend(history, axis)
    for panel in below:
        drawn, y = panel.draw(axis, y + 26)
        body += drawn
    body += _steps(axis, y + 16)
    width, height = WIDTH + 2 * margin, y + 42 + 2 * margin
    paper = f'<rect x="{-margin}" y="{-margin}" width="100%" height="100%" fill="#fff"/>' if margin else ""
    return (
        f'<svg viewBox="{-margin:g} {-margin:g} {width:g} {height:.0f}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="{FONT}" font-size="11.5">'
        f"<title>{html.escape(description)}</title>{paper}{''.join(body)}</svg>"
    )


def _legend(history: History, axis: Sequence[Piece]) -> list[str]:
    seen = {t for c in history.changes for name in c.buckets for p in axis for t in [c.tracks(name, p.stage)]}
    mixed = any(len(set(tracks)) > 1 for tracks in seen)
    entries = [("FP4 at all noise levels", FP4), ("at some", OTHER)] if mixed else [("FP4", FP4)]
    out, x = [], float(LEFT)
    for name, ink in [*entries, ("BF16", BF16)]:
        out += [_rect(x, 5, 18, 11, ink), text(x + 25, 14.5, name)]
        x += 25 + 6.4 * len(name) + 24
    if history.held:
        out += [_rect(x, 5, 18, 11, BF16), _rect(x, 8.5, 18, 4, HELD),
                text(x + 25, 14.5, "BF16 for a while, as the constraint or a gradient asked")]  # fmt: skip
    return out


def _strips(history: History, axis: Sequence[Piece], y: float) -> tuple[list[str], float]:
    """The cells of all layers, block after block, and where they end."""
    names = history.layers()
    row = 13.0 if len(names) <= NAMED else max(4.0, min(9.0, 700 / len(names)))
    out: list[str] = []
    for group, layers in groupby(names, group_of):
        out.append(text(0, y + 9.5, group, ink=INK))
        least = y + 13  # a line of text, however few and thin the strips are
        for name in layers:
            if len(names) <= NAMED and short(name) != group:
                out.append(text(LEFT - 10, y + 9.5, short(name), "end"))
            out += _row(history, axis, name, y, row)
            y += row
        y = max(y, least) + 7
    return out, y - 7


def _row(history: History, axis: Sequence[Piece], name: str, y: float, row: float) -> list[str]:
    """One layer: its cells, and over them a bar where it was held back. The tooltip has it in words."""
    cells, words, thick = [], [], row - (1.5 if row > 8 else 0.5)
    for piece in axis:
        for at, until, tracks in spans(history, piece, name):
            x = piece.px(at)
            cells.append(_rect(x, y, piece.px(until) - x, thick, colour(tracks)))
            words.append(f"{piece.stage} {number(at)} to {number(until)}: {said(tracks)}")
        steps = sorted(
            {s: why for stage, s, n, why in history.held if (stage, n) == (piece.stage, name)}.items()
        )
        for first, last, why in _stretches(steps):
            x = piece.px(first - 1)
            bar = max(2.0, piece.px(last) - x)
            cells += [_rect(x, y, bar, thick, BF16), _rect(x, y + thick * 0.3, bar, thick * 0.4, HELD)]
            words.append(f"{piece.stage} {number(first)} to {number(last)}: held on BF16 {why}".rstrip())
    title = html.escape(f"{name}\n" + "\n".join(words[:24]))
    return [f"<g><title>{title}</title>", *cells, "</g>"]


def said(tracks: Sequence[str]) -> str:
    """Tracks in words, least noise first."""
    return tracks[0].upper() if len(set(tracks)) == 1 else " | ".join(t.upper() for t in tracks)


def _stretches(steps: Sequence[tuple[float, str]]) -> Iterator[tuple[float, float, str]]:
    """(first, last, reason) of runs of successive steps."""
    start = before = None
    for step, why in steps:
        if before is None or step > before[0] + 1:
            if start is not None:
                yield start[0], before[0], start[1]
            start = (step, why)
        before = (step, why)
    if start is not None:
        yield start[0], before[0], start[1]


def _steps(axis: Sequence[Piece], y: float) -> list[str]:
    """The numbers of the time axis and what they count."""
    out = []
    for piece in axis:
        for at in ticks(0, piece.last, max(2, round(piece.width / 130))):
            if 0 <= at <= piece.last and at == int(at):
                first, last = at == 0 and piece is not axis[0], at == piece.last and piece is not axis[-1]
                anchor = "start" if first else "end" if last else "middle"
                out.append(text(piece.px(at), y, number(at), anchor))
        out.append(text(piece.left + piece.width / 2, y + 18, STAGES[piece.stage], "middle"))
    return out


# ----------------------------------------------------------------------------------------------- the panels


@dataclass(frozen=True)
class Curve:
    """One line of a panel: a key of the loop's numbers, its name at the line's end, its colour.

    kind: "steps" (as it is), "noisy" (faint, with its running mean), "peak" (the largest of steps too dense
    to draw) or "stems" (a peak from the axis up wherever it is not 0).
    """

    key: str
    name: str
    ink: str
    kind: str = "steps"


@dataclass(frozen=True)
class Panel:
    """A low chart on the common time axis: its title and a word on it in the left margin."""

    title: str
    note: str
    curves: Sequence[Curve]
    loops: Sequence[tuple[str, float, Mapping[str, Any]]]
    mark: tuple[float, str] | None = None
    top: float | None = None  # upper end of the axis
    percent: bool = False
    whole: bool = False  # it counts something
    height: float = 62.0

    def points(self, curve: Curve, piece: Piece) -> list[tuple[float, float]]:
        """(step, value) of a curve within a piece, at most one for every two pixels."""
        raw = [
            (step, value)
            for stage, step, loop in self.loops
            if stage == piece.stage and (value := finite(loop.get(curve.key))) is not None
        ]
        return thinned(raw, max(2, int(piece.width / 2)), curve.kind in ("peak", "stems"))

    def draw(self, axis: Sequence[Piece], y: float) -> tuple[list[str], float]:
        """(SVG, where it ends)."""
        drawn = [[self.points(curve, piece) for piece in axis] for curve in self.curves]
        values = [v for curve in drawn for points in curve for _, v in points]
        values += [self.mark[0]] if self.mark else []
        scale = Scale.of(values, self.top, y + self.height, y)
        out = [text(0, y + 9, self.title, ink=INK), *(text(0, y + 24 + 14 * i, part)
               for i, part in enumerate(self.note.split("\n")))]  # fmt: skip
        for value in (v for v in scale.ticks if not self.whole or v == int(v)):
            out += [_rule(p.left, p.left + p.width, scale.py(value), RULE) for p in axis]
            out.append(text(LEFT - 10, scale.py(value) + 4, self._said(value), "end"))
        ends = []
        if self.mark:
            out += [_rule(p.left, p.left + p.width, scale.py(self.mark[0]), MUTED, True) for p in axis]
            ends.append((scale.py(self.mark[0]), f"{self.mark[1]} {self._said(self.mark[0])}", MUTED))
        for curve, parts in zip(self.curves, drawn, strict=True):
            for piece, points in zip(axis, parts, strict=True):
                out += _drawn(piece, points, scale, curve)
            if last := next((points[-1][1] for points in reversed(parts) if points), None):
                ends.append((scale.py(last), f"{curve.name} {self._said(last)}".strip(), curve.ink))
        return out + _ends(ends), y + self.height

    def _said(self, value: float) -> str:
        return f"{number(100 * value)} %" if self.percent else number(value)


def panels(history: History, marks: Mapping[str, float]) -> list[Panel]:
    """Those of which there are numbers."""
    loops = [loop for loop in history.loops if history.lengths.get(loop[0])]  # of stages that are on the axis
    blue, orange = COLOURS[0], COLOURS[1]
    share, budget = Curve("fp4_share", "", blue), Curve("budget", "", blue)
    certified = [
        Curve("certified_max", "max", orange, "peak"),
        Curve("certified_mean", "mean", blue, "noisy"),
    ]
    apart, redone = Curve("consistency", "", blue, "noisy"), Curve("fallbacks", "", orange, "stems")
    every = [
        Panel("FP4 share", "of the network’s FLOPs", [share], loops, top=1.0, percent=True),
        Panel("Budget", "loss that FP4 may add,\nshare of the loss", [budget], loops),
        Panel("Consistency", "squared distance of FP4\nfrom BF16, relative", [apart], loops,
              _mark(marks, "consistency", "target")),
        Panel("Certified ratio", "proven distance of FP4\nfrom BF16, relative", certified, loops,
              _mark(marks, "certified_max", "limit")),
        Panel("Made again", "layers for which a step\nran again, on BF16", [redone], loops, whole=True),
    ]  # fmt: skip
    return [p for p in every if any(_shown(loop.get(c.key), c.key) for _, _, loop in loops for c in p.curves)]


def _mark(marks: Mapping[str, float], key: str, name: str) -> tuple[float, str] | None:
    value = finite(marks.get(key))
    return (value, name) if value else None  # 0 is off


def _shown(value: Any, key: str) -> bool:
    """Whether a panel is worth its place: that no step was made again the text says."""
    return finite(value) is not None and (key != "fallbacks" or value > 0)


def thinned(
    points: Sequence[tuple[float, float]], most: int, peak: bool = False
) -> list[tuple[float, float]]:
    """At most `most` points: means (or the largest values) of runs of equal length, at the run's last step.

    >>> thinned([(1, 0.0), (2, 4.0), (3, 1.0), (4, 1.0)], 2)
    [(2, 2.0), (4, 1.0)]
    """
    size = -(-len(points) // most) if points else 1
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(r[-1][0], max(v for _, v in r) if peak else sum(v for _, v in r) / len(r)) for r in runs]


@dataclass(frozen=True)
class Scale:
    """A vertical axis from `low` (at pixel `bottom`) to `high` (at `top`), logarithmic over a decade."""

    low: float
    high: float
    bottom: float
    top: float
    log: bool
    ticks: Sequence[float]

    @classmethod
    def of(cls, values: Sequence[float], high: float | None, bottom: float, top: float) -> Scale:
        least, most = min(values), high or max(values)
        if high is None and least > 0 and most >= 12 * least:
            powers = [10.0**k for k in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]
            return cls(powers[0], powers[-1], bottom, top, True, powers[:: max(1, len(powers) // 3)])
        steps = ticks(min(0.0, least), most if most > min(0.0, least) else 1.0, 3)
        return cls(steps[0], steps[-1], bottom, top, False, steps)

    def py(self, value: float) -> float:
        low, high, v = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, v = math.log(low), math.log(high), math.log(v)
        return self.bottom - (v - low) / (high - low) * (self.bottom - self.top)


def _drawn(piece: Piece, points: Sequence[tuple[float, float]], scale: Scale, curve: Curve) -> list[str]:
    """A curve as its kind asks for it."""
    at = [(piece.px(step), scale.py(value)) for step, value in points]
    if curve.kind == "stems":
        return [_rect(x - 0.75, y, 1.5, scale.bottom - y, curve.ink) for x, y in at if y < scale.bottom]
    if len(at) == 1:
        return [f'<circle cx="{at[0][0]:.1f}" cy="{at[0][1]:.1f}" r="2.5" fill="{curve.ink}"/>']
    lines = [(at, 1.8, 1.0)] if at else []
    if curve.kind == "noisy" and len(at) > 60:
        calm = zip((x for x, _ in at), smooth([y for _, y in at], 12), strict=True)
        lines = [(at, 1.0, 0.3), (list(calm), 1.8, 1.0)]
    out = []
    for some, width, opacity in lines:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in some)
        out.append(
            f'<polyline points="{path}" fill="none" stroke="{curve.ink}" stroke-width="{width}" '
            f'opacity="{opacity}" stroke-linejoin="round"/>'
        )
    return out


def _ends(ends: Sequence[tuple[float, str, str]]) -> list[str]:
    """Names and last values to the right of a panel, moved apart where they would overlap."""
    out, placed = [], -1e9
    for y, words, ink in sorted(ends):
        placed = max(y, placed + 14)
        out.append(text(WIDTH - RIGHT + 10, placed + 4, words, ink=ink))
    return out


def _rect(x: float, y: float, width: float, height: float, ink: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{height:.1f}" fill="{ink}"/>'


def _rule(x1: float, x2: float, y: float, ink: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{ink}"{dash}/>'


def text(x: float, y: float, words: str, anchor: str = "start", ink: str = MUTED) -> str:
    return placed_text(x, y, words, anchor, ink)
