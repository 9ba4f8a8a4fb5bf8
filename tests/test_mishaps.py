"""What can happen to a command while it runs: a reader that goes away, a full disk, a poor terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name, value", [("FP4BF16_NUM_THREADS", "many"), ("FP4BF16_TRACK", "fp5")])
def test_a_variable_of_the_environment_that_cannot_be(name, value, tmp_path):
    status, _, said = run("train", "--preset", "ci", "--out", tmp_path / "run", env={name: value})
    assert status == 2 and said.splitlines()[-1].startswith(f"fp4bf16: {name}: '{value}' is not a")


@pytest.mark.parametrize("seed", (-5, 2**63))
@pytest.mark.parametrize("how", ("--seed={}", "--set=seed={}"))
def test_a_seed_that_cannot_be(seed, how, tmp_path):
    status, _, said = run("train", "--preset", "ci", "--out", tmp_path / "run", how.format(seed))
    assert (status, said) == (2, f"fp4bf16: --seed {seed}: must be a whole number from 0 to 2^63 - 1\n")


def test_training_goes_on_when_its_log_is_no_longer_read(nobody_reads, tmp_path):
    out = tmp_path / "run"
    assert run("train", "--preset", "ci", "--out", out, stderr=nobody_reads)[0] == 0
    assert (out / "report.html").exists()
