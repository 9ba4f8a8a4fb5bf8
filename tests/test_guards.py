"""Guards: real pictures pass, spoilt ones are caught by the guard that is meant for them."""

import numpy as np
import pytest

from fp4bf16.align import guards
from fp4bf16.errors import DTypeError, NonFiniteError, ShapeError
from fp4bf16.train import data

NAMES = ["pixel_distance", "pattern_2x2", "pattern_4x4", "slope", "contrast", "colourfulness"]


def _blur(x):
    for axis in (1, 2):
        padded = np.pad(x, [(1, 1) if a == axis else (0, 0) for a in range(4)], mode="edge")
        n = x.shape[axis]
        x = sum(w * padded.take(range(i, i + n), axis=axis) for i, w in enumerate((0.25, 0.5, 0.25)))
    return x


def _noisy(x, rng, amount):
    return np.clip(x + amount * rng.standard_normal(x.shape), -1, 1).astype(np.float32)


def _dots(x, amount, period=2):
    x = x.copy()
    x[:, ::period, ::period] -= amount
    return np.clip(x, -1, 1)


@pytest.fixture(scope="module")
def faces():
    return data.load_pairs(16).select(word="face")


@pytest.fixture
def base(faces, rng):
    """What a small model makes of both styles: a little soft, a little noisy."""
    both = faces.images.reshape(-1, 16, 16, 3)
    return _noisy(0.7 * both + 0.3 * _blur(both), rng, 0.06)


@pytest.fixture
def judge(faces, base):
    return guards.Guards(faces.images[0], base)


def _broken(report):
    return {guard.name for guard in report.guards if not guard.ok}


def test_real_pictures_pass(faces, base, judge, rng):
    report = judge.check(faces.images[0])
    assert report.ok and not report.broken and [guard.name for guard in report.guards] == NAMES
    assert judge.check(_noisy(faces.images[0][rng.permutation(121)[:60]], rng, 0.02)).ok
    assert judge.check(base).ok, judge.check(base).broken


@pytest.mark.parametrize("size", [16, 32])
def test_a_planted_grid_is_caught(size, rng):
    faces = data.load_pairs(size).select(word="face").images
    base = _noisy(faces.reshape(-1, size, size, 3), rng, 0.03)
    judge = guards.Guards(faces[0], base)
    seen = judge.check(base)["pattern_2x2"].value
    for amount in (0.06, 0.3):
        report = judge.check(_dots(base, amount))
        assert "pattern_2x2" in _broken(report)
        assert report["pattern_2x2"].value == pytest.approx(0.75 * amount, abs=seen + 0.2 * amount)
    assert {"pixel_distance", "pattern_2x2", "pattern_4x4"} <= _broken(report)
    assert any("grid of 2x2 pixels" in sentence for sentence in report.broken)


def test_a_grid_that_changes_sign_is_caught_by_the_statistics(faces, base, judge):
    """It cancels in the mean picture, so only the distance can see it."""
    spoilt = np.concatenate([_dots(base[0::2], 0.25), _dots(base[1::2, ::-1, ::-1], 0.25)[:, ::-1, ::-1]])
    assert "pixel_distance" in _broken(judge.check(spoilt))


def test_a_coarse_grid_is_caught(base, judge):
    spoilt = base.copy()
    spoilt[:, 1::4, 2::4] = np.clip(spoilt[:, 1::4, 2::4] - 0.3, -1, 1)
    assert "pattern_4x4" in _broken(judge.check(spoilt))


@pytest.mark.parametrize("spoil, expected", [
    (lambda x, rng: _blur(_blur(_blur(x))), {"pixel_distance", "slope", "contrast"}),
    (lambda x, rng: np.full_like(x, 0.3), {"pixel_distance", "contrast", "colourfulness"}),
    (lambda x, rng: rng.uniform(-1, 1, x.shape), {"pixel_distance", "slope", "colourfulness"}),
    (lambda x, rng: np.repeat(x.mean(-1, keepdims=True), 3, -1), {"pixel_distance", "colourfulness"}),
    (lambda x, rng: np.sign(x), {"pixel_distance", "colourfulness"}),
    (lambda x, rng: np.where(np.arange(16)[:, None] < 8, 1.0, -1.0) + 0 * x, {"pixel_distance", "contrast"}),
], ids=["blurred", "constant", "noise", "grey", "garish", "harsh"])  # fmt: skip
def test_spoilt_pictures_break_their_guards(faces, judge, rng, spoil, expected):
    report = judge.check(spoil(faces.images[0], rng).astype(np.float32))
    assert expected <= _broken(report), report.as_dict()
    assert "pattern_2x2" not in _broken(report)
    assert len(report.broken) == len(_broken(report)) and all(s.count(":") == 1 for s in report.broken)


@pytest.mark.parametrize("size", [8, 16, 32])
def test_the_slope_notices_blur_and_noise_alone(size, rng):
    """Blur and noise that leave pattern, contrast and colour be; the range is that of the real pictures."""
    faces = data.load_pairs(size).select(word="face").images[0]
    judge = guards.Guards(faces, _noisy(faces, rng, 0.03))
    low, high = np.percentile(guards.slope(faces), [5, 95])
    passed = judge.check(_noisy(faces, rng, 0.02))["slope"]
    assert passed.ok and (passed.low, passed.high) == pytest.approx((low, high)) and low < -1.5
    blurred, noisy = judge.check(_blur(_blur(faces)))["slope"], judge.check(_noisy(faces, rng, 0.7))["slope"]
    assert not blurred.ok and blurred.value < low and "5 % point of real" in blurred.sentence
    assert blurred.sentence.endswith("blurred") and noisy.sentence.endswith("noisy") and noisy.value > high
    spoilt = judge.check(_blur(faces) if size == 8 else _blur(_blur(faces)))
    assert "pattern_2x2" not in _broken(spoilt)


def test_slope_of_known_spectra(rng):
    """Pictures made with power f^p in the Fourier domain have the slope p."""
    f = np.hypot(np.fft.fftfreq(64)[:, None], np.fft.fftfreq(64)[None])
    f[0, 0] = 1
    for power in (-3.0, -2.0, -1.0, 0.0):
        white = np.fft.fft2(rng.standard_normal((60, 64, 64)))
        x = np.fft.ifft2(white * f ** (power / 2)).real
        x = np.repeat((10 * x / x.std())[..., None], 3, axis=-1)  # loud: far above the floor of the logarithm
        assert guards.slope(x).mean() == pytest.approx(power, abs=0.08)
    steeper = [guards.slope(np.repeat(p[..., None], 3, -1)).mean() for p in (x[..., 0], _blur(x)[..., 0])]
    assert steeper[1] < steeper[0] - 0.5
    assert guards.slope(np.full((3, 9, 12, 3), 0.25)) == pytest.approx(0)
    assert guards.slope(np.zeros((0, 8, 8, 3))).shape == (0,) and guards.slope(x[:1]).shape == (1,)


def test_each_guard_is_the_one_that_catches_its_hack(faces, base, judge, rng):
    """Of a set that passes, one thing is changed; the guard that is meant for it speaks."""
    real = _noisy(faces.images[0], rng, 0.02)
    assert judge.check(real).ok
    coarse = real.copy()
    coarse[:, 1::4, 2::4] = np.clip(coarse[:, 1::4, 2::4] - 0.2, -1, 1)
    turned = np.concatenate([_dots(real[0::2], 0.25), _dots(real[1::2, ::-1, ::-1], 0.25)[:, ::-1, ::-1]])
    hacks = {
        "pattern_2x2": _dots(real, 0.08),
        "pattern_4x4": coarse,
        "pixel_distance": turned,
        "slope": _blur(_blur(real)),
        "contrast": real * 0.3 + 0.5,
        "colourfulness": np.repeat(real.mean(-1, keepdims=True), 3, -1),
    }
    assert sorted(hacks) == sorted(NAMES)
    for name, pictures in hacks.items():
        assert name in _broken(judge.check(pictures)), (name, judge.check(pictures).as_dict())


def test_kernel_distance_is_unbiased_and_exact(faces, rng):
    twemoji = faces.images[1]
    distance = guards.KernelDistance(twemoji)
    x = rng.permutation(faces.images[0])[:12]
    a = (guards.pixel_statistics(x) - distance.centre) / distance.scale
    b, n, m = distance.reference, 12, len(twemoji)

    def k(p, q):
        return np.exp(-((p - q) ** 2).sum() / (2 * distance.bandwidth))

    aa = sum(k(a[i], a[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    bb = sum(k(b[i], b[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    ab = sum(k(p, q) for p in a for q in b) / (n * m)
    assert distance(x) == pytest.approx(aa + bb - 2 * ab, abs=1e-9)

    pictures = data.load_pairs(16).style("noto")
    halves = []
    for _ in range(8):
        order = rng.permutation(len(pictures))[:240]
        halves.append(guards.KernelDistance(pictures[order[:120]])(pictures[order[120:]]))
    assert abs(np.mean(halves)) < 0.01  # two draws of one distribution
    assert distance(faces.images[0]) > 0.2  # of two


def test_statistics_are_what_their_names_say(rng):
    names = {name: i for i, name in enumerate(guards.FEATURES)}
    x = rng.uniform(-1, 1, (3, 16, 12, 3)).astype(np.float32)
    f = guards.pixel_statistics(x)
    assert f.shape == (3, len(names)) == (3, 56) and np.isfinite(f).all()
    for group, count in (("tone r", 8), ("tone b", 8), ("step x", 7), ("step y", 7)):
        assert f[:, [names[f"{group}{i}"] for i in range(count)]].sum(axis=1) == pytest.approx(1)
    assert f[:, names["tone g0"]] == pytest.approx((x[..., 1] < -0.75).mean(axis=(1, 2)))
    assert f[1, names["mean b"]] == pytest.approx(x[1, ..., 2].mean(), abs=1e-6)
    assert f[1, names["std r"]] == pytest.approx(x[1, ..., 0].std(), rel=1e-5)
    stripes = np.zeros((2, 16, 12, 3), np.float32)
    stripes[:, :, ::2] = 0.2
    s = guards.pixel_statistics(stripes)[0]
    assert [s[names[f"nyquist {d}"]] for d in ("x", "y", "xy")] == pytest.approx([0.1, 0, 0], abs=1e-7)
    assert s[names["step x4"]] == 1 and s[names["step y0"]] == 1
    assert s[names["power 4"]] > -2 and s[names["power 0"]] == pytest.approx(-4)


def test_colourfulness_and_contrast_of_known_pictures():
    red_green = np.zeros((2, 8, 8, 3), np.float32)
    red_green[:, :, :4] = [1, -1, -1]
    red_green[:, :, 4:] = [-1, 1, -1]
    # rg = +-255, yb = 127.5 everywhere: sqrt(255^2) + 0.3 * 127.5
    assert guards.colourfulness(red_green) == pytest.approx(255 + 0.3 * 127.5)
    assert guards.contrast(red_green) == pytest.approx(0.587 - 0.299)
    assert guards.colourfulness(np.full((2, 8, 8, 3), 0.4)) == pytest.approx(0)


@pytest.mark.parametrize("images, error, text", [
    (np.zeros((4, 16, 16)), ShapeError, r"images: shape is \(4, 16, 16\)"),
    (np.zeros((1, 16, 16, 3)), ShapeError, r"with n >= 2"),
    (np.zeros((4, 8, 8, 3)), ShapeError, r"images: pictures are \(8, 8, 3\), but reference_.*; bring both"),
    (np.zeros((4, 16, 16, 3), np.uint8), DTypeError, "dtype is uint8; pass floating-point pictures"),
    (np.full((4, 16, 16, 3), np.nan), NonFiniteError, "4 of 4 pictures hold NaN or Inf"),
])  # fmt: skip
def test_bad_input_is_named(judge, images, error, text):
    with pytest.raises(error, match=text):
        judge.check(images)
