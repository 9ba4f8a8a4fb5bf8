"""``python -m fp4bf16 eval``, end to end on runs of seconds; runs that are not finished; what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import re
import shutil
from contextlib import redirect_stdout

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
Image = pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from evaluated import FEW, change_checkpoint, fails, quiet, trained  # noqa: E402
from host_cuda import host_cuda  # noqa: E402, F401  (a fixture)
from test_resume import SETTINGS  # noqa: E402
from test_train_device import emulate  # noqa: E402

from fp4bf16.__main__ import main  # noqa: E402
from fp4bf16.backends import cuda  # noqa: E402
from fp4bf16.errors import CheckpointError  # noqa: E402
from fp4bf16.train import checkpoint, evaluation_sets, extractors  # noqa: E402
from fp4bf16.train.config import get_preset, override  # noqa: E402
from fp4bf16.train.distances import frechet_distance, kernel_distance  # noqa: E402
from fp4bf16.train.evaluation_page import files, text  # noqa: E402
from fp4bf16.train.evaluation_sets import cases, load_scores, load_weights, real_pictures  # noqa: E402
from fp4bf16.train.extractors import NOT_FID, featurise  # noqa: E402
from fp4bf16.train.folder import RunFolder  # noqa: E402
from fp4bf16.train.pictures import from_bytes  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    """A finished run, that nobody changes."""
    return trained(tmp_path_factory.mktemp("evaluated") / "run")


@pytest.fixture
def copy(run, tmp_path) -> pathlib.Path:
    """A run that the test may change."""
    return pathlib.Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture(scope="module")
def done(run):
    """(report, exit code, printed) of the command with other seeds and both extractors that need no extra."""
    out, printed = run / "eval", io.StringIO()
    with redirect_stdout(printed):
        code = main(["eval", str(run), "--floor-seeds", "2", "--extractors", "pixels,classes"])
    return json.loads((out / "report.json").read_text()), code, printed.getvalue()


# ---- the whole command
def test_the_command_writes_what_it_says(run, done):
    report, code, printed = done
    assert code == 0
    assert sorted(report["files"]) == sorted(p.name for p in (run / "eval").iterdir())
    assert {"tracks.png", "aligned.png", "neighbours.png", "report.html", "report.json"} == set(
        report["files"]
    )
    for name in report["files"]:
        if name.endswith(".png"):
            picture = np.asarray(Image.open(run / "eval" / name))
            assert picture.shape[0] > 100 and picture.std() > 10
    assert f"report: {run / 'eval' / 'report.html'}" in printed
    assert "Distances on: pixel statistics" in printed and "Distances on: class network" in printed
    page = (run / "eval" / "report.html").read_text()
    assert "Distances on: class network" in page and page.count("data:image/png;base64,") == 3
    assert "http" not in page.replace("http-equiv", "")  # nothing is loaded from elsewhere


def test_every_number_says_what_it_is_of(done):
    report, *_ = done
    sets = {s["name"]: s for s in report["sets"]}
    assert list(sets) == [
        "base bf16", "aligned bf16", "aligned fp4", "aligned bf16, seeds 2", "aligned bf16, seeds 3"
    ]  # fmt: skip
    assert all(s["n"] == 8 and s["unhealthy"] == 0 for s in sets.values())
    wanted = {(kind, name, to, e)
              for kind in ("kernel distance", "Fréchet distance") for name in sets
              for to in ("real", "real noto") for e in ("pixel statistics", "class network")}  # fmt: skip
    found = {(n["name"], n["of"], n["to"], n["extractor"]) for n in report["numbers"] if "to" in n}
    assert found == wanted
    for n in report["numbers"]:
        assert n["name"] and n["n"] > 0 and np.isfinite(n["value"]), n
        assert (n["low"] is None) == (n["high"] is None) and (n["low"] is None or n["low"] <= n["high"]), n
        if n["name"] == "Fréchet distance":
            assert "biased upwards" in n["note"]
        elif "median" not in n["name"]:
            assert n["low"] is not None, n
    assert {f["extractor"] for f in report["noise_floor"]} == {"pixel statistics", "class network"}
    assert all(len(f["bf16"]) == 3 and f["within"] in (True, False) for f in report["noise_floor"])
    assert report["extractors"]["class network"]["dimension"] == 128 and report["left_out"] == {}
    names = {n["name"] for n in report["numbers"]}
    assert "reward, change" in names and "held-out judge, share of wins" in names


def test_no_number_is_called_what_it_is_not(run, done):
    report, _, printed = done
    written = (
        (run / "eval" / "report.html").read_text() + (run / "eval" / "report.json").read_text() + printed
    )
    assert written.count(NOT_FID) == 3
    written = re.sub(r"base64,[^\"]*", "", written)
    left = written.replace(NOT_FID, "").replace('"not_fid"', "")
    assert "FID" not in left and "Inception" not in left and "inception" not in left


def test_default_pictures_are_the_runs_own(run):
    """Same captions, noise, steps and judges, so the numbers of the run's own report come again."""
    arrays, meta = checkpoint.load_run(run / "checkpoint.safetensors")
    e = quiet(run, dataclasses.replace(FEW, n=None, floor_seeds=0))
    for name in ("base", "aligned"):
        one = e.sets[f"{name} bf16"]
        assert np.array_equal(one.shown, arrays[f"result.{name}.pictures"][: len(one.shown)])
        assert np.array_equal(one.scores["held-out judge"], arrays[f"result.{name}.heldout"])
        assert np.mean(one.scores["reward"]) == pytest.approx(meta["results"][name]["reward"])
    share = next(
        n for n in e.report["numbers"] if n["name"].endswith("share of wins") and n["of"] == "base bf16"
    )
    assert share["value"] == meta["results"]["base"]["heldout"]


def test_sets_differ_by_what_they_are_said_to_differ_by(run):
    e = quiet(run)
    base, bf16, fp4, other = e.sets.values()
    assert not np.array_equal(base.shown, bf16.shown)  # weights
    assert not np.array_equal(bf16.shown, fp4.shown)  # track
    apart = [np.abs(from_bytes(x.shown) - from_bytes(bf16.shown)).mean() for x in (fp4, other)]
    assert apart[0] < 0.5 * apart[1]  # the same noise gives nearly the same picture, other noise does not
    assert len({tuple(x.scores["reward"]) for x in (base, bf16, fp4, other)}) == 4
    assert other.distances == {} and set(fp4.distances) == {"pixels"}


def test_settings_change_what_they_name(run):
    one = quiet(run)
    assert np.array_equal(quiet(run).sets["aligned fp4"].shown, one.sets["aligned fp4"].shown)
    for changed in ({"seed": 5}, {"steps": 1}, {"guidance": 3.0}, {"sampler": "ancestral"}):
        two = quiet(run, dataclasses.replace(FEW, floor_seeds=0, **changed))
        assert not np.array_equal(two.sets["aligned bf16"].shown, one.sets["aligned bf16"].shown), changed
        assert two.report["settings"] | changed == two.report["settings"]


def test_chunks_change_no_number(run, monkeypatch):
    settings = dataclasses.replace(FEW, n=19)  # two and a half times round the captions
    one = quiet(run, settings)
    monkeypatch.setattr(evaluation_sets, "CHUNK", 6)
    two = quiet(run, settings)
    # A judge's log-odds, sums of hundreds of float32 terms, round otherwise in another batch: a few 2^-24 of
    # values of up to ten, which a difference of two means near zero does not average out.
    assert [n["value"] for n in two.report["numbers"]] == pytest.approx(
        [n["value"] for n in one.report["numbers"]], rel=1e-5, abs=10 * 4 * 2.0**-24
    )
    assert [c[:2] for c in one.sets["aligned bf16"].closest] == [
        c[:2] for c in two.sets["aligned bf16"].closest
    ]


def test_numbers_are_those_of_the_pictures(run):
    """Distances and neighbours once more, from pictures drawn here."""
    weights = load_weights(run)
    real = real_pictures(weights.config)
    e = quiet(run)
    captions, seeds = cases(weights, real.captions, 8, weights.config.seed)
    pictures = weights.model("aligned").draw(seeds, captions, weights.config.eval.steps, "fp4")
    extractor = extractors.pixels(real.references["real"])
    x, y = (featurise(extractor, p) for p in (pictures, real.references["real noto"]))
    found = {(n["name"], n["of"], n.get("to")): n for n in e.report["numbers"]}
    of = ("aligned fp4", "real noto")
    assert found[("kernel distance", *of)]["value"] == pytest.approx(kernel_distance(x, y).value, rel=1e-9)
    assert found[("Fréchet distance", *of)]["value"] == pytest.approx(frechet_distance(x, y), rel=1e-9)
    direct = ((pictures[:, None] - real.train[None]).astype(float) ** 2).mean((2, 3, 4)) ** 0.5
    median = found[("nearest training picture, median distance", "aligned fp4", None)]
    assert median["value"] == pytest.approx(np.median(direct.min(1)))
    closest = e.sets["aligned fp4"].closest
    assert closest[0][0] == pytest.approx(direct.min()) and closest[0][1] == direct.min(1).argmin()
    assert closest[0][3]["pixels"] == direct[closest[0][1]].argmin()


def test_many_pictures_for_the_extrapolation(run):
    one = quiet(run, dataclasses.replace(FEW, at_infinity=True))
    n = next(n for n in one.report["numbers"] if n["name"] == "Fréchet distance, n to infinity")
    assert n["value"] is None and "at least 448" in n["note"]


# ---- runs that are not finished, and other kinds
def test_a_run_before_its_alignment_has_a_base_alone(copy):
    def back(arrays, meta):
        meta["stage"], meta["step"] = "align", 0

    change_checkpoint(copy, back)
    e = quiet(copy)
    assert list(e.sets) == ["base bf16", "base fp4", "base bf16, seeds 2"]
    assert not e.report["run"]["aligned"] and "not aligned yet" in text(e.report)
    assert "aligned.png" not in files(e)


def test_a_run_before_its_judges_scores_nothing(copy):
    def back(arrays, meta):
        meta["stage"], meta["step"] = "base", 5
        for name in [k for k in arrays if k.startswith(("panel.", "result."))]:
            del arrays[name]

    change_checkpoint(copy, back)
    e = quiet(copy)
    assert not e.report["run"]["judges"] and "not trained its judges" in text(e.report)
    assert {n["name"].split(",")[0] for n in e.report["numbers"]} == {
        "kernel distance", "Fréchet distance", "nearest training picture"
    }  # fmt: skip
    assert len(files(e)) == 4


def test_a_run_in_the_middle_of_its_alignment(copy):
    def back(arrays, meta):
        meta["stage"], meta["step"] = "align", 1

    change_checkpoint(copy, back)
    assert list(quiet(copy).sets)[:3] == ["base bf16", "aligned bf16", "aligned fp4"]


def test_a_diverged_model_is_reported(copy):
    def diverge(arrays, meta):
        arrays["policy.conv_out.bias"] = np.full_like(arrays["policy.conv_out.bias"], np.nan)

    change_checkpoint(copy, diverge)
    e = quiet(copy)
    assert [s["unhealthy"] for s in e.report["sets"]] == [0, 8, 8, 8]
    assert {n["of"] for n in e.report["numbers"] if n["name"] == "kernel distance"} == {"base bf16"}
    shares = {
        n["of"]: n["value"] for n in e.report["numbers"] if n["name"] == "held-out judge, share of wins"
    }
    assert shares["aligned bf16"] == 0 and e.report["noise_floor"] == []
    assert "8 of aligned fp4" in text(e.report) and len(files(e)) == 4
    json.dumps(e.report, allow_nan=False)


def test_some_unhealthy_pictures_are_left_out_of_pairs_alone(run, monkeypatch):
    spoilt = evaluation_sets.healthy

    def third_is_broken(pictures):
        good = spoilt(pictures)
        good[2] = False
        return good

    monkeypatch.setattr(evaluation_sets, "healthy", third_is_broken)
    e = quiet(run)
    assert all(s["unhealthy"] == 1 for s in e.report["sets"])
    assert all(n["n"] == 7 for n in e.report["numbers"] if n["name"] in ("kernel distance", "reward, change"))
    assert e.sets["aligned bf16"].rows.tolist() == [0, 1, 3, 4, 5, 6, 7]


def test_adapters_draw_as_in_the_run(tmp_path):
    folder = trained(tmp_path / "lora", "align.parameters=lora", "lora.rank=2")
    arrays, _ = checkpoint.load_run(folder / "checkpoint.safetensors")
    assert any(name.startswith("lora.") for name in arrays)
    e = quiet(folder, dataclasses.replace(FEW, n=None, floor_seeds=0))
    assert np.array_equal(e.sets["aligned bf16"].shown, arrays["result.aligned.pictures"])
    assert np.array_equal(e.sets["base bf16"].shown, arrays["result.base.pictures"])
    beside, merged = (load_weights(folder).model("aligned", merged=m) for m in (False, True))
    x, y = (m.draw([1, 2], ["face", "face"], 2, "bf16") for m in (beside, merged))
    assert np.abs(x - y).max() < 0.1


def test_a_sum_of_rewards_shows_its_parts(tmp_path):
    folder = trained(tmp_path / "sum", "align.reward=colourfulness - jpeg")
    e = quiet(folder)
    names = {n["name"]: n for n in e.report["numbers"]}
    assert names["reward: jpeg"]["unit"] == "bytes" and "held-out judge: colourfulness" in names
    assert "held-out judge, share of wins" not in names  # none of its judges says yes or no
    scores = e.sets["aligned bf16"].scores
    assert np.isfinite(list(scores.values())).all() and len(scores) == 6


def test_pictures_of_ones_own(tmp_path, rng):
    data, captions = tmp_path / "data", [f"thing {i}" for i in range(60)]
    data.mkdir()
    for i, caption in enumerate(captions):
        Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(data / f"{i:02d}.png")
        (data / f"{i:02d}.txt").write_text(caption)
    config = override(get_preset("ci"), [*SETTINGS, f"data.pictures={data}", "word="])
    real = real_pictures(config)
    assert list(real.references) == ["real"] and len(real.train) + len(real.heldout) <= 60
    assert len(real.train) == len(real.train_captions) > 25 and set(real.train_captions) <= set(captions)
    assert set(real.captions) <= set(captions)


def test_on_a_gpu_the_same_pictures_but_for_rounding(run, host_cuda, monkeypatch):  # noqa: F811
    """On the emulated library."""
    settings = dataclasses.replace(FEW, n=4, floor_seeds=0)
    host = quiet(run, settings)
    emulate(monkeypatch)
    device = quiet(run, dataclasses.replace(settings, device="cuda"))
    for name, one in host.sets.items():
        assert np.abs(from_bytes(device.sets[name].shown) - from_bytes(one.shown)).mean() < 0.05, name
    assert not np.array_equal(device.sets["aligned fp4"].shown, device.sets["aligned bf16"].shown)


def test_without_a_gpu_a_sentence(run, capsys):
    if cuda.find_library() is not None and cuda.devices():
        pytest.skip("there is a GPU")
    said = fails(capsys, "eval", str(run), "--device", "cuda")  # no CuPy, no library, or no driver
    assert "--device cuda" in said or "no NVIDIA driver" in said


def test_scores_need_judges(copy):
    def back(arrays, meta):
        meta["stage"], meta["step"] = "judges", 1  # one of the two is trained

    change_checkpoint(copy, back)
    assert load_scores(load_weights(copy)) is None


# ---- a run that is being written
def test_a_run_that_is_being_written_is_read(run):
    weights = load_weights(run)
    holder = RunFolder(run)
    holder.open(weights.config)
    try:
        assert len(quiet(run).sets) == 4
    finally:
        holder.close()


def test_a_checkpoint_that_is_replaced_while_it_is_read(run, monkeypatch):
    monkeypatch.setattr(evaluation_sets.time, "sleep", lambda seconds: None)
    real, calls = checkpoint.load_last, []

    def torn(*files):
        calls.append(1)
        if len(calls) == 1:
            raise CheckpointError("checksum")
        if len(calls) == 2:
            return (*real(*files)[:2], "is damaged")
        return real(*files)

    monkeypatch.setattr(evaluation_sets.checkpoint, "load_last", torn)
    assert load_weights(run).meta["stage"] == "finished" and len(calls) == 3


def test_the_last_good_checkpoint_is_taken(copy, monkeypatch):
    monkeypatch.setattr(evaluation_sets.time, "sleep", lambda seconds: None)
    shutil.copy(copy / "checkpoint.safetensors", copy / "checkpoint.previous.safetensors")
    data = bytearray((copy / "checkpoint.safetensors").read_bytes())
    data[-5] ^= 1
    (copy / "checkpoint.safetensors").write_bytes(data)
    assert load_weights(copy).meta["stage"] == "finished"


# ---- what cannot be done
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--n", "1"], "--n 1: a set has from 2"),
        (["--n", "0"], "--n 0: a set has from 2"),
        (["--steps", "0"], "--steps 0: must be from 1 to the 1000"),
        (["--steps", "1001"], "--steps 1001: must be from 1 to the 1000"),
        (["--sampler", "eulr"], "did you mean 'euler'"),
        (["--guidance", "nan"], "--guidance nan: must be a finite number"),
        (["--guidance", "-1"], "--guidance -1.0: must be a finite number of at least 0"),
        (["--seed", "-1"], "--seed -1: must be a whole number from 0"),
        (["--floor-seeds", "-1"], "--floor-seeds -1: must be from 0 to 100"),
        (["--device", "cude"], "did you mean 'cuda'"),
        (["--extractors", "pixel"], "did you mean 'pixels'"),
        (["--extractors", ""], "is no extractor"),
    ],
)
def test_wrong_settings_are_sentences(run, arguments, sentence, capsys, tmp_path):
    err = fails(capsys, "eval", str(run), *arguments, "--out", str(tmp_path / "out"))
    assert sentence in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_is_no_run(tmp_path, run, capsys):
    assert "no such folder" in fails(capsys, "eval", str(tmp_path / "none"))
    assert "there is no config.json" in fails(capsys, "eval", str(tmp_path))
    shutil.copy(run / "config.json", tmp_path)
    assert "has no checkpoint yet" in fails(capsys, "eval", str(tmp_path))
    (tmp_path / "checkpoint.safetensors").write_bytes(b"torn")
    assert "cannot be read as a checkpoint" in fails(capsys, "eval", str(tmp_path))


def test_weights_of_another_version(copy):
    def cut(arrays, meta):
        for name in [k for k in arrays if k.startswith("policy.conv_in")]:
            del arrays[name]

    change_checkpoint(copy, cut)
    with pytest.raises(CheckpointError, match="no weights of the aligned model"):
        quiet(copy)
