"""Killed with SIGKILL at random moments and run again until it is finished: nothing shows that it was."""

from __future__ import annotations

import bisect
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from test_resume import ROOT, command  # noqa: E402

#: On top of those of test_resume: no stage takes less than a tenth of the run.
SETTINGS = ("base.steps=32", "judge.steps=40", "align.iterations=3")
TIMES = {"seconds", "images_per_second", "peak_rss_mb", "stage_seconds"}
LIMIT = 120  # seconds for one process


def launch(out: pathlib.Path, settings: tuple[str, ...]) -> subprocess.Popen:
    """The command line in a process of its own; what it says goes to a file beside the folder."""
    said = out.with_suffix(".txt").open("wb")
    environment = {**os.environ, "FP4BF16_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    more = [part for s in settings for part in ("--set", s)]
    arguments = [sys.executable, "-m", "fp4bf16", *command(out), *more]
    return subprocess.Popen(arguments, cwd=out.parent, env=environment, stdout=said, stderr=said)


def finish(out: pathlib.Path, settings: tuple[str, ...]) -> str:
    """Run to the end; what was said."""
    status = launch(out, settings).wait(LIMIT)
    said = out.with_suffix(".txt").read_text()
    assert status == 0, said
    return said


def lines(out: pathlib.Path) -> int:
    """Whole lines of the metrics."""
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def results(out: pathlib.Path) -> dict[str, object]:
    """All that a run leaves but times, and the report, which shows times."""
    found: dict[str, object] = {p.name: p.read_bytes() for p in sorted(out.glob("samples/*"))}
    found |= {p.name: p.read_bytes() for p in sorted(out.glob("*.safetensors"))}
    text = (out / "metrics.jsonl").read_text().splitlines()
    found["metrics"] = [{k: v for k, v in json.loads(t).items() if k not in TIMES} for t in text]
    found["others"] = sorted(p.name for p in out.iterdir() if p.name != ".lock")
    return found


@dataclass
class Whole:
    """The run that nothing disturbed: how long it took until each line of its metrics, and its results."""

    settings: tuple[str, ...]
    written: list[float]  # seconds from the start of the process
    stages: list[str]
    seconds: float
    results: dict[str, object]

    @classmethod
    def of(cls, out: pathlib.Path, settings: tuple[str, ...]) -> Whole:
        began = time.monotonic()
        process, first = launch(out, settings), None
        while process.poll() is None:
            if first is None and lines(out):
                first = time.monotonic() - began
            time.sleep(0.002)
        assert process.returncode == 0, out.with_suffix(".txt").read_text()
        seconds = time.monotonic() - began
        found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        written = [first + line["seconds"] - found[0]["seconds"] for line in found]
        return cls(settings, written, [line["stage"] for line in found], seconds, results(out))

    def stage(self, number: int) -> str:
        """The stage that is at work when `number` lines are written."""
        return "report" if number >= len(self.stages) else self.stages[number].replace("probe", "align")


@dataclass
class Kills:
    """What became of the processes that were to be killed."""

    stages: list[str] = field(default_factory=list)
    missed: int = 0  # finished before it was their time

    def kill(self, whole: Whole, out: pathlib.Path, moment: float) -> None:
        """Start or go on with the run in `out`, and kill it where the undisturbed one was after `moment`."""
        number = bisect.bisect_right(whole.written, moment)
        after = moment - (whole.written[number - 1] if number else 0.0)
        again = out.is_dir()
        process = launch(out, whole.settings)
        # What the last process wrote is still in the metrics; they are cut back before anything is said.
        while again and number and not (said := out.with_suffix(".txt").read_bytes()):
            assert process.poll() is None, said.decode()
            time.sleep(0.002)
        while process.poll() is None and lines(out) < number:
            time.sleep(0.002)
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        if process.wait(LIMIT) == -signal.SIGKILL:
            self.stages.append(whole.stage(lines(out)))
        else:
            assert process.returncode == 0, out.with_suffix(".txt").read_text()
            self.missed += 1


def killed_and_run_again(
    whole: Whole, folder: pathlib.Path, moments: np.ndarray, runs: int, rng: np.random.Generator
) -> list[str]:
    """Deal the moments to `runs` runs, two at a time; the stages that were hit, as many as moments."""

    def disturbed(out: pathlib.Path, mine: np.ndarray) -> Kills:
        kills = Kills()
        for moment in mine:
            kills.kill(whole, out, float(moment))
        assert "finished" in finish(out, whole.settings)
        assert results(out) == whole.results, f"{out.name}: killed in {kills.stages}"
        return kills

    with ThreadPoolExecutor(2) as pool:
        done = list(
            pool.map(
                disturbed, [folder / f"run{i}" for i in range(runs)], [moments[i::runs] for i in range(runs)]
            )
        )
    stages, missed = [s for kills in done for s in kills.stages], sum(kills.missed for kills in done)
    for attempt in range(3 * missed):  # those whose moment was too near the end are killed earlier
        if len(stages) < len(moments):
            stages += disturbed(folder / f"more{attempt}", rng.uniform(0, 0.9, 1) * whole.seconds).stages
    return stages


def test_killed_at_random_moments(tmp_path, rng):
    """One moment in each tenth of the undisturbed run: the same checkpoints, pictures and metrics, bit for
    bit, at the end."""
    whole = Whole.of(tmp_path / "whole", SETTINGS)
    moments = (np.arange(10) + rng.random(10)) / 10 * whole.seconds
    stages = killed_and_run_again(whole, tmp_path, moments, 2, rng)
    assert len(stages) == 10
    assert {"base", "judges", "align"} <= set(stages), stages


#: Runs the command line with chunks of 64 rollouts, but kills its own process when its journal has got
#: `number` entries in all; says how many it got otherwise.
HARNESS = """
import functools, os, signal, sys
from fp4bf16.train import alignment, journal
alignment.Settings = functools.partial(alignment.Settings, chunk=64)
number, append, got = int(sys.argv[1]), journal.Journal.append, 0
def counted(self, entry):
    global got
    append(self, entry)
    got += 1
    if got == number:
        os.kill(os.getpid(), signal.SIGKILL)
journal.Journal.append = counted
sys.argv = ["fp4bf16", *sys.argv[2:]]
from fp4bf16.__main__ import main
status = main()
print("journal entries:", got)
sys.exit(status)
"""


def test_killed_in_the_middle_of_a_pool_draws_only_what_is_missing(tmp_path):
    """A pool of three chunks: the two in the journal are not drawn again, and it is the same run."""
    settings = ("base.steps=5", "judge.steps=2", "align.seeds=44", "align.select=random")
    more = [part for s in settings for part in ("--set", s)]

    def process(out: pathlib.Path, number: int) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", HARNESS, str(number), *command(out), *more],
            cwd=tmp_path,
            env={**os.environ, "FP4BF16_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )

    whole, out = tmp_path / "whole", tmp_path / "run"
    undisturbed = process(whole, 0)  # 2 iterations of 3 x 44 rollouts
    assert "journal entries: 6" in undisturbed.stdout, undisturbed.stderr
    assert process(out, 5).returncode == -signal.SIGKILL
    again = process(out, 0)
    assert again.returncode == 0 and "journal entries: 1" in again.stdout, again.stderr
    assert results(out) == results(whole)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        ("align.objective=nft",),
        ("align.objective=ppo", "align.explore_steps=2"),
        ("align.parameters=lora",),
        ("align.reward=style + 0.5 colourfulness",),
        ("align.workers=2",),
    ],
    ids=lambda settings: settings[0].split("=")[-1],
)
def test_killed_at_forty_random_moments(settings, tmp_path, rng):
    """The same of each objective, of adapters, of several rewards, and of exploring in several processes."""
    whole = Whole.of(tmp_path / "whole", (*SETTINGS, *settings))
    moments = (np.arange(40) + rng.random(40)) / 40 * whole.seconds
    stages = killed_and_run_again(whole, tmp_path, moments, 5, rng)
    assert len(stages) == 40
    assert {"base", "judges", "align"} <= set(stages), stages
