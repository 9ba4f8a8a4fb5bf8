"""Files that are whole at any moment: what a disk that runs full, or a long name, does to them."""

from __future__ import annotations

import errno
import json
import os
import stat

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16.files import flush_folder, write_all, write_atomic
from fp4bf16.routing import save_routes
from fp4bf16.tune import LatencyTable


def table(n):
    made = LatencyTable()
    for i in range(n):
        made.update("linear", (64, 32, 16 * i + 16), "bf16", "cpu", 1.0)
    return made


#: All that is written whole: how, n times as long a content.
WRITERS = {
    "bytes": lambda path, n: write_atomic(path, bytes(range(256)) * n),
    "parts": lambda path, n: write_atomic(path, (memoryview(np.full(97, i, np.uint8)) for i in range(3 * n))),
    "arrays": lambda path, n: fb.save(path, {str(i): np.full((7, 9), i, np.float32) for i in range(n)}),
    "latencies": lambda path, n: table(n).save(path),
    "routes": lambda path, n: save_routes(path, {f"layer.{i}": "fp4" for i in range(8 * n)}),
}


def filling(monkeypatch, room):
    """A disk with place for `room` bytes more; the last call writes what fits."""
    real = os.write

    def write(handle, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(handle, bytes(data[:room]))
        room -= done
        return done

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("wrong", ["full", "flush", "rename"])
def test_a_write_that_fails_leaves_what_was_there(kind, wrong, tmp_path, monkeypatch, rng):
    path = tmp_path / "x.json"
    WRITERS[kind](path, 3)
    small = path.read_bytes()
    WRITERS[kind](path, 4)
    before = path.read_bytes()
    assert before[-20:] != small[-20:] or len(before) > len(small)

    def broken(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if wrong == "full":
            filling(patch, int(rng.integers(0, len(small))))
        else:
            patch.setattr(os, "fsync" if wrong == "flush" else "replace", broken)
        with pytest.raises(OSError, match="No space left"):
            WRITERS[kind](path, 3)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]
    WRITERS[kind](path, 3)
    assert path.read_bytes() == small


def test_parts_are_written_one_after_another_whatever_the_system_takes_of_them(tmp_path, monkeypatch, rng):
    parts = [rng.bytes(int(n)) for n in rng.integers(0, 500, 20)] + [
        b"",
        memoryview(np.arange(0, dtype="u1")),
    ]
    real = os.write
    monkeypatch.setattr(os, "write", lambda h, data: real(h, bytes(data[: int(rng.integers(1, 100))])))
    write_atomic(tmp_path / "x", iter(parts))
    assert (tmp_path / "x").read_bytes() == b"".join(map(bytes, parts))
    handle = os.open(tmp_path / "y", os.O_WRONLY | os.O_CREAT)
    write_all(handle, parts[0])
    os.close(handle)
    assert (tmp_path / "y").read_bytes() == parts[0]


def test_a_part_that_cannot_be_made_leaves_what_was_there(tmp_path):
    def parts():
        yield b"new"
        raise RuntimeError("the array is gone")

    write_atomic(tmp_path / "x", b"old")
    with pytest.raises(RuntimeError, match="is gone"):
        write_atomic(tmp_path / "x", parts())
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("name", ["n" * 255, "\N{GRINNING FACE}" * 63])
def test_names_as_long_as_a_name_may_be(name, tmp_path):
    path, previous = tmp_path / name, tmp_path / (name[:-1] + "p")
    for content in (b"1", b"2", b"3"):
        write_atomic(path, content, previous)
    assert (path.read_bytes(), previous.read_bytes()) == (b"3", b"2")
    assert len(os.listdir(tmp_path)) == 2


def test_the_file_is_flushed_before_its_rename_and_the_folder_after(tmp_path, monkeypatch):
    done, opened = [], {}
    real = {name: getattr(os, name) for name in ("open", "fsync", "replace")}

    def open_(path, *rest):
        handle = real["open"](path, *rest)
        opened[handle] = os.fspath(path)
        return handle

    def fsync(handle):
        done.append("folder" if opened[handle] == os.fspath(tmp_path) else "file")
        real["fsync"](handle)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), real["replace"](a, b)))
    for kind, write in WRITERS.items():
        done.clear()
        write(tmp_path / "x.json", 2)
        assert done == ["file", "rename", "folder"], kind


def test_a_folder_that_cannot_be_flushed_is_no_error(tmp_path, monkeypatch):
    """The file is there: only that a loss of power may undo its rename."""
    real = os.open

    def denied(path, flags, *mode):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", denied)
    write_atomic(tmp_path / "x", json.dumps({"a": 1}).encode())
    flush_folder(tmp_path / "not there")
    assert json.loads((tmp_path / "x").read_bytes()) == {"a": 1}


def test_a_link_stays_and_a_pipe_is_written(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomic(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, b"through")
    assert os.read(reader, 100) == b"through" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe", "target"]


def test_an_error_names_the_file(tmp_path, monkeypatch):
    def full(handle, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device: '.*report.json'"):
        write_atomic(tmp_path / "report.json", b"x")
    with pytest.raises(OSError, match="absent/report.json'"):
        write_atomic(tmp_path / "absent" / "report.json", b"x")
