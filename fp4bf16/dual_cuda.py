"""A `DualWeight` in device memory: the branch as the kernels read it, and `refresh` into the same memory.

The factors come from the framework's SVD and cost a synchronisation; ``refresh(factors=False)`` keeps them
and has none: W - D U is a BF16 product with the master as its residual, quantised over the old twin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import device
from .backends import cuda_gemm as kernels
from .backends import cuda_math
from .backends.cuda_gemm import EXPANDING, Finish, Matrices, round_up
from .device import DeviceArray
from .formats import Format, QuantizedArray


@dataclass(slots=True)
class Branch:
    """BF16 factors of the branch, the outlier rows as further ranks.

    Attributes:
        down_t: (rank, K rounded up to 8), None for rank 0; of a convolution the ranks are rounded up to 8,
            too, because they are channels there. up_t: (N, rank + outliers rounded up to 8), the
            outlier rows of the master in its last columns. Padding is zero.
        index: int64 (outliers,), index32 the same as int32, or None. k: length of a row of `down_t` in use.
    """

    down_t: DeviceArray | None
    up_t: DeviceArray
    index: DeviceArray | None
    index32: DeviceArray | None
    rank: int
    outliers: int
    k: int

    @property
    def down(self) -> Matrices:
        """D as right operand of X @ D."""
        return Matrices(self.down_t, (), (), self.rank, self.down_t.shape[1], self.k, 1)

    @property
    def up(self) -> Matrices:
        """[U; outlier rows] as right operand."""
        n, width = self.up_t.shape
        return Matrices(self.up_t, (), (), n, width, self.rank + self.outliers, 1)

    def ranks(self) -> tuple[Matrices, Matrices]:
        """(D, U) with the ranks alone as contraction, operands of D @ U."""
        n, width = self.up_t.shape
        return self.down.T, Matrices(self.up_t, (), (), n, width, self.rank, 1)

    def fields(self) -> dict[str, int]:
        """The branch in the quantiser's arguments."""
        fields = {"rank": self.rank, "outliers": self.outliers}
        if self.rank:
            fields |= {"down_t": self.down_t.address, "down_stride": self.down_t.shape[1]}
        if self.outliers:
            fields["outlier_index"] = self.index32.address
        return fields


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(K, N) of a weight (K, N) or (O, kh, kw, C)."""
    return shape if len(shape) == 2 else (math.prod(shape[1:]), shape[0])


def matrix(master: DeviceArray) -> DeviceArray:
    """The master as (K, N): a view, or a copy where a convolution's weight has gaps or another order."""
    if master.ndim == 2:
        return master
    k, n = matrix_shape(master.shape)
    return device.permute(device.contiguous(cuda_math.reshaped(master, (n, k))), (1, 0))


def make_branch(master: DeviceArray, rank: int, index: np.ndarray, padding: int) -> Branch:
    """Memory for a branch of `rank`, rounded up to `padding`, with the outlier rows `index`."""
    (k, n), ranks = master.shape, round_up(rank, padding)
    down_t = device.full((ranks, round_up(k, 8)), 0, "bfloat16", like=master).owner if rank else None
    up_t = device.full((n, max(8, round_up(rank + index.size, 8))), 0, "bfloat16", like=master)
    return rebuilt((down_t, up_t.owner), rank, index, k)


def set_index(branch: Branch, index: np.ndarray) -> None:
    """Other outlier rows, as many as before."""
    for target, dtype in ((branch.index, np.int64), (branch.index32, np.int32)):
        if target is not None:
            device.assign(target, device.from_host(index.astype(dtype), like=target))


def kept(branch: Branch) -> tuple[Any, Any]:
    """The framework's arrays behind a branch, which can be copied and pickled as addresses cannot."""
    return None if branch.down_t is None else branch.down_t.owner, branch.up_t.owner


def rebuilt(arrays: tuple[Any, Any], rank: int, index: np.ndarray, k: int) -> Branch:
    """The branch over what `kept` gave, or copies of it."""
    down_t, up_t = (None if x is None else device.operand(x, "factor") for x in arrays)
    rows = [None, None]
    if index.size:
        rows = [device.from_host(index.astype(t), like=up_t) for t in (np.int64, np.int32)]
    return Branch(down_t, up_t, *rows, rank, int(index.size), k)


def views(branch: Branch) -> tuple[DeviceArray, DeviceArray]:
    """`down` (K, rank) and `up` (rank, N) as views of the branch's memory."""
    up = device.permute(cuda_math.part(branch.up_t, slice(None), slice(0, branch.rank)), (1, 0))
    if branch.rank == 0:
        return device.empty((branch.k, 0), "bfloat16", like=branch.up_t), up
    used = cuda_math.part(branch.down_t, slice(0, branch.rank), slice(0, branch.k))
    return device.permute(used, (1, 0)), up


def make_twin(master: DeviceArray, fmt: Format) -> QuantizedArray:
    """Memory for a twin blocked along K, a convolution's along C: packed bytes, scales, and the expanded
    bytes where the format has them."""
    conv = master.ndim == 4
    lead, k = (master.shape[:3], master.shape[3]) if conv else (master.shape[1:], master.shape[0])
    kp = round_up(k, fmt.multiple)
    new = lambda shape, dtype: device.empty(shape, dtype, like=master).owner  # noqa: E731
    packed = new((*lead, kp // 2 if fmt.block else kp), "uint8")
    block = new((*lead, kp // fmt.block), "uint8") if fmt.block else None
    ones = (1,) * len(lead)
    groups = {"row": (lead[0], *ones), "tensor": (1, *ones), None: None}[fmt.default_outer]
    outer = None if groups is None else new(groups, "float32")
    order = (0, 1, 2, 3) if conv else (1, 0)
    twin = QuantizedArray(packed, block, outer, fmt, master.shape, order)
    if fmt.name in EXPANDING:
        twin._expanded = packed if fmt.name == "fp8" and k % 16 == 0 else _expanded(twin, master)
    return twin


def _expanded(twin: QuantizedArray, like: DeviceArray) -> Any:
    """Memory for the expanded bytes, rows padded for TMA."""
    rows = device.full((*twin.lead, round_up(twin.k, 16)), 0, "uint8", like=like)
    return cuda_math.part(rows, ..., slice(0, twin.k_padded)).owner


def set_factors(branch: Branch, master: DeviceArray) -> None:
    """The best rank-r approximation of the master without its outlier rows, rounded to BF16, in place."""
    if branch.rank == 0:
        return
    dense = device.astype(master, "float32")
    if branch.outliers:
        cuda_math.zero_rows(dense, branch.index)
    factors = cuda_math.low_rank(dense, branch.rank)
    for view, factor in zip(views(branch), factors, strict=True):
        device.assign(view, device.astype(factor, "bfloat16"))
    if branch.outliers:
        cuda_math.zero_rows(views(branch)[0], branch.index)


def set_twin(twin: QuantizedArray, branch: Branch, master: DeviceArray) -> None:
    """The twin of W - D U and the outlier rows of `up_t`, in place, without synchronisation."""
    with device.ordered("refresh", None, [master, branch.up_t]) as stream:
        if branch.outliers:
            rows = device.permute(cuda_math.part(master, branch.index), (1, 0))
            columns = slice(branch.rank, branch.rank + branch.outliers)
            device.assign(cuda_math.part(branch.up_t, slice(None), columns), rows)
        if twin.ndim == 4:
            residual = _convolution_residual(branch, master, stream)
        else:
            residual = _residual(branch, master, stream)
        parts = {name: getattr(twin, name) for name in ("packed", "block_scale", "outer_scale")}
        fields = {name: device.operand(p, name).address for name, p in parts.items() if p is not None}
        if twin.format.name in EXPANDING and twin._expanded is not twin.packed:
            twin._expanded = _expanded(twin, master) if twin._expanded is None else twin._expanded
            expanded = device.operand(twin._expanded, "expanded")
            fields |= {"expanded": expanded.address, "expanded_stride": _row_stride(expanded)}
        if twin.ndim == 4 and twin.format.default_outer == "row":  # one outer scale an output channel
            fields |= {"mid": twin.shape[1] * twin.shape[2], "inner": 1}
        kernels.quantize(residual, twin.format, "full", stream, **fields)


def _row_stride(x: DeviceArray) -> int:
    return x.strides[-2] if x.shape[-2] > 1 else round_up(x.shape[-1], 16)


def _convolution_residual(branch: Branch, master: DeviceArray, stream: int) -> Matrices:
    """W - D U of a convolution as matrices of taps, along C."""
    if branch.rank == 0:
        return kernels.left(device.contiguous(master))
    left = _residual(branch, matrix(master), stream)  # (O, K) in memory
    return kernels.left(cuda_math.reshaped(left.array, master.shape))


def _residual(branch: Branch, master: DeviceArray, stream: int) -> Matrices:
    """W - D U as right operand, float32, zero in the outlier rows; the master itself where it is that."""
    if branch.rank == 0 and not branch.outliers:
        return kernels.right(master)
    k, n = master.shape
    turned = master.strides[0] == 1 and master.strides[1] >= k  # a PyTorch weight's .T: (N, K) in memory
    if not turned and (master.strides[1] != 1 or master.strides[0] < n):
        master = device.contiguous(master)
    if branch.rank == 0:
        left = device.astype(master, "float32")
        cuda_math.zero_rows(left, branch.index)
        return kernels.right(left)
    down, up = branch.ranks()
    shape = (n, k) if turned else (k, n)
    left = device.empty(shape, "float32", like=master)
    pair = (up, down) if turned else (down, up)
    source = kernels.right(master) if turned else kernels.left(master)
    kernels.product(kernels.left(left), stream, sixteen=pair, finish=Finish(residual=source, alpha=-1.0))
    if branch.outliers:
        cuda_math.zero_rows(device.permute(left, (1, 0)) if turned else left, branch.index)
    return kernels.left(left) if turned else kernels.right(left)


def not_finite(x: DeviceArray) -> int:
    return cuda_math.not_finite(device.astype(x, "float32"))


def host(x: Any) -> np.ndarray:
    """float32 copy on the host. Waits for the device."""
    return device.to_host(x).astype(np.float32)
