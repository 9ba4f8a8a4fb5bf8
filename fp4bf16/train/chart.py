"""Line charts as inline SVG: no script, no font, no file beside the page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 520, 266
LEFT, RIGHT, TOP, BOTTOM = 52, 96, 30, 40
INK, MUTED, RULE = "#22262b", "#6a7078", "#e3e5e8"
COLOURS = ("#2b5f8f", "#c2571a", "#3f7d4e", "#7a4f8f")  # told apart in grey and by the colour-blind as well


@dataclass(frozen=True)
class Series:
    """One line: `x`, `y` of the same length (points where y is None or not finite are left out), and its
    name.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    faint: bool = False  # a raw signal behind its average

    def points(self) -> list[tuple[float, float]]:
        return [
            (float(a), float(b))
            for a, b in zip(self.x, self.y, strict=True)
            if b is not None and math.isfinite(b)
        ]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover [low, high] in steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0.03, 0.98)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: three significant digits, no exponent where it can be avoided.

    >>> number(0.12345), number(1234.5), number(None)
    ('0.123', '1234', 'n/a')
    """
    if value is None or not math.isfinite(value):
        return "n/a"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:.{digits}g}".replace("e-0", "e-")


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    limits: tuple[float, float] | None = None,
    marks: Sequence[tuple[float, str]] = (),
    description: str = "",
) -> str:
    """SVG of `series` in one frame; `limits` fixes the y axis, `marks` are labelled horizontal lines."""
    points = [p for s in series for p in s.points()]
    if not points:
        return f'<p class="none">No values for this chart ({html.escape(y_label)}).</p>'
    xs, ys = [p[0] for p in points], [p[1] for p in points] + [m[0] for m in marks]
    x_ticks = ticks(min(xs), max(xs)) if max(xs) > min(xs) else [min(xs)]
    y_ticks = ticks(*(limits or (min(ys), max(ys))))
    x0, x1 = min(xs), max(max(xs), min(xs) + 1e-9)
    y0, y1 = y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (min(max(y, y0), y1) - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{html.escape(description or y_label)}</title>",
    ]
    for y in y_ticks:
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}" stroke="{RULE}"/>'
        )
        out.append(_text(LEFT - 8, py(y) + 4, number(y), "end"))
    for x in x_ticks:
        if x0 <= x <= x1:
            out.append(_text(px(x), HEIGHT - BOTTOM + 18, number(x), "middle"))
    for y, _ in marks:
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}" '
            f'stroke="{MUTED}" '
            f'stroke-dasharray="4 4"/>'
        )
    labels = [(py(y), name, MUTED) for y, name in marks]
    labels += _lines(series, px, py, out)
    out += _labels(labels)
    out.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, "middle"))
    out.append(_text(LEFT, 13, y_label, "start"))
    out.append("</svg>")
    return "".join(out)


def _lines(series: Sequence[Series], px, py, out: list[str]) -> list[tuple[float, str, str]]:
    """Draw the lines into `out`; (height, name, colour) of the label at each line's end."""
    labels, colour = [], -1
    for s in series:
        colour += not s.faint
        ink = COLOURS[max(colour, 0) % len(COLOURS)]
        points = s.points()
        if not points:
            continue
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        style = 'stroke-width="1" opacity=".3"' if s.faint else 'stroke-width="2"'
        out.append(f'<polyline points="{path}" fill="none" stroke="{ink}" {style} stroke-linejoin="round"/>')
        if not s.faint:
            if len(points) <= 40:
                out += [
                    f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.5" fill="{ink}"/>' for x, y in points
                ]
            labels.append((py(points[-1][1]), s.name, ink))
    return labels


def _labels(labels: list[tuple[float, str, str]]) -> list[str]:
    """Names beside the ends of the lines, moved apart where they would overlap."""
    placed, out = -1e9, []
    for y, name, ink in sorted(labels):
        placed = max(y, placed + 15)
        out.append(_text(WIDTH - RIGHT + 8, placed + 4, name, "start", ink))
    return out


def _text(x: float, y: float, text: str, anchor: str, ink: str = MUTED) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}">{html.escape(text)}</text>'


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values, shorter at the start.

    >>> smooth([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    total, out = 0.0, []
    for i, v in enumerate(values):
        total += v - (values[i - window] if i >= window else 0.0)
        out.append(total / min(i + 1, window))
    return out
