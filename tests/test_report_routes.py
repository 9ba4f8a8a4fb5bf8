"""The figure of a run's routes, from nothing but the lines of its metrics."""

from __future__ import annotations

import html.parser
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from fp4bf16.train.report_routes import marks_of, moves, route_section, routes_svg, summary
from fp4bf16.train.route_chart import BF16, FP4, HELD, LEFT, WIDTH, colour, figure, pieces, spans, thinned
from fp4bf16.train.route_history import group_of, group_rank, read, short

SVG = "{http://www.w3.org/2000/svg}"
NAMES = (
    "conv_out.weight",
    "up_blocks.1.resnets.0.conv1.weight",
    "up_blocks.0.resnets.0.conv1.weight",
    "mid_block.attentions.0.to_out.0.weight",
    "down_blocks.0.resnets.0.conv1.weight",
    "conv_in.weight",
)


def trained(stage, step, **loop):
    found = {"fp4_share": 0.8, "budget": 0.02, "budget_factor": 1.0, "consistency": None, "fallbacks": 0,
             "certified_max": 0.3, "certified_mean": 0.2, "held": {}}  # fmt: skip
    return {"stage": stage, "step": step, "loss": 0.5, "seconds": step, "loop": found | loop}


def decided(step, routes, training=None, **more):
    training = training or dict(routes[0])
    return {"stage": "router", "step": step, "holds_from": step + 1, "routes": routes, "changes": [],
            "training": training, "reasons": dict.fromkeys(training, "worth it")} | more  # fmt: skip


def route(**tracks):
    """A route of all layers: BF16 but for the ones named by their place in `NAMES`."""
    return {name: tracks.get(f"n{i}", "bf16") for i, name in enumerate(NAMES)}


def metrics(rng, steps=60, every=10):
    """A run whose routes change at random; (lines, the track of each layer in each step)."""
    now = {name: str(rng.choice(["fp4", "bf16"])) for name in NAMES}
    lines, ran = [], []
    for step in range(steps):
        ran.append(dict(now))
        lines.append(trained("base", step + 1))
        if step % every == every - 1:
            before, now = now, {name: str(rng.choice(["fp4", "bf16"])) for name in NAMES}
            inputs = {"before": [before], "before_training": before, "layers": {}, "unit": "us"}
            lines.append(decided(step, [dict(now)], inputs=inputs))
    return lines, ran


class Page(html.parser.HTMLParser):
    """Every element is closed; nothing is loaded."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.loaded = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.loaded += [v for k, v in attrs if k in ("src", "href", "srcset", "data")]
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.loaded += [v for k, v in attrs if k in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def rows_of(svg):
    """Layer -> (x, width, colour) of its rectangles."""
    found = {}
    for g in ET.fromstring(svg).iter(f"{SVG}g"):
        name = g.find(f"{SVG}title").text.split("\n")[0]
        found[name] = [
            (float(r.get("x")), float(r.get("width")), r.get("fill")) for r in g.iter(f"{SVG}rect")
        ]
    return found


def test_every_cell_has_the_track_of_its_step(rng):
    """At each step's place in the figure stands the colour of the track that the layer ran on."""
    steps = int(rng.integers(25, 90))
    lines, ran = metrics(rng, steps, int(rng.integers(1, 12)))
    svg = routes_svg(lines)
    rows = rows_of(svg)
    assert set(rows) == set(NAMES)
    (piece,) = pieces(read(lines))
    for step, tracks in enumerate(ran):
        x = piece.px(step + 0.5)
        for name, track in tracks.items():
            (ink,) = [ink for left, width, ink in rows[name] if left <= x < left + width]
            assert ink == {"fp4": FP4, "bf16": BF16}[track], (step, name)


def test_layers_stand_in_the_order_of_the_network(rng):
    lines, _ = metrics(rng)
    assert read(lines).layers() == list(NAMES[::-1])
    assert list(rows_of(routes_svg(lines))) == list(NAMES[::-1])
    blocks = ["conv_out", "up_blocks.1", "up_blocks.0", "mid_block", "down_blocks.0", "conv_in"]
    assert [group_of(name) for name in NAMES] == blocks
    assert short("down_blocks.0.resnets.0.conv1.weight") == "resnets.0.conv1"
    assert group_rank("something.else") > group_rank("conv_out.weight")


def test_alignment_has_its_own_part_of_the_axis_and_the_routes_of_the_noise_levels():
    """Policy updates count on from elsewhere: what is decided after an iteration holds after it."""
    quiet, noisy = route(n1="fp4"), route(n1="fp4", n2="fp4")
    lines = [trained("base", step) for step in range(1, 11)]
    lines += [decided(9, [quiet, noisy], training=quiet)]
    lines += [trained("align", i) for i in (1, 2)] + [decided(711, [quiet, quiet])] + [trained("align", 3)]
    history = read(lines)
    base, align = pieces(history)
    assert base.left == LEFT and base.left + base.width < align.left < WIDTH
    assert [(c.stage, c.at) for c in history.changes] == [("base", 10.0), ("align", 2.0)]
    assert spans(history, align, NAMES[2]) == [(0.0, 2.0, ("bf16", "fp4")), (2.0, 3.0, ("bf16", "bf16"))]
    assert spans(history, align, NAMES[1]) == [(0.0, 3.0, ("fp4", "fp4"))]
    half = [ink for _, _, ink in rows_of(routes_svg(lines))[NAMES[2]]]
    assert half[-1] == BF16 and half[-2] == colour(("bf16", "fp4")) not in (FP4, BF16)
    assert "at some" in routes_svg(lines)


def test_what_is_held_back_is_drawn_over_the_route():
    lines = [decided(-1, [route(n1="fp4")], holds_from=0)]
    lines += [
        trained("base", s, held={NAMES[1]: "norm jumped"} if s in (4, 5, 9) else {}) for s in range(1, 11)
    ]
    history = read(lines)
    (piece,) = pieces(history)
    bars = [(x, w) for x, w, ink in rows_of(routes_svg(lines))[NAMES[1]] if ink == HELD]
    assert bars == [pytest.approx((piece.px(3), piece.px(5) - piece.px(3)), abs=0.11),
                    pytest.approx((piece.px(8), piece.px(9) - piece.px(8)), abs=0.11)]  # fmt: skip
    assert "norm jumped" in routes_svg(lines) and "1 layer was held on BF16" in summary(history)
    counted = [decided(-1, [route(n1="fp4")], holds_from=0), trained("base", 1, held=2)]
    assert read(counted).held == [] and "for a while" not in routes_svg(counted)


def test_curves_pass_where_the_values_are(rng):
    """The certified ratio keeps its peaks however dense the steps; means are means."""
    n = 4000
    values = rng.uniform(0.1, 0.2, n)
    peak = int(rng.integers(n))
    values[peak] = 0.9
    lines = [decided(-1, [route()], holds_from=0)]
    lines += [
        trained("base", i + 1, certified_max=float(v), certified_mean=0.05) for i, v in enumerate(values)
    ]
    svg = routes_svg(lines, {"loop": {"limit": 0.5, "target": 0.1, "feedback": True}})
    drawn = [p for p in re.findall(r'points="([^"]+)"', svg)]
    assert all(len(p.split()) <= (WIDTH - LEFT) / 2 for p in drawn) and len(svg) < 120_000
    (piece,) = pieces(read(lines))
    highest = [min((tuple(map(float, q.split(","))) for q in p.split()), key=lambda q: q[1]) for p in drawn]
    assert any(abs(x - piece.px(peak + 1)) < 5 for x, _ in highest)
    assert "limit 0.5" in svg and "target" not in svg  # there are no values of the consistency
    means = thinned([(i, float(v)) for i, v in enumerate(values)], 100)
    assert len(means) == 100
    np.testing.assert_allclose(np.mean([v for _, v in means]), values.mean(), rtol=1e-9)


def test_section_is_one_piece_and_says_what_happened(rng):
    lines, _ = metrics(rng)
    name = 'a <b> & "c"'
    lines.append(
        {"stage": "router", "event": "fallback", "step": 31, "layer": name, "reason": "1 < 2 & more"}
    )
    lines.append(trained("base", 61, fallbacks=3))
    known = {NAMES[1]: {"all": 1.5e-4, "saved": 12.5, "flops": 3e6}}
    last = decided(61, [route(n1="fp4")], inputs={"before": [route()], "unit": "us", "layers": known})
    page = route_section([*lines, last], {"loop": {"limit": 0.5}})
    seen = Page(page)
    words = "".join(seen.text)
    assert seen.loaded == [] and "<script" not in page and "url(" not in page
    said = "At the end 1 of 6 layers run on FP4, with 80 % of the FLOPs"
    again = "Steps were made again with 3 layers on BF16"
    assert all(piece in words for piece in (name, "1 < 2 & more", "1 event", "worth it", again, said))
    for piece in ("0.00015", "12.5", "3 M"):
        assert piece in words, piece
    ET.fromstring(re.search(r"<svg.*?</svg>", page, re.S).group())


def test_summary_counts_what_changed():
    two = route(n1="fp4", n2="fp4")
    lines = [decided(-1, [route()], holds_from=0), trained("base", 1), decided(1, [two]),
             trained("base", 2), decided(2, [route(n1="fp4")]), trained("base", 3)]  # fmt: skip
    history = read(lines)
    assert moves(history) == 3
    assert summary(history).endswith("2 decisions changed 3 tracks.")
    assert "1 of 6 layers" in summary(history)


def test_a_given_route_has_curves_and_no_strips():
    lines = [trained("base", step, budget=None, budget_factor=None) for step in (1, 2, 3)]
    page = route_section(lines)
    assert rows_of(routes_svg(lines)) == {} and "Certified ratio" in page and "Budget" not in page
    assert summary(read(lines)) == "The route was given and stayed as it was, with 80 % of the FLOPs on FP4."
    Page(page)


def test_marks_are_those_in_force():
    config = {"loop": {"limit": 0.4, "target": 0.02, "feedback": True}}
    assert marks_of(config) == {"certified_max": 0.4, "consistency": 0.02}
    assert marks_of({"loop": {"limit": 0.0, "target": 0.02, "feedback": False}}) == {}
    assert marks_of(None) == marks_of({}) == {}


def test_nothing_is_drawn_of_a_run_without_a_router():
    silent = trained("base", 1, fp4_share=None, budget=None, certified_max=None, certified_mean=None)
    other = {"stage": "base", "step": 1, "loss": 0.1}
    event = {"stage": "router", "event": "x"}
    nowhere = trained("base", 0, budget=0.1)  # a stage without a step has no place on the axis
    assert "Budget" not in routes_svg([nowhere, trained("align", 1, budget=None)])
    for lines in ([nowhere], [], [other], [event], [decided(0, [route()])], [silent]):
        assert route_section(lines) == "" and routes_svg(lines) == ""


STRANGE = [None, float("nan"), float("inf"), -1.0, "x", [], {}, True, 0, 10**30]


def test_lines_of_any_kind_are_survived(rng):
    """What a line lacks or has too much of is left out: a report is never lost to it."""
    for _ in range(60):
        lines, _ = metrics(rng, 12, 4)
        for line in lines:
            for part in (line, line.get("loop", {})):
                for key in list(part):
                    if key not in ("stage", "step", "loop") and rng.random() < 0.2:
                        part[key] = STRANGE[rng.integers(len(STRANGE))]
                        if rng.random() < 0.3:
                            del part[key]
        if page := route_section(lines):
            Page(page)
            ET.fromstring(re.search(r"<svg.*?</svg>", page, re.S).group())
            assert not re.search(r'="[^"]*\b(nan|inf)\b', re.sub(r"<title>.*?</title>", "", page, flags=re.S))
    assert json.dumps(lines, default=str)


@pytest.mark.parametrize("layers", [1, 7, 49, 300])
def test_any_number_of_layers_fits(layers):
    names = [f"down_blocks.{i // 20}.resnets.{i % 20}.conv1.weight" for i in range(layers)]
    tracks = dict.fromkeys(names, "fp4")
    svg = figure(read([decided(-1, [tracks], holds_from=0), trained("base", 1), trained("base", 2)]))
    root = ET.fromstring(svg)
    height = float(root.get("viewBox").split()[3])
    assert len(rows_of(svg)) == layers and height < 2100
    assert (">resnets.0.conv1<" in svg) == (layers <= 48)
    for node in root.iter(f"{SVG}rect"):
        assert 0 <= float(node.get("y")) < height and float(node.get("x")) + float(node.get("width")) <= WIDTH
