"""The benches of the closed loop: every arm runs, and what they conclude follows from what they measured."""

from __future__ import annotations

import doctest
import importlib.util
import json
import pathlib
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL", reason="the extra 'train' is not installed")

from host_cuda import host_cuda  # noqa: E402, F401  (a fixture)
from test_train_device import emulate  # noqa: E402

BENCH = pathlib.Path(__file__).resolve().parents[1] / "bench"
#: A run of seconds in which the router decides a few times.
TINY = ["--", *(part for setting in (
    "base.steps=16", "base.batch=8", "loop.every=4", "loop.decide=8", "loop.curvature_every=8",
    "loop.probes=3", "align.iterations=1", "eval.captions=12", "model.block_out_channels=[8,16]",
    "judge.steps=12", "judge.width=8", "align.prompts=3", "align.seeds=4", "align.keep=2",
) for part in ("--set", setting))]  # fmt: skip


def load(name):
    """A script of the bench as a module; the path that it adds to is put back."""
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ablation():
    path = list(sys.path)
    sys.path.insert(0, str(BENCH))
    yield load("ablation_loop")
    sys.path[:] = path


@pytest.fixture
def verdicts(ablation):
    return sys.modules["ablation_verdict"]


@pytest.fixture(scope="module")
def sensitivity():
    path = list(sys.path)
    sys.path.insert(0, str(BENCH))
    yield load("sensitivity")
    sys.path[:] = path


def test_examples(ablation, sensitivity):
    for module in (ablation, sys.modules["ablation_verdict"], sys.modules["ablation_clock"], sensitivity):
        found = doctest.testmod(module)
        assert found.attempted > 0 and found.failed == 0


# ---------------------------------------------------------------------------------------------- the ablation


def here(ablation, monkeypatch):
    """Arms run in this process; returns what was started."""
    started = []

    def launch(judges, arguments, box=0.0):
        started.append(list(arguments))
        assert ablation.run_arm(judges, arguments, box) == 0
        return ""

    monkeypatch.setattr(ablation, "launch", launch)
    monkeypatch.setattr(ablation, "LOSS_ON", 96)
    return started


def test_every_arm_runs_and_is_found_again(ablation, tmp_path, monkeypatch, capsys):
    started = here(ablation, monkeypatch)
    path = tmp_path / "found" / "ablation.json"
    command = ["--preset", "ci", "--out", str(tmp_path / "runs"), "--json", str(path), "--pictures", "24"]
    assert ablation.main([*command, *TINY]) == 0  # with one seed there are no goals to miss
    found, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert list(found["arms"]) == list(ablation.ARMS) and len(started) == len(ablation.ARMS)
    for name, by_seed in found["arms"].items():
        row = by_seed["0"]
        assert row["steps"] == 16 and row["iterations"] == 1 and name in printed
        assert 0 < row["loss"] < 3 and row["kernel_distance"] is not None and 0 <= row["reward"] <= 1
        assert -1 <= row["spearman_fp4"] <= 1 and row["seconds"]["base"] > 0 and row["seconds"]["align"] > 0
        assert f"{name}, seed 0: {ablation.parts(row)}" in printed
    shares = {name: by_seed["0"]["fp4_share"] for name, by_seed in found["arms"].items()}
    assert shares["all BF16"] == 0 < shares["static skip list"] < shares["all FP4"] <= 1
    for name in ("router", "router, Fisher", "router, Hutchinson", "without consistency", "without feedback"):
        assert found["arms"][name]["0"]["decisions"] >= 2, name
    assert found["arms"]["without feedback"]["0"]["budget_factor_last"] in (None, 1.0)
    assert (tmp_path / "runs" / "judges.safetensors").exists()

    started.clear()
    assert ablation.main([*command, *TINY]) == 0 and started == []  # all of it is there
    del found["arms"]["all FP4"]
    path.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="another file"):
        ablation.main([*command, *TINY, "--set", "base.lr=1e-3"])


def test_judges_are_trained_once_for_all_arms(ablation, tmp_path, monkeypatch):
    """The second arm takes the first one's, and its run is the same as one that trains its own."""
    from fp4bf16.train import judging, stages

    here(ablation, monkeypatch)
    trained = []
    before = judging.train_judges
    monkeypatch.setitem(stages.STAGES, "judges", lambda run: (trained.append(1), before(run)))
    less = ["--set", "base.steps=2", "--set", "align.iterations=0", "--set", "eval.captions=8"]
    args = ablation.parse(["--preset", "ci", "--out", str(tmp_path), *TINY, *less])
    rows = []
    for folder, judges in (("a", "shared"), ("b", "shared"), ("c", "own")):
        out = tmp_path / folder
        settings = ablation.command("all BF16", 0, {}, out, args)
        assert ablation.launch(tmp_path / f"{judges}.safetensors", settings) == ""
        lines = [line for line in ablation.arms.metrics(out) if line["stage"] == "evaluate"]
        rows.append([{k: v for k, v in line.items() if k != "seconds"} for line in lines])
    assert len(trained) == 2 and rows[0] == rows[1] == rows[2]
    for seed, more, count in ((1, {}, 2), (0, {"judge.steps": "3"}, 3), (1, {"judge.steps": "3"}, 3)):
        settings = ablation.command("all BF16", seed, more, tmp_path / f"{seed}-{len(more)}", args)
        assert ablation.launch(tmp_path / "shared.safetensors", settings) == "" and len(trained) == count
    assert stages.STAGES["judges"] is not None and stages.STAGES["base"] is stages.train_base


def test_an_arm_that_fails_is_a_result_and_a_setting_that_does_not_fit_is_not(
    ablation, verdicts, tmp_path, monkeypatch
):
    from fp4bf16 import ConfigError

    monkeypatch.setattr(ablation, "launch", lambda *_: "base: the gradient was not finite")
    path = tmp_path / "a.json"
    command = ["--preset", "ci", "--out", str(tmp_path), "--json", str(path), "--arms", "all FP4"]
    assert ablation.main([*command, *TINY]) == 0
    row = json.loads(path.read_text())["arms"]["all FP4"]["0"]
    assert row == {"failed": "base: the gradient was not finite"}
    assert "failed: base" in verdicts.table({"all FP4": {"0": row}})
    path.unlink()
    refused = f"--out {tmp_path / 'all-fp4-0'}: holds a run with seed = 1"
    monkeypatch.setattr(ablation, "launch", lambda *_: refused)
    with pytest.raises(SystemExit, match="holds a run"):
        ablation.main([*command, *TINY])
    assert not path.exists()
    with pytest.raises(ConfigError, match="loop.decide"):
        ablation.main([*command, *TINY, "--set", "loop.decide=7"])
    assert not path.exists()
    path.write_text("not JSON")
    with pytest.raises(SystemExit, match="holds no results"):
        ablation.main([*command, *TINY])
    for wrong in (["--arms", "all"], ["--arms"], ["--seeds", "0"], ["--seconds", "0"], ["--seconds", "nan"]):
        with pytest.raises(SystemExit):
            ablation.parse(wrong)


def test_a_process_that_does_not_end_well_is_told_by_its_last_words(ablation, tmp_path):
    arguments = ["train", "--preset", "cj", "--out", str(tmp_path / "run")]
    assert "cj" in ablation.launch(tmp_path / "judges.safetensors", arguments)


@pytest.mark.parametrize("healthy", [0, 1, 2])
def test_an_arm_whose_pictures_are_not_finite_is_reported(ablation, tmp_path, monkeypatch, healthy):
    from types import SimpleNamespace

    from fp4bf16.train import engine, evaluation_sets
    from fp4bf16.train.config import get_preset

    config = get_preset("ci")
    shape = evaluation_sets.real_pictures(config).train.shape[1:]

    def draw(seeds, captions, steps, track):
        pictures = np.random.default_rng(0).random((len(seeds), *shape)).astype(np.float32)
        pictures[healthy:] = np.nan
        return pictures

    weights = SimpleNamespace(config=config, model=lambda which, merged: None)
    monkeypatch.setattr(evaluation_sets, "load_weights", lambda out: weights)
    monkeypatch.setattr(evaluation_sets, "cases", lambda *_: ([""] * 6, np.arange(6)))
    monkeypatch.setattr(engine, "make_sampler", lambda device, model: draw)
    monkeypatch.setattr(ablation, "loss_of", lambda *_: 1.0)
    found = ablation.judged(tmp_path, SimpleNamespace(device="cpu", pictures=6))
    assert found["unhealthy_base"] == found["unhealthy_aligned"] == 6 - healthy
    for key in ("kernel_distance", "kernel_distance_aligned"):
        assert (found[key] is None) == (healthy < 2)


def rows(rng, loss, share=0.9, seeds=3, spread=0.01):
    return {str(s): {"loss": loss + spread * rng.standard_normal(), "kernel_distance": 0.1 + 0.001 * s,
                     "fp4_share": share, "steps": 10, "reward": 0.5, "seconds": {"base": 1.0, "align": 2.0},
                     "fallbacks": 0, "held": 1, "spearman_fp4": 0.9, "certified_max": None}
            for s in range(seeds)}  # fmt: skip


def test_goals_are_met_or_missed_by_what_was_measured(ablation, verdicts, rng):
    good = {"all BF16": rows(rng, 1.0), ablation.CLOSED: rows(rng, 0.9)}
    assert [g["met"] for g in verdicts.goals(good)] == [True] * 4
    assert not verdicts.goals({"all BF16": rows(rng, 1.0), ablation.CLOSED: rows(rng, 2.0)})[0]["met"]
    assert not verdicts.goals({"all BF16": rows(rng, 1.0), ablation.CLOSED: rows(rng, 0.9, 0.79)})[2]["met"]
    for lost in good:  # a seed that diverges is no yardstick, and no loop that met its goal
        for seed in "02":
            nan = good | {lost: good[lost] | {seed: good[lost][seed] | {"loss": float("nan")}}}
            assert [g["met"] for g in verdicts.goals(nan)] == [lost == "all BF16", True, True, True]
    failed = good | {ablation.CLOSED: good[ablation.CLOSED] | {"2": {"failed": "x"}}}
    assert [g["met"] for g in verdicts.goals(failed)] == [True, True, True, False]
    assert (
        verdicts.goals({"all BF16": rows(rng, 1.0, seeds=1), ablation.CLOSED: rows(rng, 2.0, seeds=1)}) == []
    )
    assert "0.90" in verdicts.table(good) and len(verdicts.table(good).splitlines()) == 3


def test_differences_are_those_of_the_same_seeds(ablation, verdicts, rng):
    """Seeds that move both arms alike leave no doubt about their difference."""
    shift = rng.standard_normal(4)
    both = {name: {str(s): {"loss": float(shift[s] + less)} for s in range(4)}
            for name, less in ((ablation.CLOSED, -0.25), ("without feedback", 0.0))}  # fmt: skip
    change = verdicts.findings(both)["feedback, against a fixed budget"]["loss"]
    assert (
        change["change"] == pytest.approx(-0.25) and change["standard_error"] < 1e-12 and change["seeds"] == 4
    )
    assert verdicts.verdict(change) == "lower"
    assert verdicts.verdict(change | {"standard_error": 0.2}).startswith("no difference")
    diverged = {"change": float("nan"), "standard_error": float("nan"), "seeds": 4}
    assert verdicts.verdict(diverged) == "a run diverged"
    del both["without feedback"]["1"], both[ablation.CLOSED]["2"]
    assert verdicts.paired(both, ablation.CLOSED, "without feedback", "loss")["seeds"] == 2
    assert verdicts.paired(both, ablation.CLOSED, "all FP4", "loss") is None
    assert set(verdicts.PARTS) >= set(verdicts.findings(both))
    assert {arm for pair in verdicts.PARTS.values() for arm in pair} == set(ablation.ARMS)


def test_loss_is_that_of_the_prediction(ablation):
    """A model that knows the noise has none; one that predicts zeros has the mean square of the target."""
    from types import SimpleNamespace

    from fp4bf16.diffusion.schedules import get_schedule

    schedule = get_schedule("cosine", 1000)
    real = SimpleNamespace(train=np.full((5, 4, 4, 3), 0.5, np.float32), train_captions=("a",) * 5)
    same = {
        "schedule": schedule,
        "prediction": "x0",
        "fold": lambda p: p,
        "encode": lambda c: np.zeros((len(c), 1)),
    }
    perfect = SimpleNamespace(evaluate=lambda x, t, bag: np.full_like(x, 0.5), **same)
    nothing = SimpleNamespace(evaluate=lambda x, t, bag: np.zeros_like(x), **same)
    assert ablation.loss_of(perfect, real, n=100) == 0
    assert ablation.loss_of(nothing, real, n=100) == pytest.approx(0.25, rel=1e-6)


@pytest.fixture
def gpu(host_cuda, monkeypatch):  # noqa: F811
    """The emulated library in place of a GPU."""
    emulate(monkeypatch)
    return host_cuda


def test_loss_on_a_gpu_is_the_cpus(ablation, gpu):
    """The device rounds activations, too: a few parts in ten thousand of the loss."""
    from fp4bf16.train.config import get_preset
    from fp4bf16.train.denoiser import Denoiser
    from fp4bf16.train.evaluation_sets import real_pictures
    from fp4bf16.train.task import make_task

    config = get_preset("ci")
    real, words = real_pictures(config), make_task(config).words
    host, there = (ablation.loss_of(Denoiser(config, words), real, where, 12) for where in ("cpu", "cuda"))
    assert there == pytest.approx(host, rel=5e-3) and there != host


def test_arms_that_took_another_time_are_told(verdicts, rng):
    found = {"all BF16": rows(rng, 1.0), "all FP4": {"0": {"failed": "x"}}}  # 3 s of training
    assert verdicts.uneven(found, None) == verdicts.uneven(found, 3.1) == []
    assert verdicts.uneven(found, 4.0) == [("all BF16", 4.0, 3.0)]


def test_chart_has_a_dot_for_every_run(ablation, rng, tmp_path, capsys):
    """At the place of its value; the range of the yardstick's seeds is behind them."""
    chart = ablation.ablation_chart
    found = {"all BF16": rows(rng, 1.0), "all <FP4>": {"0": {"failed": "x"}}, ablation.CLOSED: rows(rng, 1.1)}
    path = tmp_path / "ablation.json"
    path.write_text(json.dumps({"arms": found}))
    assert chart.main([str(path)]) == 0
    root = ET.fromstring((tmp_path / "ablation.svg").read_text(encoding="utf-8"))
    svg = "{http://www.w3.org/2000/svg}"
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{svg}circle")]
    assert len(dots) == 2 * 3 * len(chart.PANELS)
    first = [x for x, y in dots if x < chart.LEFT + chart.PANEL + 1]
    losses = [row["loss"] for name in ("all BF16", ablation.CLOSED) for row in found[name].values()]
    assert np.corrcoef(first, losses)[0, 1] > 0.9999
    bands = [r for r in root.iter(f"{svg}rect") if r.get("fill") == chart.BAND]
    left, width = float(bands[0].get("x")), float(bands[0].get("width"))
    assert (left, left + width) == pytest.approx((min(first[:3]), max(first[:3])), abs=1.1)
    words = [t.text for t in root.iter(f"{svg}text")]
    assert "did not reach its end" in words and "all <FP4>" in words
    ET.fromstring(chart.chart({"all BF16": {"0": {"failed": "x"}}}))
    for lost in (float("nan"), float("inf")):  # a run that diverged: the others are drawn
        found["all <FP4>"] = {"0": found["all BF16"]["0"] | {"loss": lost}}
        drawn = chart.chart(found)
        assert drawn.count("<circle") == 2 * 3 * len(chart.PANELS) + len(chart.PANELS) - 1
        assert "nan" not in drawn and "inf" not in drawn
    path.write_text("[]")
    assert chart.main([str(path)]) == 2 and "no arms" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- sensitivity


def test_sensitivity_of_every_layer_is_predicted_and_measured(sensitivity, tmp_path, capsys):
    path = tmp_path / "sensitivity.json"
    command = ["--preset", "ci", "--steps", "12", "--batches", "3", "--batch", "12", "--moments", "4",
               "--probes", "3", "--passes", "1", "--json", str(path)]  # fmt: skip
    assert sensitivity.main(command) == 0
    found, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert found["layers"] == len(found["by_layer"]) == 39  # all products; softmax and captions are none
    for method, fit in found["methods"].items():
        assert -1 <= fit["spearman"] <= 1 and fit["seconds"] >= 0 and method in printed
        assert all(row[method] >= 0 for row in found["by_layer"])
        assert fit["interval"][0] <= fit["interval"][1]
    total = sum(row["damage"] for row in found["by_layer"])
    assert found["sum_of_damages"] == pytest.approx(total, abs=1e-12)
    assert list(found["methods"])[4:] == ["outputs", *(f"{name} + activations" for name in sensitivity.SUMS)]
    own = {name: [row[f"{name} + activations"] - row[name] for row in found["by_layer"]]
           for name in sensitivity.SUMS}  # fmt: skip
    assert all(part == pytest.approx(own["Fisher"], abs=1e-12) for part in own.values())
    # The weights' error is not in it a second time: both operands' is about the sum of either's
    assert 0.3 < sum(own["Fisher"]) / sum(row["outputs"] for row in found["by_layer"]) < 0.8
    for wrong in (["--probes", "2"], ["--batches", "0"], ["--steps", "-1"]):
        with pytest.raises(SystemExit):
            sensitivity.parse(wrong)


def test_damage_is_the_rise_of_the_loss_by_that_layer_alone(sensitivity):
    """Made again with the trainer's own forward, one layer at a time."""
    args = sensitivity.parse(["--preset", "ci", "--steps", "3", "--batches", "2", "--batch", "8"])
    bench = sensitivity.Bench(args)
    base, single, every = sensitivity.damages(bench)
    unet, batch = bench.model.unet, bench.batch(1)

    def loss(route):
        unet.apply_route(route)
        return float(bench.loss(batch).data)

    names = list(bench.layers)
    assert base[1] == pytest.approx(loss({"*": "bf16"}), rel=1e-5)
    for i in (0, 7, len(names) - 1):
        route = {names[i]: "fp4", "*": "bf16"}
        assert single[1, i] == pytest.approx(loss(route) - loss({"*": "bf16"}), abs=1e-6)
    assert np.abs(every).min() > 0 and single.shape == (2, len(names))
    assert (bench.batch(0).x != bench.batch(1).x).any() and (bench.batch(1).x == batch.x).all()


def test_agreement_knows_the_best_and_the_worst_ranking(sensitivity, rng):
    measured = rng.exponential(size=40)
    best = sensitivity.agreement(measured**3, measured)
    assert best["spearman"] == pytest.approx(1) and best["top_share"] == best["top_share_best"]
    worst = sensitivity.agreement(-measured, measured)
    assert worst["spearman"] == pytest.approx(-1) and worst["top_share"] < worst["top_share_best"]
    flat = sensitivity.agreement(np.ones(40), measured)
    assert flat["spearman"] is None and flat["interval"] == []
    assert sensitivity.agreement(measured, np.zeros(40))["top_share"] is None
    exact = np.tile(measured, (4, 1))
    assert sensitivity.halves(exact) == pytest.approx(1) and sensitivity.halves(exact[:1]) is None
