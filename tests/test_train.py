"""The trainer: configuration, the folder of a run, the command line, and what it says about bad input."""

from __future__ import annotations

import dataclasses
import io
import json
import struct

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
Image = pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from often import in_ci  # noqa: E402
from test_resume import SETTINGS, command  # noqa: E402

from fp4bf16 import extras  # noqa: E402
from fp4bf16.__main__ import main  # noqa: E402
from fp4bf16.align.panel import Panel  # noqa: E402
from fp4bf16.errors import CheckpointError, ConfigError, NonFiniteError, RewardError  # noqa: E402
from fp4bf16.train import checkpoint, progress  # noqa: E402
from fp4bf16.train.alignment import Skips  # noqa: E402
from fp4bf16.train.cli import load_model  # noqa: E402
from fp4bf16.train.config import PRESETS, check, from_dict, get_preset, override, with_value  # noqa: E402
from fp4bf16.train.evaluate import cases  # noqa: E402
from fp4bf16.train.folder import RunFolder  # noqa: E402
from fp4bf16.train.intervals import paired_gain  # noqa: E402
from fp4bf16.train.run import train  # noqa: E402
from fp4bf16.train.schedule import learning_rate  # noqa: E402
from fp4bf16.train.task import make_task  # noqa: E402


def tiny(*more: str):
    """A configuration that runs in seconds."""
    return override(get_preset("ci"), [*SETTINGS, *more])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: (folder, summary)."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, train(tiny(), out, progress.Progress(io.StringIO()))


def fails(capsys, *arguments: str) -> str:
    """The sentence with which a command line is refused (exit status 2)."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and err.count("\n") == 1
    return err


# --------------------------------------------------------------------------------------------------
# configuration


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    config = check(get_preset(name))
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_preset(capsys, tmp_path):
    assert "did you mean 'faces16'" in fails(
        capsys, "train", "--preset", "face16", "--out", str(tmp_path / "x")
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "setting, sentence",
    [
        ("base.stepz=3", "base.stepz: no such setting; did you mean 'steps'"),
        ("base=3", "base: is a section"),
        ("seed.x=3", "seed is a setting, not a section"),
        ("base.steps=many", "base.steps: 'many' is not a value of type int"),
        ("base.steps=0", "base.steps: is 0, but it must be positive"),
        ("model.block_out_channels=[8,12.5]", "model.block_out_channels: "),
        ("model.block_out_channels=[30,60]", "does not divide block_out_channels"),
        ("size=12", "size: 12 does not divide the pictures' 32 pixels"),
        ("model.unshuffle=3", "model.unshuffle: 3 does not divide size 16"),
        ("model.block_out_channels=[8,8,8,8,8]", "5 levels halve 8 pixels 4 times"),
        ("model.attention=[true]", "has 1 entries for 2 levels"),
        ("align.keep=5", "align.keep: is 5 of 6 seeds"),
        ("align.keep=8", "align.keep: is 8 of 6 seeds"),
        ("align.select=bestworst", "did you mean 'best_worst'"),
        ("align.explore_track=fp8", "not a track to explore on"),
        ("base.drop_caption=2", "is a share from 0 to 1"),
        ("winner=twemojy", "use noto or twemoji"),
        ('route={"*": "fp5"}', "did you mean 'fp4'"),
        ("judge.width=10", "judge.width: is 10, but it must be a multiple of 8"),
        ("base.steps", "has no '='"),
    ],
)
def test_settings_that_cannot_be(setting, sentence, capsys):
    assert sentence in fails(capsys, "train", "--preset", "ci", "--dry-run", "--set", setting)


def test_every_setting_can_be_set_from_text():
    config = Config = get_preset("ci")
    for section in dataclasses.fields(Config):
        value = getattr(config, section.name)
        inner = dataclasses.fields(value) if dataclasses.is_dataclass(value) else [None]
        for f in inner:
            name = section.name if f is None else f"{section.name}.{f.name}"
            now = value if f is None else getattr(value, f.name)
            text = now if isinstance(now, str) else json.dumps(list(now) if isinstance(now, tuple) else now)
            assert with_value(config, name, text) == config, name


def test_dry_run_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--dry-run", "--seed", "7", "--select", "random"]) == 0
    text = capsys.readouterr().out
    assert (
        '"seed": 7' in text
        and "M parameters" in text
        and "16 prompts x 24 seeds x 4 steps on fp4, random" in text
    )
    assert list(tmp_path.iterdir()) == []


def test_route_file(tmp_path, capsys):
    route = tmp_path / "route.json"
    route.write_text('{"*": "bf16"}')
    assert main(["train", "--dry-run", "--route", str(route)]) == 0
    assert '"*": "bf16"' in capsys.readouterr().out
    route.write_text('["bf16"]')
    assert "must be one JSON object" in fails(capsys, "train", "--dry-run", "--route", str(route))
    assert "cannot be read as JSON" in fails(
        capsys, "train", "--dry-run", "--route", str(tmp_path / "none.json")
    )
    # Twice: the last would decide, where the first that matches is meant to
    for text, why in (('{"conv_in*": "bf16", "conv_in*": "fp4"}', "stands in it twice"),
                      ("[" * 100_000, "nested too deeply")):  # fmt: skip
        route.write_text(text)
        assert why in fails(capsys, "train", "--dry-run", "--route", str(route))


# --------------------------------------------------------------------------------------------------------
# the run


def test_summary_and_folder(finished):
    out, summary = finished
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == summary and lines[-1]["stage"] == "summary"
    for key in (
        "seconds",
        "peak_rss_mb",
        "heldout_gain",
        "heldout_gain_low",
        "reward",
        "spearman_fp4",
        "spearman_bf16",
    ):
        assert isinstance(summary[key], float), key
    assert summary["pictures"] == 8 and {g["name"] for g in summary["guards"]} >= {
        "pixel_distance",
        "pattern_2x2",
    }
    config = json.loads((out / "config.json").read_text())
    assert config["threads"] >= 1 and config["versions"]["numpy"] == np.__version__
    assert {p.name for p in (out / "samples").iterdir()} == {"base.png", "aligned.png", "pairs.png"}
    assert (out / "report.html").stat().st_size < 2e6


def test_first_dpo_loss_of_a_run_is_ln2(finished):
    lines = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["stage"] == "align"][0]["first_loss"] == float(np.log(2))


def test_base_and_aligned_start_from_the_same_noise(finished):
    """The base weights of the finished checkpoint draw the base pictures of the evaluation again, bit for
    bit.
    """
    out, _ = finished
    arrays, _ = checkpoint.load(out / "checkpoint.safetensors")
    from fp4bf16.train.pictures import to_bytes

    for weights in ("base", "aligned"):
        model = load_model(out, weights)
        seeds = _evaluation_seeds(model)
        pictures = to_bytes(model.draw(*seeds, model.config.eval.steps, "bf16"))
        np.testing.assert_array_equal(pictures, arrays[f"result.{weights}.pictures"])


def _evaluation_seeds(model):
    class Run:
        config, task = model.config, make_task(model.config)

        @staticmethod
        def seed(purpose):
            from fp4bf16.diffusion import subseed

            return subseed(model.config.seed, purpose)

    captions, seeds = cases(Run)
    return seeds, captions


def test_folder_of_another_configuration(finished, capsys):
    out, _ = finished
    before = (out / "metrics.jsonl").read_bytes()
    sentence = fails(capsys, *command(out), "--seed", "3")
    assert "holds a run with seed = 0, but this one has seed = 3" in sentence
    assert "base.lr = 0.003, but this one has base.lr = 0.1" in fails(
        capsys, *command(out), "--set", "base.lr=0.1"
    )
    assert (out / "metrics.jsonl").read_bytes() == before


def test_folder_that_is_no_run(tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("x")
    assert "holds 'precious.txt' but no config.json" in fails(capsys, *command(tmp_path))
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["precious.txt"]


def test_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in fails(capsys, *command(tmp_path / "file" / "run"))
    assert "cannot be written" in fails(capsys, *command(tmp_path / "file"))


def test_two_runs_in_one_folder(tmp_path):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.open(tiny())
    with pytest.raises(ConfigError, match="another run is writing there"):
        second.open(tiny())
    second.close()
    first.close()
    assert second.open(tiny()) is None
    second.close()


def _copy(finished, tmp_path):
    import shutil

    return shutil.copytree(finished[0], tmp_path / "run")


def test_unreadable_checkpoints(finished, tmp_path, capsys):
    out = _copy(finished, tmp_path)
    file = out / "checkpoint.safetensors"
    (out / "checkpoint.previous.safetensors").unlink()  # nothing to fall back on
    whole = file.read_bytes()
    header = b'{"__metadata__":{"who":"else"}}'
    for content, sentence in (
        (whole[: len(whole) // 2], "cannot be read as a checkpoint"),
        (b"", "cannot be read as a checkpoint"),
        (struct.pack("<Q", 1 << 60) + b"{}", "cannot be read as a checkpoint"),
        (struct.pack("<Q", len(header)) + header, "not a checkpoint of fp4bf16"),
    ):
        file.write_bytes(content)
        said = fails(capsys, *command(out))
        assert sentence in said and str(file) in said
        assert file.read_bytes() == content  # nothing was overwritten
    file.write_bytes(whole)
    assert main(command(out)) == 0


def test_checkpoint_of_another_configuration(finished, tmp_path):
    out = _copy(finished, tmp_path)
    arrays, meta = checkpoint.load(out / "checkpoint.safetensors")
    meta["config"]["base"]["steps"] = 99
    checkpoint.save(out / "checkpoint.safetensors", arrays, meta)
    with pytest.raises(CheckpointError, match="another configuration than config.json"):
        train(tiny(), out, progress.Progress(io.StringIO()))


def test_checkpoint_that_does_not_fit(finished, tmp_path):
    out = _copy(finished, tmp_path)
    arrays, meta = checkpoint.load(out / "checkpoint.safetensors")
    del arrays["ema.conv_in.weight"]
    checkpoint.save(out / "checkpoint.safetensors", arrays, meta)
    with pytest.raises(CheckpointError, match="conv_in.weight is on one side only"):
        train(tiny(), out, progress.Progress(io.StringIO()))


def test_metrics_shorter_than_the_checkpoint_says(finished, tmp_path):
    out = _copy(finished, tmp_path)
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:3]))
    with pytest.raises(CheckpointError, match="has 3 lines but the checkpoint was written after"):
        train(tiny(), out, progress.Progress(io.StringIO()))


def test_fewer_prompts_than_asked_for(tmp_path, capsys):
    said = fails(capsys, *command(tmp_path / "run"), "--set", "align.prompts=101")
    assert "101 are asked for in an iteration but there are only 100; lower align.prompts" in said
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*"))


@pytest.mark.parametrize(
    "bad, sentence",
    [
        (lambda x: np.full(len(x), np.nan, np.float32), "returned nan for picture 0"),
        (lambda x: np.zeros(len(x) + 1, np.float32), "it must return one number a picture"),
    ],
)
def test_broken_reward_loses_nothing(bad, sentence, tmp_path, monkeypatch):
    out, said = tmp_path / "run", progress.Progress(io.StringIO())
    right = Panel.__call__
    monkeypatch.setattr(Panel, "__call__", lambda self, x, prompts: bad(x))
    with pytest.raises(RewardError, match=sentence):
        train(tiny(), out, said)
    _, meta = checkpoint.load(out / "checkpoint.safetensors")
    assert (meta["stage"], meta["step"]) == ("align", 0)
    monkeypatch.setattr(Panel, "__call__", right)
    assert train(tiny(), out, said)["pictures"] == 8  # goes on where the reward broke


# ---------------------------------------------------------------------------------------------------------
# sampling


def test_sample_is_the_same_in_any_number(finished, tmp_path, capsys):
    one, many = tmp_path / "one.png", tmp_path / "many.png"
    for n, seed, file in ((1, 6, one), (9, 0, many)):
        assert (
            main(
                [
                    "sample",
                    "--run",
                    str(finished[0]),
                    "--caption",
                    "Smiling face",
                    "--n",
                    str(n),
                    "--seed",
                    str(seed),
                    "--track",
                    "fp4",
                    "--out",
                    str(file),
                ]
            )
            == 0
        )
    a, b = (np.asarray(Image.open(f)) for f in (one, many))
    scale = a.shape[0] // 18  # a picture of 16 pixels and its margins, each pixel enlarged
    left = 6 * 17 * scale
    np.testing.assert_array_equal(a, b[: 18 * scale, left : left + 18 * scale])
    assert len(np.unique(a.reshape(-1, 3), axis=0)) > 50
    assert "9 pictures of 'Smiling face'" in capsys.readouterr().out


def test_sample_says_what_is_wrong(finished, tmp_path, capsys):
    run, file = str(finished[0]), str(tmp_path / "x.png")
    words = ["sample", "--run", run, "--out", file, "--caption"]
    assert "has no 'smilling'; nearest are 'smiling'" in fails(capsys, *words, "smilling face")
    assert "use bf16 or fp4" in fails(capsys, *words, "face", "--track", "fp8")
    assert "--n 0" in fails(capsys, *words, "face", "--n", "0")
    assert "no config.json" in fails(
        capsys, "sample", "--run", str(tmp_path), "--out", file, "--caption", "face"
    )
    assert not (tmp_path / "x.png").exists()


# ----------------------------------------------------------------------------------------------------------
# -- parts


def test_missing_extra(monkeypatch, capsys, tmp_path):
    real = extras.importlib.import_module

    def without(name, *rest):
        if name.startswith("PIL"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(extras.importlib, "import_module", without)
    with pytest.raises(
        ImportError, match=r"pillow, which is not installed; run: python -m pip install 'fp4bf16\[train\]'"
    ):
        extras.require("PIL.Image", "writing pictures")
    assert extras.optional("PIL.Image") is None
    assert "python -m pip install" in fails(capsys, *command(tmp_path / "run"))


def test_gradients_that_are_not_finite_are_left_out(rng):
    counters = {}
    skips = Skips("base", counters)
    assert skips.finite(1.0, 2.0) and not skips.finite(1.0, np.inf) and skips.finite(1.0, 2.0)
    for _ in range(9):
        assert not skips.finite(np.nan, 1.0)
    with pytest.raises(NonFiniteError, match="10 updates in a row .* lower base.lr"):
        skips.finite(np.nan, 1.0)
    assert skips.count == 11 and counters == {"base/skipped_in_a_row": 10}


def test_learning_rate_falls_over_the_last_share():
    rates = [learning_rate(s, 1000, 3e-3, 0.4) for s in range(1000)]
    assert rates[:601] == [3e-3] * 601 and (np.diff(rates[600:]) < 0).all() and 0 < rates[-1] < 1e-5
    assert learning_rate(9, 10, 1.0, 0.0) == 1.0


def test_paired_gain(rng):
    """The interval of the gain covers the truth about 95 times in 100 when pictures of a caption go
    together.
    """
    captions = [str(i % 60) for i in range(240)]
    covered = 0
    for _ in range(300):
        p = np.tile(rng.random(60), 4)  # a caption's chance of being won over
        gained = (rng.random(240) < p).astype(float)
        gain, low, high = paired_gain(np.zeros(240), gained, captions)
        assert low <= gain <= high
        covered += low <= 50 <= high
    assert 0.89 <= covered / 300 <= 0.99


def test_progress_on_a_log_and_on_a_terminal():
    log = io.StringIO()
    bar = progress.Progress(log, every=0)
    bar.stage("base", 2, 0, "two steps")
    bar.step(loss=0.5, **{"images/s": 12.0})
    bar.end()
    assert log.getvalue().splitlines() == ["base: two steps", "base: 1/2  loss 0.5, images/s 12"]
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    bar = progress.Progress(terminal)
    bar.stage("align", 3)
    bar.step(reward=0.25)
    bar.say("a note")
    bar.end()
    assert (
        "reward" in terminal.getvalue()
        and "0.25" in terminal.getvalue()
        and "a note" in terminal.getvalue()
        and "\r" in terminal.getvalue()
    )


@in_ci("steps, rounds", [(12, 1), (60, 3)], (12, 1))
def test_minimal_example(capsys, steps, rounds):
    """The whole idea in one file does what it says: the reward of pictures from the same noise goes up."""
    from fp4bf16.examples import minimal_dpo

    before, after = minimal_dpo.main(base_steps=steps, rounds=rounds)
    assert after > before + 0.05
    assert "accuracy" in capsys.readouterr().out
