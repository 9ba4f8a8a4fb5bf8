"""Settings that would do nothing without a word: pins that match no layer, a run too short for its router."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from test_loop import LAYER, Steps, closed, network  # noqa: E402
from test_train_loop_runs import SMALL, Killed, lines  # noqa: E402

from fp4bf16.__main__ import main  # noqa: E402
from fp4bf16.routing import DEFAULT_ROUTE, Router, RouteSet, layers_of, save_routes, unmatched  # noqa: E402
from fp4bf16.train.config import Config, get_preset, override  # noqa: E402
from fp4bf16.train.folder import RunFolder  # noqa: E402
from fp4bf16.train.policy import batches, updates  # noqa: E402
from fp4bf16.train.progress import Progress  # noqa: E402
from fp4bf16.train.run import train  # noqa: E402

LAYERS = list(layers_of(network()))
#: Of 6 + 2 x 2 steps, fewer than lie between two samples.
SHORT = [*SMALL, "base.steps=6", "loop.every=20", "loop.decide=20", "loop.curvature_every=20"]


# ---- pins ----


def test_a_pattern_without_a_layer_is_named_with_those_nearest_to_it(rng):
    name = LAYERS[int(rng.integers(len(LAYERS)))]
    wrong = name.replace("weight", "wieght")
    (said,) = unmatched([{name: "bf16", wrong: "bf16", "*": "fp4"}], LAYERS)
    assert f"route: {wrong!r} (bf16) matches no layer" in said and repr(name) in said
    assert unmatched([{name: "bf16", f"*{name[3:]}": "fp4", "?" + name[1:]: "bf16"}], LAYERS) == []
    assert unmatched([{}], LAYERS) == unmatched([], LAYERS) == []


def test_the_packages_own_patterns_are_for_all_networks():
    assert Config().route == DEFAULT_ROUTE
    without = [n for n in LAYERS if "embedding" not in n]
    assert len(without) < len(LAYERS) and unmatched([DEFAULT_ROUTE], without) == []
    assert len(unmatched([{"*embeddings*": "bf16"}], without)) == 1


def test_of_another_networks_routes_three_patterns_are_named_and_the_rest_counted():
    other = {f"encoder.{i}": "fp4" for i in range(40)}
    said = unmatched([other, other | {"*": "bf16"}], LAYERS)
    assert len(said) == 4 and "'encoder.2'" in said[2] and "so do 37 more of its 41 patterns" in said[3]


def test_the_router_and_the_loop_explain_them():
    pins = {"conv_inn*": "bf16", "conv_out*": "bf16", "*": "fp4"}
    assert Router(layers_of(network()), pins).explain().count("warning: route: 'conv_inn*'") == 1
    assert "warning" not in Router(layers_of(network()), DEFAULT_ROUTE).explain()
    for forward in ("router", "fp4"):
        assert closed(route=pins, forward=forward).explain().count("warning: route: 'conv_inn*'") == 1
        assert "warning" not in closed(forward=forward).explain()
        routes = RouteSet([{LAYER: "fp4"}, {"lost": "fp4"}], {"*": "bf16"})
        assert "'lost' (fp4)" in closed(routes, forward=forward, buckets=2).explain()


def test_the_command_line_says_them(tmp_path, capsys):
    route = tmp_path / "route.json"
    save_routes(route, {"conv_inn*": "bf16", "*": "fp4"})
    for how in (["--route", str(route)], ["--set", 'route={"conv_inn*": "bf16"}']):
        assert main(["train", "--preset", "ci", "--dry-run", *how]) == 0
        assert capsys.readouterr().out.count("warning   route: 'conv_inn*' (bf16) matches no layer") == 1
    assert main(["train", "--preset", "ci", "--dry-run"]) == 0 and "warning" not in capsys.readouterr().out


# ---- short runs ----


@pytest.mark.parametrize(
    "total, every, first", [(8, 20, 2), (79, 20, 19), (3, 20, 1), (80, 20, 20), (9, 2, 2)]
)
def test_the_first_decision_comes_after_a_quarter_of_the_run_at_the_latest(total, every, first, rng):
    steps = Steps(closed(every=every, decide=2 * every, curvature_every=every), rng)
    said = steps.loop.expect(total)
    assert (f"loop.every: is {every}, but the run has {total} steps" in said) == (first < every)
    assert (f"loop.every={first} " in said) == (first < every)
    for _ in range(first + 1):
        steps.step()
    (decision,) = steps.loop.decisions
    assert decision.step == first - 1 and decision.holds_from == first
    later = [n for n in range(first, 3 * every) if steps.loop.sampled(n)]
    assert later == [n for n in range(first, 3 * every) if (n + 1) % every == 0]
    assert steps.loop.share(steps.loop.route()) > 0.3


def test_what_cannot_decide_says_so_and_what_has_nothing_to_decide_does_not():
    assert "1 step of training in all and none after a decision" in closed(every=20).expect(1)
    assert closed(every=20).expect(0) == closed(forward="fp4", every=20).expect(5) == ""
    loop = closed(forward="fp4", every=20)
    loop.expect(5)
    assert not any(loop.sampled(n) for n in range(19))


@pytest.mark.parametrize("objective", ["dpo", "nft", "ppo"])
def test_updates_are_those_of_the_batches(objective):
    """As many entries as `make_data` makes where every rollout is healthy."""
    from fp4bf16.train.policy import TrajectoryData

    config = override(get_preset("ci"), [f"align.objective={objective}", "ppo.epochs=3", "align.batch=5",
                                         "align.explore_steps=4"])  # fmt: skip
    a = config.align  # 4 prompts, 4 kept, 2 noise levels; PPO trains 2 of 4 steps
    entries = {"dpo": 8 * 2, "nft": 16 * 2, "ppo": 16 * 2}[objective]
    data = np.zeros(entries)
    if objective == "ppo":
        data = TrajectoryData(*[np.zeros(1)] * 4, np.zeros(entries), np.zeros(entries))
    assert updates(config) == len(batches(config, data)) and a.keep == 4


def run(out, *more):
    text = io.StringIO()
    train(override(get_preset("ci"), [*SHORT, *more]), out, Progress(text))
    return text.getvalue()


def test_a_short_run_says_so_decides_and_resumes_to_the_same_bits(tmp_path, monkeypatch):
    whole, out, log = tmp_path / "whole", tmp_path / "run", RunFolder.log
    lost = 'route={"conv_inn*": "bf16", "*": "fp4"}'
    said = run(whole, lost)
    assert said.count("warning: loop.every: is 20, but the run has 10 steps of training in all") == 1
    assert said.count("warning: route: 'conv_inn*' (bf16) matches no layer") == 1
    decisions = [m for m in lines(whole) if m.get("event") == "decision"]
    assert [d["step"] for d in decisions] == [1]
    shares = [m["loop"]["fp4_share"] for m in lines(whole) if m["stage"] == "base"]
    assert shares[:2] == [0, 0] and min(shares[2:]) > 0.3
    for at in (1, 2, 4):  # before the decision, right after it, later

        def killed(self, at=at, **values):
            log(self, **values)
            if values["stage"] == "base" and values["step"] == at:
                raise Killed

        monkeypatch.setattr(RunFolder, "log", killed)
        with pytest.raises(Killed):
            run(out, lost)
    monkeypatch.setattr(RunFolder, "log", log)
    assert "warning: loop.every" in run(out, lost) and lines(out) == lines(whole)
    assert (out / "checkpoint.safetensors").read_bytes() == (whole / "checkpoint.safetensors").read_bytes()
    assert "warning" not in run(out, lost)  # it is finished: nothing is to come
    told = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert told["stage"] == "base"


def test_the_table_of_a_run_says_what_its_pins_missed(tmp_path, capsys):
    for forward in ("router", "bf16"):
        run(tmp_path / forward, 'route={"conv_inn*": "bf16", "*": "fp4"}', f"loop.forward={forward}",
            "base.steps=2", "align.iterations=0", "eval.captions=4")  # fmt: skip
        capsys.readouterr()
        assert main(["route", str(tmp_path / forward)]) == 0
        assert capsys.readouterr().out.count("warning: route: 'conv_inn*'") == 1
