"""``--from``: weights that ship, base files, checkpoints as the start of a run; what is said of bad ones."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
Image = pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from test_resume import SETTINGS  # noqa: E402

from fp4bf16 import load  # noqa: E402
from fp4bf16.__main__ import main  # noqa: E402
from fp4bf16.errors import CheckpointError, ConfigError  # noqa: E402
from fp4bf16.train import checkpoint, progress, weights  # noqa: E402
from fp4bf16.train.config import get_preset, override  # noqa: E402
from fp4bf16.train.data import Vocabulary, load_pairs  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402
from fp4bf16.train.run import train  # noqa: E402

ARGUMENTS = ["train", "--preset", "ci", *(part for s in SETTINGS for part in ("--set", s))]


def tiny(*more: str):
    return override(get_preset("ci"), [*SETTINGS, *more])


def fails(capsys, *arguments) -> str:
    """The sentence with which a command line is refused (exit status 2)."""
    assert main([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and err.count("\n") == 1
    return err


def denoiser(config) -> Denoiser:
    pairs = load_pairs(config.size).select(role="policy", word=config.word or None)
    return Denoiser(config, Vocabulary.of(pairs.captions))


@pytest.fixture
def base(tmp_path, rng):
    """A base file of the tiny configuration, with random weights: (path, model, recipe)."""
    config = tiny(f"seed={rng.integers(1 << 30)}")
    model = denoiser(config)
    path = tmp_path / "tiny.safetensors"
    recipe = {"preset": "ci", "steps": 3, "seed": config.seed}
    return path, model, weights.write_base(
        path, model.unet.state_dict(), config, model.vocabulary.words, recipe
    )


def test_base_file_and_its_recipe(base):
    path, model, recipe = base
    assert json.loads(path.with_suffix(".json").read_text()) == recipe
    assert recipe["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest() and recipe["steps"] == 3
    assert recipe["parameters"] == model.unet.parameter_count()
    arrays = load(path)
    assert {a.dtype.name for a in arrays.values()} == {"bfloat16"}
    start = weights.load_start(str(path), "ci")
    for name, a in model.unet.state_dict().items():
        np.testing.assert_allclose(start.arrays[name], a, rtol=2**-8, atol=0)  # rounded once to BF16
        np.testing.assert_array_equal(start.arrays[name], arrays[name].astype(np.float32))
    assert start.words == model.vocabulary.words and start.config == model.config


def test_run_begins_with_the_weights_and_goes_on(base, tmp_path, capsys):
    path, _, _ = base
    out, said = tmp_path / "run", progress.Progress(io.StringIO())
    start = weights.load_start(str(path), "ci")
    summary = train(tiny(), out, said, start=start)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["stage"] == "base"][0]["weights"] == start.identity()["weights"]
    assert not [line for line in lines if line["stage"] == "base" and "loss" in line]
    assert [line for line in lines if line["stage"] == "align"][0]["first_loss"] == np.log(2)
    assert summary["pictures"] == 8
    arrays, meta = checkpoint.load(out / "checkpoint.safetensors")
    for name, a in start.arrays.items():
        np.testing.assert_array_equal(arrays[f"ema.{name}"], a)
    assert any(not np.array_equal(arrays[f"policy.{n}"], a) for n, a in start.arrays.items())
    assert json.loads((out / "config.json").read_text())["start"] == start.identity()
    # the same command goes on, another start does not
    assert main([*ARGUMENTS, "--from", str(path), "--out", str(out)]) == 0
    capsys.readouterr()
    said = fails(capsys, *ARGUMENTS, "--out", out)
    assert "holds a run with --from" in said and "this one begins with a base model of its own" in said
    # a run of a run: its base model, which is what it began with
    again = weights.load_start(str(out), "ci")
    assert again.identity()["weights"] == start.identity()["weights"]
    assert weights.load_start(str(out / "checkpoint.safetensors"), "ci").words == again.words


def test_stopped_run_with_a_start_ends_in_the_same_bytes(base, tmp_path, monkeypatch):
    from fp4bf16.train import stages
    from fp4bf16.train.state import Stopped

    start = weights.load_start(str(base[0]), "ci")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(tiny(), whole, progress.Progress(io.StringIO()), start=start)
    real = stages.STAGES["align"]

    def interrupted(run):
        run.stop.asked = 2
        real(run)

    monkeypatch.setitem(stages.STAGES, "align", interrupted)
    with pytest.raises(Stopped):
        train(tiny(), parted, progress.Progress(io.StringIO()), start=start)
    monkeypatch.setitem(stages.STAGES, "align", real)
    train(tiny(), parted, progress.Progress(io.StringIO()), start=start)
    assert (whole / "checkpoint.safetensors").read_bytes() == (parted / "checkpoint.safetensors").read_bytes()


def test_sample_from_a_base_file(base, tmp_path, capsys):
    grid, one = tmp_path / "grid.png", tmp_path / "one.png"
    assert main(["sample", "--from", str(base[0]), "--n", "9", "--out", str(grid), "--seed", "5"]) == 0
    assert "9 pictures of 'angry face', " in capsys.readouterr().out
    words = ["sample", "--from", str(base[0]), "--n", "1", "--out", str(one), "--seed", "5"]
    assert main([*words, "--caption", "angry face"]) == 0
    a, b = (np.asarray(Image.open(f)) for f in (one, grid))
    np.testing.assert_array_equal(a, b[: a.shape[0], : a.shape[1]])  # seed and caption are those of the first
    with pytest.raises(SystemExit):  # one of both
        main(["sample", "--from", str(base[0]), "--run", "x", "--out", str(grid)])


def test_other_configurations_are_refused(base, capsys, tmp_path):
    path, out = base[0], tmp_path / "run"
    for setting, sentence in (
        ("model.block_out_channels=[16,16]", "trained with model.block_out_channels = (8, 16), but"),
        ("size=8", "trained with size = 16, but this run has 8"),
        ("diffusion.prediction=eps", "trained with diffusion.prediction = v, but this run has eps"),
        ("word=cat", "knows "),
    ):
        more = ["--set", setting, "--set", "align.prompts=1"]
        said = fails(capsys, *ARGUMENTS, *more, "--from", path, "--out", out)
        assert sentence in said and "use --preset ci" in said
        assert sentence in fails(capsys, *ARGUMENTS, *more, "--from", path, "--out", out, "--dry-run")
    assert not out.exists()


def test_files_that_cannot_be_used(base, tmp_path, capsys):
    path, model, _ = base
    recipe = path.with_suffix(".json")
    asked = [*ARGUMENTS, "--out", tmp_path / "run", "--from"]
    assert "there is no file" in fails(capsys, *asked, tmp_path / "none.safetensors")
    assert "there is no file" in fails(capsys, *asked, tmp_path)  # a folder, but not that of a run
    whole = path.read_bytes()
    at = len(whole) - 7
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    said = fails(capsys, *asked, path)
    assert re.search(r"has SHA-256 \w{64}, but tiny.json beside it says \w{64}; fetch both files anew", said)
    recipe.write_text("{")
    assert "tiny.json cannot be read" in fails(capsys, *asked, path)
    recipe.unlink()
    for content in (whole[: len(whole) // 2], b"", b"\0" * 100, b"garbage " * 20):
        path.write_bytes(content)
        assert "cannot be read as safetensors" in fails(capsys, *asked, path)
    path.write_bytes(whole)
    assert main([str(a) for a in (*asked, path, "--dry-run")]) == 0  # without a recipe there is no hash
    assert "base      is there: --from" in capsys.readouterr().out
    arrays = dict(model.unet.state_dict())
    nan = np.full_like(arrays["conv_in.weight"], np.nan)
    for change, sentence in (
        ({"conv_in.weight": nan}, "conv_in.weight holds NaN or Inf"),
        ({"conv_in.bias": np.zeros(3, np.float32)}, "conv_in.bias has shape (3,) instead of (8,)"),
        ({"more": np.zeros(3, np.float32)}, "parameter more is on one side only"),
    ):
        weights.write_base(path, arrays | change, model.config, model.vocabulary.words, {})
        assert sentence in fails(capsys, *asked, path)
    assert not (tmp_path / "run").exists()


def test_weights_that_do_not_ship(capsys, tmp_path):
    said = fails(capsys, *ARGUMENTS, "--out", tmp_path / "run", "--from", "base")
    assert "no weights ship for preset ci; use " in said and "a checkpoint of your own" in said
    said = fails(capsys, "sample", "--from", "base", "--preset", "emoji33", "--out", tmp_path / "x.png")
    assert "did you mean 'emoji32'" in said


def test_shipped_weights_draw_what_they_were_trained_on():
    """The packaged base: the file that its recipe describes, of the preset as it is, and its pictures are
    nearer to the drawings of their own captions than to those of others.
    """
    config = get_preset("emoji32")
    start = weights.load_start("base", "emoji32")
    model = denoiser(config)
    start.check(config, model)
    recipe = json.loads((weights.ASSETS / "emoji32.json").read_text())
    assert (weights.ASSETS / "emoji32.safetensors").stat().st_size == recipe["bytes"] < 3_000_000
    assert {"commit", "steps", "seed", "device", "data"} <= set(recipe)
    assert "CC-BY-4.0" in recipe["data"]["twemoji"] and "Apache-2.0" in recipe["data"]["noto"]
    pairs = load_pairs(32).select(role="policy")
    index = np.linspace(0, len(pairs) - 1, 24).astype(int)
    model.unet.load_state_dict(start.arrays)
    drawn = model.draw(range(24), [pairs.captions[i] for i in index], 10)
    real = pairs.images[:, index].reshape(2, 24, -1)
    distance = np.square(drawn.reshape(24, 1, 1, -1) - real[None]).mean(-1).min(1)  # (drawn, caption)
    rank = (distance < np.diag(distance)[:, None]).sum(1)
    assert (rank == 0).mean() >= 0.5 and np.median(rank) == 0, rank  # by chance 1 in 24


def test_packaged_file_that_is_damaged_or_alone(tmp_path, monkeypatch, capsys):
    for name in ("emoji32.safetensors", "emoji32.json"):
        shutil.copy(weights.ASSETS / name, tmp_path / name)
    monkeypatch.setattr(weights, "ASSETS", tmp_path)
    file = tmp_path / "emoji32.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="SHA-256 .* install the package anew"):
        weights.load_start("base", "emoji32")
    (tmp_path / "emoji32.json").unlink()
    with pytest.raises(CheckpointError, match="emoji32.json with its SHA-256 is missing"):
        weights.load_start("base", "emoji32")
    file.unlink()
    with pytest.raises(ConfigError, match="no weights ship for preset emoji32"):
        weights.load_start("base", "emoji32")
