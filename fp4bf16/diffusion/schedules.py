"""Noise schedules of the variance-preserving diffusion (DDPM), and what its network predicts.

x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) eps                   DDPM (Ho et al. 2020), eq. 4

All coefficients are float64 tables of T entries; pictures keep their own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError, nearest

#: What a network may predict: the noise (DDPM eq. 14), the velocity (progressive distillation, Salimans & Ho
#: 2022, section 4 and appendix D), or the clean picture.
PREDICTIONS = ("eps", "v", "x0")


def check_prediction(prediction: str) -> str:
    """Return `prediction` if it is one of `PREDICTIONS`, else raise `ConfigError` with the nearest name."""
    if prediction not in PREDICTIONS:
        raise ConfigError(f"prediction: {prediction!r} is not known{nearest(prediction, PREDICTIONS)}")
    return prediction


@dataclass(frozen=True, eq=False)
class Schedule:
    """`alpha_bar`, float64 (T,), falling from almost 1 to almost 0, and the formulas that read it.

    >>> s = cosine(1000)
    >>> len(s), bool(s.alpha_bar[0] > 0.999), bool(s.alpha_bar[-1] < 1e-6)
    (1000, True, True)
    """

    name: str
    alpha_bar: np.ndarray

    def __len__(self) -> int:
        return len(self.alpha_bar)

    def coefficients(self, t, ndim: int, dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
        """(alpha, sigma) = (sqrt(alpha_bar_t), sqrt(1 - alpha_bar_t)) of timesteps `t` (batch,), shaped to
        broadcast
        over `ndim`-dimensional pictures whose first axis is the batch."""
        alpha_bar = self.alpha_bar[np.asarray(t, np.int64)].reshape(-1, *(1,) * (ndim - 1))
        return np.sqrt(alpha_bar).astype(dtype), np.sqrt(1 - alpha_bar).astype(dtype)

    def add_noise(self, x0: np.ndarray, eps: np.ndarray, t) -> np.ndarray:
        """x_t of clean pictures `x0` and noise `eps` (same shape) at timesteps `t` (batch,): DDPM eq. 4."""
        alpha, sigma = self.coefficients(t, x0.ndim, x0.dtype)
        return alpha * x0 + sigma * eps

    def target(self, x0: np.ndarray, eps: np.ndarray, t, prediction: str) -> np.ndarray:
        """What the network should output at `t`: eps, v = alpha eps - sigma x0, or x0."""
        if check_prediction(prediction) == "eps":
            return eps
        if prediction == "x0":
            return x0
        alpha, sigma = self.coefficients(t, x0.ndim, x0.dtype)
        return alpha * eps - sigma * x0

    def to_x0_eps(
        self, output: np.ndarray, x_t: np.ndarray, t, prediction: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """The network's idea of (x_0, eps) from its `output` at x_t; the inverse of `target` given eq. 4.

        With v, x_0 = alpha x_t - sigma v and eps = sigma x_t + alpha v, finite at every noise level; eps
        prediction divides by alpha and x0 prediction by sigma.
        """
        alpha, sigma = self.coefficients(t, x_t.ndim, x_t.dtype)
        if check_prediction(prediction) == "v":
            return alpha * x_t - sigma * output, sigma * x_t + alpha * output
        if prediction == "eps":
            return (x_t - sigma * output) / alpha, output
        return output, self.eps_from_x0(output, x_t, t)

    def eps_from_x0(self, x0: np.ndarray, x_t: np.ndarray, t) -> np.ndarray:
        """The noise that leads from `x0` to `x_t`: eq. 4 solved for eps (also after x0 was clipped)."""
        alpha, sigma = self.coefficients(t, x_t.ndim, x_t.dtype)
        return (x_t - alpha * x0) / sigma

    def timesteps(self, steps: int, spacing: str = "trailing") -> np.ndarray:
        """`steps` timesteps, int64, from high to low noise.

        "trailing" ends the grid on T - 1, so that sampling starts at the noise level that the start noise
        has; "leading" starts it on 0 (names and formulas of Lin et al. 2023, "Common diffusion noise
        schedules and sample steps are flawed", table 2).

        >>> cosine(1000).timesteps(4).tolist()
        [999, 749, 499, 249]
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
        raise ConfigError(
            f"timesteps: spacing {spacing!r} is not known{nearest(spacing, ('trailing', 'leading'))}"
        )


def linear(steps: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02) -> Schedule:
    """beta_t linear from `beta_start` to `beta_end`; alpha_bar_t = prod (1 - beta_s). DDPM, section 4.

    >>> round(float(linear(1000).alpha_bar[-1]), 7)
    4.04e-05
    """
    return Schedule("linear", np.cumprod(1 - np.linspace(beta_start, beta_end, steps, dtype=np.float64)))


def cosine(steps: int = 1000, offset: float = 0.008, max_beta: float = 0.999) -> Schedule:
    """alpha_bar_t = f(t) / f(0), f(t) = cos²(pi/2 (t/T + s) / (1 + s)), beta_t at most `max_beta`.

    Improved DDPM (Nichol & Dhariwal 2021), eq. 17 and the clipping below it; s = `offset`.
    """
    f = np.cos((np.arange(steps + 1, dtype=np.float64) / steps + offset) / (1 + offset) * np.pi / 2) ** 2
    beta = np.minimum(1 - f[1:] / f[:-1], max_beta)
    return Schedule("cosine", np.cumprod(1 - beta))


SCHEDULES = {"linear": linear, "cosine": cosine}


def get_schedule(name: str, steps: int = 1000) -> Schedule:
    """The schedule of that name with `steps` noise levels; `ConfigError` with the nearest name otherwise."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule: {name!r} is not known{nearest(name, SCHEDULES)}")
    return SCHEDULES[name](steps)
