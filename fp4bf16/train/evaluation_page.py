"""What people see of an evaluation: sheets of pictures, a page, a table in the terminal."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..extras import require
from .chart import number
from .evaluation import Evaluation
from .extractors import NOT_FID
from .pictures import to_bytes
from .report import STYLE

INK, MUTED = (34, 38, 43), (98, 104, 112)
COLUMNS, GAP, LINE = 6, 12, 13  # cells a row, pixels between them, height of a line of text
_WIDTH = 80  # pixels of one picture on a sheet, at least


# ------------------------------------------------------------------------------------------------- sheets


def sheet(
    rows: Sequence[Sequence[np.ndarray]], titles: Sequence[str], notes: Sequence[Sequence[str]]
) -> bytes:
    """PNG of cells of pictures side by side, each picture under its title, lines of text under each cell.

    rows: a cell each, uint8 (H, W, 3) pictures as many as there are `titles`; notes: lines under each cell.
    """
    image, drawer, fonts = (
        require(f"PIL.{m}", "writing pictures") for m in ("Image", "ImageDraw", "ImageFont")
    )
    font = fonts.load_default()
    height, width = rows[0][0].shape[:2]
    scale = max(1, -(-_WIDTH // width))
    height, width = height * scale, width * scale
    cell = len(titles) * width + (len(titles) - 1) * 4
    lines = max(map(len, notes))
    columns = max(1, min(len(rows), COLUMNS * 2 // len(titles)))
    down = -(-len(rows) // columns)
    step = LINE + 2 + height + lines * LINE + GAP
    page = image.new("RGB", (columns * (cell + GAP) + GAP, down * step + GAP), "white")
    pen = drawer.Draw(page)
    for i, (pictures, under) in enumerate(zip(rows, notes, strict=True)):
        left, top = GAP + (i % columns) * (cell + GAP), GAP + (i // columns) * step
        for j, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
            x = left + j * (width + 4)
            pen.text((x, top), _fitting(title, width, font), MUTED, font)
            page.paste(image.fromarray(picture.repeat(scale, 0).repeat(scale, 1)), (x, top + LINE + 2))
        for k, line in enumerate(under):
            at = (left, top + LINE + 4 + height + k * LINE)
            pen.text(at, _fitting(line, cell, font), INK if k == 0 else MUTED, font)
    buffer = io.BytesIO()
    page.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _fitting(text: str, width: int, font: Any) -> str:
    """`text`, cut so that it is at most `width` pixels long; signs that the font lacks become '?'."""
    text = text.encode("latin-1", "replace").decode("latin-1")
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..."


def sheets(e: Evaluation) -> dict[str, bytes]:
    """File name -> PNG: the tracks side by side, base and aligned, samples and what they resemble most."""
    paired = [d for d in e.sets.values() if d.distances]
    named = [[e.captions[i]] for i in e.shown]
    by_track = {d.track: d for d in paired if d.weights == paired[-1].weights}
    files = {
        "tracks.png": sheet(
            list(zip(by_track["bf16"].shown, by_track["fp4"].shown, strict=True)), ("BF16", "FP4"), named
        )
    }
    if len(paired) == 3:
        files["aligned.png"] = sheet(
            list(zip(paired[0].shown, paired[1].shown, strict=True)), ("base", "aligned"), named
        )
    closest = by_track["bf16"].closest
    if closest:
        files["neighbours.png"] = _neighbour_sheet(e, closest)
    return files


def _neighbour_sheet(e: Evaluation, closest: list) -> bytes:
    """The samples that lie closest to a training picture, beside it."""
    spaces = list(closest[0][3])
    titles = ("sample", *(f"by {space}" for space in spaces))
    cells = [
        [picture, *to_bytes(e.real.train[[index[s] for s in spaces]])] for _, _, picture, index in closest
    ]
    notes = [
        [
            f"sample: {e.captions[row]}",
            *(f"{s}: {e.real.train_captions[index[s]]}" for s in spaces),
            f"distance {distance:.3f} in pixels",
        ]
        for distance, row, _, index in closest
    ]
    return sheet(cells, titles, notes)


# ------------------------------------------------------------------------------------------------- tables


def interval(entry: dict[str, Any]) -> str:
    """A number with its interval.

    >>> interval({"value": 0.5, "low": 0.25, "high": 0.75}), interval({"value": 0.51234})
    ('0.5 (0.25 to 0.75)', '0.512')
    """
    if entry.get("low") is None or entry.get("high") is None:
        return number(entry["value"])
    return f"{number(entry['value'])} ({number(entry['low'])} to {number(entry['high'])})"


Table = tuple[str, list[str], list[list[str]]]


def tables(report: dict[str, Any]) -> list[Table]:
    """(heading, names of the columns, rows) of all that there is."""
    numbers = report["numbers"]
    found = [
        _pivot(f"Distances on: {name}", [n for n in numbers if n.get("extractor") == name and "to" in n])
        for name in report["extractors"]
    ]
    found += [_floor_table(report)] if report["noise_floor"] else []
    judged = [n for n in numbers if n["name"].startswith(("reward", "held-out judge"))]
    found.append(_pivot("Reward and held-out judge", [n for n in judged if "->" not in n["of"]]))
    found.append(_pivot("The same noise, before and after", [n for n in judged if "->" in n["of"]]))
    near = [n for n in numbers if n["name"].startswith("nearest")]
    if near:
        heading = f"Nearest of {near[0]['train']} training pictures"
        found += [
            _pivot(f"{heading}, by {e}", [n for n in near if n["extractor"] == e]) for e in _spaces(near)
        ]
    return [table for table in found if table[2]]


def _spaces(near: list[dict]) -> list[str]:
    return list(dict.fromkeys(n["extractor"] for n in near))


#: Names of numbers as columns are headed.
HEADS = {
    "kernel distance": "kernel",
    "Fréchet distance": "Fréchet",
    "Fréchet distance, n to infinity": "Fréchet, n to infinity",
    "nearest training picture, median distance": "median distance",
    "nearest training picture, share of near-copies": "share of near-copies",
}


def _pivot(heading: str, entries: list[dict]) -> Table:
    """A row for each set, a column for each number."""

    def head(n: dict) -> str:
        to = f", to {n['to']}" if "to" in n else ""
        of_unit = f" ({n['unit']})" if n.get("unit") and n["unit"] != "share" else ""
        return HEADS.get(n["name"], n["name"]) + to + of_unit

    columns, rows = list(dict.fromkeys(map(head, entries))), {}
    for n in entries:
        rows.setdefault(n["of"], {})[head(n)] = n
    body = [
        [
            name,
            str(next(iter(row.values()))["n"]),
            *(interval(row[c]) if c in row else "n/a" for c in columns),
        ]
        for name, row in rows.items()
    ]
    extra = [n for n in entries if n.get("limit") is not None][:1]
    if extra and body:  # what held-out pictures have, as a row of its own
        n = extra[0]
        body.append(
            [
                "real, held out",
                str(n["heldout_n"]),
                number(n.get("heldout")),
                f"5 % are under {number(n['limit'])}",
            ]
        )
    return heading, ["set", "n", *columns], body


def _floor_table(report: dict) -> Table:
    """What FP4 changes, beside what other seeds change."""
    rows = []
    for f in report["noise_floor"]:
        change = {"value": f["change"], "low": f["change_low"], "high": f["change_high"]}
        verdict = {True: "within", False: "beyond", None: "no other seeds"}[f["within"]]
        rows.append([f["extractor"], f["reference"], interval(change), number(f["floor"]),
                     number(f["times_floor"]), verdict])  # fmt: skip
    columns = [
        "extractor",
        "to",
        "kernel distance, FP4 less BF16",
        "seed-to-seed floor",
        "times the floor",
        "",
    ]
    return "Does FP4 change more than other seeds do?", columns, rows


def headline(report: dict[str, Any]) -> list[str]:
    """The evaluation in a few sentences."""
    run, s = report["run"], report["settings"]
    n = report["sets"][0]["n"]
    stage = "finished" if run["stage"] == "finished" else f"at stage {run['stage']}, step {run['step']}"
    state = "aligned" if run["aligned"] else "not aligned yet, so that its base alone is looked at"
    said = [
        f"Run {run['folder']}, {stage}: {state}. {n} pictures a set, "
        f"{s['sampler']} in {s['steps']} steps, guidance {number(s['guidance'])}, seed {s['seed']}."
    ]
    broken = [f"{d['unhealthy']} of {d['name']}" for d in report["sets"] if d["unhealthy"]]
    if broken:
        said.append(f"Pictures that are not finite, or constant, and were left out: {', '.join(broken)}.")
    if not run["judges"]:
        said.append("The run has not trained its judges yet, so nothing is scored.")
    said += [f"Left out: {name} ({why})." for name, why in report["left_out"].items()]
    return [*said, NOT_FID]


def text(report: dict[str, Any]) -> str:
    """Headline and tables for a terminal."""
    blocks = ["\n".join(headline(report))]
    for heading, columns, rows in tables(report):
        cells = [columns, *rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        blocks.append("\n".join([heading, *("  " + line for line in lines)]))
    return "\n\n".join(blocks)


# --------------------------------------------------------------------------------------------------- page


CAPTIONS = {
    "tracks.png": "The same captions and noise on the two tracks, chosen by their place in the list.",
    "aligned.png": "The base and the aligned model, both on BF16, from the same noise.",
    "neighbours.png": "The samples closest to a training picture, and the training pictures nearest to them.",
}


def page(report: dict[str, Any], pictures: dict[str, bytes]) -> str:
    """``report.html``: one file that opens offline."""
    parts = ["<h1>Evaluation</h1>"]
    parts += [f"<p class=lead>{html.escape(line)}</p>" for line in headline(report)]
    for heading, columns, rows in tables(report):
        head = "".join(f"<th class=word>{html.escape(c)}</th>" for c in columns)
        body = "".join(
            "<tr>" + "".join(f"<td class=word>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows
        )
        parts.append(
            f"<h2>{html.escape(heading)}</h2><div class=scroll><table><tr>{head}</tr>{body}</table></div>"
        )
    for name, content in pictures.items():
        data = base64.b64encode(content).decode()
        parts.append(
            f'<h2>{CAPTIONS[name]}</h2><div class=scroll><img alt="{CAPTIONS[name]}" '
            f'src="data:image/png;base64,{data}"></div>'
        )
    parts.append("<footer>Written by fp4bf16. Every number stands in report.json beside this page.</footer>")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>fp4bf16 evaluation</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def files(e: Evaluation) -> dict[str, bytes]:
    """Everything that an evaluation writes: file name -> content; ``report.json`` lists them all."""
    pictures = sheets(e)
    report = e.report | {"files": sorted([*pictures, "report.html", "report.json"])}
    return pictures | {
        "report.html": page(report, pictures).encode(),
        "report.json": (json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode(),
    }
