"""`consistency.Sketcher` for the products of a network on the device: of one FP4 product in 20 an estimate of
its distance from BF16 by a Gaussian sketch (docs/certificate.md, section 7).

What is sketched is the product of some consecutive pictures of the batch, at most 64, made once more in FP32.
X (G^T W)^T is a convolution of 16 outputs: of G^T W as three BF16 numbers each, which hold an FP32 one, in
FP32 sums; what these can lose is added. G comes from the host: a sketched run is not captured in a graph.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ... import device
from ...adapters import DeviceArray
from ...backends import cuda_conv, cuda_math
from ...certify import gaussian, sketch_factor
from ...python_ref import certify as formulas
from .products import Feed, product
from .watch import RunWatcher
from .workspace import Run, converted, seen, shaped

COLUMNS, DELTA, PICTURES = 16, 1e-3, 64
_PIECES = 3  # of 8 bits


class Sketches(RunWatcher):
    """Sketches what a `consistency.Sketcher` chooses, with its draws, and tells it the estimates in `read`.

    Args:
        sketcher: counts the calls; `begin` it before each forward. recorded: as of `Certificates`.
    """

    def __init__(self, sketcher: Any, recorded: bool = True):
        self._sketcher, self.recorded = sketcher, recorded
        self._taken: list[tuple[list[str], float, DeviceArray]] = []

    def product(self, run, layer, feed, scale, d, finish) -> None:
        if feed.scale is None:
            return
        wish = self._sketcher.wants_certificate(layer)
        if wish:
            g = gaussian(layer.o, COLUMNS, wish.call, wish.step, wish.seed)
            n = feed.x.shape[0]
            start = (wish.step + wish.call) % max(1, n - PICTURES + 1)
            with run.aside():
                self._taken.append(_sketched(run, layer, feed, g, start, min(n, PICTURES)))

    def read(self) -> dict[str, float]:
        """{layer: upper estimate of |y_fp4 - y_bf16| / |y|, of the pictures that were sketched}, those since
        the last call; waits. Each holds with probability 0.999, beside what sums may add.
        """
        found: dict[str, float] = {}
        for names, loses, numbers in self._taken:
            apart, size, x, v = np.sqrt(np.maximum(device.to_host(numbers), 0)).tolist()
            estimate = (apart + loses * x * v) * sketch_factor(COLUMNS, DELTA) / math.sqrt(COLUMNS)
            ratio = estimate / size if size > 0 else (0.0 if estimate == 0 else math.inf)
            found |= {name: max(ratio, found.get(name, 0.0)) for name in names}
        self._sketcher.sketches += len(self._taken)
        self._sketcher.estimates |= found
        self._taken = []
        return found


def _some(x: DeviceArray, start: int, count: int) -> DeviceArray:
    """`count` pictures from `start` on, a view."""
    return seen(x, (count, *x.shape[1:]), x.strides, x.address + start * x.strides[0] * x.itemsize)


def _sketched(run: Run, layer: Any, feed: Feed, g: np.ndarray, start: int, count: int) -> tuple:
    """(names, what the convolution's sums lose over |X| |V|, squares of |D G|, |Y|, |X|, |V|)."""
    arrays = cuda_math.of(run.like)
    xp, raw, double = arrays.xp, arrays.raw, arrays.double
    other, of = feed.other(run, "bf16")
    of, x = layer if of is None else of, _some(other.x, start, count)
    scale = feed.scale if feed.scale.size == 1 else seen(
        feed.scale, (count,), (1,), feed.scale.address + 4 * start)  # fmt: skip
    y = run.empty((count, *layer.output(feed.x.shape)[1:]), "float32")
    product(run, layer, Feed(_some(feed.x, start, count), scale, None), y)
    g = double(raw(device.from_host(g, run.like)))
    flat = double(raw(y)).reshape(-1, layer.o) - double(raw(_row(run, layer.bias(run))))
    v, w16 = _through(run, of, g)
    through = run.empty((*y.shape[:3], _PIECES * COLUMNS), "float32")
    geometry = of.geometry(x.shape)._replace(o=_PIECES * COLUMNS)
    cuda_conv.forward(geometry, through, run.stream, x16=x, w16=w16, **of.how)
    d = double(raw(through)).reshape(-1, _PIECES, COLUMNS).sum(1) - flat @ g
    wide = raw(converted(run, x, x.shape[3], "float32"))
    squares = [(d * d).sum(), (flat * flat).sum(), double((wide * wide).sum(3)).sum(), (v * v).sum()]
    k, factor = of.kh * of.kw * of.c, formulas.conv_factor((of.kh, of.kw), (of.stride, of.stride))
    loses = _PIECES * k * formulas.FP32_ACCUMULATION * factor
    names = [name for name, _, _ in layer.members]
    return names, loses, cuda_math.wrapped(xp.stack(squares), run.like)


def _row(run: Run, x: DeviceArray) -> DeviceArray:
    return converted(run, shaped(x, (1, 1, 1, x.size)), x.size, "float32")


def _through(run: Run, layer: Any, g: Any) -> tuple[Any, DeviceArray]:
    """V = G^T W, float64, and its pieces as a BF16 weight of 48 outputs."""
    arrays, weight = cuda_math.of(run.like), layer.sixteen(run)
    taps, c = weight.size // layer.o // weight.shape[3], weight.shape[3]
    w = arrays.double(arrays.raw(converted(run, shaped(weight, (1, 1, layer.o * taps, c)), c, "float32")))
    v = g.T @ w.reshape(layer.o, taps * c)
    rest, pieces = arrays.single(v).reshape(1, 1, COLUMNS * taps, c), []
    for _ in range(_PIECES):
        held = converted(run, cuda_math.wrapped(rest, run.like), c)
        pieces.append(arrays.raw(converted(run, held, c, "float32")))
        rest = rest - pieces[-1]
    whole = cuda_math.wrapped(arrays.xp.concatenate(pieces, 2), run.like)
    return v, shaped(converted(run, whole, c), (_PIECES * COLUMNS, *weight.shape[1:]))
