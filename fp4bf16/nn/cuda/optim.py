"""The optimizer of parameters in device memory: what `nn.AdamW`, `clip_norm` and `diffusion.EMA` do on the
host, in steps that a captured graph can replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import device
from ...backends import cuda_optimizer
from ...device import DeviceArray
from ...errors import ShapeError
from .parameters import DeviceParameters


def _check(parameters: Any, average: Any, betas: Any) -> None:
    for name, given in (("parameters", parameters), ("average", average)):
        if not isinstance(given, DeviceParameters) and (given is not None or name == "parameters"):
            raise TypeError(f"DeviceAdamW: {name} is a {type(given).__name__}, but a DeviceParameters is "
                            f"needed; pass the flat of a module on the GPU, or a clone of it")  # fmt: skip
    if parameters.grad is None:
        raise ValueError("DeviceAdamW: parameters have no gradient; make the set with grad=True")
    if average is parameters or (average is not None and average.layout is not parameters.layout):
        what = "parameters itself" if average is parameters else "laid out as another module's"
        raise ShapeError(f"DeviceAdamW: average is {what}, but a set of its own of the same layout is "
                         f"needed; pass parameters.clone()")  # fmt: skip
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        raise ValueError(f"DeviceAdamW: betas is {betas!r}, but two numbers from 0 to less than 1 are "
                         f"needed; pass for example (0.9, 0.999)")  # fmt: skip


class DeviceAdamW:
    """AdamW on `parameters`, with the average of the weights in `average` (a clone) where one is given.

    `prepare` writes what changes from step to step, `step` launches and can be captured:

        optimizer.prepare(lr, stream)
        optimizer.step(stream)  # or the replay of a graph that has it

    State: `first`, `second` (float32, flat), `count` (updates prepared). `norm` (1,) float64 is that of the
    last step's gradient. A gradient (or loss) that is not finite leaves everything as it is; the host, which
    learns of it from `norm`, may then take the step back with ``count -= 1``, as the CPU does not count it.
    """

    def __init__(
        self, parameters: DeviceParameters, lr: float, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, clip: float | None = None,
        average: DeviceParameters | None = None, decay: float = 0.9999,
    ):  # fmt: skip
        _check(parameters, average, betas)
        self.parameters, self.average, self.count = parameters, average, 0
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.clip, self.decay = clip, decay
        like = parameters.data
        self.first = device.full(like.shape, 0, "float32", like, "first")
        self.second = device.full(like.shape, 0, "float32", like, "second")
        self.scalars = device.full((8,), 0, "float32", like, "scalars")
        self.squares, self.norm = (device.full((1,), 0, "float64", like, n) for n in ("squares", "norm"))

    def prepare(self, lr: float | None = None, stream: int = 0, ema_step: int | None = None) -> None:
        """Count one update and write its scalars, on `stream`. `ema_step` as of `diffusion.EMA.update`."""
        decay = None if self.average is None else self.decay
        values = cuda_optimizer.step_scalars(
            self.count + 1, self.lr if lr is None else lr, self.betas, self.weight_decay, decay, ema_step
        )
        with device.ordered("prepare", stream, (self.scalars,)):
            device.assign(self.scalars, device.from_host(values, like=self.scalars))
        self.count += 1

    def step(self, stream: int = 0, loss: DeviceArray | None = None) -> None:
        """Clip the gradient in `parameters.grad`, update, and make the copies of the parameters anew. `loss`
        (1,) float64: where it is not finite, nothing is updated.
        """
        p = self.parameters
        cuda_optimizer.sum_of_squares(p.grad, self.squares, stream)
        cuda_optimizer.clip_scalars(
            self.squares, self.scalars, stream, limit=self.clip, loss=loss, norm=self.norm
        )
        average = None if self.average is None else self.average.data
        cuda_optimizer.adamw(
            p.layout.table, p.data, p.grad, self.first, self.second, self.scalars, stream, average=average,
            betas=self.betas, eps=self.eps, **p.copies(),
        )  # fmt: skip
        p.refresh_padded(stream)

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        """The moments by parameter, on the host, for a checkpoint; `count` is kept beside them."""
        return {"first": self.parameters.state(self.first), "second": self.parameters.state(self.second)}

    def load_state(self, state: dict[str, dict[str, Any]], count: int, stream: int = 0) -> None:
        """Take up moments that `state` gave; `ShapeError` when they belong to another network."""
        if not isinstance(state, Mapping) or state.keys() != {"first", "second"}:
            held = ", ".join(state) if isinstance(state, Mapping) and state else "neither"
            raise ShapeError(f"DeviceAdamW: the state holds {held}, but first and second are "
                             f"needed; pass what state() gave")  # fmt: skip
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
            raise ValueError(f"DeviceAdamW: count is {count!r}, but the number of updates so far is needed; "
                             f"pass the count that was kept beside the state")  # fmt: skip
        moments = {name: self.parameters.layout.pack(arrays) for name, arrays in state.items()}
        for name, flat in moments.items():
            target = getattr(self, name)
            with device.ordered("load_state", stream, (target,)):
                device.assign(target, device.from_host(flat, like=target))
        self.count = int(count)
