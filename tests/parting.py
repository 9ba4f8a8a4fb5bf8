"""A run that is stopped and goes on, beside one that nobody stopped."""

from __future__ import annotations

import pytest

from fp4bf16.train.run import train
from fp4bf16.train.state import Run, Stopped


def same_bytes_when_parted(config, folder, at: tuple[str, int], monkeypatch, said) -> None:
    """`folder`/whole holds the finished run on the GPU: one that is asked to stop at (stage, step) and goes
    on ends in a checkpoint of the same bytes.
    """
    real = Run.done

    def done(self, step, save=False):
        if (self.stage, step) == at:
            self.stop.asked = 2
        real(self, step, save)

    monkeypatch.setattr(Run, "done", done)
    with pytest.raises(Stopped):
        train(config, folder / "parted", said(), "cuda")
    monkeypatch.setattr(Run, "done", real)
    train(config, folder / "parted", said(), "cuda")
    whole, parted = ((folder / name / "checkpoint.safetensors").read_bytes() for name in ("whole", "parted"))
    assert whole == parted
