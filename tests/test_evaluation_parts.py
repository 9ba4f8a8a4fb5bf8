"""Parts of the evaluation: the folder it writes, extractors, the noise floor, page, sheets, the script."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pathlib
import shutil
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
Image = pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from evaluated import fails, quiet, trained  # noqa: E402

from fp4bf16.__main__ import main  # noqa: E402
from fp4bf16.errors import ConfigError, ShapeError  # noqa: E402
from fp4bf16.routing import RouteSet, flops, save_routes  # noqa: E402
from fp4bf16.train import device_sampler, evaluation, extractors  # noqa: E402
from fp4bf16.train.distances import FeatureSet, KernelTable  # noqa: E402
from fp4bf16.train.evaluation import Settings, check_target, evaluate, write_folder  # noqa: E402
from fp4bf16.train.evaluation_numbers import noise_floor  # noqa: E402
from fp4bf16.train.evaluation_page import page, sheet  # noqa: E402
from fp4bf16.train.evaluation_sets import fp4_share, load_weights  # noqa: E402
from fp4bf16.train.extractors import Extractor, featurise, make_extractors  # noqa: E402
from fp4bf16.train.folder import RunFolder  # noqa: E402
from fp4bf16.train.progress import Progress  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    """A finished run, that nobody changes."""
    return trained(tmp_path_factory.mktemp("evaluated") / "run")


@pytest.fixture
def copy(run, tmp_path) -> pathlib.Path:
    """A run that the test may change."""
    return pathlib.Path(shutil.copytree(run, tmp_path / "copy"))


# ---- the folder that is written
def test_running_again_replaces_the_folder(copy, capsys):
    arguments = ["eval", str(copy), "--n", "4", "--floor-seeds", "0", "--extractors", "pixels"]
    assert main(arguments) == 0
    first = (copy / "eval" / "report.json").read_bytes()
    stale = copy / ".eval.new.999999999"
    stale.mkdir()
    assert main([*arguments, "--seed", "9"]) == 0
    second = json.loads((copy / "eval" / "report.json").read_text())
    assert second["settings"]["seed"] == 9 and json.loads(first)["settings"]["seed"] == 0
    assert not [p for p in copy.iterdir() if p.name.startswith(".eval.")]
    assert main(["train", "--preset", "ci", "--out", str(copy), "--dry-run"]) == 0
    loaded = RunFolder(copy)
    assert loaded.open(load_weights(copy).config)[1]["stage"] == "finished"  # the run still opens
    loaded.close()


def test_a_failure_leaves_the_old_evaluation(tmp_path, monkeypatch):
    target = tmp_path / "eval"
    write_folder(target, {"report.json": b'{"files": ["report.json", "a.png"]}', "a.png": b"1"})
    write_bytes = pathlib.Path.write_bytes

    def full(self, data):
        if self.name == "a.png":
            raise OSError(28, "No space left on device")
        return write_bytes(self, data)

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_folder(target, {"report.json": b"{}", "a.png": b"2"})
    monkeypatch.undo()
    replace = os.replace

    def no_new(source, to):
        if ".new." in str(source):
            raise OSError(5, "Input/output error")
        replace(source, to)

    monkeypatch.setattr(evaluation.os, "replace", no_new)
    with pytest.raises(OSError, match="Input/output"):
        write_folder(target, {"report.json": b"{}", "a.png": b"2"})
    assert (target / "a.png").read_bytes() == b"1" and {p.name for p in tmp_path.iterdir()} == {"eval"}


def test_files_of_others_are_not_deleted(run, tmp_path, capsys):
    with pytest.raises(ConfigError, match="holds 'checkpoint.*', which no evaluation wrote"):
        check_target(run)
    write_folder(tmp_path / "eval", {"report.json": b'{"files": ["report.json"]}'})
    (tmp_path / "eval" / "notes.txt").write_text("mine")
    said = fails(capsys, "eval", str(run), "--out", str(tmp_path / "eval"))
    assert "holds 'notes.txt', which no evaluation wrote" in said
    (tmp_path / "file").write_text("")
    assert "cannot be made a folder" in fails(capsys, "eval", str(run), "--out", str(tmp_path / "file" / "x"))


# ---- extractors
def test_an_extractor_that_is_not_installed(run, monkeypatch, rng):
    def missing():
        raise ImportError("EfficientNet-Lite0 needs the package torch")

    monkeypatch.setattr(extractors, "efficientnet", missing)
    real = rng.uniform(-1, 1, (5, 16, 16, 3)).astype(np.float32)
    made, absent = make_extractors(None, real)
    assert [e.name for e in made] == ["pixel statistics", "class network"]
    assert absent == {"EfficientNet-Lite0": "EfficientNet-Lite0 needs the package torch"}
    with pytest.raises(ImportError, match="needs the package torch"):
        make_extractors(("efficientnet",), real)
    assert main(["eval", str(run), "--extractors", "efficientnet"]) == 2


def test_featurise(rng):
    pictures = rng.uniform(-1, 1, (7, 8, 8, 3)).astype(np.float32)
    e = extractors.pixels(pictures)
    x = featurise(e, pictures)
    assert x.shape == (7, 56) and np.allclose(x.mean(0), 0, atol=1e-4) and (x.std(0) < 1.001).all()
    assert np.array_equal(featurise(e, pictures, chunk=1), x) and featurise(e, pictures[:0]).shape == (0, 56)
    wrong = Extractor("wrong", 3, lambda p: np.zeros((len(p), 4)), "")
    with pytest.raises(ShapeError, match=r"wrong: features have shape \(7, 4\)"):
        featurise(wrong, pictures)


# ---- the floor
@pytest.mark.parametrize("shift, within", [(0.0, True), (0.002, True), (1.0, False)])
def test_noise_floor_tells_a_shift_from_other_seeds(shift, within, rng):
    sets = {"real": FeatureSet(rng.normal(size=(300, 6)), "real")}
    names = [f"bf16 {i}" for i in range(4)]
    for name in names:
        sets[name] = FeatureSet(rng.normal(size=(300, 6)) + 0.5, name)
    sets["fp4"] = FeatureSet(sets["bf16 0"].values + shift, "bf16 0")
    found = noise_floor(KernelTable(sets, replicates=200), "fp4", names, "real")
    assert found["within"] is within and found["floor"] >= found["floor_mean"] > 0
    values = [found["distance"][n] for n in names]
    assert found["floor"] == pytest.approx(max(values) - min(values))
    assert found["change"] == pytest.approx(found["distance"]["fp4"] - values[0], abs=1e-9)
    assert found["change_low"] <= found["change"] <= found["change_high"]
    assert len(found["between"]) == 6 + 4


def test_without_other_seeds_there_is_no_floor(rng):
    sets = {n: FeatureSet(rng.normal(size=(30, 6)), s) for n, s in (("real", "r"), ("a", "s"), ("b", "s"))}
    found = noise_floor(KernelTable(sets), "b", ["a"], "real")
    assert found["floor"] is None and found["within"] is None and found["times_floor"] is None


# ---- the script
def _script():
    spec = importlib.util.spec_from_file_location("sample_quality", ROOT / "bench" / "sample_quality.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sample_quality(run, tmp_path, capsys, monkeypatch):
    script = _script()
    monkeypatch.setattr(script, "QUICK", 10)
    file = tmp_path / "quality.json"
    arguments = [str(run), "--quick", "--floor-seeds", "2", "--extractors", "pixels", "--json", str(file)]
    status = script.main(arguments)
    found = json.loads(file.read_text())
    assert status == (0 if found["held"] else 1) and len(found["rows"]) == 2
    assert [s["n"] for s in found["sets"]] == [10] * 4 and found["settings"]["n"] == 10
    row = found["rows"][0]
    assert row["within"] == (abs(row["change"]) <= row["floor"]) and row["change_low"] < row["change_high"]
    assert found["machine"]["fp4bf16"] and "pixel statistics" in capsys.readouterr().out
    assert script.main([*arguments, "--floor-seeds", "0"]) == 1  # without a floor nothing is claimed
    assert script.main([str(tmp_path), "--quick"]) == 2


def test_routes_of_sample_quality(run, tmp_path, monkeypatch, capsys):
    """A route of BF16 alone changes nothing, its share is 0; the run's own decides, not it. Files that are no
    routes, or of one name, are refused at once.
    """
    script = _script()
    monkeypatch.setattr(script, "QUICK", 10)
    real, verdicts = script.compare_sets, iter([False, True, True, True, False, False])

    def compared(*given):
        found, verdict = real(*given), next(verdicts)
        return *found[:3], [row | {"within": verdict} for row in found[3]]

    monkeypatch.setattr(script, "compare_sets", compared)
    files = [tmp_path / "plain.json", tmp_path / "upper.json"]
    save_routes(files[0], {"*": "bf16"})
    save_routes(files[1], RouteSet([{"*": "bf16"}, {"*": "fp4"}], {"*": "fp4"}))
    target = tmp_path / "quality.json"
    arguments = [str(run), "--quick", "--floor-seeds", "1", "--extractors", "pixels", "--json", str(target)]
    for status in (1, 0):  # what the run's own route says, against both files
        assert script.main([*arguments, "--route", *map(str, files)]) == status
        found = json.loads(target.read_text())
        assert found["held"] is (status == 0)
        assert [about["held"] for about in found["routes"].values()] == [status == 0, *2 * [status == 1]]
        said = [line for line in capsys.readouterr().out.splitlines() if "of the FLOPs on FP4" in line]
        assert ["DOES NOT HOLD" in line for line in said] == [status == 1, *2 * [status == 0]]
        assert "(decides)" in said[0] and "(of plain.json, beside it)" in said[1]
    routes = {name.rpartition(", ")[2]: about for name, about in found["routes"].items()}
    assert routes["plain"]["share"] == 0 and routes["plain"]["routes"]["buckets"] == [{"*": "bf16"}]
    assert routes["upper"]["share"] == pytest.approx(0.5) and len(found["rows"]) == 6
    same = [r["change"] for r in found["rows"] if r["fp4"].endswith("plain")]
    assert same == pytest.approx([0.0, 0.0], abs=1e-9)  # the same pictures, summed in another order
    assert all(abs(r["change"]) > 1e-6 for r in found["rows"] if r["fp4"].endswith("upper"))
    (tmp_path / "other").mkdir()
    again = save_routes(tmp_path / "other" / "plain.json", {"*": "bf16"})
    files[1].write_text("[]")
    for bad, said in ((again, "both would be reported as 'plain'; rename one"), (files[1], "upper.json")):
        assert script.main([*arguments, "--route", str(files[0]), str(bad)]) == 2
        assert said in capsys.readouterr().err
    save_routes(files[1], RouteSet([{"*": "fp4"}, {"conv_on*": "bf16", "*": "dual"}], {"*": "fp4"}))
    assert script.main([*arguments, "--route", str(files[1]), "--device", "cuda"]) == 2
    assert "* is on 'dual', but on the GPU" in capsys.readouterr().err
    script.check_files(load_weights(run), [str(files[1])], "cpu")
    assert "upper.json: route: 'conv_on*' (bf16) matches no layer" in capsys.readouterr().err


def test_routes_are_looked_at_before_anything_is_drawn(run, tmp_path, monkeypatch):
    """A pattern without a layer is said; on the GPU the dual track is refused, if drawn on."""

    class Drawing(Exception):
        pass

    def draw(*_):
        raise Drawing

    monkeypatch.setattr(evaluation, "draw_all", draw)
    monkeypatch.setattr(device_sampler, "place", lambda: None)
    wrong, dual = {"conv_on*": "bf16", "*": "fp4"}, {"*": "dual"}
    for buckets, training, on_gpu in (
        ([{"*": "fp4"}, wrong], {"*": "fp4"}, Drawing),
        ([{"*": "fp4"}, wrong | dual], {"*": "fp4"}, ConfigError),
        ([wrong], dual, Drawing),
    ):
        file, said = save_routes(tmp_path / "some.json", RouteSet(buckets, training)), io.StringIO()
        settings = Settings(n=6, floor_seeds=0, extractors=("pixels",), route=str(file))
        for device, outcome in (("cpu", Drawing), ("cuda", on_gpu)):
            with pytest.raises(outcome, match="is on 'dual'" if outcome is ConfigError else None):
                evaluate(run, replace(settings, device=device), Progress(said))
        sentence = f"warning: --route {file}: route: 'conv_on*' (bf16) matches no layer"
        assert said.getvalue().count(sentence) == 1 + (on_gpu is Drawing)
        assert said.getvalue().count("warning") == 1 + (on_gpu is Drawing)


def test_share_is_of_what_each_route_multiplies(run):
    """On "dual" upsampling convolutions are not by phases: that half of the steps costs more."""
    weights = load_weights(run)
    model = weights.model("aligned")
    model.unet.upsample_by_phases(True)
    cost = {}
    for track in ("dual", "bf16"):
        model.unet.apply_route({"*": track})
        cost[track] = sum(flops(model.unet).values())
    assert cost["dual"] > cost["bf16"]
    for tracks in (("dual", "bf16"), ("bf16", "dual")):
        model.routes = RouteSet([{"*": track} for track in tracks], {"*": "fp4"})
        for track in ("dual", "bf16"):  # that it is on when asked, and afterwards
            model.unet.apply_route({"*": track})
            assert fp4_share(model, 4) == pytest.approx(cost["dual"] / sum(cost.values()))
            assert sum(flops(model.unet).values()) == cost[track]


def test_eval_on_a_route(run, tmp_path):
    file = save_routes(tmp_path / "plain.json", {"*": "bf16"})
    settings = Settings(n=6, floor_seeds=0, extractors=("pixels",))
    plain = evaluate(run, replace(settings, route=str(file)), Progress(io.StringIO()))
    own = evaluate(run, settings, Progress(io.StringIO()))
    assert plain.report["settings"]["route"] == str(file)

    def features(e, track):
        which = (s for s in e.sets.values() if (s.weights, s.track) == ("aligned", track))
        return next(which).features["pixel statistics"]

    assert np.array_equal(features(plain, "fp4"), features(plain, "bf16"))
    assert not np.array_equal(features(own, "fp4"), features(own, "bf16"))
    assert plain.report["routes"]["buckets"] == [{"*": "bf16"}]
    assert own.report["routes"]["buckets"] == [load_weights(run).config.route]
    many = save_routes(tmp_path / "many.json", RouteSet([{"*": "fp4"}] * 1001, {"*": "fp4"}))
    with pytest.raises(ConfigError, match="many.json: is of 1001 parts of the noise levels, but the run has"):
        evaluate(run, replace(settings, route=str(many)), Progress(io.StringIO()))
    with pytest.raises(ConfigError, match="absent.json: cannot be read"):
        evaluate(run, replace(settings, route=str(tmp_path / "absent.json")), Progress(io.StringIO()))


# ---- page and sheets
def test_the_page_escapes_what_it_is_told(run):
    e = quiet(run)
    report = json.loads(json.dumps(e.report))
    report["run"]["folder"] = "<script>&"
    assert "&lt;script&gt;&amp;" in page(report, {}) and "<script>" not in page(report, {})


def test_a_sheet_takes_any_caption(rng):
    picture = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    content = sheet([[picture, picture]] * 2, ("BF16", "FP4"), [["a " * 200], ["\u732b \U0001f408"]])
    assert Image.open(io.BytesIO(content)).size == (2 * (2 * 80 + 4 + 12) + 12, 15 + 80 + 13 + 12 + 12)
