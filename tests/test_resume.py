"""Killed in each stage and run again: the same final checkpoint, bit for bit, and complete metrics."""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fp4bf16.routing import work
from fp4bf16.train import checkpoint
from fp4bf16.train.cli import load_model
from fp4bf16.train.config import get_preset, override
from fp4bf16.train.engine import BaseData
from fp4bf16.train.evaluation_sets import load_weights
from fp4bf16.train.exploring import MakeDraw, weights_of
from fp4bf16.train.folder import RunFolder
from fp4bf16.train.progress import Progress
from fp4bf16.train.route_cli import loop_of
from fp4bf16.train.state import Run, Stop

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
ROOT = pathlib.Path(__file__).resolve().parents[1]

#: Long enough to be hit in every stage, short enough for a test.
SETTINGS = [
    "base.steps=16",
    "base.batch=8",
    "base.checkpoint_every=5",
    "judge.steps=12",
    "judge.batch=16",
    "judge.width=8",
    "model.block_out_channels=[8,16]",
    "align.prompts=3",
    "align.seeds=4",
    "align.keep=2",
    "align.explore_steps=1",
    "align.steps=2",
    "align.batch=4",
    "eval.captions=8",
    "eval.steps=2",
    "diffusion.chunk=8",
]
STAGES = ("base", "judges", "evaluate_base", "align", "evaluate")
#: Of two stages of a kind, which are saved alike, one is enough in CI; test_kill.py hits all of them.
BY_STAGE = [pytest.param(s, marks=[pytest.mark.long] * (s in ("judges", "evaluate"))) for s in STAGES]

#: Runs the command line, but kills its own process at the n-th line of metrics of a stage, after the line is
#: written and before anything that follows it; or sends it a signal there.
HARNESS = """
import os, sys
from fp4bf16.train import folder
stage, number, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
log, seen = folder.RunFolder.log, 0
def counted(self, **values):
    global seen
    log(self, **values)
    seen += values["stage"] == stage
    if values["stage"] == stage and seen == number:
        os.kill(os.getpid(), how)
folder.RunFolder.log = counted
sys.argv = ["fp4bf16", *sys.argv[4:]]
from fp4bf16.__main__ import main
sys.exit(main())
"""


def command(out: pathlib.Path) -> list[str]:
    """Arguments of the run that these tests interrupt."""
    settings = [part for s in SETTINGS for part in ("--set", s)]
    return ["train", "--preset", "ci", "--out", str(out), *settings]


def start(out: pathlib.Path, *kill: object, threads: int = 1) -> subprocess.CompletedProcess:
    """Run the command in a process of its own; `kill` is (stage, number of the line, signal)."""
    environment = {**os.environ, "FP4BF16_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    arguments = [str(k) for k in kill] or ["none", "0", "0"]
    return subprocess.run(
        [sys.executable, "-c", HARNESS, *arguments, *command(out)],
        cwd=out.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def positions(out: pathlib.Path) -> list[tuple[str, int | None]]:
    """(stage, step) of every line of the metrics."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [(line["stage"], line.get("step")) for line in map(json.loads, lines)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
    """The run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = start(out)
    assert done.returncode == 0, done.stderr
    return out


def test_a_run_is_complete(whole):
    assert positions(whole)[:16] == [("base", s) for s in range(1, 17)]
    assert positions(whole)[-1] == ("summary", None)
    assert [p for p in positions(whole) if p[0] == "align"] == [("align", 1), ("align", 2)]


@pytest.mark.parametrize("stage", BY_STAGE)
def test_killed_and_run_again_gives_the_same_bytes(stage, whole, tmp_path):
    out = tmp_path / "run"
    number = 13 if stage == "base" else 1
    killed = start(out, stage, number, int(signal.SIGKILL))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert positions(out)[-1][0] == stage
    # What a kill in the middle of a write leaves: a torn temporary file, which is cleared away.
    torn = out / ".checkpoint.safetensors.x1y2.tmp"
    torn.write_bytes(b"torn")
    again = start(out)
    assert again.returncode == 0, again.stderr
    assert positions(out) == positions(whole) and not torn.exists()
    assert (out / "checkpoint.safetensors").read_bytes() == (whole / "checkpoint.safetensors").read_bytes()
    for name in ("base", "aligned", "pairs"):
        assert (out / f"samples/{name}.png").read_bytes() == (whole / f"samples/{name}.png").read_bytes()


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop_saves_and_says_how_to_go_on(number, code, whole, tmp_path):
    out = tmp_path / "run"
    stopped = start(out, "base", 7, int(number))
    assert stopped.returncode == code
    assert "stopped and saved" in stopped.stderr and "python -m fp4bf16 train --preset ci" in stopped.stderr
    _, meta = checkpoint.load(out / "checkpoint.safetensors")
    assert (meta["stage"], meta["step"]) == (
        "base",
        7,
    )  # not the regular checkpoint at step 5: nothing is lost
    if number == signal.SIGTERM:
        return
    again = start(out)
    assert again.returncode == 0 and "going on with" in again.stderr and "step 7" in again.stderr
    assert (out / "checkpoint.safetensors").read_bytes() == (whole / "checkpoint.safetensors").read_bytes()


def test_finished_run_says_so_and_changes_nothing(whole):
    before = {
        p: (p.stat().st_mtime_ns, p.read_bytes())
        for p in whole.rglob("*.*")
        if p.is_file() and p.name != ".lock"
    }
    began = time.monotonic()
    again = start(whole)
    assert again.returncode == 0 and "already finished" in again.stderr
    assert time.monotonic() - began < 60
    for path, (_, content) in before.items():
        assert path.read_bytes() == content


def test_other_thread_count_is_said(tmp_path):
    out = tmp_path / "run"
    assert start(out, "base", 6, int(signal.SIGKILL), threads=1).returncode == -signal.SIGKILL
    again = start(out, "base", 1, int(signal.SIGKILL), threads=2)
    assert "1 threads and goes on with 2: the result will not be bit-identical" in again.stderr


def test_checkpoint_holds_what_its_format_says(whole):
    arrays, meta = checkpoint.load(whole / "checkpoint.safetensors")
    assert meta["stage"] == "finished" and meta["config"]["preset"] == "ci"
    policy, ema = checkpoint.take(arrays, "policy"), checkpoint.take(arrays, "ema")
    assert set(policy) == set(ema) == set(checkpoint.take(arrays, "adam.first"))
    assert "conv_in.weight" in policy and "caption_embedding.weight" in policy
    assert any(not np.array_equal(policy[k], ema[k]) for k in policy)  # aligned is not base
    assert {k.split(".")[2] for k in arrays if k.startswith("panel.style.")} == {"reward", "heldout"}
    assert arrays["result.base.pictures"].dtype == np.uint8


def new_run(out: pathlib.Path, *more: str) -> Run:
    """A run in its folder, from its checkpoint where there is one."""
    config = override(get_preset("ci"), [*SETTINGS, *more])
    folder, progress = RunFolder(out), Progress(io.StringIO())
    run = Run(config, folder, progress, Stop(progress.say))
    if found := folder.open(config):
        run.restore(*found)
    return run


def leave(run: Run) -> None:
    run.close()
    run.folder.close()


def test_all_that_a_run_holds_is_carried_over(tmp_path, rng):
    """Weights, moments, position in the data, counts: the next process goes on as this one would have."""
    from source_sets import sidecars

    from fp4bf16.train.sources import open_pictures

    source = open_pictures(sidecars(tmp_path / "pictures", rng), 16, seed=3)
    first = new_run(tmp_path / "run")
    for a in first.engine.state().values():  # views of the weights and moments themselves
        a[...] = rng.standard_normal(a.shape)
    first.engine.optimizer.count = 7
    first.arrays, first.results = {"base.heldout": rng.random(3)}, {"probe": {"reward": 0.1}}
    first.counters = {"unhealthy": 3}
    first.stream("base", source, word=None).next(5)
    first.log(step=3, loss=1.0)
    first.done(3, save=True)
    weights = {name: a.copy() for name, a in first.engine.state().items()}
    first.journal(3).append({"chunk": 0, "reward": [0.1]})
    then = first.stream("base", source).next(11)
    leave(first)

    second = new_run(tmp_path / "run")
    assert (second.stage, second.step, second.engine.updates) == ("base", 3, 7)
    state = second.engine.state()
    assert set(state) == set(weights) and all(np.array_equal(state[k], weights[k]) for k in weights)
    assert second.arrays["base.heldout"].tobytes() == first.arrays["base.heldout"].tobytes()
    assert (second.results, second.counters) == (first.results, first.counters)
    assert second.journal(3).read() == [{"chunk": 0, "reward": [0.1]}]
    second.save()  # of a stream that is not open yet the position is kept
    leave(second)

    third = new_run(tmp_path / "run")
    found = third.stream("base", source).next(11)
    np.testing.assert_array_equal(found[0], then[0])
    assert found[1] == then[1]
    leave(third)


def test_rewards_go_on_with_the_same_scores(tmp_path, rng):
    """Their scales are running means of the pictures that were seen."""
    reward = "align.reward=jpeg + 0.5 colourfulness"
    pictures = rng.uniform(-1, 1, (8, 16, 16, 3)).astype(np.float32)
    first = new_run(tmp_path / "run", reward)
    first.panel.observe(pictures, ["face"] * 8)
    first.save()
    first.panel.observe(pictures[:3] / 2, ["face"] * 3)  # after the checkpoint: to be forgotten
    forgotten = first.panel.reward(pictures, ["face"] * 8)
    leave(first)
    scores = []
    for _ in range(2):
        run = new_run(tmp_path / "run", reward)
        scores.append([getattr(run.panel, role)(pictures, ["face"] * 8) for role in ("reward", "heldout")])
        run.panel.observe(pictures[:3] / 2, ["face"] * 3)
        assert run.panel.reward(pictures, ["face"] * 8).tobytes() == forgotten.tobytes()
        leave(run)
    for a, b in zip(*scores, strict=True):
        assert a.tobytes() == b.tobytes() != forgotten.tobytes()


def test_the_pool_of_another_iteration_is_dropped(tmp_path):
    run = new_run(tmp_path / "run")
    run.journal(0).append({"chunk": 0})
    assert run.journal(0).read() == [{"chunk": 0}]
    run.engine.optimizer.count += 1  # other weights
    assert run.journal(0).read() == []
    run.journal(0).append({"chunk": 1})
    assert run.journal(1).read() == []
    run.journal(1).append({"chunk": 2})
    run.save()
    leave(run)
    run = new_run(tmp_path / "run")
    assert run.journal(0).read() == []  # as after a damaged checkpoint, an iteration earlier
    run.journal(0).append({"chunk": 3})
    leave(run)
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    run = new_run(tmp_path / "run")  # anew
    assert run.folder.journal.read() == [] and not run.folder.journal.path.read_bytes()
    leave(run)


def test_checkpoints_of_before_there_were_streams_are_read(tmp_path):
    run = new_run(tmp_path / "run")
    run.save()
    leave(run)
    file = tmp_path / "run" / "checkpoint.safetensors"
    arrays, meta = checkpoint.load(file)
    for name in ("counters", "streams"):
        del meta[name]
    checkpoint.save(file, arrays, meta)
    run = new_run(tmp_path / "run")
    assert run.counters == {}
    leave(run)


@pytest.mark.parametrize("phases", [False, True, None])
@pytest.mark.parametrize("loop", [(), ("loop.forward=router",)], ids=["bf16", "router"])
def test_goes_on_multiplying_as_it_did(phases, loop, tmp_path, rng):
    """By phases or not, bit for bit, and so do all who read the checkpoint. One of before there were phases
    does not say (None): it was without.
    """
    first = new_run(tmp_path / "run", *loop)
    by_default, seeds = first.model.draw([1, 2], ["face"] * 2, 2), {"row": 1, "t": 2, "noise": 3, "drop": 4}
    first.model.unet.upsample_by_phases(bool(phases))
    pictures = rng.uniform(-1, 1, (8, *first.model.shape)).astype(np.float32)
    data = BaseData(pictures, first.model.encode(["face"] * 8), seeds, len(first.model.schedule))
    first.save()
    leave(first)
    file = tmp_path / "run" / "checkpoint.safetensors"
    arrays, meta = checkpoint.load_run(file)
    assert meta.pop("format") and meta["phases"] is bool(phases)
    if phases is None:
        del meta["phases"]
        checkpoint.save(file, arrays, meta)
    second, costs = new_run(tmp_path / "run", *loop), work(first.model.unet)
    folder = tmp_path / "run"
    readers = [load_weights(folder).model("base"), load_model(folder, "base"), second.model]
    drawn = {track: first.model.draw([1, 2], ["face"] * 2, 2, track) for track in ("bf16", "fp4")}
    assert np.array_equal(drawn["bf16"], by_default) is bool(phases)
    for model in readers:
        assert model.by_phases is bool(phases)
        for track, pictures in drawn.items():
            np.testing.assert_array_equal(model.draw([1, 2], ["face"] * 2, 2, track), pictures)
    make, load = MakeDraw(second.config, second.model.vocabulary.words, second.model.by_phases)()
    load(weights_of(second.engine))
    np.testing.assert_array_equal(make([1, 2], ["face"] * 2, 2, "fp4"), drawn["fp4"])
    for made in (second.loop, loop_of(folder)[0]):
        assert made is None or {n: of.flops for n, of in made.router.layers.items()} == {
            n: of.flops for n, of in costs.items()
        }
    for run in (first, second):
        assert run.engine.base_step(data, 0, 1e-3).finite
    a, b = first.engine.state(), second.engine.state()
    assert all(np.array_equal(a[name], b[name]) for name in a)
    second.save()
    leave(second)
    assert checkpoint.load(file)[1]["phases"] is bool(phases)


def test_goes_on_from_the_checkpoint_before_a_damaged_one(whole, tmp_path):
    """The whole command line: the same bytes at the end, and a sentence that says what happened."""
    out = tmp_path / "run"
    assert start(out, "align", 2, int(signal.SIGKILL)).returncode == -signal.SIGKILL
    file = out / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    assert checkpoint.load_run(file)[1]["stage"] == "align"
    content[-5] ^= 8
    file.write_bytes(content)
    again = start(out)
    assert again.returncode == 0, again.stderr
    assert f"{file}: " in again.stderr and "it is kept as checkpoint.damaged.safetensors" in again.stderr
    assert "The run goes on from checkpoint.previous.safetensors" in again.stderr
    assert positions(out) == positions(whole)
    for name in ("checkpoint", "checkpoint.previous"):
        assert (out / f"{name}.safetensors").read_bytes() == (whole / f"{name}.safetensors").read_bytes()
