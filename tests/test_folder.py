"""The folder of a run on disks that are full, read-only, damaged or gone, and among two runs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from test_checkpoint import CONFIG, NEWEST, PREVIOUS, advance, arrays, meta, standing, step_of  # noqa: E402
from test_resume import ROOT, command, positions, start  # noqa: E402

from fp4bf16.errors import CheckpointError, ConfigError  # noqa: E402
from fp4bf16.train.folder import RunFolder  # noqa: E402


@contextlib.contextmanager
def as_nobody(tmp_path):
    """A folder of two steps where permissions count: for root they do not, so be somebody else meanwhile."""
    if os.geteuid():
        advance(tmp_path / "run", 2)
        yield tmp_path / "run"
        return
    place = pathlib.Path(tempfile.mkdtemp())  # not under tmp_path, which only its owner may enter
    advance(place / "run", 2)  # as root, for whom all that Python imports is readable
    for path in (place, *place.rglob("*")):
        os.chown(path, 65534, 65534)
    os.seteuid(65534)
    try:
        yield place / "run"
    finally:
        os.seteuid(0)
        shutil.rmtree(place)


def test_a_file_that_may_not_be_read_is_not_taken_for_damaged(tmp_path):
    with as_nobody(tmp_path) as out:
        (out / NEWEST).chmod(0)
        with pytest.raises(CheckpointError, match="may not be read; give it read permission"):
            advance(out)
        (out / NEWEST).chmod(0o600)
        assert standing(out) == (2, [])


# ---------------------------------------------------------------------------------------------------- disks


@pytest.mark.parametrize("what", ["the checkpoint", "the metrics"])
def test_a_disk_that_runs_full_loses_nothing(what, tmp_path, monkeypatch, rng):
    out, real = tmp_path / "run", os.write
    advance(out, 3)
    before = {name: (out / name).read_bytes() for name in (NEWEST, PREVIOUS)}
    folder = RunFolder(out)
    folder.open(CONFIG)
    room = int(rng.integers(0, 3000 if what == "the checkpoint" else 20))

    def full(handle, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(handle, bytes(data[:room]))
        room -= done
        return done

    if what == "the checkpoint":
        folder.log(stage="base", step=4, seconds=1.0)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        folder.save(arrays(4), meta(4)) if what == "the checkpoint" else folder.log(stage="base", step=4)
    folder.close()
    monkeypatch.setattr(os, "write", real)
    assert {name: (out / name).read_bytes() for name in before} == before
    assert not list(out.glob(".*.tmp"))
    assert (out / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert standing(out) == (3, []) and advance(out) == 4


def test_a_real_full_disk(tmp_path):
    """A memory disk of 300 KB for checkpoints of 100 KB: two and a half fit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk may be mounted here: {mounted.stderr.strip()}")
    try:
        out, size = disk / "run", 25_000
        assert advance(out, 1, size) == 1
        assert advance(out, 1, size) == 2
        with pytest.raises(OSError, match="No space left"):
            advance(out, 1, size)
        assert not list(out.glob(".*.tmp"))
        assert standing(out) == (2, [])
        subprocess.run(["mount", "-o", "remount,size=600k", str(disk)], check=True)
        assert advance(out, 2, size) == 4 and standing(out) == (4, [])
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_run_whose_files_may_not_grow_goes_on_when_they_may(tmp_path):
    """The command line: no file may be longer than a checkpoint's half, as on a full disk."""
    out = tmp_path / "run"
    assert start(out, "base", 13, int(signal.SIGKILL)).returncode == -signal.SIGKILL
    before = {name: (out / name).read_bytes() for name in (NEWEST, PREVIOUS)}
    assert step_of(out / NEWEST) == 10
    limit = len(before[NEWEST]) // 2
    done = subprocess.run(
        [sys.executable, "-m", "fp4bf16", *command(out)],
        cwd=tmp_path,
        env={**os.environ, "FP4BF16_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the run stopped ([Errno 27] File too large" in done.stderr
    assert "the same command goes on from its last checkpoint" in done.stderr
    assert {name: (out / name).read_bytes() for name in before} == before
    assert not list(out.glob(".*.tmp"))
    again = start(out)
    assert again.returncode == 0 and "stage base, step 10" in again.stderr
    assert positions(out)[-1] == ("summary", None)


def test_a_folder_that_is_read_only(tmp_path):
    with as_nobody(tmp_path) as out:
        out.chmod(0o555)
        with pytest.raises(
            ConfigError, match=r"cannot be written \(Permission denied\); name another folder"
        ):
            advance(out)
        out.chmod(0o755)
        assert standing(out) == (2, [])


@pytest.mark.parametrize("then", ["log", "save", "picture"])
def test_a_folder_that_is_removed_in_the_middle(then, tmp_path):
    out = tmp_path / "run"
    folder = RunFolder(out)
    folder.open(CONFIG)
    folder.log(stage="base", step=1, seconds=1.0)
    shutil.rmtree(out)
    act = {
        "log": lambda: folder.log(stage="base", step=2, seconds=2.0),
        "save": lambda: folder.save(arrays(1), meta(1)),
        "picture": lambda: folder.picture("base", np.zeros((4, 4, 3), np.uint8)),
    }
    with pytest.raises(CheckpointError, match="the folder was removed while the run was writing to it.*anew"):
        act[then]()
    folder.close()
    assert not out.exists()
    assert advance(out) == 1  # as it says


def test_metrics_removed_in_the_middle(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open(CONFIG)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: was removed while.*name another folder"):
        folder.save(arrays(1), meta(1))
    folder.close()


def test_two_runs_in_one_folder(tmp_path):
    """The second is refused and changes nothing, temporary files of the first among it."""
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.open(CONFIG)
    first.log(stage="base", step=1, seconds=1.0)
    at_work = tmp_path / "run" / ".checkpoint.safetensors.0.tmp"
    at_work.write_bytes(b"half")
    with pytest.raises(ConfigError, match="another run is writing there; wait for it or name another folder"):
        second.open(CONFIG)
    second.close()
    assert at_work.exists()
    first.log(stage="base", step=2, seconds=2.0)
    first.save(arrays(2), meta(2))
    first.close()
    assert standing(tmp_path / "run") == (2, []) and not at_work.exists()


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"", "cannot be read (Expecting value"),
        (b'{"config": {', "cannot be read ("),
        (b"\xff\xfe\x00", "cannot be read ('utf-8' codec"),
        (b"[" * 100_000, "cannot be read ("),
        (b"[1]", "cannot be read ("),
        (b"{}", "cannot be read (no object 'config')"),
        (b'{"config": 3}', "cannot be read (no object 'config')"),
        (b'{"config": {}, "start": ["base"]}', "cannot be read (no object 'start')"),
        (b'{"config": {}, "versions": 1}', "cannot be read (no object 'versions')"),
        (b'{"config": {}}', "holds a run with align.batch = 32, but this one has align.batch = 8"),
    ],
)
def test_a_damaged_configuration(content, sentence, tmp_path):
    out = tmp_path / "run"
    advance(out, 2)
    (out / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        advance(out)
    said = str(error.value)
    assert str(out) in said and sentence in said and "name another folder" in said
    assert step_of(out / NEWEST) == 2


def test_lines_that_a_crash_tore_are_dropped(tmp_path):
    out = tmp_path / "run"
    advance(out, 2)
    with open(out / "metrics.jsonl", "ab") as f:
        f.write(b'{"stage": "base", "step": 3, "seconds": 3.0}\n{"stage": "ba')
    assert standing(out) == (2, [])
    assert advance(out) == 3
    assert [json.loads(t)["step"] for t in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_picture_is_whole_or_absent(tmp_path, rng):
    from PIL import Image

    out, sheet = tmp_path / "run", rng.integers(0, 256, (5, 7, 3), np.uint8)
    folder = RunFolder(out)
    folder.open(CONFIG)
    (out / "samples" / ".base.png.1.tmp").write_bytes(b"torn")
    folder.picture("base", sheet, scale=2)
    with Image.open(out / "samples" / "base.png") as image:
        np.testing.assert_array_equal(np.asarray(image), sheet.repeat(2, 0).repeat(2, 1))
    folder.close()
    assert advance(out) == 1
    assert [p.name for p in (out / "samples").iterdir()] == ["base.png"]
