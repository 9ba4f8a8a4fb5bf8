"""Checkpoints under a crash at any operation, and under damage."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from fp4bf16.errors import CheckpointError  # noqa: E402
from fp4bf16.train import checkpoint  # noqa: E402
from fp4bf16.train.config import get_preset  # noqa: E402
from fp4bf16.train.folder import RunFolder  # noqa: E402

CONFIG = get_preset("ci")
NEWEST, PREVIOUS, DAMAGED = (f"checkpoint{n}.safetensors" for n in ("", ".previous", ".damaged"))


def arrays(step: int, size: int = 1000) -> dict[str, np.ndarray]:
    """What the checkpoint of `step` holds."""
    return {"policy.w": np.arange(size, dtype=np.float32) + np.float32(step), "n": np.array([step])}


def meta(step: int) -> dict:
    """And its metadata."""
    return {"config": CONFIG.to_dict(), "stage": "base", "step": step, "words": ["face"]}


def advance(out: pathlib.Path, steps: int = 1, size: int = 1000) -> int:
    """Open the folder and make `steps` more steps, each with one line and a checkpoint; the step reached."""
    folder = RunFolder(out)
    try:
        found = folder.open(CONFIG)
        step = found[1]["step"] if found else 0
        for _ in range(steps):
            step += 1
            folder.log(stage="base", step=step, seconds=1.0)
            folder.save(arrays(step, size), meta(step))
    finally:
        folder.close()
    return step


def standing(out: pathlib.Path) -> tuple[int, list[str]]:
    """(step of the checkpoint that a run would take, what it would say); the content is as it was saved."""
    folder = RunFolder(out)
    try:
        found, meta_found = folder.open(CONFIG)
        for name, a in arrays(meta_found["step"], found["policy.w"].size).items():
            np.testing.assert_array_equal(found[name], a)
        assert folder.lines == meta_found["lines"] == len((out / "metrics.jsonl").read_bytes().splitlines())
        assert [line["step"] for line in folder.metrics()] == list(range(1, meta_found["step"] + 1))
        return meta_found["step"], folder.warnings
    finally:
        folder.close()


def step_of(file: pathlib.Path) -> int:
    return checkpoint.load_run(file)[1]["step"]


def test_arrays_come_back_as_they_were(tmp_path, rng):
    """Single numbers, none at all, views that are not contiguous; and equal content gives equal bytes."""
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    given = {
        "number": np.array(24),
        "scalar": np.float32(0.5),
        "none": np.zeros((0, 3), np.float64),
        "transposed": x.T,
        "step": x[::2, 1:, ::-1],
        "bytes": rng.integers(0, 256, (2, 3), np.uint8),
    }
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    checkpoint.save(first, given, meta(1))
    found, known = checkpoint.load(first)
    assert known == {"format": checkpoint.FORMAT, **meta(1)} and set(found) == set(given)
    for name, a in given.items():
        assert found[name].shape == a.shape and found[name].dtype == a.dtype, name
        np.testing.assert_array_equal(found[name], a)
    checkpoint.save(second, {name: np.array(found[name]) for name in reversed(list(found))}, meta(1))
    assert first.read_bytes() == second.read_bytes()


# ------------------------------------------------------------------------------------------ a crash anywhere

OPERATIONS = ("open", "write", "fsync", "link", "replace", "unlink", "close", "ftruncate", "mkdir", "rmdir")


def crash_at(number: int, action) -> bool:
    """Run `action` in a child that dies at its operation `number` on files, before it, or in the middle of a
    write; whether it came that far. No handler and no `finally` of the child runs."""
    child = os.fork()
    if child == 0:
        count = 0

        def dying(name: str, real):
            def operation(*args, **kwargs):
                nonlocal count
                count += 1
                if count == number:
                    if name == "write":
                        real(args[0], bytes(args[1])[: len(args[1]) // 2])
                    os._exit(77)
                return real(*args, **kwargs)

            return operation

        for name in OPERATIONS:
            setattr(os, name, dying(name, getattr(os, name)))
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 77), status
    return status == 77


def no_links(*_args, **_kwargs):
    raise OSError(errno.EPERM, "Operation not permitted")


def copy_tree(made: pathlib.Path, out: pathlib.Path, link=os.link) -> None:
    """Where two names are one file, their copies are too."""
    copies: dict[int, str] = {}

    def copy(source, target):
        first = copies.setdefault(os.stat(source).st_ino, target)
        shutil.copy2(source, target) if first == target else link(first, target)

    shutil.copytree(made, out, copy_function=copy)


def one_file(out: pathlib.Path) -> None:
    """What a crash between the two renames of a save leaves."""
    (out / PREVIOUS).unlink()
    os.link(out / NEWEST, out / PREVIOUS)


#: Folders as they may be when a run takes them up: steps saved before, what is done to them, what is left.
BEFORE = {
    "new folder": (0, lambda out: None, 0),
    "one checkpoint": (1, lambda out: None, 1),
    "two checkpoints": (3, lambda out: None, 3),
    "both names one file": (3, one_file, 3),
    "newest missing": (3, lambda out: (out / NEWEST).unlink(), 2),
    "newest damaged": (3, lambda out: (out / NEWEST).write_bytes(b"x" * 100), 2),
}


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
@pytest.mark.parametrize("before", BEFORE)
def test_a_crash_at_any_operation_leaves_a_good_checkpoint(before, links, tmp_path, monkeypatch):
    steps, change, left = BEFORE[before]
    made = tmp_path / "made"
    if steps:
        assert advance(made, steps) == steps
        change(made)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    number, died = 0, True
    while died:
        number += 1
        out = tmp_path / f"run{number}"
        if steps:
            copy_tree(made, out)
        died = crash_at(number, lambda out=out: advance(out))
        saved = [f for f in (NEWEST, PREVIOUS) if (out / f).exists()]
        if left == 0 and not saved:
            assert advance(out) == 1 and died
        else:
            step, said = standing(out)
            assert step in (left, left + 1) if died else step == left + 1
            assert bool(said) <= (before.startswith("newest") or not links), said
            assert advance(out) == step + 1
            assert step_of(out / NEWEST) == step + 1 and step_of(out / PREVIOUS) == step
            assert not os.path.samefile(out / NEWEST, out / PREVIOUS)
        assert not list(out.glob(".*.tmp"))
        if before == "newest damaged":
            assert (out / DAMAGED).read_bytes() == b"x" * 100
        shutil.rmtree(out)
    assert number > 15  # operations of opening and saving: this test reached them all


def test_what_is_renamed_is_on_the_disk_before(tmp_path, monkeypatch):
    """A loss of power keeps what was flushed: file before rename, folder after, metrics before all."""
    advance(tmp_path / "run", 2)
    folder, done = RunFolder(tmp_path / "run"), []
    folder.open(CONFIG)
    real = {name: getattr(os, name) for name in ("open", "fsync", "link", "replace")}
    opened = {}

    def named(path) -> str:
        name = pathlib.Path(path).name
        return "temporary " + name[1:].rsplit(".", 2)[0] if name.endswith(".tmp") else name

    def note(name, *what):
        done.append((name, *map(named, what)))
        return real[name]

    def open_(path, *rest):
        handle = note("open", path)(path, *rest)
        opened[handle] = path
        return handle

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", lambda handle: note("fsync", opened.get(handle, "metrics"))(handle))
    monkeypatch.setattr(os, "link", lambda a, b: note("link", a, b)(a, b))
    monkeypatch.setattr(os, "replace", lambda a, b: note("replace", a, b)(a, b))
    folder.save(arrays(3), meta(3))
    assert done == [
        ("fsync", "metrics"),
        ("open", f"temporary {NEWEST}"),
        ("fsync", f"temporary {NEWEST}"),
        ("link", NEWEST, f"temporary {PREVIOUS}"),
        ("replace", f"temporary {PREVIOUS}", PREVIOUS),
        ("replace", f"temporary {NEWEST}", NEWEST),
        ("open", "run"),
        ("fsync", "run"),
    ]
    folder.close()


# ---------------------------------------------------------------------------------------------------- damage


def flipped(content: bytes, rng) -> bytes:
    """One bit of the arrays is another."""
    at = int(rng.integers(8 + int.from_bytes(content[:8], "little"), len(content)))
    return content[:at] + bytes([content[at] ^ 1 << int(rng.integers(8))]) + content[at + 1 :]


def header_flipped(content: bytes, rng) -> bytes:
    """One digit of the step in the header is another."""
    return content.replace(b'\\"step\\": 5', b'\\"step\\": 7', 1)


def other_format(content: bytes, rng) -> bytes:
    """A whole file, of a later version."""
    return content.replace(b"fp4bf16-checkpoint-1", b"fp4bf16-checkpoint-9", 1)


DAMAGE = {
    "flipped bit": (flipped, "is damaged: its checksum is"),
    "other step": (header_flipped, "is damaged: its checksum is"),
    "cut short": (lambda c, rng: c[: int(rng.integers(1, len(c)))], "cannot be read as a checkpoint"),
    "empty": (lambda c, rng: b"", "cannot be read as a checkpoint"),
    "other format": (other_format, "has format 'fp4bf16-checkpoint-9', this version reads"),
    "zeros": (lambda c, rng: bytes(len(c)), "cannot be read as a checkpoint"),
    "noise": (lambda c, rng: rng.bytes(len(c)), "cannot be read as a checkpoint"),
    "a row too deep": (lambda c, rng: len(c).to_bytes(8, "little") + b"[" * len(c), "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_taken(kind, tmp_path, rng):
    out, (damage, sentence) = tmp_path / "run", DAMAGE[kind]
    advance(out, 5)
    bad = damage((out / NEWEST).read_bytes(), rng)
    (out / NEWEST).write_bytes(bad)
    step, said = standing(out)  # which looks at the metrics as well: cut back to four lines
    assert step == 4 and len(said) == 1
    assert said[0].startswith(f"{out / NEWEST}: ") and sentence in said[0]
    assert said[0].endswith(
        f"; it is kept as {DAMAGED}. The run goes on from {PREVIOUS}, which was written at stage base, step 4"
    )
    assert (out / DAMAGED).read_bytes() == bad and not (out / NEWEST).exists()
    # Before the next checkpoint it is the same, only that there is no damaged file any more.
    step, said = standing(out)
    assert step == 4 and f"{NEWEST}: is missing. The run goes on from {PREVIOUS}" in said[0]
    assert advance(out) == 5
    assert standing(out) == (5, []) and step_of(out / PREVIOUS) == 4
    # A second time: the first one is still kept.
    (out / NEWEST).write_bytes(b"again")
    assert "kept as checkpoint.damaged.2.safetensors" in standing(out)[1][0]
    assert (out / DAMAGED).read_bytes() == bad
    assert (out / "checkpoint.damaged.2.safetensors").read_bytes() == b"again"


def test_notes_say_it_first(tmp_path):
    out = tmp_path / "run"
    advance(out, 2)
    (out / NEWEST).write_bytes(b"")
    folder = RunFolder(out)
    folder.open(CONFIG)
    assert folder.notes("cuda")[0] == folder.warnings[0] and "began on cpu" in folder.notes("cuda")[1]
    folder.close()


def test_both_damaged(tmp_path, rng):
    out = tmp_path / "run"
    advance(out, 3)
    for name in (NEWEST, PREVIOUS):
        (out / name).write_bytes(flipped((out / name).read_bytes(), rng))
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    with pytest.raises(CheckpointError) as error:
        advance(out)
    said = str(error.value)
    assert said.startswith(f"{out / NEWEST}: is damaged") and f"and {PREVIOUS} beside it is damaged" in said
    assert said.endswith("; move both away to start the run anew, or use another --out")
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()} == before
    for name in (NEWEST, PREVIOUS):  # what it says helps
        (out / name).rename(tmp_path / name)
    assert advance(out) == 1 and len((out / "metrics.jsonl").read_bytes().splitlines()) == 1


def test_the_only_one_damaged(tmp_path):
    out = tmp_path / "run"
    advance(out, 1)
    (out / NEWEST).write_bytes(b"?")
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint.*; move it away to start"):
        advance(out)
    assert (out / NEWEST).read_bytes() == b"?"


def test_previous_of_another_run_is_not_taken(tmp_path):
    out = tmp_path / "run"
    advance(out, 2)
    other = meta(1)
    other["config"]["seed"] = 5
    checkpoint.save(out / PREVIOUS, arrays(1), {**other, "lines": 1})
    (out / NEWEST).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoint\.previous\.safetensors: was written by another"):
        advance(out)
    assert (out / NEWEST).read_bytes() == b""


def test_metrics_cut_too_short_for_the_one_before(tmp_path):
    """Nothing is put aside when the run cannot go on anyway."""
    out = tmp_path / "run"
    advance(out, 4)
    (out / NEWEST).write_bytes(b"")
    (out / "metrics.jsonl").write_bytes(b"{}\n")
    with pytest.raises(CheckpointError, match="has 1 lines but the checkpoint was written after 3"):
        advance(out)
    assert (out / NEWEST).exists() and not (out / DAMAGED).exists()
