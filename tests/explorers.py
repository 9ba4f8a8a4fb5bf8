"""What the workers of test_workers build. It imports little, for every worker imports it anew."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import time
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Make:
    """Pictures of seeds, brighter by the weight ``shift``. Where `folder` is given, what a job for a prompt
    in it asks for is done once (of all workers): a death, an error, or no end.
    """

    folder: str = ""
    pause: float = 0.0

    def __call__(self):
        held = {"shift": np.float32(0)}
        main = multiprocessing.parent_process() is None

        def draw(seeds, prompts, steps, track):
            time.sleep(self.pause)
            for name in set(prompts) if self.folder and not main else ():
                self.happen(name)
            noise = [np.random.default_rng([int(s), int(steps)]).standard_normal((4, 4, 3)) for s in seeds]
            return np.array(noise, np.float32) + held["shift"] + np.float32(track == "fp4")

        return draw, held.update

    def happen(self, name):
        path = pathlib.Path(self.folder) / name
        if not path.exists():
            return
        if not name.startswith("always"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        if "exit" in name:
            os._exit(3)
        if "kill" in name:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in name:
            time.sleep(3600)
        if "stop" in name:
            os.kill(os.getpid(), signal.SIGSTOP)
        if "raise" in name:
            raise ValueError("no luck")


def bad_factory():
    raise RuntimeError("cannot be built")


def reward(pictures, prompts):
    return pictures.mean((1, 2, 3))
