"""The arms of bench/ablation_loop.py: a dot for each seed, the range of all-BF16's seeds behind them.

    python bench/ablation_chart.py bench/results/cpu/ablation_loop.json

Writes an SVG of the same name beside the file.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ablation_verdict import YARDSTICK, column

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp4bf16.train.chart import COLOURS, INK, MUTED, RULE, number, ticks  # noqa: E402
from fp4bf16.train.route_chart import FONT, text  # noqa: E402

LEFT, PANEL, GAP, ROW, TOP = 150, 196, 52, 30, 56
BAND = "#eef2f6"
#: Title, a word on it, key, whether it is a share that reaches from 0 to 1.
PANELS = (
    ("Loss", "of the base model, on BF16", "loss", False),
    ("Kernel distance", "of its pictures to real ones", "kernel_distance", False),
    ("Reward", "after the alignment", "reward", False),
    ("On FP4", "share of the FLOPs", "fp4_share", True),
)


def chart(found: Mapping[str, Any]) -> str:
    """SVG of the arms in `found`: {arm: {seed: row}}."""
    names = list(found)
    width, height = LEFT + len(PANELS) * (PANEL + GAP) - GAP + 12, TOP + ROW * len(names) + 34
    out = [
        f'<svg viewBox="-16 -14 {width + 32} {height + 28}" role="img" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="{FONT}" font-size="12"><title>Arms of the ablation</title>'
        f'<rect x="-16" y="-14" width="100%" height="100%" fill="#fff"/>'
    ]
    for i, name in enumerate(names):
        out.append(text(0, TOP + ROW * (i + 0.5) + 4, name, ink=INK))
    for i, panel in enumerate(PANELS):
        out += _panel(found, names, panel, LEFT + i * (PANEL + GAP))
    for i, name in enumerate(names):
        if not any(_finite(found, name, key) for *_, key, _ in PANELS):
            out.append(text(LEFT, TOP + ROW * (i + 0.5) + 4, "did not reach its end", ink=COLOURS[1]))
    return "".join([*out, "</svg>\n"])


def _finite(found: Mapping[str, Any], name: str, key: str) -> list[float]:
    """The values of an arm that can be drawn; a run that diverged has others."""
    return [v for v in column(found, name, key) if math.isfinite(v)]


def _panel(
    found: Mapping[str, Any], names: Sequence[str], panel: tuple[str, str, str, bool], left: float
) -> list[str]:
    title, note, key, share = panel
    everything = [v for name in names for v in _finite(found, name, key)]
    out = [text(left, 6, title, ink=INK), text(left, 22, note)]
    if not everything:
        return [*out, text(left, TOP + 14, "no values")]
    marks = ticks(0.0, 1.0, 2) if share else ticks(min(everything), max(everything), 3)
    low, high, bottom = marks[0], marks[-1], TOP + ROW * len(names)

    def px(value: float) -> float:
        return left + (value - low) / (high - low) * PANEL

    yardstick = _finite(found, YARDSTICK, key) if YARDSTICK in found and not share else []
    if len(yardstick) > 1:
        first, last = px(min(yardstick)), px(max(yardstick))
        out.append(f'<rect x="{first:.1f}" y="{TOP - 8}" width="{max(last - first, 1):.1f}" '
                   f'height="{bottom - TOP + 12}" fill="{BAND}"/>')  # fmt: skip
    for mark in marks:
        out.append(f'<line x1="{px(mark):.1f}" x2="{px(mark):.1f}" y1="{TOP - 8}" y2="{bottom + 4}" '
                   f'stroke="{RULE}"/>')  # fmt: skip
        out.append(
            text(px(mark), bottom + 20, f"{number(100 * mark)} %" if share else number(mark), "middle")
        )
    for i, name in enumerate(names):
        out += _dots([px(v) for v in _finite(found, name, key)], TOP + ROW * (i + 0.5), name == YARDSTICK)
    return out


def _dots(at: Sequence[float], y: float, yardstick: bool) -> list[str]:
    """A dot for each seed and, for more than one, a tick at their mean."""
    ink = MUTED if yardstick else COLOURS[0]
    out = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{ink}" fill-opacity=".55"/>' for x in at]
    if len(at) > 1:
        mean = sum(at) / len(at)
        out.append(f'<line x1="{mean:.1f}" x2="{mean:.1f}" y1="{y - 9:.1f}" y2="{y + 9:.1f}" '
                   f'stroke="{ink}" stroke-width="2"/>')  # fmt: skip
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="the JSON file that ablation_loop.py wrote")
    args = parser.parse_args(arguments)
    try:
        found = json.loads(args.results.read_text())["arms"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"ablation_chart: {html.escape(str(args.results))} holds no arms ({error!r})", file=sys.stderr)
        return 2
    path = args.results.with_suffix(".svg")
    path.write_text(chart(found), encoding="utf-8")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
