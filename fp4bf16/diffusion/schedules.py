"""Noise schedules, variance-preserving (VP: DDPM) and variance-exploding (VE: score matching), and what a
network predicts on them.

x_t = alpha_t x_0 + sigma_t eps, eps standard normal

VP: alpha² + sigma² = 1, alpha² = alpha_bar                               DDPM (Ho et al. 2020), eq. 4
VE: alpha = 1, sigma up to many times the deviation of the data           Song et al. 2021 (SDE), eq. 9

A network sees x_t / sqrt(alpha² + sigma²). In that scale every schedule is a VP one, with
alpha_bar = alpha² / (alpha² + sigma²) and the same targets: whatever knows VP alone (a kernel that takes
`alpha_bar`) makes VE with that table.

All coefficients are float64 tables of T entries; pictures keep their own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..errors import ConfigError, ShapeError, nearest

#: What a network may predict: the noise (DDPM eq. 14), the velocity (progressive distillation, Salimans & Ho
#: 2022, section 4 and appendix D), or the clean picture.
PREDICTIONS = ("eps", "v", "x0")
#: How the timesteps of a sampler are laid out: see `Schedule.timesteps`.
SPACINGS = ("trailing", "leading", "karras")
RHO = 7.0  # of "karras"


def check_prediction(prediction: str) -> str:
    """Return `prediction` if it is one of `PREDICTIONS`, else raise `ConfigError` with the nearest name."""
    if prediction not in PREDICTIONS:
        raise ConfigError(f"prediction: {prediction!r} is not known{nearest(prediction, PREDICTIONS)}")
    return prediction


@dataclass(frozen=True, eq=False)
class Schedule:
    """`alpha` and `sigma`, float64 (T,), from the least noise to the most, and the formulas that read them.

    Raises `ShapeError` for tables of different lengths, `ConfigError` where alpha or sigma is not above 0, or
    their ratio does not rise.

    >>> s = cosine(1000)
    >>> len(s), bool(s.alpha_bar[0] > 0.999), bool(s.alpha_bar[-1] < 1e-6)
    (1000, True, True)
    """

    name: str
    alpha: np.ndarray
    sigma: np.ndarray
    #: Given where it is what alpha and sigma were made from: their squares would not be its bits.
    exact: np.ndarray | None = field(default=None, repr=False)

    def __post_init__(self):
        alpha, sigma = (np.asarray(a, np.float64) for a in (self.alpha, self.sigma))
        if alpha.shape != sigma.shape or alpha.ndim != 1 or not alpha.size:
            raise ShapeError(f"Schedule: alpha has shape {alpha.shape} but sigma has shape {sigma.shape}; "
                             f"give two tables of one length, at least 1")  # fmt: skip
        if not ((alpha > 0).all() and (sigma > 0).all() and (np.diff(sigma / alpha) > 0).all()):
            raise ConfigError(f"Schedule: {self.name!r} must have alpha and sigma above 0, and more noise in "
                              f"every level than in that before; check its tables")  # fmt: skip
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "sigma", sigma)

    def __len__(self) -> int:
        return len(self.alpha)

    @cached_property
    def preserving(self) -> bool:
        """Whether alpha² + sigma² = 1 at every level (VP)."""
        return bool(np.abs(self.alpha**2 + self.sigma**2 - 1).max() < 1e-9)

    @cached_property
    def norm(self) -> np.ndarray:
        """sqrt(alpha² + sigma²), float64 (T,): the deviation of x_t where that of the pictures is 1; of VP
        exactly 1.
        """
        return np.ones(len(self)) if self.preserving else np.hypot(self.alpha, self.sigma)

    @cached_property
    def alpha_bar(self) -> np.ndarray:
        """alpha² / (alpha² + sigma²), float64 (T,): of VP alpha², of others that of `scaled`."""
        return self.exact if self.exact is not None else (self.alpha / self.norm) ** 2

    @cached_property
    def scaled(self) -> Schedule:
        """The VP schedule of ``scale_input(x_t)``: itself where it is VP.

        >>> s = ve(100)
        >>> x0, eps, t = np.full((1, 1), 0.5), np.ones((1, 1)), [70]
        >>> seen = s.scale_input(s.add_noise(x0, eps, t), t)
        >>> bool(np.allclose(seen, s.scaled.add_noise(x0, eps, t)))
        True
        """
        if self.preserving:
            return self
        return Schedule(self.name, self.alpha / self.norm, self.sigma / self.norm)

    @property
    def start_scale(self) -> float:
        """Standard deviation of the noise that sampling starts from: 1 for VP, the largest sigma for others.

        >>> cosine(10).start_scale, ve(10).start_scale
        (1.0, 50.0)
        """
        return 1.0 if self.preserving else float(self.sigma[-1])

    def _at(self, table: np.ndarray, t, ndim: int, dtype) -> np.ndarray:
        """Entries `t` (batch,) of a table, shaped to broadcast over pictures of `ndim` dimensions."""
        return table[np.asarray(t, np.int64)].reshape(-1, *(1,) * (ndim - 1)).astype(dtype)

    def coefficients(self, t, ndim: int, dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
        """(alpha, sigma) of timesteps `t` (batch,), shaped to broadcast over `ndim`-dimensional pictures
        whose first axis is the batch.
        """
        return self._at(self.alpha, t, ndim, dtype), self._at(self.sigma, t, ndim, dtype)

    def scale_input(self, x: np.ndarray, t) -> np.ndarray:
        """x_t / sqrt(alpha² + sigma²), what the network sees: of VP `x` itself.

        The deviation of what a network sees is then about 1 at every level, as c_in of Karras et al. 2022,
        table 1, with data of deviation 1.
        """
        return x if self.preserving else x / self._at(self.norm, t, x.ndim, x.dtype)

    def add_noise(self, x0: np.ndarray, eps: np.ndarray, t) -> np.ndarray:
        """x_t of clean pictures `x0` and noise `eps` (same shape) at timesteps `t` (batch,): DDPM eq. 4."""
        alpha, sigma = self.coefficients(t, x0.ndim, x0.dtype)
        return alpha * x0 + sigma * eps

    def target(self, x0: np.ndarray, eps: np.ndarray, t, prediction: str) -> np.ndarray:
        """What the network should output at `t`: eps, x0, or v = (alpha eps - sigma x0) / sqrt(alpha² +
        sigma²).
        """
        if check_prediction(prediction) == "eps":
            return eps
        if prediction == "x0":
            return x0
        alpha, sigma = self.scaled.coefficients(t, x0.ndim, x0.dtype)
        return alpha * eps - sigma * x0

    def to_x0_eps(
        self, output: np.ndarray, x_t: np.ndarray, t, prediction: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """The network's idea of (x_0, eps) from its `output` at x_t; the inverse of `target` given x_t.

        With v, of VP, x_0 = alpha x_t - sigma v and eps = sigma x_t + alpha v, finite at every noise level;
        eps prediction divides by alpha and x0 prediction by sigma.
        """
        if check_prediction(prediction) == "v":
            alpha, sigma = self.scaled.coefficients(t, x_t.ndim, x_t.dtype)
            seen = self.scale_input(x_t, t)
            return alpha * seen - sigma * output, sigma * seen + alpha * output
        if prediction == "eps":
            alpha, sigma = self.coefficients(t, x_t.ndim, x_t.dtype)
            return (x_t - sigma * output) / alpha, output
        return output, self.eps_from_x0(output, x_t, t)

    def x0_coefficients(
        self, t, prediction: str, ndim: int = 4, dtype=np.float32
    ) -> tuple[np.ndarray, np.ndarray]:
        """(a, b) with x_0 = a x_t + b output, shaped as `coefficients`: `to_x0_eps` is linear in the output.

        v: (alpha, -sigma sqrt(alpha² + sigma²)) / (alpha² + sigma²); eps: (1, -sigma) / alpha; x0: (0, 1).

        >>> s, x, output = cosine(100), np.float32([[0.5]]), np.float32([[0.25]])
        >>> a, b = s.x0_coefficients([40], "v", ndim=2)
        >>> bool(np.allclose(a * x + b * output, s.to_x0_eps(output, x, [40], "v")[0]))
        True
        """
        if check_prediction(prediction) == "v":
            a, b = self.alpha / self.norm**2, -self.sigma / self.norm
        elif prediction == "eps":
            a, b = 1 / self.alpha, -self.sigma / self.alpha
        else:
            a, b = np.zeros(len(self)), np.ones(len(self))
        return self._at(a, t, ndim, dtype), self._at(b, t, ndim, dtype)

    def eps_from_x0(self, x0: np.ndarray, x_t: np.ndarray, t) -> np.ndarray:
        """The noise that leads from `x0` to `x_t` (also after x0 was clipped)."""
        alpha, sigma = self.coefficients(t, x_t.ndim, x_t.dtype)
        return (x_t - alpha * x0) / sigma

    def score(self, output: np.ndarray, x_t: np.ndarray, t, prediction: str) -> np.ndarray:
        """The gradient of log p(x_t) that the network's output stands for: -eps / sigma.

        Vincent 2011, "A connection between score matching and denoising autoencoders"; Song et al. 2021,
        section 3.3.

        >>> ve(100).score(np.ones((1, 1)), np.zeros((1, 1)), [99], "eps").tolist()
        [[-0.02]]
        """
        _, eps = self.to_x0_eps(output, x_t, t, prediction)
        return -eps / self._at(self.sigma, t, x_t.ndim, x_t.dtype)

    def timesteps(self, steps: int, spacing: str = "trailing") -> np.ndarray:
        """`steps` timesteps, int64, from high to low noise.

        "trailing" ends the grid on T - 1, so that sampling starts at the noise level that the start noise
        has; "leading" starts it on 0 (names and formulas of Lin et al. 2023, "Common diffusion noise
        schedules and sample steps are flawed", table 2). "karras" goes from T - 1 to 0 through the levels
        nearest to a grid that is even in (sigma / alpha)^(1/7) (Karras et al. 2022, eq. 5 with rho = 7); it
        spends a step on the lowest level, and up to about 25 steps "trailing" comes nearer to the data, on
        VE too.

        >>> cosine(1000).timesteps(4).tolist()
        [999, 749, 499, 249]
        >>> ve(1000).timesteps(4, "karras").tolist()
        [999, 779, 479, 0]
        """
        total = len(self)
        if not 1 <= steps <= total:
            raise ConfigError(
                f"timesteps: {steps} sampling steps of a schedule with {total}; give 1 to {total}"
            )
        if spacing == "trailing":
            return np.round(total - np.arange(steps) * total / steps).astype(np.int64) - 1
        if spacing == "leading":
            return (np.arange(steps) * (total // steps)).astype(np.int64)[::-1].copy()
        if spacing == "karras":
            return self._karras(steps)
        raise ConfigError(f"timesteps: spacing {spacing!r} is not known{nearest(spacing, SPACINGS)}")

    def _karras(self, steps: int) -> np.ndarray:
        """The levels of "karras", all different: each at least one below that before, and none too low for
        those to come.
        """
        ratio = self.sigma / self.alpha
        high, low = ratio[-1] ** (1 / RHO), ratio[0] ** (1 / RHO)
        wanted = (high + np.arange(steps) / max(steps - 1, 1) * (low - high)) ** RHO
        nearest_level = np.interp(np.log(wanted), np.log(ratio), np.arange(len(self)))
        levels, before = np.round(nearest_level).astype(np.int64), len(self)
        for i in range(steps):
            levels[i] = before = min(max(levels[i], steps - 1 - i), before - 1)
        return levels


def variance_preserving(name: str, alpha_bar: np.ndarray) -> Schedule:
    """The VP schedule of a table `alpha_bar`, float64 (T,), that falls from almost 1 to almost 0.

    Raises `ConfigError` where it leaves (0, 1) or does not fall.

    >>> s = variance_preserving("two levels", np.array([0.75, 0.36]))
    >>> s.alpha[1], s.sigma[1]
    (np.float64(0.6), np.float64(0.8))
    """
    alpha_bar = np.asarray(alpha_bar, np.float64)
    if not ((alpha_bar > 0) & (alpha_bar < 1)).all():
        raise ConfigError(f"schedule: alpha_bar of {name!r} runs from {alpha_bar.max()} to "
                          f"{alpha_bar.min()}, but it must lie between 0 and 1, both left out")  # fmt: skip
    return Schedule(name, np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar), exact=alpha_bar)


def linear(steps: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02) -> Schedule:
    """beta_t linear from `beta_start` to `beta_end`; alpha_bar_t = prod (1 - beta_s). DDPM, section 4.

    >>> round(float(linear(1000).alpha_bar[-1]), 7)
    4.04e-05
    """
    beta = np.linspace(beta_start, beta_end, steps, dtype=np.float64)
    return variance_preserving("linear", np.cumprod(1 - beta))


def cosine(steps: int = 1000, offset: float = 0.008, max_beta: float = 0.999) -> Schedule:
    """alpha_bar_t = f(t) / f(0), f(t) = cos²(pi/2 (t/T + s) / (1 + s)), beta_t at most `max_beta`.

    Improved DDPM (Nichol & Dhariwal 2021), eq. 17 and the clipping below it; s = `offset`.
    """
    f = np.cos((np.arange(steps + 1, dtype=np.float64) / steps + offset) / (1 + offset) * np.pi / 2) ** 2
    beta = np.minimum(1 - f[1:] / f[:-1], max_beta)
    return variance_preserving("cosine", np.cumprod(1 - beta))


def ve(steps: int = 1000, sigma_min: float = 0.01, sigma_max: float = 50.0) -> Schedule:
    """The variance-exploding schedule: alpha = 1, sigma geometric from `sigma_min` to `sigma_max`.

    Song et al. 2021, "Score-Based Generative Modeling through Stochastic Differential Equations", section 3.4
    and appendix C; Song & Ermon 2020 take sigma_max as large as the largest distance between two pictures.
    An error of eps prediction is sigma times as large in x0, so that few steps from a large sigma_max want v
    or x0 prediction. Raises `ConfigError` unless 0 < sigma_min < sigma_max.

    >>> ve(3).sigma.round(4).tolist()
    [0.01, 0.7071, 50.0]
    """
    if not 0 < sigma_min < sigma_max < np.inf:
        raise ConfigError(f"ve: sigma runs from {sigma_min} to {sigma_max}; give 0 < sigma_min < sigma_max")
    sigma = np.geomspace(sigma_min, sigma_max, steps) if steps > 1 else np.array([sigma_max])
    return Schedule("ve", np.ones(steps), sigma)


SCHEDULES = {"linear": linear, "cosine": cosine, "ve": ve}


def get_schedule(name: str, steps: int = 1000) -> Schedule:
    """The schedule of that name with `steps` noise levels; `ConfigError` with the nearest name otherwise."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule: {name!r} is not known{nearest(name, SCHEDULES)}")
    return SCHEDULES[name](steps)
