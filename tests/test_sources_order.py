"""The order is a pure function of seed and epoch, a position is exact, and memory has a bound."""

from __future__ import annotations

import gc
import itertools
import json
import threading
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import source_sets as sets

from fp4bf16.errors import ConfigError
from fp4bf16.train.sources import decode, open_pairs, open_pictures, stream
from fp4bf16.train.sources.order import ShardOrder


def _emoji(folder, rng):
    return "emoji"


#: Name -> (how it is opened, how it is made).
SETS = {
    "sidecars": (open_pictures, sets.sidecars),
    "table": (open_pictures, sets.table),
    "shards": (open_pictures, sets.shards),
    "pair table": (open_pairs, sets.pair_table),
    "pick-a-pic": (open_pairs, sets.pick_a_pic),
    "structs": (open_pairs, lambda folder, rng: sets.pick_a_pic(folder, rng, 7, 3, structs=True)),
}


def _make(name, tmp_path, rng, shuffle, seed=5):
    """A function that opens the same set anew each time."""
    opener, make = SETS[name]
    path = make(tmp_path / "set", rng)
    return lambda **changed: opener(path, 4, **({"seed": seed, "shuffle": shuffle} | changed))


def _taken(some, n=1):
    """`n` samples one by one, hashable: captions and pixels."""
    found = []
    for _ in range(n):
        *pictures, captions = some.next(1)
        found.append((captions[0], *(p.tobytes() for p in pictures)))
    return found


@pytest.mark.parametrize("shuffle", [0, 1, 4, 1000])
@pytest.mark.parametrize("name", SETS)
def test_every_position_goes_on_as_if_nothing_had_been(tmp_path, rng, monkeypatch, name, shuffle):
    monkeypatch.setattr(stream, "CHUNK", 5)  # so that states fall within chunks and between them
    make = _make(name, tmp_path, rng, shuffle)
    total = 2 * sum(len(some[-1]) for some in make().once(9)) + 9  # into the third epoch
    with make().stream() as whole:
        states, counts, sequence, epochs = [whole.state()], [whole.counts], [], []
        for _ in range(total):
            sequence += _taken(whole)
            states.append(whole.state())
            counts.append(whole.counts)
            epochs.append(whole.epoch)
    assert epochs[0] == 0 and epochs[-1] >= 2 and epochs == sorted(epochs)
    for position in range(total - 6):
        saved = json.dumps(states[position])
        with make().stream(json.loads(saved)) as resumed:
            assert json.dumps(resumed.state()) == saved and resumed.counts == counts[position]
            assert _taken(resumed, 6) == sequence[position : position + 6]
            assert resumed.state() == states[position + 6] and resumed.counts == counts[position + 6]
    # A run that is stopped again and again ends where the undisturbed one does.
    state, left = None, []
    while len(left) < total:
        with make().stream(state) as piece:
            left += _taken(piece, min(int(rng.integers(1, 8)), total - len(left)))
            state = json.loads(json.dumps(piece.state()))
    assert left == sequence and state == states[-1]


def test_the_same_of_the_emoji(rng):
    source = open_pairs("emoji", 8, seed=3)
    with source.stream() as whole:
        whole.next(1600)
        state, want = whole.state(), whole.next(200)
    with open_pairs("emoji", 8, seed=3).stream(json.loads(json.dumps(state))) as resumed:
        found = resumed.next(200)
        assert resumed.epoch == 1
    assert found[2] == want[2] and (found[0] == want[0]).all() and (found[1] == want[1]).all()


@pytest.mark.parametrize("name", SETS)
def test_an_epoch_gives_everything_once_in_an_order_of_its_own(tmp_path, rng, name):
    make = _make(name, tmp_path, rng, 4)
    every = [c for some in make().once(4) for c in some[-1]]
    epochs = []
    for seed in (5, 6):
        with make(seed=seed).stream() as some:
            for _ in range(3):
                epochs.append(some.next(len(every))[-1])
                assert Counter(epochs[-1]) == Counter(every)
    assert len(set(map(tuple, epochs))) == 6, "epochs and seeds have orders of their own"
    with make(shuffle=0).stream() as some:
        assert some.next(2 * len(every))[-1] == 2 * every
    for n in (1, 3, len(every) + 2):
        with make().stream() as some:
            total = [c for _ in range(-(-2 * len(every) // n)) for c in some.next(n)[-1]]
            assert total[: 2 * len(every)] == epochs[0] + epochs[1]


def test_shuffling_reaches_through_the_whole_buffer(tmp_path, rng):
    """The place in the order of a sample is hardly correlated with its place in the files."""
    sets.shards(tmp_path, rng, 1, 400, bad=False)
    for shuffle, low, high in ((0, 0.999999, 1), (20, 0.9, 0.9999), (400, -0.25, 0.25)):
        with open_pictures(tmp_path, 1, seed=int(rng.integers(2**32)), shuffle=shuffle).stream() as some:
            places = [int(c.split()[-1]) for c in some.next(400)[-1]]
        assert low <= np.corrcoef(places, np.arange(400))[0, 1] <= high  # 0.25 is 5 standard errors


def test_batches_of_none_and_of_wrong_numbers(tmp_path, rng):
    with _make("pick-a-pic", tmp_path, rng, 4)().stream() as some:
        before = some.state()
        chosen, rejected, captions = some.next(0)
        assert chosen.shape == rejected.shape == (0, 4, 4, 3) and captions == [] and some.state() == before
        for n in (-1, 2.0, True, None):
            with pytest.raises(ConfigError, match=f"n is {n}, but it must be a whole number of at least 0"):
                some.next(n)
    for n in (0, -1, 1.5):
        with pytest.raises(ConfigError, match=f"once: n is {n}"):
            next(_make("sidecars", tmp_path / "b", rng, 4)().once(n))


@pytest.mark.parametrize("name", SETS)
def test_a_set_that_changed_is_noticed(tmp_path, rng, name):
    make = _make(name, tmp_path, rng, 4)
    with make().stream() as some:
        some.next(3)
        state = some.state()
    files = sorted(
        p for p in (tmp_path / "set").rglob("*") if p.suffix in (".png", ".tar") or "train" in p.name
    )
    content = files[-1].read_bytes()
    files[-1].write_bytes(content + b"\0" * 512)
    with pytest.raises(
        ConfigError, match=r"has changed since the position was saved \([\d,]+ files with .* now\)"
    ):
        make().stream(state)
    files[-1].write_bytes(content)
    make().stream(state).close()
    files[-1].rename(files[-1].with_name("train-x" + files[-1].name))
    with pytest.raises(ConfigError, match="has changed since the position was saved"):
        make().stream(state)


def test_files_that_are_no_part_of_the_set_may_change(tmp_path, rng):
    for name in SETS:
        make = _make(name, tmp_path / name, rng, 4)
        folder = tmp_path / name / "set"
        (folder / "log.csv").write_text("step,loss")
        with make().stream() as some:
            some.next(1)
            state = some.state()
        (folder / "log.csv").write_text("step,loss\n1,2\n")
        (folder / "notes.txt").write_text("one more")
        (folder / "report.json").write_text("{}")
        make().stream(state).close()


def test_a_table_that_changed_is_noticed(tmp_path, rng):
    make = _make("table", tmp_path, rng, 4)
    with make().stream() as some:
        state = some.state()
    table = tmp_path / "set/metadata.csv"
    table.write_text(table.read_text(encoding="utf-8").replace("really", "surely"), encoding="utf-8")
    with pytest.raises(ConfigError, match="with other names or content"):
        make().stream(state)


def test_buffered_pictures_that_broke_are_noticed(tmp_path, rng, monkeypatch):
    """A file of the same size whose pictures in the buffer cannot be read any more."""
    monkeypatch.setattr(stream, "CHUNK", 1)
    make = _make("shards", tmp_path, rng, 6)
    with make().stream() as some:
        some.next(1)
        state = some.state()
    for path in (tmp_path / "set").glob("*.tar"):
        data = bytearray(path.read_bytes())
        data[600:] = bytes(len(data) - 600)
        path.write_bytes(data)
    with pytest.raises(ConfigError, match="has changed since the position was saved"):
        make().stream(state)


def test_states_that_are_none(tmp_path, rng):
    make = _make("shards", tmp_path, rng, 4)
    with make().stream() as some:
        some.next(3)
        state = some.state()
    for wrong in ({}, [], "x", {"format": "other"}, state | {"format": None}):
        with pytest.raises(ConfigError, match="no fp4bf16-source-1; start a new run"):
            make().stream(wrong)
    for name, value in (("seed", 6), ("shuffle", 5), ("role", "policy"), ("word", "cat")):
        with pytest.raises(ConfigError, match=rf"saved with {name} = {value!r}, but this run has "):
            make().stream(state | {name: value})
    for wrong in (None, [], {"files": "x"}):
        with pytest.raises(ConfigError, match="other files then"):
            make().stream(state | {"set": wrong})
    for name in ("epoch", "epoch_given", "counts", "shard", "start", "buffer", "skip"):
        for value in (None, -1, 1.5, "x", 2**80, [[0, 0], [0, 0]], [[99, 0]], {"read": -1}, [0], True):
            if name in ("epoch_given", "start") and value == 2**80:
                continue  # any number of them is a position
            with pytest.raises(ConfigError, match="position cannot be used|has changed since"):
                make().stream(state | {name: value})
        with pytest.raises(ConfigError, match="position cannot be used"):
            make().stream({k: v for k, v in state.items() if k != name})


# --------------------------------------------------------------------------------------------------- memory


def _full(some) -> None:
    """Wait until as much has been read ahead as ever is."""
    end = time.monotonic() + 20
    while not some._queue.full() and time.monotonic() < end:
        time.sleep(0.002)
    assert some._queue.full()


def _tar_of(path, rng, number):
    blobs = [sets.encode(sets.noise(rng, 20, 20), "PNG") for _ in range(16)]
    files = (
        (f"{i:06d}.{e}", d)
        for i in range(number)
        for e, d in (("png", blobs[i % 16]), ("txt", b"cat %d" % i))
    )
    return sets.write_tar(path, list(files))


def test_memory_is_bounded_by_the_buffer(tmp_path, rng):
    size, shuffle = 16, 256
    peaks = []
    for number in (480, 1680):
        path = _tar_of(tmp_path / f"{number}.tar", rng, number)
        source = open_pictures(path, size, seed=1, shuffle=shuffle)
        with source.stream() as warm:  # what is loaded once stays out of the account
            warm.next(1)
        gc.collect()
        tracemalloc.start()
        with source.stream() as some:
            for _ in range(number // 60):
                some.next(60)
                _full(some)  # so that all that is ever held is held in either run
            assert some.counts.read >= number
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    held = (shuffle + 5 * stream.CHUNK) * (3 * size**2 + 1000)  # pictures, their captions and places
    assert peaks[1] < held + (2 << 20), f"{peaks} bytes, of which a buffer may hold {held}"
    more = 1200 * 3 * size**2  # bytes of the further pictures, a quarter of which would be seen
    assert peaks[1] - peaks[0] < more / 4, f"{more} more bytes of pictures took {peaks} bytes"
    assert path.stat().st_size > 2 * peaks[1], "the set itself would not fit in there"


# --------------------------------------------------------------------------------------------------- thread


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "fp4bf16-source"]


def _gone() -> bool:
    end = time.monotonic() + 10
    while _threads() and time.monotonic() < end:
        time.sleep(0.01)
    return not _threads()


def test_threads_end(tmp_path, rng):
    source = _make("shards", tmp_path, rng, 4)()
    some = source.stream()
    some.next(1)
    assert len(_threads()) == 1
    state = some.state()
    some.close()
    some.close()
    assert not _threads() and some.state() == state
    with pytest.raises(ValueError, match="the stream is closed; make another from its state"):
        some.next(1)
    forgotten = source.stream()
    forgotten.next(1)
    del forgotten
    gc.collect()
    assert _gone(), "nobody holds the stream, but its thread is still there"
    never_read = source.stream()
    never_read.close()
    assert not _threads()


def test_closing_does_not_wait_for_a_buffer_to_fill(tmp_path, rng, monkeypatch):
    source = _make("shards", tmp_path, rng, 1000)()
    slow = decode.decode

    def wait(*arguments):
        time.sleep(0.2)
        return slow(*arguments)

    monkeypatch.setattr("fp4bf16.train.sources.order.decode", wait)
    some = source.stream()
    began = time.monotonic()
    some.close()
    assert time.monotonic() - began < 1.5 and not _threads()  # 13 pictures would take 2.6 s


def test_errors_of_the_thread_come_up_where_samples_are_asked_for(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK", 2)
    source = _make("shards", tmp_path, rng, 0)()
    want = [c for _, captions in source.once(1) for c in captions]
    numbers = itertools.count()
    draw = ShardOrder.draw

    def failing(order):
        if next(numbers) == 5:
            raise OSError("the disk is on fire")
        return draw(order)

    monkeypatch.setattr(ShardOrder, "draw", failing)
    some = source.stream()
    assert some.next(4)[1] == want[:4]
    state = some.state()
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is on fire"):
            some.next(1)
    assert some.state() == state and _gone()
    with source.stream(state) as resumed:
        assert resumed.next(3)[1] == want[4:7]


def test_reading_goes_on_while_the_trainer_computes(tmp_path, rng):
    source = _make("shards", tmp_path, rng, 4)()
    with source.stream() as some:
        some.next(1)
        _full(some)
