"""Runs of seconds that the tests of the evaluation look at."""

from __future__ import annotations

import io
import pathlib

from test_resume import SETTINGS

from fp4bf16.__main__ import main
from fp4bf16.train import checkpoint
from fp4bf16.train.config import get_preset, override
from fp4bf16.train.evaluation import Evaluation, Settings, evaluate
from fp4bf16.train.progress import Progress
from fp4bf16.train.run import train

FEW = Settings(n=8, floor_seeds=1, extractors=("pixels",))


def trained(out: pathlib.Path, *more: str) -> pathlib.Path:
    """The folder of a finished run."""
    settings = [*SETTINGS, "align.lr=3e-3", "align.guard=warn", *more]
    train(override(get_preset("ci"), settings), out, Progress(io.StringIO()))
    return out


def quiet(folder: pathlib.Path, settings: Settings = FEW) -> Evaluation:
    """`evaluate` without a word."""
    return evaluate(folder, settings, Progress(io.StringIO()))


def change_checkpoint(folder: pathlib.Path, change) -> None:
    """Write the checkpoint anew after ``change(arrays, meta)``."""
    file = folder / "checkpoint.safetensors"
    arrays, meta = checkpoint.load_run(file)
    change(arrays, meta)
    meta.pop("format")
    checkpoint.save(file, arrays, meta)


def fails(capsys, *arguments: str) -> str:
    """The sentence with which a command line is refused (exit status 2)."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    printed, err = capsys.readouterr()
    assert printed == "" and "Traceback" not in err
    return err
