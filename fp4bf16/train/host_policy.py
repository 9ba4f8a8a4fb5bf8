"""Policy training on the CPU: one step of each objective, the old policy, the sampler's trajectories.

A mixin of `engine.HostEngine`, which holds the weights, the moments and what a checkpoint needs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..align.dpo import dpo_backward
from ..align.nft import NFTSettings, nft_backward, old_share
from ..align.ppo import Trajectories, log_probability, ppo_backward, step_table
from ..diffusion.noise import normal
from ..diffusion.samplers import Model, generate
from ..errors import ConfigError
from ..nn.optim import clip_norm
from ..nn.unet import pixel_shuffle
from ..nn.watch import watching
from ..tracks import tracks
from .host_loop import HostLoop, Pictures
from .policy import Data, PairData, SampleData, StepResult, TrajectoryData, batches, filled, stacked


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What policy training changes, copied: `take_back` puts it in place again."""

    arrays: dict[str, np.ndarray]
    updates: int


class HostPolicy(HostLoop):
    """The part of `HostEngine` that trains a policy. `old`: flat weights of the old policy, where one is."""

    old: np.ndarray | None
    _begun: Data | None = None
    _eps: np.ndarray  # noise of all entries of pairs and samples
    _old_logp: np.ndarray  # log-probabilities of all steps of trajectories before the first update
    _table: np.ndarray  # `align.ppo.step_table` of the sampler that made them

    # ----------------------------------------------------------------------------------------- other policies

    def _frozen(self, weights: Callable[[], AbstractContextManager]) -> Model:
        """The network without a tape, on the policy's track, with the weights that `weights()` puts in place.
        Nobody watches its products: what is judged and held back is the policy.
        """

        def run(x: np.ndarray, t: np.ndarray, captions: np.ndarray) -> np.ndarray:
            with weights(), tracks(self.model.track), watching():
                return self.model.evaluate(x, t, captions)

        return run

    @property
    def _reference(self) -> Model:
        """What the policy stays near: the base, which adapters leave as it is."""
        if self.lora is not None:
            return self._frozen(self.lora.disabled)
        return self._frozen(lambda: self.model.unet.using(self.average))

    @property
    def _owner(self) -> Any:
        """Whose weights are trained: the adapters or the network."""
        return self.model.unet if self.lora is None else self.lora

    def collect(self, seeds: Any, captions: Sequence[str], steps: int, track: str = "bf16") -> np.ndarray:
        """Pictures to learn from, as `draw`: NFT draws them from the old policy, PPO with the ancestral
        sampler and without guidance, whose steps it trains.
        """
        if self.old is not None:
            with self._owner.using(self.old):
                return self.draw(seeds, captions, steps, track)
        if self.config.align.objective == "ppo":
            return self.model.draw(seeds, captions, steps, track, sampler="ancestral", guidance=1.0)
        return self.draw(seeds, captions, steps, track)

    def trajectories(
        self, seeds: Any, captions: Sequence[str], steps: int, track: str = "bf16"
    ) -> Trajectories:
        """The pictures that ``draw(..., sampler="ancestral", guidance=1.0)`` gives, bit for bit, with the
        latents on the way.
        """
        model, seen = self.model, []

        def watched(x: np.ndarray, t: np.ndarray, condition: np.ndarray) -> np.ndarray:
            seen.append(x.copy())
            return evaluate(x, t, condition)

        with model.drawing(track) as evaluate:
            folded = generate(
                watched, seeds, model.encode(captions), model.shape, model.schedule, steps,
                sampler="ancestral", prediction=model.prediction, chunk=self.config.diffusion.chunk,
            )  # fmt: skip
        timesteps, _ = step_table(model.schedule, steps, model.prediction)
        pictures = np.ascontiguousarray(pixel_shuffle(folded, self.config.model.unshuffle))
        return Trajectories(pictures, stacked(seen, folded, steps), timesteps)

    # -------------------------------------------------------------------------------------------------- steps

    def begin(self, data: Data) -> None:
        """Make ready for the entries of one iteration: their noise, or the old policy's log-probabilities."""
        self._begun = data
        if isinstance(data, TrajectoryData):
            self._begin_trajectories(data)
            return
        seed, step = data.noise
        self._eps = normal(seed, step, (len(data), *self.model.shape))

    def _begin_trajectories(self, data: TrajectoryData) -> None:
        """On the batches that will be trained, by the function that trains them, on the route that they will
        run on: the ratio begins with 1.
        """
        if self.loop is not None:
            self.loop.freeze()
            self.model.unet.apply_route(self.loop.route())
        model, self._old_logp = self.model, np.empty(len(data))
        timesteps, self._table = step_table(model.schedule, len(data.timesteps), model.prediction)
        data.check(timesteps)
        for some in batches(self.config, data, passes=1):
            x, following, captions, t, rows, live = self._steps(data, some)
            with tracks(model.track):
                output = model.evaluate(x, t, captions)
            logp, _ = log_probability(output, x, following, rows)
            self._old_logp[some] = logp[live > 0]

    def _steps(self, data: TrajectoryData, some: slice, size: int | None = None) -> tuple[np.ndarray, ...]:
        """(x, following, captions, t, rows, live) of the entries `some`, filled up to a whole batch, or to
        `size`.
        """
        index, live = filled(some, self.config.align.batch if size is None else size)
        row, step = data.row[index], data.step[index]
        x, following = data.latents[step, row], data.latents[step + 1, row]
        return x, following, data.captions[row], data.timesteps[step], self._table[step], live

    def policy_step(self, data: Data, some: slice, lr: float) -> StepResult:
        """One update from the entries `some` of the data that `begin` was given. Where loss or gradient are
        not finite nothing is updated.
        """
        if data is not self._begun:
            raise ConfigError("policy_step: data is not what was begun; call begin(data) first")
        step = {PairData: self._dpo, SampleData: self._nft, TrajectoryData: self._ppo}[type(data)]

        def once(part: slice) -> tuple[float, dict[str, float]]:
            self.parameters.zero_grad()
            return step(data, slice(some.start + part.start, some.start + part.stop))

        loss, stats = self.learn(once, some.stop - some.start, lambda: self._pictures(data, some))
        result = StepResult(loss, clip_norm(self.parameters.grad, self.config.align.clip), stats)
        self._update(result, lr)
        self.learned(own=False)
        return result

    def _pictures(self, data: Data, some: slice) -> Pictures:
        """The clean pictures that the entries `some` are about, at their noise levels."""
        row = data.row[some]
        if isinstance(data, TrajectoryData):
            return Pictures(data.latents[-1][row], data.captions[row], data.timesteps[data.step[some]])
        x0 = data.chosen if isinstance(data, PairData) else data.pictures
        return Pictures(x0[row], data.captions[row], data.t[some], self._eps[some])

    def _dpo(self, data: PairData, some: slice) -> tuple[float, dict[str, float]]:
        c, model, row = self.config.align, self.model, data.row[some]
        found = dpo_backward(
            model.policy, self._reference, data.chosen[row], data.rejected[row], data.captions[row],
            data.t[some], self._eps[some], model.schedule, model.prediction, c.beta, c.hold, self._phases,
        )  # fmt: skip
        return found.loss, found.stats

    def _nft(self, data: SampleData, some: slice) -> tuple[float, dict[str, float]]:
        c, model, row = self.config, self.model, data.row[some]
        old = self._frozen(lambda: self._owner.using(self.old))
        settings = NFTSettings(c.nft.beta, c.nft.kl, c.nft.advantage_clip)
        return nft_backward(
            model.policy, old, self._reference, data.pictures[row], data.captions[row], data.t[some],
            self._eps[some], data.advantage[row], model.schedule, model.prediction, settings, c.align.hold,
            self._phases,
        )  # fmt: skip

    def _ppo(self, data: TrajectoryData, some: slice) -> tuple[float, dict[str, float]]:
        c = self.config
        # A slice within a batch (of the loop's sampled steps) is not filled up
        whole = some.start % c.align.batch == 0 and some.stop in (some.start + c.align.batch, len(data))
        size = c.align.batch if whole else 1
        index, _ = filled(some, size)
        x, following, captions, t, rows, live = self._steps(data, some, size)
        return ppo_backward(
            self.model.policy, self._reference, x, following, captions, t, rows,
            data.advantage[data.row[index]].astype(np.float64), self._old_logp[index], c.ppo.clip, live,
            c.ppo.advantage_clip * c.align.hold, self._phases,
        )  # fmt: skip

    @property
    def _phases(self) -> int:
        """Pixels that lie folded in the channels of one colour."""
        return self.config.model.unshuffle**2

    def end_iteration(self, iteration: int) -> None:
        """After the last step of iteration number `iteration` (from 0): the old policy follows."""
        if self.old is not None:
            share = np.float32(old_share(iteration))
            self.old *= share
            self.old += (1 - share) * self.parameters.data
        self._end()

    def _end(self) -> None:
        """The data of `begin` are done with."""
        self._begun = None
        if self.loop is not None:
            self.loop.thaw()

    # ---------------------------------------------------------------------------------------------- snapshots

    def _changing(self) -> dict[str, np.ndarray]:
        found = {"parameters": self.parameters.data, **self.optimizer.state()}
        return found if self.old is None else found | {"old": self.old}

    def snapshot(self) -> Snapshot:
        """A copy of what policy training changes: weights or adapters, moments, old policy, updates."""
        return Snapshot({name: a.copy() for name, a in self._changing().items()}, self.updates)

    def take_back(self, snapshot: Snapshot) -> None:
        """Undo all that came after the snapshot, bit for bit."""
        for name, array in self._changing().items():
            array[...] = snapshot.arrays[name]
        self.parameters.touch()
        self.optimizer.count = snapshot.updates
        self._end()
