"""The report: one file, nothing loaded from elsewhere, and it says what went wrong."""

from __future__ import annotations

import base64
import html.parser
import io
import re

import numpy as np
import pytest

from fp4bf16.train.chart import Series, line_chart, number, ticks
from fp4bf16.train.pictures import from_bytes, grid, png, to_bytes
from fp4bf16.train.report import build_report

Image = pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")


def _lines():
    guard = {"name": "pattern_2x2", "base": 0.01, "aligned": 0.2, "low": 0.0, "high": 0.03, "holds": False}
    summary = {
        "stage": "summary",
        "heldout_gain": 17.25,
        "heldout_gain_low": 12.0,
        "heldout_gain_high": 22.5,
        "reward_base": 0.5,
        "reward": 0.9,
        "spearman_fp4": 0.93,
        "guards": [guard],
        "guards_broken": ["pattern_2x2"],
        "seconds": 123.4,
        "peak_rss_mb": 321.0,
        "stage_seconds": {"base": 60.0, "align": 40.0},
    }
    align = [
        {
            "stage": "align",
            "step": i,
            "loss": 0.6 / i,
            "reward/best": 0.9,
            "reward/worst": 0.2,
            "reward/explored": 0.5,
            "rewards/accuracies": 0.8,
            "fidelity/fp4/spearman": 0.9,
            "fidelity/bf16/spearman": 0.95,
        }
        for i in (1, 2)
    ]
    probe = [
        {"stage": "probe", "step": i, "reward": 0.5, "heldout": 0.5, "pixel_distance": 0.2, "pattern": 0.01}
        for i in (0, 1, 2)
    ]
    base = [{"stage": "base", "step": i, "loss": 1 / i} for i in range(1, 60)]
    return [*base, *probe, *align, summary]


def _pairs(rng):
    pictures = rng.integers(0, 256, (2, 16, 16, 3)).astype(np.uint8)
    return [
        {
            "caption": 'a <b>"face"</b>',
            "base": pictures[0],
            "aligned": pictures[1],
            "base_score": 0.2,
            "aligned_score": 0.9,
        }
    ]


class _Reader(html.parser.HTMLParser):
    """Collects sources, links and unclosed elements."""

    def __init__(self):
        super().__init__()
        self.sources, self.open, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.sources += [v for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img", "br", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_startendtag(self, tag, attrs):
        self.sources += [v for k, v in attrs if k in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def _read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    assert reader.open == [], f"left open: {reader.open}"
    return reader


def test_report_is_one_file(rng):
    page = build_report('{"seed": 0}', _lines(), _pairs(rng), ["A fact & another."])
    reader = _read(page)
    assert reader.sources and all(s.startswith("data:image/png;base64,") for s in reader.sources)
    assert "url(" not in page and "@import" not in page and "<script" not in page and "<link" not in page
    text = "".join(reader.text)
    for piece in ("+17.2 points", "A fact & another.", 'a <b>"face"</b>', "broken", "pattern_2x2", "123 s"):
        assert piece in text, piece
    assert page.count("<svg") == 7


def test_pictures_come_back_from_the_page(rng):
    pairs = _pairs(rng)
    page = build_report("{}", _lines(), pairs)
    found = [base64.b64decode(d) for d in re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", page)]
    for data, which in zip(found, ("base", "aligned"), strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), pairs[0][which])


def test_report_of_a_run_that_stopped_early():
    page = build_report("{}", [{"stage": "base", "step": 1, "loss": None}], [])
    text = "".join(_read(page).text)
    assert "has not reached its end" in text and "There are no pictures yet" in text and "No values" in text


def test_run_from_trained_weights_has_no_curve_of_the_base():
    page = build_report("{}", [{"stage": "base", "step": 0, "from": "base", "weights": "0123"}], [])
    assert "Base model: mean squared error" not in page
    assert "Base model: mean squared error" in build_report("{}", [{"stage": "base", "loss": None}], [])


def test_chart_survives_any_values(rng):
    for y in (
        [],
        [None],
        [1.0],
        [0.0, 0.0],
        [float("nan"), 2.0],
        list(rng.standard_normal(50) * 1e6),
        [1e-12, 2e-12],
    ):
        svg = line_chart([Series("y <z>", range(len(y)), y)], "x", "y & z")
        _read(f"<div>{svg}</div>")
        assert "nan" not in svg.lower().replace("n/a", "") and "inf" not in svg.lower()


def test_chart_draws_where_the_values_are():
    svg = line_chart([Series("up", [0, 10], [0.0, 1.0])], "x", "y", limits=(0, 1))
    (x0, y0), (x1, y1) = (
        map(float, p.split(",")) for p in re.search(r'points="([^"]+)"', svg).group(1).split()
    )
    assert x0 < x1 and y0 > y1  # SVG's y grows downwards


def test_ticks_cover_the_range(rng):
    for _ in range(200):
        low, high = np.sort(rng.standard_normal(2) * 10.0 ** rng.integers(-6, 7))
        t = ticks(low, high)
        assert t[0] <= low + 1e-9 * abs(low) and t[-1] >= high - 1e-9 * abs(high) and 2 <= len(t) <= 9


def test_numbers_for_people():
    assert [number(v) for v in (0.5, 12.345, 999.9, 3, None, float("nan"), 1.75e-5)] == [
        "0.5",
        "12.3",
        "1000",
        "3",
        "n/a",
        "n/a",
        "1.75e-5",
    ]


def test_pictures_as_bytes(rng):
    x = rng.integers(0, 256, (5, 4, 4, 3)).astype(np.uint8)
    np.testing.assert_array_equal(to_bytes(from_bytes(x)), x)
    assert to_bytes(np.array([np.nan, -9.0, 9.0])).tolist() == [128, 0, 255]
    sheet = grid(x, columns=2, gap=1)
    np.testing.assert_array_equal(sheet[11:15, 1:5], x[4])
    assert (sheet[11:15, 6:10] == 255).all()  # the empty place
    image = Image.open(io.BytesIO(png(x[0], scale=3)))
    np.testing.assert_array_equal(np.asarray(image)[::3, ::3], x[0])
