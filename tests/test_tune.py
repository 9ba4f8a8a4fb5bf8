"""The latency table: moving averages, buckets of shapes, files that survive crashes and strangers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest

from fp4bf16 import ConfigError
from fp4bf16.tune import Key, Latency, LatencyTable, cache_folder, shape_bucket

WHERE = ("conv2d", (1024, 256, 2304), "fp4", "NVIDIA H200")


def filled(rng, n: int = 20, **how) -> LatencyTable:
    table = LatencyTable(**how)
    for _ in range(n):
        op, track = rng.choice(["linear", "conv2d"]), rng.choice(["bf16", "fp4", "dual"])
        shape = tuple(int(v) for v in rng.integers(0, 5000, 3))
        table.update(str(op), shape, str(track), "cpu", float(rng.exponential(50)))
    return table


# ---- averages ----
def test_the_first_values_are_averaged_alike_and_later_ones_move_it(rng):
    values = rng.exponential(10, 12).tolist()
    table, window = LatencyTable(window=5), 5
    for value in values:
        entry = table.update(*WHERE, value)
    mean = 0.0
    for i, value in enumerate(values):
        share = 1 / min(i + 1, window)
        mean = (1 - share) * mean + share * value
    assert entry.count == 12 and entry.microseconds == pytest.approx(mean, rel=1e-12)
    few = LatencyTable(window=5)
    for value in values[:5]:
        entry = few.update(*WHERE, value)
    assert entry.microseconds == pytest.approx(sum(values[:5]) / 5, rel=1e-12)


def test_a_machine_that_changed_is_followed():
    table = LatencyTable(window=4)
    for _ in range(50):
        table.update(*WHERE, 10.0)
    for _ in range(20):
        table.update(*WHERE, 40.0)
    left = 30 * 0.75**20  # what is left of the difference: each value takes a quarter of it
    assert table.get(*WHERE).microseconds == pytest.approx(40.0 - left, rel=1e-12)


def test_entries_are_apart_by_operation_shape_track_and_device():
    table = LatencyTable()
    table.update(*WHERE, 1.0)
    others = [
        ("linear", *WHERE[1:]), (WHERE[0], (1024, 256, 2305), *WHERE[2:]), (*WHERE[:2], "bf16", WHERE[3]),
        (*WHERE[:3], "cpu"), (WHERE[0], (4096, 256, 2304), *WHERE[2:]),
    ]  # fmt: skip
    assert all(table.get(*other) is None for other in others)
    for i, other in enumerate(others):
        table.update(*other, 2.0 + i)
    assert len(table) == 6 and table.get(*WHERE) == Latency(1.0, 1)


def test_buckets_are_the_nearest_power_of_two_in_octaves(rng):
    for rows in rng.integers(1, 1 << 30, 200).tolist():
        (bucket, rest) = shape_bucket((rows, 7))
        assert rest == 7 and bucket & (bucket - 1) == 0
        assert 2 * rows * rows >= bucket * bucket and rows * rows <= 2 * bucket * bucket
        assert shape_bucket((bucket, 7)) == (bucket, 7)  # what is stored is found again
    assert shape_bucket((0,)) == (0,) and shape_bucket((1, 0)) == (1, 0)


def test_a_frozen_table_stays_as_it_is(rng):
    table = filled(rng)
    table.frozen, before = True, table.to_dict()
    other = filled(rng)
    assert table.update(*WHERE, 5.0) is None and table.get(*WHERE) is None
    table.merge(other)
    assert table.to_dict() == before


def test_merging_weighs_by_count_and_takes_what_is_new(rng):
    values = rng.exponential(10, 7).tolist()
    one, two = LatencyTable(), LatencyTable()
    for value in values[:3]:
        one.update(*WHERE, value)
    for value in values[3:]:
        two.update(*WHERE, value)
    two.update("linear", (1, 2, 3), "bf16", "cpu", 9.0)
    one.merge(two)
    assert one.get(*WHERE).count == 7
    assert one.get(*WHERE).microseconds == pytest.approx(sum(values) / 7, rel=1e-12)
    assert one.get("linear", (1, 2, 3), "bf16", "cpu") == Latency(9.0, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_time_that_cannot_be_is_refused_also_by_a_frozen_table(value):
    for frozen in (False, True):
        with pytest.raises(ValueError, match=r"microseconds is .*finite time from 0"):
            LatencyTable(frozen=frozen).update(*WHERE, value)


def test_bad_keys_are_refused():
    table = LatencyTable()
    with pytest.raises(ValueError, match="'fp5' is not a track; did you mean 'fp4'"):
        table.update("conv2d", (1, 2, 3), "fp5", "cpu", 1.0)
    with pytest.raises(ValueError, match="device is ''"):
        table.update("conv2d", (1, 2, 3), "fp4", "", 1.0)
    with pytest.raises(ValueError, match=r"shape \(1, -2\) holds -2"):
        table.get("conv2d", (1, -2), "fp4", "cpu")
    with pytest.raises(ValueError, match=r"holds 1\.5"):
        shape_bucket((1.5,))
    with pytest.raises(ValueError, match="at least the rows"):
        shape_bucket(())
    with pytest.raises(ValueError, match="window is 0"):
        LatencyTable(window=0)


# ---- files ----
def test_a_table_comes_back_to_the_bit(rng, tmp_path):
    table = filled(rng, 50, window=7)
    path = table.save(tmp_path / "deep" / "latency.json")
    again = LatencyTable.load(path)
    assert again == table and again.window == 7 and list(again) == list(table)
    assert [p.name for p in path.parent.iterdir()] == ["latency.json"]  # nothing is left beside it
    assert LatencyTable.load(LatencyTable().save(path)) == LatencyTable()


def test_the_cache_is_where_the_variable_says(rng, tmp_path, monkeypatch):
    monkeypatch.setenv("FP4BF16_CACHE_DIR", str(tmp_path / "mine"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(LatencyTable.load()) == 0
    table = filled(rng)
    assert table.save() == tmp_path / "mine" / "latency.json" and LatencyTable.load() == table
    monkeypatch.delenv("FP4BF16_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "fp4bf16"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "fp4bf16"


def test_the_cache_keeps_what_other_runs_have_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("FP4BF16_CACHE_DIR", str(tmp_path))
    one, two = LatencyTable.load(), LatencyTable.load()  # two runs that begin at the same time
    one.update(*WHERE[:3], "cpu", 1.0)
    two.update(*WHERE, 2.0)
    two.save()
    one.save()
    found = LatencyTable.load()
    assert found.get(*WHERE[:3], "cpu") == Latency(1.0, 1) and found.get(*WHERE) == Latency(2.0, 1)
    assert len(one) == len(two) == 1  # what a run goes by is its own
    two.update(*WHERE, 4.0)
    two.save()
    assert LatencyTable.load().get(*WHERE) == Latency(3.0, 2)
    (tmp_path / "latency.json").write_text("broken")
    two.save()
    assert LatencyTable.load() == two


BROKEN = [
    "", "not JSON", "[]", "{}", '{"format": "fp4bf16-latency"}',
    '{"format": "fp4bf16-latency", "version": 2, "window": 16, "entries": []}',
    '{"format": "fp4bf16-latency", "version": 1, "window": 16, "entries": [["conv2d"]]}',
    '{"format": "fp4bf16-latency", "version": 1, "window": 0, "entries": []}',
    '{"format": "fp4bf16-latency", "version": 1, "window": 16, '
    '"entries": [["conv2d", [1], "fp4", "cpu", NaN, 1]]}',
    '{"format": "fp4bf16-latency", "version": 1, "window": 16, '
    '"entries": [["conv2d", [1], "fp4", "cpu", 1.0, 0]]}',
    '{"format": "fp4bf16-latency", "version": 1, "window": 16, '
    '"entries": [["conv2d", [1], "fp9", "cpu", 1.0, 1]]}',
    '{"format": "fp4bf16-latency", "version": 1, "window": 16, '
    f'"entries": [["conv2d", [1], "fp4", "cpu", 1{"0" * 400}, 1]]}}',
    '{"format": "fp4bf16-latency", "version": 1, "window": true, "entries": []}',
    "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_file_that_holds_no_table_is_named_and_a_broken_cache_is_no_error(text, tmp_path, monkeypatch):
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"latency\.json: "):
        LatencyTable.load(path)
    monkeypatch.setenv("FP4BF16_CACHE_DIR", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="measured before are not used"):
        assert LatencyTable.load() == LatencyTable()


def test_a_named_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        LatencyTable.load(tmp_path / "none.json")


def test_random_damage_never_gives_another_exception(rng, tmp_path):
    good = json.dumps(filled(rng, 5).to_dict()).encode()
    path = tmp_path / "latency.json"
    for _ in range(300):
        data = bytearray(good)
        for at in rng.integers(0, len(data), int(rng.integers(1, 4))):
            data[at] = int(rng.integers(0, 256))
        path.write_bytes(bytes(data[: int(rng.integers(0, len(data) + 1))]) if rng.random() < 0.3 else data)
        try:
            table = LatencyTable.load(path)
        except ConfigError:
            continue
        assert all(isinstance(key, Key) and value.count >= 1 for key, value in table)


def test_a_write_that_fails_leaves_the_old_file(rng, tmp_path, monkeypatch):
    table = filled(rng)
    path = table.save(tmp_path / "latency.json")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        filled(rng).save(path)
    assert LatencyTable.load(path) == table and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path):
    code = (
        "import sys; from fp4bf16.tune import LatencyTable\n"
        "t = LatencyTable()\n"
        "for i in range(200): t.update('conv2d', (1, 2, i), 'fp4', sys.argv[1], 1.0)\n"
        "for _ in range(20): t.save(sys.argv[2])"
    )
    path = str(tmp_path / "latency.json")
    running = [subprocess.Popen([sys.executable, "-c", code, f"device {i}", path]) for i in range(3)]
    assert [p.wait(60) for p in running] == [0, 0, 0]
    table = LatencyTable.load(path)
    assert len(table) == 200 and len({key.device for key, _ in table}) == 1
    assert len(list(tmp_path.iterdir())) == 1
