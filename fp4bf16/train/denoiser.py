"""The model of a run: captions and seeds in, pictures out, on the track asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..diffusion.noise import subseed
from ..diffusion.samplers import Model, generate
from ..diffusion.schedules import get_schedule
from ..errors import ConfigError, NonFiniteError
from ..nn.layers import upsampling
from ..nn.tape import Variable, no_grad
from ..nn.unet import UNet2D, UNetConfig, pixel_shuffle, pixel_unshuffle
from ..routing import RouteSet, bucket_of
from ..tracks import tracks
from .config import Config
from .data import Vocabulary, words_of


def unet_config(config: Config, vocabulary: int) -> UNetConfig:
    """The UNet of a run's configuration, for captions of `vocabulary` words."""
    m = config.model
    side, channels = config.size // m.unshuffle, 3 * m.unshuffle**2
    return UNetConfig(
        sample_size=side,
        in_channels=channels,
        out_channels=channels,
        block_out_channels=m.block_out_channels,
        down_block_types=tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in m.attention),
        up_block_types=tuple("AttnUpBlock2D" if a else "UpBlock2D" for a in m.attention[::-1]),
        layers_per_block=m.layers_per_block,
        norm_num_groups=m.norm_num_groups,
        attention_head_dim=None,
        caption_vocabulary=vocabulary,
    )


def base_routes(config: Config) -> RouteSet | None:
    """The routes of noise levels that a configuration gives, None where ``route`` holds for all."""
    return RouteSet(config.routes[:-1], config.routes[-1]) if config.routes else None


class Denoiser:
    """UNet, vocabulary and noise schedule of a run.

    The policy's weights live in ``unet.flat.data``; methods that take `weights` run with another buffer of
    the same layout (the average, the reference) and leave the policy as it was.

    track: of `policy` and of the frozen networks beside it, which overrides the layers' own; None: each layer
    runs where the route has put it. routes: of the noise levels that pictures are drawn at on the FP4 track;
    None: every level runs where the route has put it.
    """

    def __init__(self, config: Config, vocabulary: Vocabulary):
        if track := os.environ.get("FP4BF16_TRACK"):
            raise ConfigError(
                f"FP4BF16_TRACK: {track!r} is not a track for all of a run, which sets that of each layer "
                f"and stage itself; unset it (--route chooses the layers that explore in FP4)"
            )
        self.config, self.vocabulary = config, vocabulary
        self.unet = UNet2D(unet_config(config, len(vocabulary)), seed=subseed(config.seed, "weights"))
        self.unet.apply_route(config.route)
        self.track: str | None = "bf16"
        self.routes: RouteSet | None = base_routes(config)
        self.schedule = get_schedule(config.diffusion.schedule, config.diffusion.timesteps)
        self.prediction = config.diffusion.prediction
        side = config.size // config.model.unshuffle
        self.shape = (side, side, 3 * config.model.unshuffle**2)

    @property
    def by_phases(self) -> bool:
        """Whether upsampling convolutions are multiplied by phases (`UNet2D.upsample_by_phases`)."""
        return all(conv.phases for conv in upsampling(self.unet).values())

    def encode(self, captions: Sequence[str], strict: bool = False) -> np.ndarray:
        """Bags of words, float32 (n, vocabulary). Words that the model was not trained on are left out, or
        raise
        `ConfigError` naming them where `strict`."""
        if strict:
            return self.vocabulary.encode(captions)
        known = set(self.vocabulary.words)
        return self.vocabulary.encode([" ".join(w for w in words_of(c) if w in known) for c in captions])

    def fold(self, pictures: np.ndarray) -> np.ndarray:
        """Pictures (n, H, W, 3) as the network sees them."""
        return np.ascontiguousarray(pixel_unshuffle(pictures, self.config.model.unshuffle))

    def policy(self, x: np.ndarray, t: np.ndarray, captions: np.ndarray) -> Variable:
        """The network's output on the tape, on `track`: what is trained. x: x_t of the schedule, which the
        network sees in the scale of `Schedule.scale_input`.
        """
        with tracks(self.track):
            return self.unet(self.schedule.scale_input(x, t), t, captions=captions)

    def evaluate(self, x: np.ndarray, t: np.ndarray, captions: np.ndarray) -> np.ndarray:
        """The same values without a tape, on the track in force.

        Where a picture or its output is not finite, the output is NaN as a whole: a sampler that clips would
        make pixels of infinities, and the picture would look healthy. The others do not suffer from it.
        """
        with no_grad():
            return self._outputs(x, t, captions, _finite(x))

    def _outputs(self, x: np.ndarray, t: np.ndarray, captions: np.ndarray, live: np.ndarray) -> np.ndarray:
        """The outputs of the pictures that are `live` (n,), NaN for the others."""
        rows, nothing = np.flatnonzero(live), np.full_like(x, np.nan)
        if not rows.size:
            return nothing
        some = x if live.all() else np.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x, np.float32(0))
        try:
            output = self.unet(self.schedule.scale_input(some, t), t, captions=captions).data
        except NonFiniteError:  # of the FP4 track's quantisers, which refuse the whole batch for one picture
            if rows.size == 1:
                return nothing
            for half in np.array_split(rows, 2):
                nothing[half] = self._outputs(x, t, captions, np.isin(np.arange(len(x)), half))[half]
            return nothing
        bad = ~(live & _finite(output))
        if bad.any():
            output[bad] = np.nan
        return output

    @contextmanager
    def drawing(self, track: str) -> Iterator[Model]:
        """What a sampler asks for pictures on a track: `evaluate`, on the FP4 track by `routes` if there are
        some, each noise level on its own. The layers' tracks are afterwards as they were.
        """
        if track != "fp4" or self.routes is None:
            with tracks(None if track == "fp4" else track):
                yield self.evaluate
            return
        levels, buckets, held = len(self.schedule), len(self.routes.buckets), -1
        before = {m.key: m.track for _, m in self.unet.named_modules() if getattr(m, "routed", False)}

        def routed(x: np.ndarray, t: np.ndarray, captions: np.ndarray) -> np.ndarray:
            nonlocal held
            bucket = bucket_of(int(np.max(t)), levels, buckets)  # a sampler asks at one level at a time
            if bucket != held:
                self.unet.apply_route(self.routes.of(bucket))
                held = bucket
            return self.evaluate(x, t, captions)

        try:
            with tracks(None):
                yield routed
        finally:
            self.unet.apply_route(before)

    def draw(
        self,
        seeds,
        captions: Sequence[str],
        steps: int,
        track: str = "bf16",
        sampler: str | None = None,
        strict: bool = False,
        guidance: float | None = None,
    ) -> np.ndarray:
        """One picture a seed, float32 (n, H, W, 3) in [-1, 1], from the policy's weights.

        `steps` counts evaluations of the network, whatever the sampler; a guidance other than 1 takes twice
        as many. Where sampler or guidance is None it is the configuration's. On the FP4 track every layer
        runs where the run's route (or `routes`, level by level) puts it; "bf16" overrides the route.
        """
        of = self.config.diffusion
        encoded = self.encode(captions, strict)
        with self.drawing(track) as evaluate:
            latents = generate(
                evaluate,
                seeds,
                encoded,
                self.shape,
                self.schedule,
                steps,
                sampler=of.sampler if sampler is None else sampler,
                prediction=self.prediction,
                chunk=of.chunk,
                guidance=of.guidance if guidance is None else guidance,
            )
        return np.ascontiguousarray(pixel_shuffle(latents, self.config.model.unshuffle))


def _finite(x: np.ndarray) -> np.ndarray:
    """Which pictures are finite in all pixels: bool (n,)."""
    return np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
