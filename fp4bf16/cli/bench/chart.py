"""Rates as horizontal bars in one SVG: no script, no font, no file beside it."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT = 1060, 240, 300
BAR, GAP, HEAD, TOP = 17, 5, 38, 58
INK, MUTED, RULE = "#22262b", "#6a7078", "#e3e5e8"
OURS, PEER = "#2b5f8f", "#b9c0c7"


def _text(x: float, y: float, text: str, anchor: str = "start", ink: str = INK, weight: str = "400") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}" '
            f'font-weight="{weight}">{html.escape(text)}</text>')  # fmt: skip


def _peer(track: str) -> bool:
    return track.startswith(("cublas", "triton", "np.", "copy", "torch")) or ", " in track.split(" packed")[0]


def _rate(row: dict[str, Any]) -> tuple[float | None, str]:
    """What a row's bar shows."""
    if row["op"] == "quantize":
        return row.get("gb_s"), "GB/s"
    if row.get("gflops") is not None:
        return row["gflops"], "GFLOP/s"
    return row.get("tflop_s"), "TFLOP/s"


def _label(row: dict[str, Any], value: float, unit: str) -> str:
    parts = [f"{value:.0f} {unit}"]
    if row.get("x_cublas"):
        parts.append(f"{row['x_cublas']:.2f} x cuBLAS")
    elif row.get("x_copy"):
        parts.append(f"{row['x_copy']:.0%} of copy")
    elif row.get("x_np"):
        parts.append(f"{1 / row['x_np']:.2f} x np.matmul")
    if row.get("error") is not None:
        parts.append(f"error {row['error']:.2g}")
    return ", ".join(parts)


def bars(rows: list[dict[str, Any]], title: str) -> str:
    """SVG of the rows that have a rate, a group a shape, one scale a group; ours are dark."""
    groups: dict[tuple[str, tuple[int, ...]], list[dict[str, Any]]] = {}
    for row in rows:
        if _rate(row)[0]:
            groups.setdefault((row["op"], tuple(row["shape"])), []).append(row)
    height = TOP + sum(HEAD + len(group) * (BAR + GAP) for group in groups.values()) + 12
    out = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, Helvetica, Arial, sans-serif" '
        f'font-size="13">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(16, 26, title, weight="600"),
        _text(16, 46, "dark: this package; grey: what it is compared with. Longer is faster.", ink=MUTED),
    ]
    y = float(TOP)
    for (op, shape), group in groups.items():
        top = max(_rate(row)[0] for row in group)
        out.append(f'<line x1="16" x2="{WIDTH - 16}" y1="{y + 8:.0f}" y2="{y + 8:.0f}" stroke="{RULE}"/>')
        out.append(_text(16, y + 27, f"{op} {' x '.join(map(str, shape))}", weight="600"))
        y += HEAD
        for row in group:
            value, unit = _rate(row)
            length = value / top * (WIDTH - LEFT - RIGHT)
            colour = PEER if _peer(row["track"]) else OURS
            out.append(_text(LEFT - 10, y + 13, row["track"], "end"))
            out.append(f'<rect x="{LEFT}" y="{y:.0f}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
            out.append(_text(LEFT + length + 8, y + 13, _label(row, value, unit), ink=MUTED))
            y += BAR + GAP
    out.append("</svg>")
    return "\n".join(out) + "\n"


def write(path: str, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write `bars` with what they were measured on as the title."""
    parts = [about.get("gpu") or about.get("cpu"), f"fp4bf16 {about.get('fp4bf16')}"]
    parts += [f"{name} {about[name]}" for name in ("driver", "torch", "numpy") if about.get(name)]
    parts.append(f"commit {str(about.get('commit'))[:10]}")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(bars(rows, ", ".join(map(str, parts))), encoding="utf-8")
