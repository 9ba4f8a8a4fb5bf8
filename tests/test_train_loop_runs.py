"""Whole runs with the closed loop: their metrics, killed anywhere, their routes on the command line."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from test_resume import SETTINGS  # noqa: E402
from test_train_loop import LAYER, ROUTER  # noqa: E402

from fp4bf16.__main__ import main  # noqa: E402
from fp4bf16.errors import ConfigError  # noqa: E402
from fp4bf16.routing import RouteSet, load_routes, save_routes  # noqa: E402
from fp4bf16.train import checkpoint  # noqa: E402
from fp4bf16.train.cli import load_model  # noqa: E402
from fp4bf16.train.config import check, from_dict, get_preset, override  # noqa: E402
from fp4bf16.train.data import Vocabulary  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402
from fp4bf16.train.engine import make_engine  # noqa: E402
from fp4bf16.train.folder import RunFolder  # noqa: E402
from fp4bf16.train.progress import Progress  # noqa: E402
from fp4bf16.train.run import train  # noqa: E402

SMALL = [*SETTINGS, *ROUTER, "base.steps=12", "loop.buckets=2", "loop.consistency=0.1"]


class Killed(BaseException):
    pass


def whole(out, *more: str):
    return train(override(get_preset("ci"), [*SMALL, *more]), out, Progress(io.StringIO()))


def lines(out) -> list[dict]:
    text = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(t).items() if k not in
             ("seconds", "images_per_second", "peak_rss_mb", "stage_seconds")} for t in text]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("looped") / "run"
    whole(out)
    return out


def test_metrics_say_what_the_loop_did(finished):
    found = lines(finished)
    training = [m for m in found if m["stage"] in ("base", "align")]
    assert len(training) == 14 and all(set(m["loop"]) >= {
        "fp4_share", "budget", "budget_factor", "consistency", "certified_max", "certified_mean",
        "fallbacks", "held"} for m in training)  # fmt: skip
    assert training[0]["loop"]["fp4_share"] == 0 and training[-1]["loop"]["fp4_share"] > 0.3
    decisions = [m for m in found if m.get("event") == "decision"]
    assert [d["stage"] for d in decisions] == ["router"] * len(decisions)
    assert [d["step"] for d in decisions][:4] == [1, 3, 7, 11]
    for line in found:  # written before the first step that it holds for
        if line.get("event") == "decision" and line["step"] < 11:
            following = found[found.index(line) + 1]
            assert following["step"] == line["holds_from"] + 1


def test_killed_anywhere_it_goes_on_to_the_same_bits(finished, tmp_path, monkeypatch, rng):
    total, log = len(lines(finished)), RunFolder.log
    out, left = tmp_path / "run", sorted(int(n) for n in rng.choice(np.arange(2, total), 3, replace=False))
    for number in left:
        seen = 0

        def counted(self, number=number, **values):
            nonlocal seen
            log(self, **values)
            seen = self.lines
            if seen == number:
                raise Killed

        monkeypatch.setattr(RunFolder, "log", counted)
        with pytest.raises(Killed):
            whole(out)
    monkeypatch.setattr(RunFolder, "log", log)
    whole(out)
    assert lines(out) == lines(finished), left
    for name in ("checkpoint.safetensors", "samples/aligned.png"):
        assert (out / name).read_bytes() == (finished / name).read_bytes(), (name, left)


def test_a_decision_outlives_the_process_that_made_it(tmp_path, monkeypatch):
    """What it was made from may be the clock: after a kill it is not made anew."""
    out, log = tmp_path / "run", RunFolder.log

    def killed(self, **values):
        log(self, **values)
        if values["stage"] == "base" and values["step"] == 9:
            raise Killed

    monkeypatch.setattr(RunFolder, "log", killed)
    with pytest.raises(Killed):
        whole(out)
    before = [m for m in lines(out) if m.get("event") == "decision"]
    assert [d["step"] for d in before] == [1, 3, 7]  # the checkpoint is of step 5
    monkeypatch.setattr("fp4bf16.routing.router.settle", None)  # the way in which decisions are made

    def stopped(self, **values):
        log(self, **values)
        if values["stage"] == "base" and values["step"] == 9:
            raise Killed

    monkeypatch.setattr(RunFolder, "log", stopped)
    with pytest.raises(Killed):
        whole(out)
    assert [m for m in lines(out) if m.get("event") == "decision"] == before


def test_a_checkpoint_without_the_loops_state_is_refused(finished, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (out / name).write_bytes((finished / name).read_bytes())
    arrays, meta = checkpoint.load(finished / "checkpoint.safetensors")
    for bad in (None, {"number": 3}):
        wrong = {k: v for k, v in meta.items() if k != "loop"} | ({} if bad is None else {"loop": bad})
        checkpoint.save(out / "checkpoint.safetensors", arrays, wrong)
        with pytest.raises(checkpoint.CheckpointError, match="does not fit"):
            whole(out)
        assert main(["route", str(out)]) == 2


def test_a_run_of_before_the_loop_goes_on(tmp_path):
    out = tmp_path / "run"
    config = override(get_preset("ci"), SETTINGS)
    folder = RunFolder(out)
    folder.open(config)
    folder.close()
    old = json.loads((out / "config.json").read_text())
    del old["config"]["loop"], old["config"]["routes"]
    (out / "config.json").write_text(json.dumps(old))
    again = RunFolder(out)
    assert again.open(config) is None
    again.close()
    with pytest.raises(ConfigError, match=r"loop\.forward = 'bf16', but this one has loop\.forward = 'fp4'"):
        RunFolder(out).open(override(config, ["loop.forward=fp4"]))


# ---- the command line -------------------------------------------------------------------------------------


def test_route_shows_and_saves_the_routes_of_a_run(finished, tmp_path, capsys):
    file = tmp_path / "route.json"
    assert main(["route", str(finished), "--save", str(file)]) == 0
    said = capsys.readouterr().out
    assert "pinned by 'conv_in*'" in said and "decided at step" in said and LAYER in said
    routes = load_routes(file)
    assert len(routes.buckets) == 2 and routes.about["run"] == "run"
    model = load_model(finished)
    assert model.routes == RouteSet(routes.buckets, routes.training)
    assert main(["route", str(finished), "--bucket", "1"]) == 0
    assert "noise levels 2 of 2" in capsys.readouterr().out
    for arguments, sentence in (
        (["--bucket", "2"], "give 0 to 1"),
        (["--save", str(tmp_path / "no" / "r.json")], "make it"),
        (["--save", str(tmp_path)], "is a folder"),
    ):
        assert main(["route", str(finished), *arguments]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["route", str(tmp_path)]) == 2 and "no config.json" in capsys.readouterr().err


def test_saved_routes_are_taken_up(finished, tmp_path, capsys):
    file = tmp_path / "route.json"
    main(["route", str(finished), "--save", str(file)])
    capsys.readouterr()
    routes = load_routes(file)
    for how in ("bf16", "fp4", "router"):
        settings = ["--set", f"loop.forward={how}", "--set", "loop.buckets=2"]
        assert main(["train", "--preset", "ci", "--route", str(file), *settings, "--dry-run"]) == 0
        config = check(from_dict(json.loads(capsys.readouterr().out.split("\nmodel ")[0])))
        assert config.routes == (*routes.buckets, routes.training)
        engine = make_engine("cpu", Denoiser(config, Vocabulary(("cat", "face"))), config)
        drawn = engine.model.routes if engine.loop is None else engine.loop.routes()
        assert list(drawn.buckets) == list(routes.buckets)
        assert engine.loop is None or engine.loop.route() == routes.training
    refused = ["--set", "loop.forward=router", "--dry-run"]
    assert main(["train", "--preset", "ci", "--route", str(file), *refused]) == 2
    assert "set loop.buckets=2" in capsys.readouterr().err
    plain = save_routes(tmp_path / "one.json", {"conv_in*": "bf16", "*": "fp4"})
    assert main(["train", "--preset", "ci", "--route", str(plain), "--dry-run"]) == 0
    assert len(json.loads(capsys.readouterr().out.split("\nmodel ")[0])["routes"]) == 2
    file.write_text(json.dumps({"format": "fp4bf16-route", "version": 9}))
    assert main(["train", "--preset", "ci", "--route", str(file), "--dry-run"]) == 2
    assert "version" in capsys.readouterr().err


def test_loggers_get_no_curve_of_each_layer(tmp_path, finished):
    """A decision holds numbers of every layer; what is drawn are its own."""
    folder, given = RunFolder(tmp_path / "run"), []

    class Seen:
        def log(self, step, values):
            given.append(values)

        def close(self):
            pass

    folder.open(override(get_preset("ci"), SETTINGS))
    folder._loggers = Seen()
    decision = next(m for m in lines(finished) if m.get("event") == "decision")
    folder.log(**decision)
    folder.close()
    assert {"budget", "spent", "saved", "step"} <= set(given[0])
    assert not any(isinstance(v, dict) for v in given[0].values())
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text()) == decision


@pytest.mark.parametrize("how, said", [
    ("bf16", ""), ("fp4", "training's forward on the route"), ("router", "a router (outputs), for 2 % of"),
])  # fmt: skip
def test_the_plan_says_what_the_loop_does(how, said, capsys):
    assert main(["train", "--preset", "ci", "--set", f"loop.forward={how}", "--dry-run"]) == 0
    plan = capsys.readouterr().out.split("\nmodel ")[1]
    assert (said in plan) and ("loop " in plan) == bool(said)
