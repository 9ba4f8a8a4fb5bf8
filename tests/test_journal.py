"""The journal: what was appended is there after any crash, and nothing else is."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4bf16.train.journal import Journal

ROOT = pathlib.Path(__file__).resolve().parents[1]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def filled(path: pathlib.Path, entries: list[dict]) -> Journal:
    journal = Journal(path)
    for entry in entries:
        journal.append(entry)
    journal.close()
    return journal


@given(entries=st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=4))
def test_entries_come_back(entries, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "rollout.jsonl"
    path.unlink(missing_ok=True)
    assert filled(path, entries).read() == Journal(path).read() == entries
    assert all("entry" in json.loads(line) for line in path.read_bytes().splitlines()) if entries else True


def test_floats_keep_their_bits(tmp_path, rng):
    bits = rng.integers(0, 2**64, 500, np.uint64)
    values = bits.view(np.float64)
    path = tmp_path / "rollout.jsonl"
    filled(path, [{"reward": values.tolist()}])
    back = np.array(Journal(path).read()[0]["reward"])
    np.testing.assert_array_equal(np.isnan(back), np.isnan(values))
    good = ~np.isnan(values)
    np.testing.assert_array_equal(back[good].view(np.uint64), bits[good])
    rewards = rng.standard_normal(50).astype(np.float32)
    filled(tmp_path / "b", [{"reward": rewards.tolist()}])
    np.testing.assert_array_equal(np.float32(Journal(tmp_path / "b").read()[0]["reward"]), rewards)


def test_no_file_and_none_appended(tmp_path):
    journal = Journal(tmp_path / "rollout.jsonl")
    assert journal.read() == []
    journal.clear()
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_cut_anywhere(tmp_path, rng):
    """Cut at each byte: the entries whose lines are whole, and the next one is appended behind them."""
    entries = [{"chunk": i, "reward": rng.standard_normal(2).tolist()} for i in range(3)]
    path = tmp_path / "rollout.jsonl"
    filled(path, entries)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        kept = sum(end <= length for end in ends)
        journal = Journal(path)
        assert journal.read() == entries[:kept]
        if length % 7 == 0:
            journal.append({"chunk": "next"})
            journal.close()
            assert Journal(path).read() == [*entries[:kept], {"chunk": "next"}]


def test_changed_anywhere(tmp_path, rng):
    """A byte that has changed ends the journal before its line."""
    entries = [{"chunk": i, "reward": rng.standard_normal(2).tolist(), "caption": "ä"} for i in range(3)]
    path = tmp_path / "rollout.jsonl"
    filled(path, entries)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        line = whole[:at].count(b"\n")
        read = Journal(path).read()
        assert read == entries[:line], (at, read)


@pytest.mark.parametrize("content", [b"\n", b"{}\n", b"[1]\n", b"\xff\n", b"[" * 99999 + b"\n", b"\0" * 64])
def test_what_is_no_journal_is_empty(content, tmp_path):
    path = tmp_path / "rollout.jsonl"
    path.write_bytes(content)
    journal = Journal(path)
    assert journal.read() == []
    journal.append({"a": 1})
    assert journal.read() == [{"a": 1}] and Journal(path).read() == [{"a": 1}]
    journal.close()


def test_begin_keeps_what_is_of_the_same_key(tmp_path):
    path = tmp_path / "rollout.jsonl"
    journal = Journal(path)
    assert not journal.begin(iteration=2, shape=(3, 4))
    journal.append({"chunk": 0})
    journal.close()
    for again in (journal, Journal(path)):
        assert again.begin(iteration=2, shape=(3, 4)) and again.read() == [{"chunk": 0}]
    assert not journal.begin(iteration=3, shape=(3, 4)) and journal.read() == []
    journal.append({"chunk": 1})
    journal.clear()
    assert journal.read() == Journal(path).read() == []
    journal.append({"chunk": 2})  # still of iteration 3
    assert Journal(path).begin(iteration=3, shape=(3, 4)) and Journal(path).read() == [{"chunk": 2}]
    assert not Journal(path).begin(iteration=4, shape=(3, 4)) and Journal(path).read() == []
    journal.close()
    filled(tmp_path / "b", [{"chunk": 9}])  # begun with no key at all
    assert not Journal(tmp_path / "b").begin() and Journal(tmp_path / "b").read() == []


def test_what_json_cannot_hold(tmp_path):
    journal = Journal(tmp_path / "rollout.jsonl")
    journal.append({"a": 1})
    with pytest.raises(TypeError, match="ndarray is not JSON serializable"):
        journal.append({"a": np.zeros(2)})
    assert Journal(journal.path).read() == [{"a": 1}]
    journal.close()


def test_full_disk(tmp_path, monkeypatch, rng):
    """A line that does not fit leaves nothing, and the next that does is whole."""
    real, journal = os.write, Journal(tmp_path / "rollout.jsonl")
    journal.append({"a": 1})
    room = int(rng.integers(0, 30))

    def full(handle, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(handle, bytes(data[:room]))
        room -= done
        return done

    with monkeypatch.context() as m:
        m.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            journal.append({"b": "x" * 40})
    assert Journal(journal.path).read() == journal.read() == [{"a": 1}]
    journal.append({"c": 3})
    assert Journal(journal.path).read() == [{"a": 1}, {"c": 3}]
    journal.close()


WRITER = """
import sys
from fp4bf16.train.journal import Journal
journal = Journal(sys.argv[1])
first = len(journal.read())
for i in range(first, 100_000):
    journal.append({"i": i, "text": "x" * (i % 7) * 500})
    print(i, flush=True)
"""


def test_killed_while_it_appends(tmp_path, rng):
    """What `append` returned from is there after SIGKILL, at most one entry more, without a hole."""
    path, reached = tmp_path / "rollout.jsonl", -1
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        first = process.stdout.readline()
        time.sleep(0.2 * rng.random())
        process.send_signal(signal.SIGKILL)
        said = [int(i) for i in (first + process.communicate()[0]).split(b"\n")[:-1]]
        entries = Journal(path).read()
        assert [e["i"] for e in entries] == list(range(len(entries)))
        assert said[0] == reached + 1 and said[-1] < len(entries) <= said[-1] + 2
        reached = len(entries) - 1
