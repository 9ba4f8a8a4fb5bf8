"""Workers that explore: the same pool with any number of them, and nothing lost when one dies."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import numpy as np
import pytest
from explorers import Make, bad_factory, reward

from fp4bf16.align.pool import Job, Settings, explore
from fp4bf16.align.rollout import measure_fidelity, rollout
from fp4bf16.align.workers import Explorer
from fp4bf16.backends import threads
from fp4bf16.errors import ConfigError
from fp4bf16.train.config import get_preset, override
from fp4bf16.train.data import Vocabulary
from fp4bf16.train.denoiser import Denoiser
from fp4bf16.train.engine import HostEngine
from fp4bf16.train.exploring import MakeDraw, weights_of

ROOT = pathlib.Path(__file__).resolve().parents[1]


def seeds_of(rng, prompts=4, n=80):
    return rng.integers(0, 2**64, (prompts, n), dtype=np.uint64)


def gone(pids, seconds=10.0):
    """Whether all these processes end, and leave no zombie."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


def same(a, b):
    for name in ("pictures", "labels", "kept", "seeds", "explored", "columns"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert a.stats == b.stats


# ---------------------------------------------------------------------------------------------- the same pool


@pytest.fixture(scope="module")
def shared():
    """Two workers for all that do them no harm: nothing is said of them, and they stay the same ones."""
    said = []
    with Explorer(Make(pause=0.005), 2, threads=1, say=said.append) as explorer:
        yield explorer
        pids = explorer.processes
    assert said == [] and gone(pids) and explorer.processes == []


def test_pool_of_workers_is_the_single_process_pool(shared, rng):
    """Also with new weights, which every worker takes up, and in the pictures that are made anew."""
    seeds, prompts, settings = seeds_of(rng), list("abcd"), Settings(keep=4, steps=5)
    draw, load = Make()()
    for shift in (1.5, 2.5, 0.0):
        load({"shift": np.float32(shift)})
        shared.refresh({"shift": np.float32(shift)})
        alone = rollout(draw, reward, seeds, prompts, settings, 3)
        same(alone, rollout(draw, reward, seeds, prompts, settings, 3, explorer=shared))
    pids = shared.processes
    assert len(set(pids)) == 2 and os.getpid() not in pids
    here = measure_fidelity(draw, reward, alone, prompts, settings)
    assert measure_fidelity(draw, reward, alone, prompts, settings, shared) == here
    assert shared.processes == pids  # the same ones all the time


def test_workers_draw_and_the_main_process_does_not(shared, rng):
    def draw(*_):
        raise AssertionError("the main process drew")

    pool = explore(draw, reward, seeds_of(rng), list("abcd"), Settings(), explorer=shared)
    assert len(shared.processes) == 2
    assert np.isfinite(pool.rewards).all()
    assert list(shared.pictures([], draw)) == []


def test_order_and_memory_do_not_depend_on_who_is_fast(shared):
    """Pictures come in the order of the jobs, and few are taken before the first is given out."""
    taken = []

    def jobs():
        for i in range(20):
            taken.append(i)
            yield Job(np.arange(i, i + 2, dtype=np.uint64), ["a", "b"], 1, "fp4")

    draw, _ = Make()()
    for i, pictures in enumerate(shared.pictures(jobs(), draw)):
        assert len(taken) <= i + 6
        np.testing.assert_array_equal(pictures, draw([i, i + 1], ["a", "b"], 1, "fp4"))
    assert i == 19


@pytest.mark.parametrize("track, parameters", [
    pytest.param("fp4", "full", marks=pytest.mark.long),
    pytest.param("bf16", "full", marks=pytest.mark.long),
    ("fp4", "lora"),
])  # fmt: skip
def test_the_network_draws_the_same_pictures_in_workers(track, parameters, rng):
    """The UNet, bit for bit, with its weights changed, and with other numbers of threads on either side."""
    config = override(get_preset("ci"), [f"align.parameters={parameters}", f"align.explore_track={track}"])
    captions, before = ["cat face", "dog", "dog face"], threads.num_threads()
    words = ("cat", "dog", "face")
    engine = HostEngine(Denoiser(config, Vocabulary(words)), config)
    engine.begin_alignment()
    engine.parameters.data += rng.standard_normal(engine.parameters.data.shape).astype(np.float32) * 0.02
    engine.parameters.touch()
    settings = Settings(keep=4, explore_steps=2, steps=3, explore_track=track)
    seeds, mine = seeds_of(rng, 3, 70), []
    with Explorer(MakeDraw(config, words), 2, threads=1) as explorer:
        explorer.refresh(weights_of(engine))
        for n in (1, 3):
            threads.set_num_threads(n)
            try:
                mine.append(rollout(engine.draw, reward, seeds, captions, settings))
            finally:
                threads.set_num_threads(before)
        theirs = rollout(engine.draw, reward, seeds, captions, settings, explorer=explorer)
    same(mine[0], mine[1])
    same(mine[0], theirs)


def test_none_and_one_job(rng):
    draw, _ = Make()()
    jobs = [Job(np.arange(5, dtype=np.uint64), list("abcde"), 2, "fp4")]
    with Explorer(Make(), 0) as explorer:
        np.testing.assert_array_equal(next(explorer.pictures(jobs, draw)), draw(*jobs[0]))
        assert explorer.processes == []
    with Explorer(Make(), 4, threads=1) as explorer:
        (found,) = explorer.pictures(jobs, draw)
        np.testing.assert_array_equal(found, draw(*jobs[0]))
        assert len(explorer.processes) == 1  # no more than there is to do


# ----------------------------------------------------------------------------------------------------- deaths


def run_with(tmp_path, rng, happening, count=2, **options):
    """A pool whose prompt `happening` makes a worker fail: (is the pool right, what was said)."""
    said, seeds = [], seeds_of(rng, 4, 128)
    prompts = ["a", happening, "b", "c"]
    draw, _ = Make(str(tmp_path))()
    (tmp_path / happening).write_text("")
    with Explorer(Make(str(tmp_path)), count, threads=1, say=said.append, **options) as explorer:
        pool = explore(draw, reward, seeds, prompts, Settings(), explorer=explorer)
        pids = explorer.processes
    assert gone(pids)
    alone = explore(draw, reward, seeds, prompts, Settings())
    np.testing.assert_array_equal(pool.rewards, alone.rewards)
    assert pool.counts == alone.counts
    return said, pids


def test_workers_that_die_raise_or_hang_lose_nothing(tmp_path, rng):
    """One after the other, each in another chunk, with no more processes than take their places."""
    prompts, seeds, said = ["exit", "raise", "hang", "kill"], seeds_of(rng, 4, 128), []
    draw, _ = Make(str(tmp_path))()
    for name in prompts:
        (tmp_path / name).write_text("")
    with Explorer(Make(str(tmp_path)), 2, threads=1, say=said.append, replacements=4, seconds=5) as explorer:
        began = time.monotonic()
        pool = explore(draw, reward, seeds, prompts, Settings(chunk=64), explorer=explorer)
        assert 5 <= time.monotonic() - began < 120
        pids = explorer.processes
    alone = explore(draw, reward, seeds, prompts, Settings())
    np.testing.assert_array_equal(pool.rewards, alone.rewards)
    assert pool.counts == alone.counts and gone(pids) and len(said) == 4
    for what in ("ended with exit status 3", "raised ValueError: no luck", "was killed by SIGKILL",
                 "did not answer within 5 s and was killed"):  # fmt: skip
        (sentence,) = [s for s in said if s.startswith(f"explorer: a worker {what} at chunk ")]
        assert "; nothing is lost: " in sentence


@pytest.mark.parametrize("happening, what", [
    ("always exit", "ended with exit status 3"),
    pytest.param("always raise", "raised ValueError: no luck", marks=pytest.mark.long),
    pytest.param("always hang", "did not answer within 5 s and was killed", marks=pytest.mark.long),
    pytest.param("always stop", "did not answer within 5 s and was killed", marks=pytest.mark.long),
])  # fmt: skip
def test_a_chunk_that_every_worker_fails_at_is_drawn_here(happening, what, tmp_path, rng):
    said, pids = run_with(tmp_path, rng, happening, replacements=9, seconds=5)
    assert len(said) == 2 and pids  # the others went on
    assert all(f"a worker {what} at chunk 1; nothing is lost: a new one takes its place" in s for s in said)


def test_when_no_worker_is_left_the_main_process_does_the_rest(tmp_path, rng):
    said, pids = run_with(tmp_path, rng, "always kill", count=2, replacements=0)
    assert pids == [] and "1 others do its work" in said[0]
    assert said[1].endswith("none is left, so the main process draws the rest")


def test_kill_9_in_the_middle(rng):
    """From outside, at any moment: once while it draws, once before it has begun."""
    seeds, prompts, said = seeds_of(rng, 6, 128), list("abcdef"), []
    draw, _ = Make()()
    with Explorer(Make(pause=0.1), 2, threads=1, say=said.append) as explorer:
        killed = []

        def killing(pictures, prompts):  # called in the main process after every chunk
            alive = [pid for pid in explorer.processes if pid not in killed]
            if len(killed) < 2 and alive:
                time.sleep(0.05)  # the other chunk is being drawn
                killed.append(alive[0])
                os.kill(killed[-1], signal.SIGKILL)
            return reward(pictures, prompts)

        pool = explore(draw, killing, seeds, prompts, Settings(chunk=64), explorer=explorer)
        pids = explorer.processes
        assert gone(killed) and not set(killed) & set(pids) and len(killed) == 2
    alone = explore(draw, reward, seeds, prompts, Settings())
    np.testing.assert_array_equal(pool.rewards, alone.rewards)
    np.testing.assert_array_equal(pool.seeds, alone.seeds)
    assert len(said) == 2 and all("was killed by SIGKILL" in s for s in said)
    assert gone(pids)


def test_a_factory_that_fails_leaves_the_main_process(rng):
    draw, _ = Make()()
    seeds = seeds_of(rng, 2, 64)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Explorer(bad_factory, 1, threads=1, replacements=0) as explorer:
            pool = explore(draw, reward, seeds, ["a", "b"], Settings(), explorer=explorer)
    np.testing.assert_array_equal(pool.rewards, explore(draw, reward, seeds, ["a", "b"], Settings()).rewards)
    texts = [str(w.message) for w in seen]
    assert len(texts) == 1 and "raised RuntimeError: cannot be built before its first chunk" in texts[0]


def test_an_error_of_the_reward_stops_what_is_under_way(rng):
    """It is raised as it is; the next pool is not disturbed by chunks of the last one."""
    draw, _ = Make()()
    seeds = seeds_of(rng, 4, 128)

    def failing(pictures, prompts):
        raise KeyError("reward")

    said = []
    with Explorer(Make(pause=0.02), 2, threads=1, say=said.append) as explorer:
        with pytest.raises(KeyError, match="reward"):
            explore(draw, failing, seeds, list("abcd"), Settings(), explorer=explorer)
        pool = explore(draw, reward, seeds, list("abcd"), Settings(), explorer=explorer)
        alone = explore(draw, reward, seeds, list("abcd"), Settings())
        np.testing.assert_array_equal(pool.rewards, alone.rewards)
    assert said == []  # nothing of this is the workers' fault


def test_a_draw_that_fails_everywhere_is_the_callers_error(rng):
    def failing(*_):
        raise ZeroDivisionError("here too")

    jobs = [Job(np.arange(2, dtype=np.uint64), ["always raise"] * 2, 1, "fp4")]
    with Explorer(Make(), 0) as explorer, pytest.raises(ZeroDivisionError, match="here too"):
        list(explorer.pictures(jobs, failing))


def test_bad_arguments(tmp_path):
    with pytest.raises(ConfigError, match="workers: is -1"):
        Explorer(Make(), -1)
    with pytest.raises(ConfigError, match="make_draw cannot be sent to a worker"):
        Explorer(lambda: None, 1)
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"a chunk is given {seconds} seconds; give a positive"):
            Explorer(Make(), 1, seconds=seconds)


def test_weights_that_cannot_be_written(rng, tmp_path):
    said, draw = [], Make()()[0]
    with Explorer(Make(), 2, say=said.append, folder=tmp_path / "missing") as explorer:
        explorer.refresh({"shift": np.zeros(3, np.float32)})
        pool = explore(draw, reward, seeds_of(rng), list("abcd"), Settings(), explorer=explorer)
        assert explorer.processes == [] and np.isfinite(pool.rewards).all()
    assert len(said) == 1 and "the main process explores" in said[0]


def test_nothing_is_left_in_the_folder(tmp_path):
    with Explorer(Make(), 1, threads=1, folder=tmp_path) as explorer:
        explorer.refresh({"shift": np.float32(1)})
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ how a run can end

SCRIPT = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    sys.path[:0] = [{root!r}, {tests!r}]
    import numpy as np
    from fp4bf16.align.pool import Settings, explore
    from fp4bf16.align.workers import Explorer
    from explorers import Make, reward

    def slow(pictures, prompts):
        print(*explorer.processes, flush=True)
        return reward(pictures, prompts)

    if __name__ == "__main__":
        make = Make(pause=0.2)
        draw, _ = make()
        with Explorer(make, 2, threads=1) as explorer:
            seeds = np.arange(6400, dtype=np.uint64).reshape(4, 1600)
            explore(draw, slow, seeds, list("abcd"), Settings(chunk=64), explorer=explorer)
"""


def start(tmp_path):
    """A run in a session of its own, exploring: (process, its workers)."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests"))))
    run = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           text=True, start_new_session=True)  # fmt: skip
    timer = threading.Timer(60, run.kill)
    timer.start()
    pids = [int(p) for p in run.stdout.readline().split()]
    timer.cancel()
    assert len(pids) == 2, run.stderr.read()
    return run, pids


def test_ctrl_c_ends_all(tmp_path):
    """The terminal sends it to every process of the group; only the run is interrupted by it."""
    run, pids = start(tmp_path)
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=30)
    assert run.returncode != 0 and errors.count("KeyboardInterrupt") == 1
    assert gone(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_workers_end_with_a_killed_run(number, tmp_path):
    run, pids = start(tmp_path)
    run.send_signal(number)
    run.communicate(timeout=30)
    assert run.returncode == -number and gone(pids)
