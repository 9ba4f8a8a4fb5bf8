"""Samplers: from noise to pictures with few evaluations of the network.

A sampler is a pure function of (model, start noise, condition). `generate` draws the noise of every picture
from its own seed and runs fixed-size chunks, the last one padded: every picture goes through the same
kernels with the same shapes whatever stands beside it, so that one seed gives one picture, bit for bit, in
any batch.

`steps` is the number of evaluations of the network for every sampler, with guidance twice as many: what a
sampler costs, not how many levels it stops at.

In s = sigma / alpha and y = x / alpha, the probability-flow ODE of every schedule is dy/ds = (y - x0) / s,
which is the model's eps (Karras et al. 2022, appendix B; DDIM's eq. 14). `euler` and `ddim` with eta 0 make
the same steps of it; `heun` makes steps of second order. `ancestral` draws from q(x' | x_t, x0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError, ShapeError, nearest
from .noise import normal
from .schedules import Schedule

#: model(x (batch, ...) float32, t (batch,) int64, condition (batch, ...) or None) -> (batch, ...) float32
Model = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]

START = (
    0  # step number of the noise that a picture starts from; the noise added at timestep t has number t + 1
)


class Step(NamedTuple):
    """One evaluation of the network, at timestep `t`, and what follows: x' = a x0 + b eps + c x + d z, in the
    scale that the network sees; None: that term is left out.

    z is noise, or, where `corrects`, the x before the evaluation before this one. `norms`: by what x, x' and
    z must be multiplied to be as `Schedule.add_noise` makes them (1 for VP, and for noise).
    """

    t: int
    a: float | None
    b: float | None
    c: float | None = None
    d: float | None = None
    norms: tuple[float, float, float] = (1.0, 1.0, 1.0)
    corrects: bool = False

    def factors(self) -> tuple[float | None, ...]:
        """(a, b, c, d) in the scale of `Schedule.add_noise`; those of VP as they are."""
        here, there, z = self.norms
        return tuple(
            None if f is None else f * n
            for f, n in zip(self[1:5], (there, there, there / here, there / z), strict=True)
        )


def plan(
    sampler: str, schedule: Schedule, steps: int, *, eta: float = 0.0, spacing: str = "trailing"
) -> list[Step]:
    """The evaluations of a sampler, `steps` of them; `eta` is of "ddim" alone, and "ancestral" is eta 1.

    >>> from fp4bf16.diffusion import cosine
    >>> [(s.t, s.corrects) for s in plan("heun", cosine(1000), 4)]
    [(999, False), (666, False), (332, True), (332, False)]
    """
    if sampler not in SAMPLERS:
        raise ConfigError(f"sampler: {sampler!r} is not known{nearest(sampler, SAMPLERS)}")
    if sampler == "heun":
        return _heun_plan(schedule, steps, spacing)
    pairs = _pairs(schedule.timesteps(steps, spacing))
    if sampler == "ancestral":
        return [_ancestral_step(schedule, t, then) for t, then in pairs]
    return [_ddim_step(schedule, t, then, eta if sampler == "ddim" else 0.0) for t, then in pairs]


def _pairs(timesteps: np.ndarray) -> list[tuple[int, int]]:
    """(t, the next one) of a grid; -1 is the clean picture."""
    levels = [int(t) for t in timesteps]
    return list(zip(levels, [*levels[1:], -1], strict=True))


def _levels(schedule: Schedule, t: int, then: int) -> tuple[float, float, float, float]:
    """alpha_bar at `t` and at `then`, norm at `t` and at `then`."""
    clean = then < 0
    there, norm = (1.0, 1.0) if clean else (schedule.alpha_bar[then], float(schedule.norm[then]))
    return schedule.alpha_bar[t], there, float(schedule.norm[t]), norm


def _ddim_step(schedule: Schedule, t: int, then: int, eta: float) -> Step:
    here, there, *norms = _levels(schedule, t, then)
    s = eta * np.sqrt((1 - there) / (1 - here)) * np.sqrt(1 - here / there)
    rest = np.sqrt(max(1 - there - s * s, 0.0))
    return Step(t, np.sqrt(there), rest, None, s if s > 0 else None, (*norms, 1.0))


def _ancestral_step(schedule: Schedule, t: int, then: int) -> Step:
    here, there, *norms = _levels(schedule, t, then)
    beta = 1 - here / there
    a, c = np.sqrt(there) * beta / (1 - here), np.sqrt(1 - beta) * (1 - there) / (1 - here)
    d = None if then < 0 else np.sqrt(beta * (1 - there) / (1 - here))
    return Step(t, a, None, c, d, (*norms, 1.0))


def _heun_plan(schedule: Schedule, steps: int, spacing: str) -> list[Step]:
    """With p = x alpha' / alpha, whose y is that of x, and Euler's end q = p + alpha' (s' - s) eps, the end
    of Heun's step is (p + q) / 2 + alpha' (s' - s) / 2 eps(q).
    """
    count = min(steps, (steps + 3) // 2)
    first_heun, found = 2 * count - 1 - steps, []
    for i, (t, then) in enumerate(_pairs(schedule.timesteps(count, spacing))):
        found.append(_ddim_step(schedule, t, then, 0.0))
        if i < first_heun or then < 0:
            continue
        here, there, before, after = _levels(schedule, t, then)
        ratio = np.sqrt(there) / np.sqrt(here)
        half = (np.sqrt(1 - there) - ratio * np.sqrt(1 - here)) / 2
        found.append(Step(then, None, half, 0.5, ratio / 2, (after, after, before), corrects=True))
    return found


def _run(
    steps: list[Step],
    model: Model,
    x: np.ndarray,
    condition,
    schedule: Schedule,
    prediction: str,
    clip: float | None,
    noise: Callable[[int], np.ndarray] | None,
) -> np.ndarray:
    """The pictures that a plan leads to from `x`."""
    before = x
    for step in steps:
        t = np.full(len(x), step.t, np.int64)
        x0, eps = schedule.to_x0_eps(model(x, t, condition), x, t, prediction)
        if clip is not None:
            x0 = np.clip(x0, -clip, clip)
            eps = schedule.eps_from_x0(x0, x, t) if step.b is not None else eps
        a, b, c, d = (None if f is None else x.dtype.type(f) for f in step.factors())
        terms = [f * of for f, of in ((a, x0), (b, eps), (c, x)) if f is not None]
        new = terms[0] + terms[1]
        if d is not None:
            new += d * (before if step.corrects else noise(step.t))
        before, x = x, new
    return x


def ddim(
    model: Model,
    x: np.ndarray,
    condition,
    schedule: Schedule,
    steps: int,
    *,
    prediction: str = "v",
    eta: float = 0.0,
    clip: float | None = 1.0,
    noise: Callable[[int], np.ndarray] | None = None,
    spacing: str = "trailing",
) -> np.ndarray:
    """DDIM (Song et al. 2021) from start noise `x` (batch, ...) in `steps` evaluations of `model`.

    x' = sqrt(alpha_bar') x0 + sqrt(1 - alpha_bar' - s²) eps + s z                                   eq. 12
    s = eta sqrt((1 - alpha_bar') / (1 - alpha_bar)) sqrt(1 - alpha_bar / alpha_bar')                eq. 16

    `eta` 0 is deterministic. `clip` bounds |x0| before eps is recomputed from it. `noise(t)` gives z where
    eta > 0. `x` has the deviation `schedule.start_scale`; of a schedule that is not VP the formulas hold for
    x / sqrt(alpha² + sigma²).
    """
    if eta and noise is None:
        raise ConfigError(
            f"ddim: eta is {eta} but no noise was given; pass noise=, or eta=0 for the deterministic form"
        )
    steps = plan("ddim", schedule, steps, eta=eta, spacing=spacing)
    return _run(steps, model, x, condition, schedule, prediction, clip, noise)


def euler(
    model: Model,
    x: np.ndarray,
    condition,
    schedule: Schedule,
    steps: int,
    *,
    prediction: str = "v",
    clip: float | None = 1.0,
    noise: Callable[[int], np.ndarray] | None = None,
    spacing: str = "trailing",
) -> np.ndarray:
    """Euler's method on the probability-flow ODE from start noise `x`, in `steps` evaluations of `model`.

    y' = y + (s' - s) (y - x0) / s with y = x / alpha, s = sigma / alpha      (Karras et al. 2022, alg. 1)

    On VE y is x itself. As y = x0 + s eps, this is x' = alpha' x0 + sigma' eps: DDIM with eta 0, bit for bit.
    `noise` is not used.
    """
    steps = plan("euler", schedule, steps, spacing=spacing)
    return _run(steps, model, x, condition, schedule, prediction, clip, noise)


def heun(
    model: Model,
    x: np.ndarray,
    condition,
    schedule: Schedule,
    steps: int,
    *,
    prediction: str = "v",
    clip: float | None = 1.0,
    noise: Callable[[int], np.ndarray] | None = None,
    spacing: str = "trailing",
) -> np.ndarray:
    """Heun's method on the same ODE as `euler`: Karras et al. 2022, algorithm 1, without its churn.

    Steps take two evaluations, but the last one, to the clean picture, is Euler's, and so is the first, or
    are the first two where `steps` is odd: a schedule that ends in pure noise (cosine) begins with a step in
    s as large as s itself, on which the mean of the slopes at its ends is worse than the slope at its
    beginning. The error falls as that of a method of order two on the grid "karras", as far as the first and
    the last step let it on "trailing". `noise` is not used.
    """
    steps = plan("heun", schedule, steps, spacing=spacing)
    return _run(steps, model, x, condition, schedule, prediction, clip, noise)


def ancestral(
    model: Model,
    x: np.ndarray,
    condition,
    schedule: Schedule,
    steps: int,
    *,
    prediction: str = "v",
    clip: float | None = 1.0,
    noise: Callable[[int], np.ndarray],
    spacing: str = "trailing",
) -> np.ndarray:
    """Ancestral sampling of DDPM from start noise `x`: draws from the posterior q(x' | x_t, x0) at every
    step.

    mean = sqrt(alpha_bar') beta / (1 - alpha_bar) x0 + sqrt(1 - beta) (1 - alpha_bar') / (1 - alpha_bar) x_t
    variance = beta (1 - alpha_bar') / (1 - alpha_bar)                                DDPM eq. 6 and 7
    with beta = 1 - alpha_bar / alpha_bar' where timesteps are left out               Improved DDPM eq. 19

    On VE the same posterior is Euler's step to sigma_down and noise of sigma_up,
    sigma_up² = sigma'² (1 - sigma'² / sigma²), sigma_down² = sigma'² - sigma_up²    Song et al. 2021, app. F
    """
    steps = plan("ancestral", schedule, steps, spacing=spacing)
    return _run(steps, model, x, condition, schedule, prediction, clip, noise)


def coefficients(
    sampler: str,
    schedule: Schedule,
    steps: int,
    *,
    clip: float | None = 1.0,
    spacing: str = "trailing",
    eta: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """(timesteps (steps,), float32 (steps, 8)) of a sampler, for a kernel that makes one step:
    sqrt(alpha_bar), sqrt(1 - alpha_bar), a, b, c, d, clip (0: none), 0, where
    x' = a x0 + b eps + c x + d z with the clipped x0 and the eps that belongs to it.

    x is in the scale that the network sees, and so is the start noise: ``start_scale / norm`` of its level.
    What z is, `plan` says: of the second evaluation of a step of "heun" the x before the first.

    >>> from fp4bf16.diffusion import cosine
    >>> t, table = coefficients("ddim", cosine(100), 2)
    >>> t.tolist(), table[-1, 2:6].tolist()
    ([99, 49], [1.0, 0.0, 0.0, 0.0])
    """
    made, seen = plan(sampler, schedule, steps, eta=eta, spacing=spacing), schedule.scaled
    table = [(seen.alpha[s.t], seen.sigma[s.t], *(f or 0.0 for f in s[1:5]), clip or 0.0, 0.0) for s in made]
    return np.array([s.t for s in made], np.int64), np.array(table, np.float64).astype(np.float32)


SAMPLERS = {"ddim": ddim, "euler": euler, "heun": heun, "ancestral": ancestral}


def check_guidance(guidance: float) -> float:
    """Return `guidance` if it is a finite number, else raise `ConfigError`."""
    if not np.isfinite(guidance):
        raise ConfigError(f"guidance: {guidance} is not a finite number; 1 leaves the model as it is")
    return float(guidance)


def guided(model: Model, guidance: float) -> Model:
    """Classifier-free guidance (Ho & Salimans 2022, eq. 6 with w = guidance - 1): without + guidance (with -
    without), where "without" has a condition of zeros, as a caption left out in training has.

    1 is `model` itself, 0 the model without the condition; any other number evaluates the model twice, on
    batches of the same size. Raises `ConfigError` for a guidance that is not finite.

    >>> add = lambda x, t, condition: x + condition
    >>> guided(add, 3.0)(np.zeros(2), None, np.array([1.0, 0.0])).tolist()
    [3.0, 0.0]
    """
    if check_guidance(guidance) == 1:
        return model

    def without(x, t, condition):
        return model(x, t, np.zeros_like(condition))

    def combined(x, t, condition):
        low = without(x, t, condition)
        return low + low.dtype.type(guidance) * (model(x, t, condition) - low)

    return combined if guidance else without


def generate(
    model: Model,
    seeds: Sequence[int],
    condition: np.ndarray | None,
    shape: Sequence[int],
    schedule: Schedule,
    steps: int,
    *,
    sampler: str = "ddim",
    prediction: str = "v",
    chunk: int = 64,
    clip: float | None = 1.0,
    guidance: float = 1.0,
) -> np.ndarray:
    """One picture (`shape`) for every seed, float32 (len(seeds), *shape), in `steps` evaluations.

    `condition` holds one row a picture, or is None. The model always sees `chunk` pictures. `guidance`: see
    `guided`; other than 1 it needs a condition.

    >>> from fp4bf16.diffusion import cosine
    >>> zero = lambda x, t, condition: np.zeros_like(x)
    >>> generate(zero, [7, 8, 9], None, (2, 2, 3), cosine(100), steps=4, chunk=2).shape
    (3, 2, 2, 3)
    """
    made = plan(sampler, schedule, steps)
    if condition is not None and len(condition) != len(seeds):
        raise ShapeError(
            f"generate: condition has {len(condition)} rows but there are {len(seeds)} seeds; "
            f"give one row a seed"
        )
    if condition is None and guidance != 1:
        raise ConfigError(f"generate: guidance is {guidance} but there is no condition to guide to; pass "
                          f"condition=, or guidance=1")  # fmt: skip
    seeds, shape, model = np.array(seeds, np.uint64), tuple(shape), guided(model, guidance)
    pictures = np.empty((len(seeds), *shape), np.float32)
    for start in range(0, len(seeds), chunk):
        count = min(chunk, len(seeds) - start)
        rows = np.minimum(
            np.arange(start, start + chunk), start + count - 1
        )  # the last picture pads the chunk

        def draw(t: int, some=seeds[rows]) -> np.ndarray:
            return normal(some, t + 1, shape)

        x = normal(seeds[rows], START, shape)
        if schedule.start_scale != 1:
            x *= np.float32(schedule.start_scale)
        c = None if condition is None else np.ascontiguousarray(condition[rows])
        pictures[start : start + count] = _run(made, model, x, c, schedule, prediction, clip, draw)[:count]
    return pictures
