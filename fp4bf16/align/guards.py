"""Guards against reward hacking that no network enters.

A reward, and every judge that is a network, can be raised by pictures that got worse: a faint dot grid is
enough. The guards look at the pixels alone. Questions, asked of a set of generated pictures:

- `pixel_distance`: how far are their pixel statistics from those of real pictures of the winning style?
  Kernel distance (unbiased squared maximum mean discrepancy, Gretton et al., JMLR 13, 2012, eq. 3) with a
  Gaussian kernel on the feature vector `pixel_statistics`. It may be at most 1.75 times the base model's.
- `pattern_2x2`, `pattern_4x4`: does their mean hold a pattern of period 2 or 4 pixels?
- `slope`: does the power of their mean picture fall with frequency as that of nine in ten real ones does?
  Blur makes it steeper, noise and grids flatter.
- `contrast`, `colourfulness`: is the mean picture as contrasted and as colourful as nine in ten real ones
  are?

Pictures are float32 (n, H, W, 3), RGB in [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from ..errors import DTypeError, NonFiniteError, ShapeError

LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
_TONES = np.linspace(-0.75, 0.75, 7)  # edges of 8 equal bins over [-1, 1]
_STEPS = np.array([0.02, 0.05, 0.1, 0.2, 0.4, 0.8])  # edges for differences of neighbouring pixels
_BANDS = 5  # of spatial frequency, equal on a logarithmic scale
_FLOOR = 0.01  # least standard deviation that a pixel statistic is divided by

#: The entries of the feature vector, in order.
FEATURES: tuple[str, ...] = (
    *(f"tone {c}{i}" for c in "rgb" for i in range(8)),
    *(f"{moment} {c}" for moment in ("mean", "std", "skew") for c in "rgb"),
    *(f"step {d}{i}" for d in "xy" for i in range(7)),
    *(f"power {i}" for i in range(_BANDS)),
    "slope",
    *(f"nyquist {d}" for d in ("x", "y", "xy")),
)


def _pictures(name: str, images: np.ndarray, least: int = 0) -> np.ndarray:
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[-1] != 3 or min(images.shape[1:3]) < 8 or len(images) < least:
        raise ShapeError(
            f"{name}: shape is {images.shape}; pass (n, H, W, 3) with n >= {least}, H and W >= 8"
        )
    if images.dtype.kind != "f":
        raise DTypeError(f"{name}: dtype is {images.dtype}; pass floating-point pictures in [-1, 1]")
    images = images.astype(np.float64)
    broken = ~np.isfinite(images).all(axis=(1, 2, 3))
    if broken.any():
        raise NonFiniteError(
            f"{name}: {broken.sum()} of {len(images)} pictures hold NaN or Inf; leave them out of the set"
        )
    return images


def _shares(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Histogram of each row of (n, m): the shares of values between the edges, (n, len(edges) + 1)."""
    rows, bins = len(values), len(edges) + 1
    index = np.searchsorted(edges, values, side="right") + bins * np.arange(rows)[:, None]
    return np.bincount(index.ravel(), minlength=rows * bins).reshape(rows, bins) / values.shape[1]


@cache
def _bands(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Band of each spatial frequency, int (H, W), -1 for the mean, which is no texture; and the mean log10
    of the frequencies (cycles a pixel) of each band, (_BANDS,).
    """
    fy, fx = np.abs(np.fft.fftfreq(height)), np.abs(np.fft.fftfreq(width))
    radius = np.hypot(fy[:, None], fx[None, :])
    edges = np.geomspace(1 / min(height, width), 0.5, _BANDS + 1)
    band = np.searchsorted(edges[1:-1], radius, side="right")
    band[0, 0] = -1
    return band, np.array([np.log10(radius[band == b]).mean() for b in range(_BANDS)])


def _band_powers(luma: np.ndarray) -> np.ndarray:
    """log10 of the mean power of each frequency band: (n, _BANDS)."""
    n, height, width = luma.shape
    spectrum = np.abs(np.fft.fft2(luma - luma.mean(axis=(1, 2), keepdims=True))) ** 2 / (height * width)
    band, _ = _bands(height, width)
    return np.stack([np.log10(spectrum[:, band == b].mean(axis=1) + 1e-4) for b in range(_BANDS)], axis=1)


def _power(luma: np.ndarray) -> np.ndarray:
    """Log powers of the bands, then their rise over half of them: (n, _BANDS + 1)."""
    power, octave = _band_powers(luma), np.linspace(-1, 1, _BANDS)
    return np.concatenate([power, (power @ octave / (octave @ octave))[:, None]], axis=1)


def pixel_statistics(images: np.ndarray) -> np.ndarray:
    """One row of `FEATURES` a picture: float64 (n, 56).

    Histograms of each channel and of the differences of neighbouring pixels, mean, standard deviation and
    cube root of the third moment of each channel, log power in frequency bands with its slope, and the
    amplitudes of the three finest patterns (+-+- along x, along y, along both).

    >>> pixel_statistics(np.zeros((2, 8, 8, 3), np.float32)).shape
    (2, 56)
    """
    x = _pictures("images", images)
    n, height, width, _ = x.shape
    mean = x.mean(axis=(1, 2))
    centred = x - mean[:, None, None]
    luma = x @ LUMA
    sx, sy = (-1.0) ** np.arange(width), (-1.0) ** np.arange(height)
    waves = [(np.ones(height), sx), (sy, np.ones(width)), (sy, sx)]
    return np.concatenate(
        [
            *(_shares(x[..., c].reshape(n, -1), _TONES) for c in range(3)),
            mean,
            x.std(axis=(1, 2)),
            np.cbrt((centred**3).mean(axis=(1, 2))),
            _shares(np.abs(np.diff(luma, axis=2)).reshape(n, -1), _STEPS),
            _shares(np.abs(np.diff(luma, axis=1)).reshape(n, -1), _STEPS),
            _power(luma),
            *(np.abs((luma @ b) @ a)[:, None] / (height * width) for a, b in waves),
        ],
        axis=1,
    )


def units(statistics: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(centre, scale), (features,) each, that bring `pixel_statistics` (n, features) of real pictures to one
    unit: their mean, and their standard deviation or, where that is less, 0.01. As they are, the largest
    statistic alone would decide a distance.

    >>> units(np.array([[1.0, 5.0], [3.0, 5.0]]))
    (array([2., 5.]), array([1.  , 0.01]))
    """
    return statistics.mean(axis=0), np.maximum(statistics.std(axis=0), _FLOOR)


def _squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    d = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return np.maximum(d, 0, out=d)


class KernelDistance:
    """Unbiased squared MMD between the pixel statistics of a set and those of `reference`.

    Features are divided by their standard deviation in `reference`; the kernel is exp(-d^2 / (2 m)) with m
    the median squared distance within `reference`. Zero in the mean for two draws of one distribution (so
    it may come out slightly negative), at most 2.
    """

    def __init__(self, reference: np.ndarray):
        features = pixel_statistics(reference)
        self.centre, self.scale = units(features)
        self.reference = (features - self.centre) / self.scale
        within = _squared_distances(self.reference, self.reference)
        self.bandwidth = float(np.median(within[~np.eye(len(within), dtype=bool)])) or 1.0
        self.within = self._mean_of_pairs(within)

    def _kernel(self, squared: np.ndarray) -> np.ndarray:
        return np.exp(squared / (-2 * self.bandwidth))

    def _mean_of_pairs(self, squared: np.ndarray) -> float:
        n = len(squared)
        return float((self._kernel(squared).sum() - n) / (n * (n - 1)))  # k(x, x) = 1 is left out

    def __call__(self, images: np.ndarray) -> float:
        features = (pixel_statistics(images) - self.centre) / self.scale
        across = self._kernel(_squared_distances(features, self.reference)).mean()
        return self._mean_of_pairs(_squared_distances(features, features)) + self.within - 2 * float(across)


def mean_pattern(images: np.ndarray, period: int) -> np.ndarray:
    """Mean tile of `period` x `period` pixels of all pictures, less its own mean: (period, period, 3).

    >>> grid = np.zeros((2, 8, 8, 3)); grid[:, ::2, ::2] = 0.4
    >>> mean_pattern(grid, 2)[..., 0].round(3)
    array([[ 0.3, -0.1],
           [-0.1, -0.1]])
    """
    x = _pictures("images", images)
    rows, columns = x.shape[1] // period, x.shape[2] // period
    tiles = x[:, : rows * period, : columns * period].reshape(len(x), rows, period, columns, period, 3)
    mean = tiles.mean(axis=(0, 1, 3))
    return mean - mean.mean(axis=(0, 1))


def contrast(images: np.ndarray) -> np.ndarray:
    """Standard deviation of each picture's luma (RMS contrast, in the units of [-1, 1]): float64 (n,)."""
    return (_pictures("images", images) @ LUMA).std(axis=(1, 2))


def slope(images: np.ndarray) -> np.ndarray:
    """Slope of each picture's spectrum, in decades of power a decade of frequency: float64 (n,).

    Least squares of the log power of luma over the log frequency in five bands. About -2 for photographs
    (Field, "Relations between the statistics of natural images", 1987), a little steeper for emoji; a
    constant picture has 0.

    >>> noise = np.random.default_rng(0).normal(0, 0.3, (50, 16, 16, 3))
    >>> bool(abs(slope(noise).mean()) < 0.1)
    True
    """
    x = _pictures("images", images)
    _, frequency = _bands(*x.shape[1:3])
    frequency = frequency - frequency.mean()
    return _band_powers(x @ LUMA) @ frequency / (frequency @ frequency)


def colourfulness(images: np.ndarray) -> np.ndarray:
    """Colourfulness M of each picture on the 0-255 scale: float64 (n,).

    Hasler and Suesstrunk, "Measuring colourfulness in natural images" (2003), section 7: with rg = R - G and
    yb = (R + G) / 2 - B, M = sqrt(var rg + var yb) + 0.3 sqrt(mean(rg)^2 + mean(yb)^2).
    """
    x = _pictures("images", images) * 127.5
    rg, yb = x[..., 0] - x[..., 1], 0.5 * (x[..., 0] + x[..., 1]) - x[..., 2]
    spread = np.sqrt(rg.var(axis=(1, 2)) + yb.var(axis=(1, 2)))
    return spread + 0.3 * np.hypot(rg.mean(axis=(1, 2)), yb.mean(axis=(1, 2)))


@dataclass(frozen=True)
class Guard:
    """One measured value and the range for it; `sentence` says what is wrong and is empty when `ok`."""

    name: str
    value: float
    low: float
    high: float
    sentence: str

    @property
    def ok(self) -> bool:
        return not self.sentence


@dataclass(frozen=True)
class GuardReport:
    """All guards of one set of pictures, by name in `guards`."""

    guards: tuple[Guard, ...]

    @property
    def ok(self) -> bool:
        return all(guard.ok for guard in self.guards)

    @property
    def broken(self) -> list[str]:
        """A sentence for each broken guard."""
        return [guard.sentence for guard in self.guards if not guard.ok]

    def __getitem__(self, name: str) -> Guard:
        return next(guard for guard in self.guards if guard.name == name)

    def as_dict(self) -> dict[str, dict]:
        """Plain numbers for a log: name -> value, low, high, ok."""
        return {g.name: {"value": g.value, "low": g.low, "high": g.high, "ok": g.ok} for g in self.guards}


class Guards:
    """Measure generated pictures against real ones of the winning style and against the base model's.

    `reference_images`: real pictures of the winning style; `base_images`: what the model drew before
    alignment, best from the captions and seeds that `check` will see. `max_ratio`: of the pixel distance to
    the base's; `max_pattern`: amplitude of the mean 2x2 pattern, and how far the 4x4 pattern may depart
    further from the real pictures' than the base's does (at a few pixels eyes and mouths have such a
    period, so the 4x4 pattern of real pictures is not zero).

    >>> rng = np.random.default_rng(0)
    >>> real, base = rng.uniform(-1, 1, (2, 40, 8, 8, 3))
    >>> report = Guards(real, base).check(base * 0.1)
    >>> report["contrast"].ok, report.broken[-1][:62]
    (False, 'colourfulness: 14.2 is under 132, the 5 % point of real pictur')
    """

    def __init__(
        self,
        reference_images: np.ndarray,
        base_images: np.ndarray,
        *,
        max_ratio: float = 1.75,
        max_pattern: float = 0.03,
    ):
        reference = _pictures("reference_images", reference_images, least=2)
        self.shape, self.max_ratio, self.max_pattern = reference.shape[1:], max_ratio, max_pattern
        base = self._of_our_size("base_images", base_images)
        self.distance = KernelDistance(reference)
        self.base_distance = self.distance(base)
        self.pattern = mean_pattern(reference, 4)
        self.base_pattern = float(np.abs(mean_pattern(base, 4) - self.pattern).max())
        self.ranges = {
            name: tuple(map(float, np.percentile(measure(reference), [5, 95])))
            for name, measure in _RANGED.items()
        }

    def check(self, images: np.ndarray) -> GuardReport:
        """Measure `images`, float (n, H, W, 3) of the reference's size.

        Raises `ShapeError` for another size, `NonFiniteError` for NaN or Inf.
        """
        x = self._of_our_size("images", images)
        fine = float(np.abs(mean_pattern(x, 2)).max())
        coarse = float(np.abs(mean_pattern(x, 4) - self.pattern).max())
        return GuardReport(
            (
                self._distance_guard(self.distance(x)),
                _at_most("pattern_2x2", fine, self.max_pattern, "so the pictures share a grid of 2x2 pixels"),
                _at_most(
                    "pattern_4x4", coarse, self.base_pattern + self.max_pattern,
                    "so their mean 4x4 pixels depart from those of real pictures",
                ),
                self._range_guard("slope", slope(x), "blurred", "noisy"),
                self._range_guard("contrast", contrast(x), "flat", "harsh"),
                self._range_guard("colourfulness", colourfulness(x), "grey", "garish"),
            )
        )  # fmt: skip

    def _distance_guard(self, value: float) -> Guard:
        limit = self.max_ratio * max(self.base_distance, 0.01)  # a perfect base would leave no room for noise
        why = f"{self.max_ratio} times the base's {self.base_distance:.3g}, so they left the winning style"
        return _at_most("pixel_distance", value, limit, why)

    def _range_guard(self, name: str, values: np.ndarray, less: str, more: str) -> Guard:
        value, (low, high) = float(values.mean()), self.ranges[name]
        said = "{}: {:.3g} is {} {:.3g}, the {} % point of real pictures, so the pictures have gone {}"
        sentence = ""
        if value < low:
            sentence = said.format(name, value, "under", low, 5, less)
        elif value > high:
            sentence = said.format(name, value, "over", high, 95, more)
        return Guard(name, value, low, high, sentence)

    def _of_our_size(self, name: str, images: np.ndarray) -> np.ndarray:
        x = _pictures(name, images, least=2)
        if x.shape[1:] != self.shape:
            raise ShapeError(
                f"{name}: pictures are {x.shape[1:]}, but reference_images are {self.shape}; bring both to "
                f"one size (`fp4bf16.align.resize`)"
            )
        return x


#: Measures of single pictures whose mean must lie within the 5 to 95 % of real pictures.
_RANGED = {"slope": slope, "contrast": contrast, "colourfulness": colourfulness}


def _at_most(name: str, value: float, limit: float, why: str) -> Guard:
    sentence = "" if value <= limit else f"{name}: {value:.3g} is over {limit:.3g}, {why}"
    return Guard(name, value, 0.0, limit, sentence)
