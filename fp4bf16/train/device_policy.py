"""Policy training on a GPU: one step of each objective as a captured graph, by the formulas of `align`.

A mixin of `device.CudaEngine`. DPO runs on kernels of its own; NFT and PPO are the functions of `align.nft`
and `align.ppo` on the device's arrays, which read nothing back. All x lie in the scale that the network sees,
in which every schedule is a VP one (`Schedule.scaled`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import device
from ..adapters import DeviceArray
from ..align.drift import hold, packed
from ..align.nft import NFT_STATS, NFTSettings, nft_loss, old_share
from ..align.ppo import COLUMNS, PPO_STATS, Trajectories, check_clip, log_probability, ppo_loss, step_table
from ..backends import cuda_diffusion, cuda_math
from ..backends.cuda_diffusion import DPO_STATS
from ..diffusion.samplers import Step
from ..errors import ConfigError
from ..nn.cuda.parameters import DeviceParameters
from ..nn.tape import no_grad
from ..nn.xp import namespace
from .device_loop import CudaLoop
from .device_sampler import _part
from .policy import Data, PairData, SampleData, StepResult, TrajectoryData, batches, filled, stacked


@dataclass(frozen=True, eq=False)
class DeviceSnapshot:
    """What policy training changes, copied on the device."""

    arrays: dict[str, DeviceArray]
    updates: int


class CudaPolicy(CudaLoop):
    """The part of `CudaEngine` that trains a policy."""

    old: DeviceParameters | None
    _begun: Data | None = None
    _seen: list[np.ndarray] | None = None  # latents, while `trajectories` draws
    _collecting: bool = False  # whether the old policy draws
    _room: dict[str, tuple[int, int]]
    _old_logp: np.ndarray
    _table: np.ndarray

    # ---- drawing
    def collect(self, seeds: Any, captions: Sequence[str], steps: int, track: str = "bf16") -> np.ndarray:
        """Pictures to learn from, as `HostPolicy.collect`."""
        if self.old is not None:
            with self._as_old():
                return self.draw(seeds, captions, steps, track)
        if self.config.align.objective == "ppo":
            return self.draw(seeds, captions, steps, track, sampler="ancestral", guidance=1.0)
        return self.draw(seeds, captions, steps, track)

    @contextmanager
    def _as_old(self) -> Iterator[None]:
        """The network has the weights of the old policy."""
        if self.lora is not None:  # in the same memory, which the same graphs read
            with self.lora.using(self.old.data, self._stream()):
                yield
            return
        self._collecting = True
        try:
            with self.model.unet.using(self.old):
                yield
        finally:
            self._collecting = False

    def _run(self, key: tuple, function: Callable[[int], None], routed: bool = False) -> None:
        """The old policy has graphs of its own: a graph keeps the weights that it was captured with."""
        super()._run((*key, "old") if self._collecting else key, function, routed)

    def trajectories(
        self, seeds: Any, captions: Sequence[str], steps: int, track: str = "bf16"
    ) -> Trajectories:
        """As `HostPolicy.trajectories`, but the latents are in the scale that the network sees."""
        self._seen = seen = []
        try:
            pictures = self.draw(seeds, captions, steps, track, sampler="ancestral", guidance=1.0)
        finally:
            self._seen = None
        timesteps, _ = step_table(self.model.schedule.scaled, steps, self.model.prediction)
        return Trajectories(pictures, stacked(seen, self.model.fold(pictures), steps), timesteps)

    def _advance(self, x: DeviceArray, step: Step, *more: Any) -> None:
        if self._seen is not None:
            self._seen.append(device.to_host(x))
        super()._advance(x, step, *more)

    # ---- beginning
    def begin(self, data: Data) -> None:
        """Pictures, captions and all noise of one iteration to the device, or the old policy's
        log-probabilities from it.
        """
        self._begun = data
        if isinstance(data, TrajectoryData):
            self._begin_trajectories(data)
            return
        name, parts = ("dpo", (data.chosen, data.rejected)) if isinstance(data, PairData) else (
            "nft", (data.pictures,))  # fmt: skip
        count = len(parts[0])
        self._make_room(name, count, len(data))
        room, (pictures, captions, noise) = self._room[name][0], self._buffers(name)
        for i, part in enumerate(parts):
            device.write(_part(pictures, i * room, i * room + count), part)
        device.write(_part(captions, 0, count), data.captions)
        device.write(self.memory_of(f"{name} seed", (1,), "uint64"), np.array([data.noise[0]], np.uint64))
        device.write(self.memory_of(f"{name} number", (1,), "uint32"), np.array([data.noise[1]]))
        eps = _part(noise, 0, len(data))
        self._normal(name, device.reshape(eps, (1, eps.size)), self._stream())

    def _make_room(self, name: str, count: int, entries: int) -> None:
        """Room for as many pictures (or pairs) and entries as a rollout of the configuration can give, so
        that one graph serves all iterations. Where more are given, buffers and graphs are made anew.
        """
        c = self.config.align
        most = c.prompts * c.keep // (2 if name == "dpo" else 1)
        before = self._room.get(name)
        room = before or (most, most * c.timesteps)
        self._room[name] = max(room[0], count), max(room[1], entries)
        if before not in (None, self._room[name]):
            self._forget(name)
            self.memory_of.drop(*(f"{name} {kind}" for kind in ("pictures", "captions", "noise")))

    def _buffers(self, name: str) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
        """Pictures (of pairs the chosen ones first) and captions, one a picture or pair, and noise, one an
        entry.
        """
        (room, entries), shape, words = self._room[name], self.model.shape, len(self.model.vocabulary)
        pictures = self.memory_of(f"{name} pictures", ((2 if name == "dpo" else 1) * room, *shape))
        return (pictures, self.memory_of(f"{name} captions", (room, words)),
                self.memory_of(f"{name} noise", (entries, *shape)))  # fmt: skip

    def _write_noise(self, name: str, some: slice, into: DeviceArray) -> None:
        """The noise of the entries `some`, filled up with that of the last (see `policy.filled`)."""
        raw, noise = cuda_math.of(into).raw, self._buffers(name)[2]
        count = some.stop - some.start
        device.assign(_part(into, 0, count), _part(noise, some.start, some.stop))
        if count < len(raw(into)):
            raw(into)[count:] = raw(noise)[some.stop - 1]

    def _begin_trajectories(self, data: TrajectoryData) -> None:
        if self.loop is not None:  # on the route that they will be trained on: the ratio begins with 1
            self.loop.freeze()
            self.model.unet.apply_route(self.loop.route())
        model, self._old_logp = self.model, np.empty(len(data))
        timesteps, self._table = step_table(model.schedule.scaled, len(data.timesteps), model.prediction)
        data.check(timesteps)
        for some in batches(self.config, data, passes=1):
            n, live = self._write_steps(data, some)
            self._run(("ppo old", n), lambda stream, n=n: self._old_graph(stream, n))
            logp = device.to_host(self.memory_of("ppo logp", (n,), "float64"))
            self._old_logp[some] = logp[live > 0]

    # ---- steps
    def policy_step(self, data: Data, some: slice, lr: float) -> StepResult:
        """One update from the entries `some` of the data that `begin` was given."""
        if data is not self._begun:
            raise ConfigError("policy_step: data is not what was begun; call begin(data) first")
        self._write_scalars(lr)
        step = {PairData: self._dpo, SampleData: self._nft, TrajectoryData: self._ppo}[type(data)]
        stats = self._learnt(
            lambda part: step(data, slice(some.start + part.start, some.start + part.stop)),
            some.stop - some.start, lambda: self._pictures(data, some), None,
        )  # fmt: skip
        loss, norm = stats.pop("loss"), stats.pop("norm")
        result = self._counted(StepResult(loss, norm, stats))
        self.learned(own=False)
        return result

    def _found(self, name: str, names: Sequence[str]) -> DeviceArray:
        """Where the numbers of a step go."""
        return self.memory_of(f"{name} results", (len(names),), "float64")

    def _read(self, name: str, names: Sequence[str]) -> dict[str, float]:
        return dict(zip(names, device.to_host(self._found(name, names)).tolist(), strict=True))

    def _finish(self, output: Any, gradient: Any, found: DeviceArray, like: DeviceArray, stream: int) -> None:
        """Backward and update from an array of the framework; the norm is the last of the numbers."""
        self._backward(output, cuda_math.wrapped(gradient, like, "gradient"))
        last = found.shape[0] - 1
        self._update(stream, self.config.align.clip, _part(found, last, last + 1), None)

    @property
    def _phases(self) -> int:
        return self.config.model.unshuffle**2

    def _others(self, weights: Sequence[DeviceParameters], *given: DeviceArray) -> list[DeviceArray]:
        """What the network says with each of these; then it has the policy's weights."""
        found = [self._by(one, *given) for one in weights]
        self._merge(self._stream())
        return found

    def _by(self, weights: DeviceParameters, x: DeviceArray, t: DeviceArray, bag: DeviceArray) -> DeviceArray:
        """What the network says with the old policy's weights, or the average. Adapters are exchanged in the
        network's own weights, and these left as they are then.
        """
        with no_grad():
            if self.lora is not None:
                self.lora.put(None if weights is self.average else weights.data, self._stream())
                return device.operand(self._forward(x, t, bag).data, "frozen")
            with self.model.unet.using(weights):
                return device.operand(self._forward(x, t, bag).data, "frozen")

    # ---- DPO
    def _dpo(self, data: PairData, some: slice) -> dict[str, float]:
        index, live = filled(some, self.config.align.batch)
        n, room, row, t = len(index), self._room["dpo"][0], data.row[index], data.t[index]
        rows = np.stack([np.concatenate(two) for two in ((row, row + room), (t, t), (row, row))])
        device.write(self.memory_of("dpo rows", (3, 2 * n), "int64"), rows)
        device.write(self.memory_of("dpo live", (2 * n,), "float64"), np.concatenate([live, live]))
        both = self.memory_of("dpo eps", (2 * n, *self.model.shape))
        for start in (0, n):  # both pictures of a pair have the same noise
            self._write_noise("dpo", some, _part(both, start, start + n))
        self._run(("dpo", n), lambda stream: self._dpo_graph(stream, n))
        return self._read("dpo", DPO_NUMBERS)

    def _dpo_graph(self, stream: int, n: int) -> None:
        """`align.dpo.dpo_backward`, then the update."""
        shape, c = self.model.shape, self.config.align
        rows = self.memory_of("dpo rows", (3, 2 * n), "int64")
        row, t, worded = (device.operand(rows.owner[i], "rows") for i in range(3))
        pictures, captions, _ = self._buffers("dpo")
        x, target = self._noised(pictures, row, self.memory_of("dpo eps", (2 * n, *shape)), t, stream)
        bag = self._bag(captions, worded, stream)
        anchor, errors, weight = (device.empty((2 * n,), "float64", self.like) for _ in range(3))
        (frozen,) = self._others([self.average], x, t, bag)
        cuda_diffusion.squared_error(frozen, target, anchor, stream)
        output = self._forward(x, t, bag)
        prediction = device.operand(output.data, "output")
        gradient = device.empty(x.shape, "float32", self.like)
        cuda_diffusion.squared_error(prediction, target, errors, stream)
        found, count = self._found("dpo", DPO_NUMBERS), len(DPO_STATS)
        self._dpo_loss(errors, anchor, weight, _part(found, 0, count), stream)
        cuda_diffusion.squared_error_backward(prediction, target, weight, gradient, stream)
        raw = cuda_math.of(x).raw
        numbers, slope, ours, theirs = (raw(a) for a in (found, gradient, prediction, frozen))
        live = raw(self.memory_of("dpo live", (2 * n,), "float64"))
        numbers[count] = hold(slope, ours, theirs, self._phases, c.beta * c.hold, live)
        apart = (ours - theirs) ** 2 * live.astype(ours.dtype).reshape(-1, *(1,) * len(shape))
        numbers[count + 1] = apart.mean(dtype=np.float64) * (len(live) / live.sum())
        self._finish(output, slope, found, x, stream)

    def _dpo_loss(
        self, errors: DeviceArray, anchor: DeviceArray, weight: DeviceArray, stats: DeviceArray, stream: int
    ) -> None:
        """`align.dpo.dpo_loss` of the pairs that are live, by a kernel that knows none but live ones: pairs
        that fill up get a margin of 0, and what they add to its means is taken out. In a full batch all this
        is a product with 1 and a sum with 0.
        """
        raw = cuda_math.of(errors).raw
        live = raw(self.memory_of("dpo live", errors.shape, "float64"))
        share = len(live) / live.sum()
        for one in (raw(errors), raw(anchor)):
            one *= live
        cuda_diffusion.dpo(errors, anchor, self.config.align.beta, weight, stats, stream)
        factor, numbers = raw(weight), raw(stats)
        factor *= live * share
        filler = {"loss": math.log(2), "rewards/accuracies": 0.5}  # of a pair without a margin
        numbers += (numbers - packed(namespace(live), [filler.get(s, 0.0) for s in DPO_STATS])) * (share - 1)

    # ---- NFT
    def _nft(self, data: SampleData, some: slice) -> dict[str, float]:
        index, live = filled(some, self.config.align.batch)
        n, row, t, model = len(index), data.row[index], data.t[index], self.model
        device.write(self.memory_of("nft rows", (2, n), "int64"), np.stack([row, t]))
        device.write(self.memory_of("nft live", (n,), "float64"), live)
        self._write_noise("nft", some, self.memory_of("nft eps", (n, *model.shape)))
        a, b = model.schedule.scaled.x0_coefficients(t, model.prediction, 1)
        device.write(self.memory_of("nft coefficients", (2, n)), np.stack([a, b]))
        device.write(self.memory_of("nft advantage", (n,), "float64"), data.advantage[row])
        self._run(("nft", n), lambda stream: self._nft_graph(stream, n))
        return self._read("nft", NFT_NUMBERS)

    def _nft_graph(self, stream: int, n: int) -> None:
        """`align.nft.nft_backward`, then the update."""
        c, shape = self.config, (n, *self.model.shape)
        rows = self.memory_of("nft rows", (2, n), "int64")
        row, t = (device.operand(rows.owner[i], "rows") for i in range(2))
        pictures, captions, _ = self._buffers("nft")
        eps = self.memory_of("nft eps", shape)
        x, _ = self._noised(pictures, row, eps, t, stream)
        clean = device.empty(shape, "float32", self.like)
        cuda_diffusion.add_noise(pictures, row, eps, t, self.alpha_bar, "x0", stream, target=clean)
        bag = self._bag(captions, row, stream)
        others = self._others([self.old, self.average], x, t, bag)
        output = self._forward(x, t, bag)
        raw, prediction = cuda_math.of(x).raw, device.operand(output.data, "output")
        ab = raw(self.memory_of("nft coefficients", (2, n)))
        settings = NFTSettings(c.nft.beta, c.nft.kl, c.nft.advantage_clip)
        arrays = [raw(a) for a in (prediction, *others, x, clean)]
        advantage, live = (raw(self.memory_of(f"nft {s}", (n,), "float64")) for s in ("advantage", "live"))
        values, gradient = nft_loss(*arrays, (ab[0], ab[1]), advantage, settings, live)
        found = self._found("nft", NFT_NUMBERS)
        numbers, count = raw(found), len(NFT_STATS)
        numbers[:count] = values
        weight = c.nft.advantage_clip * c.align.hold
        numbers[count] = hold(gradient, arrays[0], arrays[2], self._phases, weight, live)
        self._finish(output, gradient, found, x, stream)

    # ---- PPO
    def _step_buffers(self, n: int) -> dict[str, DeviceArray]:
        shape, words = (n, *self.model.shape), len(self.model.vocabulary)
        kinds = {"x": (shape, "float32"), "following": (shape, "float32"), "t": ((n,), "int64"),
                 "bag": ((n, words), "float32"), "rows": ((n, len(COLUMNS)), "float64"),
                 **{name: ((n,), "float64") for name in ("live", "advantage", "old")}}  # fmt: skip
        return {name: self.memory_of(f"ppo {name}", *kind) for name, kind in kinds.items()}

    def _write_steps(self, data: TrajectoryData, some: slice) -> tuple[int, np.ndarray]:
        """The entries `some` to the device, filled up to a whole batch; how many they are then, and which of
        them are live.
        """
        index, live = filled(some, self.config.align.batch)
        row, step = data.row[index], data.step[index]
        values = {"x": data.latents[step, row], "following": data.latents[step + 1, row],
                  "t": data.timesteps[step], "bag": data.captions[row], "rows": self._table[step],
                  "live": live, "advantage": data.advantage[row], "old": self._old_logp[index]}  # fmt: skip
        for name, buffer in self._step_buffers(len(index)).items():
            device.write(buffer, values[name])
        return len(index), live

    def _old_graph(self, stream: int, n: int) -> None:
        """Log-probabilities of the steps, by the policy as it is."""
        b = self._step_buffers(n)
        with no_grad():
            output = device.operand(self._forward(b["x"], b["t"], b["bag"]).data, "output")
        raw = cuda_math.of(output).raw
        logp, _ = log_probability(raw(output), raw(b["x"]), raw(b["following"]), raw(b["rows"]))
        raw(self.memory_of("ppo logp", (n,), "float64"))[...] = logp

    def _ppo(self, data: TrajectoryData, some: slice) -> dict[str, float]:
        n, _ = self._write_steps(data, some)
        self._run(("ppo", n), lambda stream: self._ppo_graph(stream, n))
        return self._read("ppo", PPO_NUMBERS)

    def _ppo_graph(self, stream: int, n: int) -> None:
        """`align.ppo.ppo_backward`, then the update."""
        b, c = self._step_buffers(n), self.config
        (frozen,) = self._others([self.average], b["x"], b["t"], b["bag"])
        output = self._forward(b["x"], b["t"], b["bag"])
        raw, prediction = cuda_math.of(frozen).raw, device.operand(output.data, "output")
        ours, theirs, live = raw(prediction), raw(frozen), raw(b["live"])
        more = [raw(b[name]) for name in ("x", "following", "rows", "advantage", "old")]
        values, gradient = ppo_loss(ours, theirs, *more, check_clip(c.ppo.clip), live)
        found = self._found("ppo", PPO_NUMBERS)
        numbers, count = raw(found), len(PPO_STATS)
        numbers[:count] = values
        weight = c.ppo.advantage_clip * c.align.hold
        numbers[count] = hold(gradient, ours, theirs, self._phases, weight, live)
        self._finish(output, gradient, found, b["x"], stream)

    # ---- between iterations
    def end_iteration(self, iteration: int) -> None:
        """As `HostPolicy.end_iteration`."""
        if self.old is not None:
            share, raw = np.float32(old_share(iteration)), cuda_math.of(self.old.data).raw
            old = raw(self.old.data)
            old *= share
            old += raw(self.parameters.data) * (1 - share)
            self.old.refresh(self._stream())
        self._end()

    def _end(self) -> None:
        """The data of `begin` are done with."""
        self._begun = None
        if self.loop is not None:
            self.loop.thaw()

    def _changing(self) -> dict[str, DeviceArray]:
        found = {"parameters": self.parameters.data, "first": self.first, "second": self.second}
        return found if self.old is None else found | {"old": self.old.data}

    def snapshot(self) -> DeviceSnapshot:
        """A copy of what policy training changes, on the device: weights or adapters, moments, old policy,
        updates.
        """
        copies = {}
        for name, array in self._changing().items():
            copies[name] = device.empty(array.shape, array.dtype, self.like, name)
            device.assign(copies[name], array)
        return DeviceSnapshot(copies, self.updates)

    def take_back(self, snapshot: DeviceSnapshot) -> None:
        """Undo all that came after the snapshot, bit for bit."""
        for name, array in self._changing().items():
            device.assign(array, snapshot.arrays[name])
        for weights in (self.parameters, self.old):
            if weights is not None:
                weights.refresh(self._stream())
        self._merge(self._stream())
        self.updates = snapshot.updates
        self._end()


DPO_NUMBERS = (*DPO_STATS, "drift", "kl", "norm")
NFT_NUMBERS = (*NFT_STATS, "drift", "norm")
PPO_NUMBERS = (*PPO_STATS, "drift", "norm")
