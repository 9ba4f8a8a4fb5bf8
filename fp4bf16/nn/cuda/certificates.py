"""Certificates of a network's FP4 products, made on the device, in captured graphs too.

    certificates = Certificates(model)
    with watching(certificates):
        graph.capture(lambda stream: model(x, t))
    graph.replay()
    certificates.read()                 # waits: what is proven of each product, by layer

Each product costs one more launch of one thread block: the quantisers hand on the norms of what they wrote,
the convolution the squares of its result, the norms of the weights are made once a version (`norms`). With a
threshold the product is followed by its BF16 form, whose kernels return at once unless the certificate's flag
is set: nothing is decided by the host.

What is certified is the product alone, stored in the result's dtype; the ratio is to the norm of the result
as it is stored, bias, time embedding and residual included. docs/certificate.md, section 11.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ... import device
from ...adapters import DeviceArray
from ...backends import cuda_certificate, cuda_conv, cuda_math, cuda_optimizer
from ...errors import ConfigError
from ...python_ref import certify as formulas
from .norms import shaped_row
from .watch import RunWatcher
from .workspace import Run, converted, seen

#: Over what sums lose that the framework makes in float64.
_ROOM = 1 + 2.0**-20
#: A bound under which a product of zeros alone has the ratio 0, as of `consistency.certified_ratio`.
_NOTHING = 2.0**-100
#: What subnormal E4M3 bytes can add to |A'|^2, a share of it an element, under an outer scale that was found
#: from the largest element.
_SUBNORMAL = 2.0**-24


class Sizes(NamedTuple):
    """Norms of what a product reads, as the quantiser left them.

    norms: (parts, 2) float32 of `cuda_norm.group_norm`; or sums: (rows, 3) float64 of the quantiser. outer:
    the outer scale (1,), where it was not found from the largest element of a picture. picture: elements of
    one. times: what the norm is multiplied by, each number being there several times.
    """

    norms: DeviceArray | None = None
    sums: DeviceArray | None = None
    outer: DeviceArray | None = None
    picture: int = 0
    times: float = 1.0


def by_picture(run: Run, sums: DeviceArray, n: int) -> DeviceArray:
    """The quantiser's sums of pixels as sums of `n` pictures: one thread block reads them."""
    raw = cuda_math.of(sums).raw(sums)
    return cuda_math.wrapped(raw.reshape(n, -1, 3).sum(1), sums)


class Found(NamedTuple):
    """What is known of a product: bound and accumulation as of `certify.Certificate`, norm of its result and
    its elements, Frobenius norm of its weight.
    """

    bound: float
    accumulation: float
    product: float
    elements: int
    weight: float

    @property
    def ratio(self) -> float:
        """(bound + accumulation) over the result's norm; infinite where nothing is proven."""
        both = self.bound + self.accumulation
        if math.isnan(both) or math.isnan(self.product):
            return math.inf
        if self.product == 0:
            return 0.0 if both < _NOTHING else math.inf
        return both / self.product


class Certificates(RunWatcher):
    """A certificate of every FP4 product of the runs that it watches, and with a threshold its redoing.

    Args:
        model: a `UNet2D` on the GPU, any of its sets of weights.
        threshold: None, or the ratio over which a product is redone on BF16 in the same place; one that NaN
            or Inf met is as well.
        recorded: whether of recorded runs alone, those that a backward may follow.

    A redone product has the BF16 track's bits for its input (that of the last convolution, which has a kernel
    of its own, but for the last one). The gradients of a recorded run are those of the
    operands that the FP4 product read all the same. Layers that are one product (q, k and v; projections of
    the time embedding) share its certificate.

    Raises `ConfigError` for a model that is not on a GPU and for a threshold that is no number from 0.
    """

    certifies = True

    def __init__(self, model: Any, threshold: float | None = None, recorded: bool = False):
        if not model.on_device:
            raise ConfigError("Certificates: the model is on the CPU, where nn.watching has the watchers of "
                              "products; call its cuda(like) first")  # fmt: skip
        number = isinstance(threshold, int | float | np.number) and not isinstance(threshold, bool)
        if threshold is not None and not (number and threshold >= 0):
            raise ConfigError(f"Certificates: threshold is {threshold!r}, but a number from 0 is needed, or "
                              f"None for none")  # fmt: skip
        self.threshold, self.recorded = threshold, recorded
        like, rows = model.flat.data, model.flat.layout.most_rows
        # A row: the kernel's four numbers, the norm of the weight, three unused; under 0 where none has run
        self.found = device.full((rows, 8), -1, "float32", like, "certificates")
        self._flags = device.full((rows, 1), 0, "int32", like, "flags")
        self._counts = device.full((rows, 2), 0, "int32", like, "counts")
        self._layers: dict[int, tuple[list[str], int]] = {}  # by row: members, elements of the result

    # ---- a step
    def begin(self) -> None:
        """Before a forward whose layers may be others than the last one's: forget what was found."""
        cuda_math.of(self.found).raw(self.found)[...] = -1

    def end(self, weights: Any) -> None:
        """After a forward with `weights`: note the norms of the weights, so that `read` fetches one array."""
        raw = cuda_math.of(self.found).raw
        raw(self.found)[:, 4] = raw(weights.norms.table)[:, 0]

    # ---- a product
    def certify(self, run: Run, layer: Any, feed: Any, d: DeviceArray, made: DeviceArray | None,
                finish: Mapping[str, Any]) -> bool:  # fmt: skip
        """After the FP4 product d of `feed` with its epilogue: its certificate, and with a threshold its BF16
        form. made: the sums of d by channel, or None. Returns whether they are still d's.
        """
        row, sizes = run.weights.layout.row_of(layer), feed.sizes
        self._layers[row] = [name for name, _, _ in layer.members], d.size
        k, flag = layer.kh * layer.kw * layer.c, shaped_row(self._flags, row)
        squares, step = _squares(run, d, made)
        factor = formulas.conv_factor((layer.kh, layer.kw), (layer.stride, layer.stride))
        redo = self.threshold is not None
        cuda_certificate.certificate(
            run.weights.norms.row(run, layer), _first(self.found, row), run.stream, k=k, columns=layer.o,
            elements=d.size, output=d.dtype, norms=sizes.norms, sums=sizes.sums, outer_scale=sizes.outer,
            factor=factor * sizes.times * _ROOM, gain=_gain(run.accumulate, k, sizes),
            squares=squares, square_stride=step, threshold=self.threshold, flag=flag if redo else None,
            counts=shaped_row(self._counts, row),
        )  # fmt: skip
        return not redo or _redone(run, layer, feed, d, flag, made, dict(finish))

    # ---- results
    def read(self) -> dict[str, Found]:
        """{layer: what was found} of those that have run on FP4 since `begin`, as they ran last; waits."""
        host = device.to_host(self.found).astype(np.float64)
        found = {}
        for row, (names, elements) in self._layers.items():
            bound, accumulation, _, product, weight = host[row, :5].tolist()
            if bound != -1:
                found |= dict.fromkeys(names, Found(bound, accumulation, product, elements, weight))
        return found

    def _counted(self, column: int) -> Counter:
        host, found = device.to_host(self._counts), Counter()
        for row, (names, _) in self._layers.items():
            if host[row, column]:
                found.update(dict.fromkeys(names, int(host[row, column])))
        return found

    @property
    def calls(self) -> int:
        """How many products were certified; waits."""
        host = device.to_host(self._counts)
        return int(host[:, 0].sum(dtype=np.int64))

    @property
    def counts(self) -> Counter:
        """{layer: how many of its products were redone}; waits."""
        return self._counted(1)


class Fallback(Certificates):
    """`consistency.Fallback` for a `UNet2D` on the GPU: products whose certified ratio is over `threshold`
    are redone on BF16, in graphs and in the frozen runs of samplers too.

        fallback = Fallback(model, 0.5)
        with watching(fallback):          # of fp4bf16.nn.cuda.watch
            prediction = model(x, t)
        fallback.counts                   # waits: {layer: how often}
    """

    def __init__(self, model: Any, threshold: float):
        if threshold is None:
            raise ConfigError("Fallback: threshold is None, but a number from 0 is needed")
        super().__init__(model, threshold)


def _first(table: DeviceArray, row: int) -> DeviceArray:
    """The first four numbers of a row."""
    whole = shaped_row(table, row)
    return seen(whole, (4,), (1,))


def _gain(accumulate: str, k: int, sizes: Sizes) -> float:
    """g of formula (6) of docs/certificate.md. A picture's outer scale, the least power of two o with amax <=
    288 o, leaves its largest number over 2^6 o: the error of rounding amax > 144 o, or of cutting it off, is
    at most a quarter. So E elements of (2^-6 o)^2 add less than E 2^-24 of the square of the norm.
    """
    gain = formulas.ACCUMULATE[accumulate](k, subnormal=0)
    return gain if sizes.outer is not None else gain * math.sqrt(1 + sizes.picture * _SUBNORMAL)


def _squares(run: Run, d: DeviceArray, made: DeviceArray | None) -> tuple[DeviceArray, int]:
    """Numbers whose sum is |d|^2, and the steps in which they lie."""
    if made is not None:
        return seen(made, (made.size,), (1,), made.address + 4), 2  # every second: the squares
    with run.aside():
        wide = d if d.dtype == "float32" and d.c_contiguous else converted(run, d, d.shape[3], "float32")
    square = run.empty((1,), "float64")
    cuda_optimizer.sum_of_squares(wide, square, run.stream)
    return device.astype(square, "float32"), 1


def _redone(run: Run, layer: Any, feed: Any, d: DeviceArray, flag: DeviceArray, made: DeviceArray | None,
            finish: dict[str, Any]) -> bool:  # fmt: skip
    """The product on BF16 into d where `flag` is set, with what the BF16 track launches; whether `made` is
    filled with its sums then.
    """
    with run.only_if(flag):
        other, of = feed.other(run, "bf16")
        of = layer if of is None else of
        if "x16" in finish:  # a shortcut in the same launch
            finish["residual"] = _shortcut(run, d, flag, finish)
        geometry, how = of.geometry(other.x.shape), {"bias": layer.bias(run), **of.how, **finish}
        how |= {"x16": other.x, "w16": of.sixteen(run), "run_if": flag}
        same = made is not None and cuda_conv.sum_parts(geometry, d, **how) == made.shape[1]
        cuda_conv.forward(geometry, d, run.stream, sums=made if same else None, **how)
    return same


def _shortcut(run: Run, d: DeviceArray, flag: DeviceArray, finish: dict[str, Any]) -> DeviceArray:
    """The product that the FP4 one had beside it, by itself; what it takes leaves `finish`."""
    x, w, bias = (finish.pop(name) for name in ("x16", "w16", "bias2"))
    del finish["on_output"]
    out, (n, h, w_, _) = run.empty(d.shape), x.shape
    geometry = cuda_conv.Geometry(n, h, w_, h, w_, d.shape[3], 1, 1, 1, 0, 0)
    cuda_conv.forward(geometry, out, run.stream, x16=x, w16=w, bias=bias, run_if=flag)
    return out
