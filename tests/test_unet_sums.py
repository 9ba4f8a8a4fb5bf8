"""What a UNet on the device spares its norms and its backward, by the emulated library: the sums that
convolutions hand to the norms after them, and the twins that are decoded together.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from host_cuda import Arrays, host_cuda, memory, put  # noqa: F401  (host_cuda is a fixture)
from unet_cases import FP4, Case, joined, relative

from fp4bf16 import device
from fp4bf16.backends import cuda_conv, cuda_math
from fp4bf16.backends.cuda_gemm import FORMATS
from fp4bf16.interop import BFLOAT16
from fp4bf16.nn.cuda import products
from fp4bf16.nn.layers import GroupNorm
from fp4bf16.nn.tape import no_grad

ROUTES = {"bf16": {}, "fp4": FP4}
EIGHT = FORMATS["fp8"]  # as which a twin's E4M3 bytes are decoded


@pytest.fixture(autouse=True)
def _arithmetic(host_cuda, monkeypatch):  # noqa: F811
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())
    monkeypatch.setattr(products, "SUMMED_BATCH", 0)  # the tests' batches are small
    monkeypatch.setattr(products, "SUMMED_IMAGE", 0)


class Watch:
    """Launches of convolutions and norms. parts: of the sums that a convolution could write, by its result's
    address; written: addresses of those that were; norms: (addresses of the sums that one was given, whether
    all convolutions that wrote its input could write them).
    """

    def __init__(self, monkeypatch, library):
        self.loaded, self.at, self._kept = library, library.at, []
        self.parts, self.written, self.norms = {}, [], []
        call, make = device.call, library.fake._make

        def watched(name, *arguments):
            call(name, *arguments)
            if name in ("conv2d", "group_norm"):
                getattr(self, name)(arguments[0][0])

        def kept(*arguments):  # so that an address stands for one array
            self._kept.append(make(*arguments))
            return self._kept[-1]

        monkeypatch.setattr(device, "call", watched)
        monkeypatch.setattr(library.fake, "_make", kept)

    def conv2d(self, a) -> None:
        parts = self.loaded.lib.fp4bf16_conv2d_sum_parts(self.loaded.ffi.addressof(a))
        self.parts[self.at(a.d)] = int(parts)
        if self.at(a.sums):
            self.written.append(self.at(a.sums))

    def group_norm(self, a) -> None:
        given, x = [i for i in range(2) if self.at(a.sums[i])], self.at(a.x)
        sources = [parts for d, parts in self.parts.items() if x <= d < x + 2 * a.c]
        assert len(sources) in (1, 2)
        self.norms.append(([self.at(a.sums[i]) for i in given], all(sources)))
        if given:
            self._compare(a, given)

    def _compare(self, a, given) -> None:
        """The sums that the norm is given are those of what it reads, channel by channel."""
        sums = [memory(self.at(a.sums[i]), (a.n, a.sum_parts[i], a.sum_channels[i], 2), np.float32)
                for i in given]  # fmt: skip
        got = np.concatenate([s.astype(np.float64).sum(1) for s in sums], 1)
        x = memory(self.at(a.x), (a.n, a.pixels, a.c), BFLOAT16, (a.x_image, a.x_pixel, 1)).astype(np.float64)
        terms = np.stack([x, np.square(x)], -1)
        # a float32 sum of `pixels` terms, in any order, errs by less than this
        assert (np.abs(got - terms.sum(1)) <= a.pixels * 2.0**-24 * np.abs(terms).sum(1)).all()


@pytest.fixture
def watch(host_cuda, monkeypatch):  # noqa: F811
    return Watch(monkeypatch, host_cuda)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["tiny", "no middle"])
def test_norms_get_the_sums_of_what_they_read(name, route, rng, watch):
    """`Watch` compares the values: of joined pictures, the features' channels come first."""
    case = Case(name, rng, put, ROUTES[route])
    with no_grad():
        case.forward()
    assert len(watch.norms) == sum(isinstance(m, GroupNorm) for _, m in case.device.named_modules())
    assert all(bool(given) == could for given, could in watch.norms)
    used = [address for given, _ in watch.norms for address in given]
    assert {len(given) for given, _ in watch.norms} >= {1, 2}
    assert set(used) == set(watch.written) and len(set(watch.written)) == len(watch.written)


def test_a_scaled_block_has_none(rng, watch):
    """Its sum is divided after the convolution has summed it; every other norm still gets its sums."""
    case = Case("variants", rng, put)
    case.x = rng.standard_normal((2, 32, 32, 3)).astype(np.float32)
    with no_grad():
        case.forward()
    without = sum(could and not given for given, could in watch.norms)
    assert without == 3  # mid_block.attentions.0.group_norm, resnets.1.norm1, up_blocks.0.resnets.0.norm1
    assert all(could or not given for given, could in watch.norms)


@pytest.mark.parametrize("name", ["tiny", "variants", "no middle"])
def test_results_are_those_without_sums(name, rng, monkeypatch):
    """But for the rounding of the statistics, which carries some numbers over to BF16's next one; what reads
    these rounds otherwise in turn. Two roundings, however independent, are sqrt(2) of one's error apart.
    """
    seed, found = int(rng.integers(1 << 30)), []
    for parts in (cuda_conv.parts_of, lambda args: 0):
        monkeypatch.setattr(cuda_conv, "parts_of", parts)
        case = Case(name, np.random.default_rng(seed), put)
        found.append(case.on_device())
    exact, exact_gradients = case.on_host("reference")
    (y, gradients), (z, others) = found
    assert relative(y, z) < 1.5 * relative(z, exact)
    apart = relative(joined(gradients), joined(others))
    assert apart < 1.5 * relative(joined(others), joined(exact_gradients))


def test_what_is_computed_again_keeps_its_sums(rng, watch):
    """The backward's norms are given the same sums as the forward's, and the inventory knows of them."""
    seed, held = int(rng.integers(1 << 30)), {}
    for save in ("packed", "recompute"):
        case = Case("tiny", np.random.default_rng(seed), put, FP4, save=save)
        del watch.norms[:]
        case.forward().backward(put(case.g))
        count = sum(isinstance(m, GroupNorm) for _, m in case.device.named_modules())
        first, again = watch.norms[:count], watch.norms[count:]
        assert len(again) == (0 if save == "packed" else count)
        assert sorted(first) == sorted(again) or not again
        held[save] = case.device.inventory()["statistics"]
    assert held["packed"] < held["recompute"]


def test_twins_of_equal_rows_are_decoded_at_once(rng, monkeypatch):
    """In the backward, each set when the first of it is needed, however many layers it serves; those of a
    weight by phases on their own.
    """
    case = Case("tiny", rng, put, FP4)
    flat, decoded, call = case.device.flat, [], device.call

    def watched(name, *arguments):
        call(name, *arguments)
        if name == "dequantize" and arguments[0] == EIGHT:
            decoded.append(arguments[5])

    y = case.forward()
    monkeypatch.setattr(device, "call", watched)
    y.backward(put(case.g))
    layers = [n for n, m in case.device.named_modules() if getattr(m, "track", None) == "fp4"]
    twins = [f"{n}.weight" for n in layers if flat.layout.twins.get(f"{n}.weight")]
    assert len(decoded) == len(set(decoded)) < len(twins) / 2
    phased = {4 * flat.layout.shapes[n][3] for n in case.device.phased()}
    assert phased <= set(decoded) <= phased | {flat.layout.row_length(n) for n in twins}


def test_twins_of_equal_rows_lie_together(rng):
    flat = Case("tiny", rng, put).device.flat
    for name in flat.layout.twins:
        w8, scales, first = flat.twins_like(name)
        own, rows = flat.twin_of(name), flat.layout.shapes[name][0]
        k = math.prod(flat.layout.shapes[name][1:])
        assert w8.shape == (len(scales.owner.array), k) and w8.c_contiguous
        assert w8.owner.array[first : first + rows].tobytes() == own[0].owner.array.tobytes(), name
        assert np.array_equal(scales.owner.array[first : first + rows], own[1].owner.array), name
        assert own[0].address == w8.address + first * k and own[1].address == scales.address + 4 * first


@pytest.mark.parametrize(
    "n, side, pays", [(64, 32, True), (63, 32, False), (256, 16, True), (255, 16, False), (9999, 8, False)]
)
def test_sums_are_made_where_they_pay(monkeypatch, n, side, pays):
    monkeypatch.undo()
    assert products._sums_pay(cuda_conv.Geometry(n, side, side, side, side, 128, 3, 3, 1, 1, 1)) is pays
