"""What can happen to a command while it runs: a reader that goes away, a full disk, a poor terminal."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("safetensors")

from safetensors.numpy import save as safetensors_save  # noqa: E402

from fp4bf16.__main__ import main  # noqa: E402
from fp4bf16.train import checkpoint  # noqa: E402
from fp4bf16.train.folder import RunFolder  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "fp4bf16"]


def run(*arguments, env=None, **how):
    """A command from the checkout, as a process of its own: (exit status, stdout, stderr)."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    done = subprocess.run([*COMMAND, *map(str, arguments)], cwd=ROOT, env=os.environ | (env or {}),
                          stdin=subprocess.DEVNULL, timeout=120, **how)  # fmt: skip
    return done.returncode, (done.stdout or b"").decode(), (done.stderr or b"").decode()


@pytest.fixture
def nobody_reads():
    """The writing end of a pipe whose reader is gone, as after ``| head``."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("command", ("info", "validate --op quantize --shape 2x16", "train --dry-run"))
def test_the_reader_of_the_output_goes_away(command, nobody_reads):
    assert run(*command.split(), stdout=nobody_reads) == (141, "", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full here")
def test_the_output_cannot_be_written():
    with open("/dev/full", "wb") as full:
        status, _, said = run("info", stdout=full)
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith("fp4bf16: ") and "No space left" in said


def test_a_word_that_the_terminal_cannot_show(tmp_path):
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    run_of = ["sample", "--run", "gesichter-für-é", "--caption", "x", "--out", tmp_path / "o.png"]
    status, _, said = run(*run_of, env=ascii_only)
    assert status == 2 and "gesichter-f\\xfcr-\\xe9: there is no config.json" in said


@pytest.mark.parametrize(
    "name, value", [("FP4BF16_NUM_THREADS", "many"), ("FP4BF16_TRACK", "fp5"), ("FP4BF16_TRACK", "bf16")]
)
def test_a_variable_of_the_environment_that_cannot_be(name, value, tmp_path):
    status, _, said = run("train", "--preset", "ci", "--out", tmp_path / "run", env={name: value})
    assert status == 2 and said.splitlines()[-1].startswith(f"fp4bf16: {name}: '{value}' is not a")


def test_a_package_that_cannot_be_written_for_an_account_without_a_home(tmp_path):
    """As in many containers. Root may write everywhere, so the folders are of a kind that nobody can make."""
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "from fp4bf16.backends import compiled\n"
        "nowhere = Path(os.devnull) / 'x'\n"
        "compiled.default_folders = lambda: [nowhere]\n"
        "from numba.core import caching\n"
        "def refuse(*_): raise OSError('read-only')\n"
        "for name, kind in vars(caching).items():\n"
        "    if name.endswith('CacheLocator') and 'UserProvided' not in name and name != '_CacheLocator':\n"
        "        kind.ensure_cache_path = refuse\n"
        "import numpy as np, fp4bf16.backends.cpu_random\n"
        "from numba import config\n"
        "print(config.CACHE_DIR, len(os.listdir(config.CACHE_DIR)))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "fp4bf16-"))
    assert not list(tmp_path.iterdir())  # gone with the process


def test_a_shape_of_digits_that_are_no_numbers():
    status, _, said = run("validate", "--op", "matmul", "--shape", "\u00b2x3x4")
    assert status == 2 and "'\u00b2x3x4' is not a shape; give whole numbers like 128x256x64" in said


@pytest.mark.parametrize("seed", (-5, 2**63))
@pytest.mark.parametrize("how", ("--seed={}", "--set=seed={}"))
def test_a_seed_that_cannot_be(seed, how, tmp_path):
    status, _, said = run("train", "--preset", "ci", "--out", tmp_path / "run", how.format(seed))
    assert (status, said) == (2, f"fp4bf16: --seed {seed}: must be a whole number from 0 to 2^63 - 1\n")


def test_training_goes_on_when_its_log_is_no_longer_read(nobody_reads, tmp_path):
    out = tmp_path / "run"
    assert run("train", "--preset", "ci", "--out", out, stderr=nobody_reads)[0] == 0
    assert (out / "report.html").exists()


# ---- what is found in a folder when the same command is given again ----------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("mishaps") / "run"
    assert main(["train", "--preset", "ci", "--out", str(out)]) == 0
    return out


@pytest.fixture
def folder(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def again(folder, capsys, *arguments) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["train", "--preset", "ci", "--out", str(folder), *arguments])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("where", (-1000, 0.5))
def test_a_byte_of_the_checkpoint_has_changed(where, folder, capsys):
    path = folder / "checkpoint.safetensors"
    (folder / "checkpoint.previous.safetensors").unlink()  # nothing to fall back on
    data = bytearray(path.read_bytes())
    data[where if isinstance(where, int) else int(where * len(data))] ^= 0x40
    path.write_bytes(data)
    for status, _, said in (
        again(folder, capsys),
        (main(["sample", "--run", str(folder), "--caption", "", "--out", str(folder / "o.png")]),
         *capsys.readouterr()),
    ):  # fmt: skip
        assert status == 2 and f"{path}: is damaged: its checksum is " in said
    assert path.read_bytes() == data and not (folder / "o.png").exists()


@pytest.mark.parametrize("meta, sentence", [
    ("[1]", "has format None, this version reads"),
    ('{"format": "fp4bf16-checkpoint-1"}', "is damaged: its checksum is None"),
])  # fmt: skip
def test_metadata_of_another_hand(meta, sentence, folder, capsys):
    arrays = {"a": np.zeros(3, np.float32)}
    (folder / "checkpoint.previous.safetensors").unlink()
    (folder / "checkpoint.safetensors").write_bytes(safetensors_save(arrays, {"fp4bf16": meta}))
    status, _, said = again(folder, capsys)
    assert status == 2 and sentence in said


def test_a_checkpoint_that_is_not_of_a_run(folder, capsys):
    arrays, meta = checkpoint.load(folder / "checkpoint.safetensors")
    del meta["words"]
    checkpoint.save(folder / "checkpoint.safetensors", arrays, meta)
    (folder / "checkpoint.previous.safetensors").unlink(missing_ok=True)
    status, _, said = again(folder, capsys)
    assert status == 2 and "words is None, but a list is needed" in said


@pytest.mark.parametrize("line, text, sentence", [
    (5, b"\xff\xfe", "line 5 is no line of a run"),
    (5, b"{}", "line 5 is no line of a run"),
    (-1, b"{torn", "is no line of a run"),
    (-1, b'{"stage": "base", "seconds": 1}', "its last line is of stage 'base'"),
])  # fmt: skip
def test_metrics_of_another_hand(line, text, sentence, folder, capsys):
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    lines[line - (line > 0)] = text
    path.write_bytes(b"\n".join(lines) + b"\n")
    status, _, said = again(folder, capsys)
    assert status == 2 and said.splitlines()[-1].startswith(f"fp4bf16: {path}: ") and sentence in said


def test_a_report_that_is_gone_is_made_again(folder, capsys):
    before = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    status, printed, _ = again(folder, capsys)
    assert status == 0 and f"report: {folder / 'report.html'}" in printed
    assert (folder / "report.html").read_bytes() == before


def test_a_full_disk_says_how_to_go_on(folder, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(RunFolder, "open", full)
    status, _, said = again(folder, capsys)
    assert status == 2 and "No space left on device" in said and "the same command goes on from" in said


@pytest.mark.parametrize("caption, sentence", [
    ("\U0001f600", "has no word of letters or digits"), ("...", "has no word of letters or digits"),
    ("\u00e9", "the vocabulary of 118 words has no '\u00e9'"),
])  # fmt: skip
def test_a_caption_without_a_word(caption, sentence, finished, tmp_path, capsys):
    command = ["sample", "--run", str(finished), "--out", str(tmp_path / "o.png"), "--n", "1", "--caption"]
    assert main([*command, caption]) == 2
    assert sentence in capsys.readouterr().err
    assert main([*command, ""]) == 0


@pytest.mark.parametrize("setting, sentence", [
    ("eval.steps=2000", "eval.steps: is 2000, but a schedule of 1000 timesteps"),
    ("align.explore_steps=1001", "align.explore_steps: is 1001, but a schedule of 1000 timesteps"),
    ("align.lr=inf", "align.lr: is inf, but it must be positive and finite"),
    ("diffusion.schedule=cosin", "schedule: 'cosin' is not known; did you mean 'cosine'?"),
    ("diffusion.prediction=w", "prediction: 'w' is not known"),
    ("eval.captions=1", "eval.captions: is 1, but an interval needs 2 captions"),
    ("eval.captions=-2", "eval.captions: is -2, but an interval needs 2 captions"),
    ("align.prompts=9999", "9999"),
])  # fmt: skip
def test_a_plan_that_would_fail_after_training_fails_before(setting, sentence, capsys):
    assert main(["train", "--preset", "ci", "--dry-run", "--set", setting]) == 2
    printed, said = capsys.readouterr()
    assert printed == "" and sentence in said
