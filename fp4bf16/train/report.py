"""``report.html``: one file that opens offline and shows what a run did, good or bad."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from .chart import Series, line_chart, number, smooth
from .pictures import png
from .report_routes import route_section

STYLE = """
:root { color-scheme: light; --ink: #22262b; --muted: #626870; --rule: #e3e5e8; --bad: #a8341c; }
* { box-sizing: border-box; }
body {
  margin: 0; background: #fff; color: var(--ink);
  font: 17px/1.55 Charter, "Bitstream Charter", "Sitka Text", Cambria, Georgia, serif;
}
main { max-width: 72rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .4rem; font-weight: 600; }
h2 { font-size: 1.3rem; margin: 3.2rem 0 .4rem; font-weight: 600; }
p { max-width: 44rem; margin: .4rem 0 1rem; }
.lead, figcaption, .none, footer { color: var(--muted); }
table, .tile, svg text, figcaption, .pair span {
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
.tiles {
  display: grid; gap: 1.5rem; margin: 2rem 0;
  grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr));
}
.tile { border-top: 2px solid var(--ink); padding-top: .6rem; }
.tile b { display: block; font-size: 1.5rem; font-weight: 600; line-height: 1.3; white-space: nowrap; }
.tile span { display: block; font-size: .82rem; line-height: 1.35; color: var(--muted); }
.bad, .tile.bad b { color: var(--bad); }
.charts {
  display: grid; gap: 1.5rem 2.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(27rem, 100%), 1fr));
}
figure { margin: 0; }
figcaption { font-size: .85rem; line-height: 1.4; max-width: 34rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11.5px; }
.gallery {
  display: grid; gap: 1.4rem 1.2rem;
  grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr));
}
.pair div { display: grid; grid-template-columns: 1fr 1fr; gap: 4px; }
.pair img { width: 100%; display: block; image-rendering: pixelated; }
.pair span { font-size: .7rem; color: var(--muted); text-align: center; }
.pair figcaption { text-align: center; color: var(--ink); font-size: .82rem; margin-top: .15rem; }
table { border-collapse: collapse; font-size: .88rem; margin: .8rem 0 1.2rem; }
.scroll { overflow-x: auto; }
th, td { text-align: right; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--rule); }
th, td { white-space: nowrap; }
th { font-weight: 600; }
th:first-child, td:first-child, .word { text-align: left; }
details { margin-top: 2.5rem; }
summary { cursor: pointer; }
pre { font-size: .8rem; line-height: 1.45; overflow-x: auto; }
footer { margin-top: 4rem; font-size: .85rem; border-top: 1px solid var(--rule); padding-top: 1rem; }
"""

#: What each guard measures.
MEASURED = {
    "pixel_distance": "kernel distance of their pixel statistics to the winning style's",
    "pattern_2x2": "amplitude of their mean 2 x 2 pixels: a fine dot grid",
    "pattern_4x4": "how far their mean 4 x 4 pixels depart from the real pictures'",
    "slope": "how steeply the power of their spectrum falls, in decades a decade",
    "contrast": "mean standard deviation of the luma, on [-1, 1]",
    "colourfulness": "mean of Hasler and Suesstrunk's measure, on 0 to 255",
}


def build_report(
    config_text: str,
    metrics: Sequence[dict[str, Any]],
    pairs: Sequence[dict[str, Any]],
    facts: Sequence[str] = (),
) -> str:
    """The page as one string of HTML, nothing loaded from elsewhere.

    `metrics` are the lines of ``metrics.jsonl``; what is missing among them (a run stopped early) is said
    in its place. `pairs` hold ``caption``, ``base``, ``aligned`` (uint8 (H, W, 3), from the same noise),
    ``base_score``, ``aligned_score`` (the held-out judge's probability of the winning style).
    """
    by_stage: dict[str, list[dict[str, Any]]] = {}
    for line in metrics:
        by_stage.setdefault(line.get("stage", ""), []).append(line)
    summary = (by_stage.get("summary") or [{}])[-1]
    config = json.loads(config_text)
    parts = [
        _head(summary, facts, config.get("loop", {}).get("forward", "bf16")),
        _tiles(summary),
        _gallery(pairs),
        _curves(by_stage),
        _guards(summary),
        _fidelity(by_stage),
        route_section(metrics, config),
        _times(summary),
        f"<details><summary>Configuration</summary><pre>{html.escape(config_text)}</pre></details>",
        "<footer>Written by fp4bf16. Every number stands in metrics.jsonl beside this page.</footer>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>fp4bf16 run</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _head(summary: dict, facts: Sequence[str], forward: str) -> str:
    lines = "".join(f"<p class=lead>{html.escape(fact)}</p>" for fact in facts)
    state = "" if summary else '<p class="bad">This run has not reached its end; what is there is shown.</p>'
    by = (summary.get("objective") or "dpo").upper()
    trained = "trained in BF16" if forward == "bf16" else "trained with an FP4 forward"
    return f"<h1>Explored in FP4, {trained}, aligned by {by}</h1>{lines}{state}"


def _tiles(summary: dict) -> str:
    if not summary:
        return ""
    gain, low, high = (summary.get(k) for k in ("heldout_gain", "heldout_gain_low", "heldout_gain_high"))
    broken, share = summary.get("guards_broken") or [], _by_share(summary)
    change = _signed if share else _change
    reward = "mean probability of what is wanted" if share else html.unescape(summary.get("rewards") or "")
    tiles = [
        (
            f"{change(gain)} {summary.get('heldout_unit', 'points')}",
            f"held-out judge, {'share of wins' if share else 'mean'}; 95 % interval {change(low)} to "
            f"{change(high)}",
            False,
        ),
        (
            f"{number(summary.get('reward_base'))} → {number(summary.get('reward'))}",
            f"reward: {reward}",
            False,
        ),
        (
            number(summary.get("spearman_fp4")),
            "Spearman rank correlation of the FP4 exploration with the full BF16 sampling",
            False,
        ),
        (
            "all hold" if not broken else f"{len(broken)} broken",
            "guards that no network enters" + (": " + ", ".join(broken) if broken else _taken_back(summary)),
            bool(broken),
        ),
        *_success(summary),
        (
            f"{number(summary.get('seconds'))} s",
            f"total; largest memory {number(summary.get('peak_rss_mb'))} MB",
            False,
        ),
    ]
    cells = "".join(
        f'<div class="tile{" bad" if bad else ""}"><b>{html.escape(value)}</b>'
        f"<span>{html.escape(text)}</span></div>"
        for value, text, bad in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _by_share(summary: dict) -> bool:
    return summary.get("heldout_unit", "points") == "points"


def _taken_back(summary: dict) -> str:
    count = summary.get("taken_back") or 0
    return f"; {count} iterations that broke one were taken back" if count else ""


def _success(summary: dict) -> list[tuple[str, str, bool]]:
    if summary.get("success_rate") is None:
        return []
    low, high = 100 * summary["success_low"], 100 * summary["success_high"]
    text = f"of {summary['rollouts']} rollouts gave a good picture; 95 % interval {low:.2f} to {high:.2f} %"
    return [(f"{100 * summary['success_rate']:.2f} %", text, False)]


def _change(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.3g}".replace("-", "−")


def _signed(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.1f}".replace("-", "−")


def _image(picture: np.ndarray, alt: str) -> str:
    data = base64.b64encode(png(picture)).decode()
    return f'<img alt="{html.escape(alt, quote=True)}" src="data:image/png;base64,{data}">'


def _gallery(pairs: Sequence[dict[str, Any]]) -> str:
    if not pairs:
        return "<h2>Before and after</h2><p class=none>There are no pictures yet.</p>"
    cells = []
    for pair in pairs:
        caption = pair["caption"]
        cells.append(
            f'<figure class="pair"><div>{_image(pair["base"], "base: " + caption)}'
            f"{_image(pair['aligned'], 'aligned: ' + caption)}"
            f"<span>base {pair['base_score']:.2f}</span><span>aligned {pair['aligned_score']:.2f}</span>"
            f"</div><figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    return (
        "<h2>Before and after</h2><p>Each pair starts from the same noise: the base model on the left, the "
        "aligned "
        "one on the right, with what the held-out judge says. Chosen by position "
        "in the "
        f'list, not by score.</p><div class="gallery">{"".join(cells)}</div>'
    )


def _column(lines: Sequence[dict], key: str) -> list[Any]:
    return [line.get(key) for line in lines]


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _curve(
    lines: Sequence[dict],
    keys: dict[str, str],
    y_label: str,
    caption: str,
    limits: tuple[float, float] | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Figure of some columns over the alignment's iterations; `keys` are name of the line -> name of the
    column.
    """
    series = [Series(name, _column(lines, "step"), _column(lines, key)) for name, key in keys.items()]
    return _figure(
        line_chart(series, "alignment iteration", y_label, limits=limits, marks=marks, description=caption),
        caption,
    )


def _curves(stages: dict[str, list[dict]]) -> str:
    align, probe = stages.get("align", []), stages.get("probe", [])
    start = [line["pixel_distance"] for line in probe[:1] if line.get("pixel_distance")]
    charts = [
        _base_curve(stages.get("base", [])),
        *_reward_curves(stages.get("summary", [{}])[-1], probe, align),
        _curve(
            probe,
            {"distance": "pixel_distance"},
            "distance",
            "Guard: kernel distance of the probe pictures' pixel statistics to the winning style.",
            marks=[(1.75 * value, "1.75 x base") for value in start],
        ),
        _curve(
            probe,
            {"2x2 pattern": "pattern"},
            "amplitude",
            "Guard: amplitude of the mean 2x2 pattern, where a dot grid over every picture would show.",
            marks=[(0.03, "limit")],
        ),
    ]
    return f'<h2>How it went</h2><div class="charts">{"".join(charts)}</div>'


#: objective -> its curves: columns of the metrics, name of the axis, what they are, a line to compare with.
_OBJECTIVES = {
    "dpo": (
        {"loss": "loss", "accuracy": "rewards/accuracies"},
        "DPO",
        "DPO loss (ln 2 before the first update) and share of pairs with a positive margin.",
        [(float(np.log(2)), "ln 2")],
    ),
    "nft": ({"loss": "loss"}, "NFT", "Loss of DiffusionNFT, with its distance from the reference.", []),
    "ppo": (
        {"clipped": "clipfrac"},
        "share",
        "Share of the steps whose ratio of likelihoods, new policy to old, was clipped.",
        [],
    ),
}


def _reward_curves(summary: dict, probe: Sequence[dict], align: Sequence[dict]) -> list[str]:
    share = _by_share(summary)
    keys, axis, text, marks = _OBJECTIVES[summary.get("objective") or "dpo"]
    return [
        _curve(
            probe,
            {"reward": "reward", "held-out": "heldout"} if share else {"held-out": "heldout"},
            "probability" if share else "held-out judge",
            "What the judges say of the same probe pictures after every iteration"
            + (": the one that gives the reward, and the one that nothing was trained on." if share else "."),
            limits=(0, 1) if share else None,
        ),
        _curve(
            align,
            {"best": "reward/best", "explored": "reward/explored", "worst": "reward/worst"},
            "reward",
            "Reward of all explored rollouts, and of the better and the worse half of those that were made "
            "again in BF16 (these are the labels).",
        ),
        _curve(align, keys, axis, text, marks=marks),
    ]


def _base_curve(lines: Sequence[dict]) -> str:
    if any(line.get("weights") for line in lines):
        return ""  # --from: nothing was trained here
    lines = [line for line in lines if line.get("loss") is not None]
    steps, loss = _column(lines, "step"), _column(lines, "loss")
    window = max(1, len(loss) // 40)
    series = [Series("each step", steps, loss, faint=True), Series("mean", steps, smooth(loss, window))]
    chart = line_chart(series, "step", "loss", description="Training loss of the base model")
    return _figure(
        chart, f"Base model: mean squared error of the velocity, and its mean over {window} steps."
    )


def _guards(summary: dict) -> str:
    rows = summary.get("guards") or []
    if not rows:
        return ""
    body = "".join(
        f"<tr><td>{html.escape(row['name'])}</td><td>{number(row['base'])}</td><td>{number(row['aligned'])}</td>"
        f"<td>{_range(row)}</td><td class='word{'' if row['holds'] else ' bad'}'>"
        f"{'holds' if row['holds'] else 'broken'}</td>"
        f"<td class='word'>{html.escape(MEASURED.get(row['name'], ''))}</td></tr>"
        for row in rows
    )
    return (
        "<h2>Guards</h2><p>A reward can be raised without better pictures: a dot grid over every picture "
        "raises "
        "several independent judges at once. These numbers use no network, and a broken one means that the "
        "gain "
        "above is not to be believed.</p><div "
        "class=scroll><table><tr><th>guard</th><th>base</th><th>aligned</th>"
        "<th>limit</th><th></th><th class=word>what it measures in the pictures</th></tr>"
        f"{body}</table></div>"
    )


def _range(row: dict) -> str:
    return (
        f"at most {number(row['high'])}"
        if not row["low"]
        else f"{number(row['low'])} to {number(row['high'])}"
    )


def _fidelity(stages: dict[str, list[dict]]) -> str:
    lines = [line for line in stages.get("align", []) if line.get("fidelity/fp4/spearman") is not None]
    if not lines:
        return ""
    arms = {"FP4": "fp4", "BF16": "bf16"}
    chart = _curve(
        lines,
        {name: f"fidelity/{key}/spearman" for name, key in arms.items()},
        "Spearman",
        "Spearman correlation, within each prompt, of the rewards after few steps with those of the full "
        "BF16 sampling of the same seeds.",
        limits=(0, 1),
    )
    columns = ("spearman", "hit_best", "hit_worst", "rank_best", "rank_worst")
    rows = "".join(
        f"<tr><td>{name}, few steps</td>"
        + "".join(f"<td>{number(_mean(lines, f'fidelity/{key}/{column}'))}</td>" for column in columns)
        + "</tr>"
        for name, key in arms.items()
    )
    best, worst, blind = (
        number(lines[-1].get(f"fidelity/{k}")) for k in ("perfect_best", "perfect_worst", "random")
    )
    return (
        "<h2>Does the cheap exploration rank as the full sampling does?</h2>"
        "<p>Explored rewards choose seeds, they are never labels. A perfect proxy's picks have true ranks of "
        f"{best} and {worst} in the mean, a blind one's {blind}.</p>"
        f"<div class=charts>{chart}</div><div class=scroll><table><tr><th>explored with</th><th>Spearman</th>"
        "<th>hits, best</th><th>hits, worst</th><th>true rank of best</th><th>of worst</th></tr>"
        f"{rows}</table></div>"
    )


def _mean(lines: Sequence[dict], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return sum(values) / len(values) if values else None


def _times(summary: dict) -> str:
    times = summary.get("stage_seconds") or {}
    if not times:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(name.replace('_', ' '))}</td><td>{seconds:.1f}</td></tr>"
        for name, seconds in times.items()
    )
    return f"<h2>Where the time went</h2><table><tr><th>stage</th><th>seconds</th></tr>{rows}</table>"
