"""What one pass of a network over a batch shares: the stream, the weights, the memory, and views of pictures.

Pictures are `DeviceArray`s (N, H, W, C) in BF16 or E4M3 bytes whose pixels lie evenly spaced: an array of
their own, or a range of channels of a wider one (`part`). What one step of a network hands to the next is
such an array with the sums over it that a norm needs (`Pictures`). Memory comes from the caller's framework,
on its current stream, and goes back when the last `DeviceArray` over it does; nothing is read back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ... import device
from ...adapters import ITEMSIZE, DeviceArray, contiguous_strides
from ...backends import cuda
from ...backends.cuda_gemm import DTYPES, FORMATS, filled, round_up

SAVES = ("packed", "bf16", "recompute")
GRADIENTS = ("twin", "master")


class Pictures(NamedTuple):
    """Pictures (N, H, W, C), and what the convolutions that wrote them summed on the way, so that a norm does
    not read them for its statistics.

    sums: of consecutive ranges of channels, C together, (N, parts, C_i, 2) float32: sum and sum of squares of
    each channel over a part of an image's pixels (`cuda_conv.sum_parts`). None at all where they are unknown
    of any channel.
    """

    array: DeviceArray
    sums: tuple[DeviceArray, ...] = ()


def beside(first: Pictures, second: Pictures) -> Pictures:
    """The array of `second`, in which its own channels come after those of `first`, with the sums of both."""
    return Pictures(second.array, first.sums + second.sums if first.sums and second.sums else ())


class Run:
    """One forward and the backward that belongs to it.

    Attributes:
        weights, gradients: `DeviceParameters` that the layers read, and to which gradients are added.
        version: of the weights that the forward read.
        recording: whether a backward will follow.
        save: how the inputs of FP4 products are kept for the weights' gradients: "packed" FP4, the decoded
            values in "bf16", or not at all, "recompute". All give the same gradients. The BF16 track keeps
            them with "bf16" and computes them again otherwise.
        backward: what the gradient in the input of an FP4 layer is made with, the "twin" or the "master".
        accumulate: how FP4 products are summed, "fast" or "promoted" (`fp4bf16.matmul`).
        held: bytes kept for the backward, by kind.
        twins: of the weights, decoded for the backward (`products.Layer.seen`), by the length of their rows.
        time: what the residual blocks read of the time embedding (`embedding.Time`).
        watchers: what looks at the products (`watch`), those that ask for it of a run that records nothing.
        certificates: that one of them which certifies FP4 products (`certificates`), or None.
        run_if: a flag (1,) int32 on the device without which products and norms do nothing, or None.
    """

    def __init__(
        self, weights: Any, gradients: Any, like: DeviceArray, recording: bool, save: str, backward: str,
        accumulate: str, watchers: tuple = (),
    ):  # fmt: skip
        self.weights, self.gradients, self.like = weights, gradients, like
        self.version = weights.version
        self.recording, self.save, self.backward, self.accumulate = recording, save, backward, accumulate
        self.stream = device.launch("unet2d", None, (like,))
        self.held: Counter = Counter()
        self._counted: set[tuple[int, int]] = set()
        self.twins: dict[int, DeviceArray] = {}
        self.time: Any = None
        self.watchers = tuple(w for w in watchers if recording or not w.recorded)
        self.certificates = next((w for w in self.watchers if w.certifies), None)
        self.run_if: DeviceArray | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is computed inside is no part of the pass: nothing is kept for backward, nobody watches."""
        before = self.recording, self.watchers, self.certificates
        self.recording, self.watchers, self.certificates = False, (), None
        try:
            yield
        finally:
            self.recording, self.watchers, self.certificates = before

    @contextmanager
    def only_if(self, flag: DeviceArray) -> Iterator[None]:
        """`aside`, and products and norms inside do nothing where `flag` is 0 when they start."""
        with self.aside():
            self.run_if = flag
            try:
                yield
            finally:
                self.run_if = None

    def empty(self, shape: Sequence[int], dtype: str = "bfloat16", hold: str | None = None) -> DeviceArray:
        """New memory; `hold` is the kind under which it is counted where it is kept for the backward."""
        made = device.empty(shape, dtype, like=self.like)
        self.hold(hold, made)
        return made

    def hold(self, kind: str | None, *arrays: DeviceArray) -> None:
        """Count `arrays` as kept for the backward; each once, for several steps may keep the same one."""
        if kind is not None and self.recording:
            new = {(a.address, a.nbytes) for a in arrays} - self._counted
            self.held[kind] += sum(nbytes for _, nbytes in new)
            self._counted |= new

    def on_this_stream(self) -> Run:
        """Work from here on goes to the stream that is current now: the backward may run on another."""
        self.stream = device.launch("unet2d", None, (self.like,))
        return self


# ---- views -------------------------------------------------------------------------------------------------
def seen(x: DeviceArray, shape: tuple, strides: tuple, address: int | None = None) -> DeviceArray:
    """x's memory with another shape and strides."""
    address = x.address if address is None else address
    return DeviceArray(address, shape, strides, x.dtype, x.device, x.framework, x.owner, x.name)


def part(x: DeviceArray, start: int, count: int) -> DeviceArray:
    """`count` channels of pictures from `start` on, a view."""
    return seen(x, (*x.shape[:-1], count), x.strides, x.address + start * ITEMSIZE[x.dtype])


def shaped(x: DeviceArray, shape: Sequence[int]) -> DeviceArray:
    """A C-contiguous array in another shape, a view."""
    shape = tuple(shape)
    return seen(x, shape, contiguous_strides(shape))


def rows(x: DeviceArray) -> tuple[int, int, int]:
    """(rows, channels, stride from row to row) of pictures, a row being a pixel."""
    n, h, w, c = x.shape
    return n * h * w, c, x.strides[2]


# ---- conversions -------------------------------------------------------------------------------------------
def converted(run: Run, x: DeviceArray, channels: int, dtype: str = "bfloat16") -> DeviceArray:
    """Pictures in another dtype, in `channels` channels: those that `x` lacks are zero."""
    count, c, stride = rows(x)
    made = run.empty((*x.shape[:-1], channels), dtype)
    device.call("convert", x.address, DTYPES[x.dtype], 1, count, c, 0, stride, 1, made.address, DTYPES[dtype],
                channels, run.stream)  # fmt: skip
    return made


# ---- FP4 ---------------------------------------------------------------------------------------------------
def quantize(run: Run, x: DeviceArray, count: int, k: int, stride: int, per_scale: int, search: str,
             results: dict[str, DeviceArray]) -> None:  # fmt: skip
    """nvfp4_exact of `count` rows of `k` elements, one outer scale for each `per_scale` rows.

    results: any of "expanded" (count, width), "packed" with "block_scale", "outer_scale".
    """
    fields: dict[str, Any] = {
        "x": x.address, "rows": count, "k_size": k, "after": 1, "x_stride": stride, "k_stride": 1,
        "dtype": DTYPES[x.dtype], "format": FORMATS["nvfp4_exact"], "search": int(search == "fast"),
        "mid": per_scale, "inner": 1,
    }  # fmt: skip
    fields |= {name: array.address for name, array in results.items()}
    if "expanded" in results:
        fields["expanded_stride"] = results["expanded"].shape[-1]
    args = filled("fp4bf16_quantize_args", fields)
    library = cuda.load()
    size = int(library.lib.fp4bf16_quantize_workspace_size(args))
    if size > 0:
        workspace = run.empty((size,), "uint8")  # which has to live until the launch
        args.workspace = library.ffi.cast("void*", workspace.address)
    device.call("quantize", args, run.stream)


def decoded(run: Run, packed: DeviceArray, block: DeviceArray | None, outer: DeviceArray, per_scale: int,
            shape: Sequence[int]) -> DeviceArray:  # fmt: skip
    """BF16 of packed nvfp4_exact, exactly; without `block` of E4M3 bytes. Rows run along the last axis, and
    lie a multiple of 16 bytes apart.
    """
    k = shape[-1]
    made = run.empty((*shape[:-1], round_up(k, 8)))
    count, stride = math.prod(shape[:-1]), made.shape[-1]
    device.call("dequantize", FORMATS["fp8" if block is None else "nvfp4_exact"], packed.address,
                0 if block is None else block.address, outer.address, count, k, per_scale, 1, made.address,
                DTYPES["bfloat16"], 1, stride, 1, run.stream)  # fmt: skip
    return part(made, 0, k)
