"""TensorBoard and Weights & Biases beside the metrics: what they get, and that neither can stop a run."""

from __future__ import annotations

import io
import json
import os
import pathlib
import subprocess
import sys
import time
import types

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
Image = pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from fp4bf16.errors import ConfigError  # noqa: E402
from fp4bf16.train.config import get_preset  # noqa: E402
from fp4bf16.train.events import EventFile, masked_crc32c  # noqa: E402
from fp4bf16.train.folder import RunFolder  # noqa: E402
from fp4bf16.train.loggers import Loggers, check_loggers, open_loggers, parse_loggers, scalars  # noqa: E402

CONFIG = get_preset("ci")
ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(out: pathlib.Path, names: list[str], steps: list[int], save_after: int, say=print) -> None:
    """One process of a run: opens the folder, logs the steps that are still to do, and is killed: nothing is
    closed properly."""
    folder = RunFolder(out)
    found = folder.open(CONFIG)
    folder.log_to(names, say)
    done = found[1]["step"] if found else 0
    for step in steps:
        if step <= done:
            continue
        folder.log(stage="align", step=step, loss=step / 4, kl=None, seconds=float(step))
        if step == save_after:
            meta = {"config": CONFIG.to_dict(), "stage": "align", "step": step, "words": []}
            folder.save({"w": np.zeros(3, np.float32)}, meta)
        if step % 2 == 0:
            folder.picture("aligned", np.full((3, 5, 3), step, np.uint8))
    folder.journal.close()
    os.close(folder._metrics)
    folder._lock.close()


# ------------------------------------------------------------------------------------------------------ names


def test_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    assert parse_loggers(" wandb,tensorboard , wandb,, jsonl") == ("wandb", "tensorboard")
    assert parse_loggers("") == () == check_loggers([])
    with pytest.raises(ConfigError, match="--log tensorbord: is not a logger; did you mean 'tensorboard'?"):
        parse_loggers("jsonl,tensorbord")
    with pytest.raises(
        ConfigError, match="--log comet: is not a logger; known: 'tensorboard', 'wandb', 'jsonl'"
    ):
        open_loggers(["comet"], pathlib.Path("run"), {})
    with pytest.raises(ConfigError, match=r"got the text 'wandb', but a list of names is needed"):
        check_loggers("wandb")


def test_a_package_that_is_missing_is_said_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"wandb, which is not installed; run: .*'fp4bf16\[wandb\]'"):
        open_loggers(["wandb"], tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_imported_unless_asked_for(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from fp4bf16.train.loggers import open_loggers, parse_loggers\n"
        "found = open_loggers(parse_loggers('tensorboard'), pathlib.Path('.'), {})\n"
        "found[0].log(1, {'a/b': 1.0}); found[0].close()\n"
        "print(sorted({'torch', 'tensorboard', 'tensorboardX', 'tensorflow', 'wandb'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.stdout.strip() == "[]"
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_scalars_of_a_line():
    line = {
        "stage": "align",
        "step": 3,
        "rewards/chosen": np.float32(0.5),
        "ok": np.bool_(True),
        "none": None,
        "text": "x",
        "rows": [1, 2],
        "guards": {"contrast": {"value": 0.25, "ok": False}},
    }
    assert scalars(line) == {
        "align/step": 3.0,
        "align/rewards/chosen": 0.5,
        "align/ok": 1.0,
        "align/guards/contrast/value": 0.25,
        "align/guards/contrast/ok": 0.0,
    }


# ------------------------------------------------------------------------------------------------ TensorBoard


def read_back(folder: pathlib.Path):
    """What TensorBoard itself finds in a folder."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra 'tensorboard' is not installed",
    )
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    return found


def test_tensorboard_reads_what_was_written(tmp_path, rng):
    values = rng.standard_normal(300)
    values[[3, 5, 7]] = np.nan, np.inf, 1e300
    file = EventFile(tmp_path)
    for step, value in enumerate(values.tolist(), 1):
        file.scalars(step, {"align/loss": value, "align/größe": -value})
    file.scalars(2**40, {"late/x": 1.0})
    picture = rng.integers(0, 256, (9, 5, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    file.picture(17, "aligned", buffer.getvalue(), picture.shape)
    file.close()
    found = read_back(tmp_path)
    assert set(found.Tags()["scalars"]) == {"align/loss", "align/größe", "late/x"}
    events = found.Scalars("align/loss")
    assert [e.step for e in events] == list(range(1, 301))
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32)
    np.testing.assert_array_equal(np.float32([e.value for e in events]), expected)
    assert expected[7] == np.inf and found.Scalars("late/x")[0].step == 2**40
    image = found.Images("aligned")[0]
    assert (image.step, image.width, image.height) == (17, 5, 9)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), picture)


def test_records_have_the_published_checksums():
    """CRC-32C of the examples in RFC 3720, B.4, masked as TensorFlow masks it."""
    for data, crc in (
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ):
        rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
        assert masked_crc32c(data) == (rotated + 0xA282EAD8) % 2**32


def test_a_resumed_run_shows_no_step_twice(tmp_path):
    out = tmp_path / "run"
    run(out, ["tensorboard"], [1, 2, 3, 4, 5], save_after=3)
    run(out, ["tensorboard"], [1, 2, 3, 4], save_after=9)  # goes on after 3, is killed again
    run(out, ["tensorboard"], list(range(1, 9)), save_after=8)
    assert len(list((out / "tensorboard").iterdir())) == 3
    found = read_back(out / "tensorboard")
    assert [(e.step, e.value) for e in found.Scalars("align/loss")] == [(s, s / 4) for s in range(1, 9)]
    assert [e.step for e in found.Images("aligned")] == [2, 4, 6, 8]
    assert "align/kl" not in found.Tags()["scalars"]


def test_a_run_that_starts_anew_shows_the_new_one_alone(tmp_path):
    out = tmp_path / "run"
    run(out, ["tensorboard"], [1, 2, 3], save_after=9)
    run(out, ["tensorboard"], [1, 2], save_after=9)
    assert [e.step for e in read_back(out / "tensorboard").Scalars("align/loss")] == [1, 2]


def test_a_record_that_a_crash_tore(tmp_path):
    out = tmp_path / "run"
    run(out, ["tensorboard"], [1, 2, 3], save_after=2)
    (file,) = (out / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    run(out, ["tensorboard"], [1, 2, 3, 4], save_after=9)
    assert [e.step for e in read_back(out / "tensorboard").Scalars("align/loss")] == [1, 2, 3, 4]


def test_a_finished_run_that_is_only_looked_at_writes_nothing(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open(CONFIG)
    folder.log_to(["tensorboard"], print)
    folder.close()
    assert not (tmp_path / "run" / "tensorboard").exists()


# ----------------------------------------------------------------------------------------------------- W&B


class FakeWandb(types.ModuleType):
    """Records what a run of Weights & Biases is given."""

    def __init__(self, key: bool = False):
        super().__init__("wandb")
        self.inits, self.logged, self.axes, self.finished, self.key = [], [], [], 0, key

    def login(self, prompt=True, verify=True):
        assert not prompt and not verify
        return self.key

    def init(self, **arguments):
        self.inits.append(arguments)
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def define_metric(self, name, step_metric):
        self.axes.append((name, step_metric))

    def finish(self):
        self.finished += 1

    @staticmethod
    def Image(picture):  # noqa: N802
        return ("picture", picture.tobytes())

    @staticmethod
    def Settings(**settings):  # noqa: N802
        return settings


@pytest.fixture
def wandb(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_every_step_once(tmp_path, wandb):
    out = tmp_path / "run"
    run(out, ["wandb"], [1, 2, 3, 4, 5], save_after=3)
    run(out, ["wandb"], [1, 2, 3, 4], save_after=9)
    run(out, ["wandb"], list(range(1, 9)), save_after=8)
    numbers = [(step, v["align/loss"]) for step, v in wandb.logged if "align/loss" in v]
    assert numbers == [(s, s / 4) for s in range(1, 9)]
    pictures = [(step, v["aligned"]) for step, v in wandb.logged if "aligned" in v]
    assert pictures == [(s, ("picture", bytes([s]) * 45)) for s in (2, 4, 6, 8)]
    assert len(wandb.inits) == 3 and len({i["id"] for i in wandb.inits}) == 1
    first = wandb.inits[0]
    assert first["mode"] == "offline" and first["resume"] == "allow" and first["project"] == "fp4bf16"
    assert first["dir"] == str(out) and first["name"] == "run" and first["config"] == CONFIG.to_dict()
    assert wandb.axes[0] == ("align/*", "align/step")


def test_wandb_is_online_with_a_key_alone(tmp_path, wandb, monkeypatch):
    wandb.key = True
    run(tmp_path / "a", ["wandb"], [1], save_after=9)
    wandb.key = False
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run(tmp_path / "b", ["wandb"], [1], save_after=9)
    assert [i["mode"] for i in wandb.inits] == [None, None] and wandb.inits[1]["project"] == "mine"
    assert wandb.inits[0]["id"] != wandb.inits[1]["id"]


def test_an_older_wandb_that_would_ask_for_a_key_is_offline(tmp_path, wandb):
    def login(key=None):
        raise AssertionError("must not be asked")

    wandb.login = login
    run(tmp_path / "a", ["wandb"], [1], save_after=9)
    assert wandb.inits[0]["mode"] == "offline"


def test_wandb_is_not_begun_before_there_is_something(tmp_path, wandb):
    folder = RunFolder(tmp_path / "run")
    folder.open(CONFIG)
    folder.log_to(["wandb"], print)
    assert not wandb.inits
    folder.log(stage="base", step=1, loss=1.0, seconds=0.1)
    folder.close()
    assert len(wandb.inits) == 1 and wandb.finished == 1


def test_a_position_that_is_damaged_begins_a_new_one(tmp_path, wandb):
    out = tmp_path / "run"
    run(out, ["wandb"], [1, 2], save_after=2)
    (out / "wandb" / "position").write_bytes(b"\xff")
    run(out, ["wandb"], [1, 2, 3], save_after=9)
    assert [s for s, _ in wandb.logged if s == 3] and len({i["id"] for i in wandb.inits}) == 2


def test_real_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    out, said = tmp_path / "run", []
    folder = RunFolder(out)
    folder.open(CONFIG)
    folder.log_to(["wandb"], said.append)
    folder.log(stage="align", step=1, loss=0.5, seconds=0.1)
    folder.picture("aligned", np.zeros((4, 4, 3), np.uint8))
    folder.close()
    assert not said
    (file,) = (out / "wandb").glob("offline-run-*/run-*.wandb")
    until = time.monotonic() + 60
    while b"align/loss" not in file.read_bytes():  # its own process writes, and may be a moment behind
        assert time.monotonic() < until, "nothing of the run is in its file"
        time.sleep(0.05)
    assert list((out / "wandb").glob("offline-run-*/files/media/images/aligned_*.png"))


# -------------------------------------------------------------------------------------------------- failures


class Broken:
    """Fails from call number `after` on."""

    name = "broken"

    def __init__(self, after: int, error: Exception, on_close: bool = False):
        self.calls, self.after, self.error, self.on_close = [], after, error, on_close

    def log(self, step, values):
        self.calls.append(step)
        if len(self.calls) > self.after:
            raise self.error

    def pictures(self, step, name, picture):
        self.log(step, {})

    def close(self):
        self.calls.append("close")
        if self.on_close:
            raise self.error


def test_a_logger_that_fails_is_dropped_with_one_sentence():
    said, good = [], Broken(99, ValueError())
    bad = Broken(1, OSError(28, "No space left\n on device"), on_close=True)
    loggers = Loggers([bad, good], said.append)
    for step in (1, 2, 3):
        loggers.log(step, {"stage": "base", "loss": 1.0})
    loggers.pictures(3, "base", np.zeros((1, 1, 3), np.uint8))
    loggers.close()
    assert bad.calls == [1, 2, "close"] and good.calls == [1, 2, 3, 3, "close"]
    assert said == [
        "warning: the logger broken failed ([Errno 28] No space left on device) and gets nothing more; the "
        "run goes on, and metrics.jsonl has everything"
    ]


def test_one_that_fails_at_the_end(capsys):
    loggers = Loggers([Broken(9, RuntimeError(), on_close=True)])
    loggers.close()
    assert "the logger broken failed (RuntimeError)" in capsys.readouterr().out and loggers.left == []


def test_ctrl_c_is_no_failure():
    loggers = Loggers([Broken(0, KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt):
        loggers.log(1, {"loss": 1.0})


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_run_goes_on_without_them(name, tmp_path, wandb):
    """TensorBoard's folder is a file, W&B cannot reach its server."""
    out, said = tmp_path / "run", []

    def init(**_):
        raise ConnectionError("api.wandb.ai: no route to host")

    wandb.init = init
    folder = RunFolder(out)
    folder.open(CONFIG)
    (out / "tensorboard").write_bytes(b"")
    folder.log_to([name], said.append)
    for step in (1, 2):
        folder.log(stage="base", step=step, loss=1.0, seconds=float(step))
    folder.close()
    assert len(said) == 1 and f"the logger {name} failed" in said[0]
    assert [json.loads(t)["step"] for t in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2]
