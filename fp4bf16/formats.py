"""Number formats and the container of a quantised array."""

from __future__ import annotations

import copy as _copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import DTypeError, ShapeError, nearest


@dataclass(frozen=True)
class Format:
    """A quantised number format.

    Attributes:
        name: "nvfp4_exact", "nvfp4", "mxfp4" or "fp8".
        block: elements that share one block scale, along the contraction; 0 where there is no block scale.
        scale: dtype of a block scale's byte: "float8_e4m3fn", "float8_e8m0fnu" or None.
        element: dtype of an element: "float4_e2m1fn" or "float8_e4m3fn".
        default_outer: what the outer scale is given for unless asked otherwise: "row", "tensor" or None.
    """

    name: str
    block: int
    scale: str | None
    element: str
    default_outer: str | None

    @property
    def bits(self) -> float:
        """Bits an element, block scales counted, outer scales not."""
        return 8.0 if self.block == 0 else 4 + 8 / self.block

    @property
    def multiple(self) -> int:
        """The container pads K to a multiple of this."""
        return self.block or 1

    def __str__(self) -> str:
        return self.name


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("nvfp4_exact", 16, "float8_e4m3fn", "float4_e2m1fn", "row"),
        Format("nvfp4", 16, "float8_e4m3fn", "float4_e2m1fn", "tensor"),
        Format("mxfp4", 32, "float8_e8m0fnu", "float4_e2m1fn", None),
        Format("fp8", 0, None, "float8_e4m3fn", "row"),
    )
}


def get_format(name: str | Format) -> Format:
    """The `Format` called `name`; a `Format` is returned as it is.

    >>> get_format("nvfp4_exact").bits
    4.5
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"format: {name!r} is not a format{nearest(name, FORMATS)}")
    return FORMATS[name]


@dataclass
class QuantStats:
    """What the quantiser saw. Norms are sums of squares in float64; rows are those of the stored layout.

    Attributes:
        row_norm_sq, row_quantized_norm_sq, row_error_sq: float64 (rows,), of x, of its quantised value, of
            their difference. The certificate of a product is made of these.
        clipped: elements beyond the largest code of their block. underflowed_blocks: blocks under the least
            scale.
        zero_blocks: blocks of zeros. overflow: blocks beyond what the outer scale reaches (fails a
            certificate).
        source_dtype: dtype of x.
    """

    row_norm_sq: np.ndarray
    row_quantized_norm_sq: np.ndarray
    row_error_sq: np.ndarray
    clipped: int = 0
    underflowed_blocks: int = 0
    zero_blocks: int = 0
    overflow: int = 0
    source_dtype: str = "float32"

    @property
    def norm_sq(self) -> float:
        return float(self.row_norm_sq.sum())

    @property
    def quantized_norm_sq(self) -> float:
        return float(self.row_quantized_norm_sq.sum())

    @property
    def error_norm_sq(self) -> float:
        return float(self.row_error_sq.sum())


def _check_array(name: str, array: Any) -> None:
    if array is not None and not hasattr(array, "itemsize"):
        raise TypeError(
            f"QuantizedArray: {name} is a {type(array).__name__}, but an array is needed; pass "
            f"numpy.asarray of it"
        )


@dataclass(eq=False, repr=False)
class QuantizedArray:
    """A quantised array: packed codes, block scales, outer scales; data, not a handle.

    The bytes are stored with the blocked axis last: stored axis ``order[i]`` is logical axis ``i``. `shape`
    is logical (the padding of K is not in it) and ``.T`` is a view of the same bytes.

    Attributes:
        packed: uint8 (\\*lead, K_padded / 2), two E2M1 codes a byte, low nibble = even k; for "fp8" uint8
            (\\*lead, K), one E4M3 byte an element. An array of the caller's framework.
        block_scale: uint8 (\\*lead, K_padded / block) E4M3 or E8M0 bytes in linear layout; None for "fp8".
        outer_scale: float32 with as many axes as the stored array, 1 where it does not vary (always 1 in the
            last): the decode scale, it multiplies; None for "mxfp4".
        format: the `Format`. shape: logical shape. order: see above.
        stats: `QuantStats` of the quantisation, or None for a container made by hand or loaded.

    `expanded` is kept: other bytes must be assigned (``xq.packed = new``) or come from ``quantize(out=xq)``.
    Written into the old array by hand they leave it behind; assign the array to itself then.

    >>> import numpy as np, fp4bf16 as fb
    >>> xq = fb.quantize(np.ones((4, 32), np.float32))
    >>> xq
    QuantizedArray(nvfp4_exact, shape (4, 32), blocked along axis 1, 88 bytes, 5.5 bits an element)
    >>> xq.T.shape
    (32, 4)
    """

    packed: Any
    block_scale: Any
    outer_scale: Any
    format: Format
    shape: tuple[int, ...]
    order: tuple[int, ...]
    stats: QuantStats | None = None
    _expanded: Any = field(default=None, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in ("packed", "block_scale"):
            object.__setattr__(self, "_expanded", None)

    def __post_init__(self):
        self.shape, self.order = tuple(map(int, self.shape)), tuple(map(int, self.order))
        self.check()

    def check(self) -> None:
        """Raise for arrays that do not fit one another, as they may not after one was replaced by hand."""
        self.format = get_format(self.format)
        n = len(self.shape)
        if n == 0 or sorted(self.order) != list(range(n)):
            raise ShapeError(
                f"QuantizedArray: order {self.order} is not a permutation of the {n} axes of {self.shape}; "
                f"pass the stored position of each axis"
            )
        *lead, k = self.stored_shape
        block = self.format.block
        padded = -(-k // block) * block if block else k
        self._check("packed", self.packed, (*lead, padded // 2 if block else k))
        if block:
            self._check("block_scale", self.block_scale, (*lead, padded // block))
        elif self.block_scale is not None:
            raise ShapeError("QuantizedArray: block_scale must be None for fp8, which has no block scale")
        self._check_outer((*lead, 1))
        if self._expanded is not None:
            self._check("expanded", self._expanded, (*lead, self.k_padded))

    def _check(self, name: str, array: Any, want: tuple[int, ...]) -> None:
        _check_array(name, array)
        if array is None or tuple(array.shape) != want:
            got = None if array is None else tuple(array.shape)
            raise ShapeError(
                f"QuantizedArray: {name} of a {self.format} array of shape {self.shape} stored in order "
                f"{self.order} must be {want}, but is {got}; pass bytes of that shape"
            )
        if array.itemsize != 1:
            raise DTypeError(
                f"QuantizedArray: {name} has dtype {array.dtype}, {array.itemsize} bytes an element, but "
                f"bytes are needed; pass uint8"
            )

    def _check_outer(self, want: tuple[int, ...]) -> None:
        outer = self.outer_scale
        _check_array("outer_scale", outer)
        got = None if outer is None else tuple(outer.shape)
        if self.format.default_outer is None:
            fits, needed = outer is None, "None, for the format has none"
        else:
            fits = got is not None and len(got) == len(want)
            fits = fits and all(n in (1, m) for n, m in zip(got, want, strict=True))
            needed = f"{want}, or 1 in some of these axes"
        if not fits:
            raise ShapeError(
                f"QuantizedArray: outer_scale of a {self.format} array of shape {self.shape} stored in order "
                f"{self.order} must be {needed}, but is {got}; reshape it"
            )
        if outer is not None and "float" not in str(outer.dtype):  # bfloat16, torch.float32 as well
            raise DTypeError(
                f"QuantizedArray: outer_scale has dtype {outer.dtype}, but float32 is needed; pass the "
                f"decode scales themselves, no exponents"
            )

    # ---- shape
    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def axis(self) -> int:
        """The logical axis that the blocks run along."""
        return self.order.index(self.ndim - 1)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Logical shape in stored axis order, K not padded."""
        stored = list(self.shape)
        for n, position in zip(self.shape, self.order, strict=True):
            stored[position] = n
        return tuple(stored)

    @property
    def lead(self) -> tuple[int, ...]:
        """Stored shape without the blocked axis."""
        return self.stored_shape[:-1]

    @property
    def rows(self) -> int:
        """Number of stored rows: the product of `lead`."""
        return int(np.prod(self.lead, dtype=np.int64))

    @property
    def k(self) -> int:
        """Length of the blocked axis, without padding."""
        return self.shape[self.axis]

    @property
    def k_padded(self) -> int:
        m = self.format.multiple
        return -(-self.k // m) * m

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def dtype(self) -> str:
        """Element type by name: "float4_e2m1fn" or "float8_e4m3fn"."""
        return self.format.element

    @property
    def nbytes(self) -> int:
        """Bytes of packed codes, block scales and outer scales (the cached expansion is not counted)."""
        parts = [self.packed, self.block_scale, self.outer_scale]
        return sum(int(np.prod(tuple(p.shape), dtype=np.int64)) * p.itemsize for p in parts if p is not None)

    def transpose(self, *axes: int) -> QuantizedArray:
        """A view with permuted logical axes (reversed when none are given), as ``np.transpose``."""
        if len(axes) == 1 and not isinstance(axes[0], int):
            axes = tuple(axes[0])
        axes = axes or tuple(reversed(range(self.ndim)))
        n = self.ndim
        if not all(-n <= a < n for a in axes) or sorted(a % n for a in axes) != list(range(n)):
            raise ShapeError(
                f"transpose: axes {axes} are not a permutation of the {self.ndim} axes of {self.shape}"
            )
        axes = tuple(a % self.ndim for a in axes)
        view = _copy.copy(self)
        view.shape = tuple(self.shape[a] for a in axes)
        view.order = tuple(self.order[a] for a in axes)
        view._expanded = self._expanded  # copy.copy left it out: it is not in the pickled state
        return view

    @property
    def T(self) -> QuantizedArray:
        """The same bytes with the axes reversed."""
        return self.transpose()

    @property
    def mT(self) -> QuantizedArray:
        """The same bytes with the last two axes swapped."""
        if self.ndim < 2:
            raise ShapeError(f"mT: an array of shape {self.shape} has fewer than two axes")
        axes = list(range(self.ndim))
        axes[-2:] = axes[:-3:-1]
        return self.transpose(*axes)

    # ---- data
    @property
    def expanded(self):
        """E4M3 bytes, uint8 (\\*lead, K_padded), block scale folded in: exact for "nvfp4_exact"."""
        if self._expanded is None:
            from .quantize import expand  # floor above: only the data's owner may ask for it

            self._expanded = expand(self)
        return self._expanded

    def copy(self) -> QuantizedArray:
        """A deep copy; the cached expansion is dropped."""
        new = _copy.copy(self)
        new.packed, new.block_scale, new.outer_scale = (
            None if p is None else (p.clone() if hasattr(p, "clone") else p.copy())
            for p in (self.packed, self.block_scale, self.outer_scale)
        )
        new.stats, new._expanded = _copy.deepcopy(self.stats), None
        return new

    def __getstate__(self) -> dict:
        state = dict(self.__dict__)
        state["_expanded"] = None
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # the bytes of a pickle may come from anywhere

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        from .quantize import host_values

        if copy is False:
            raise ValueError("QuantizedArray: copy is False, but decoding makes a new array; pass copy=None")
        value = host_values(self)
        return value if dtype is None else value.astype(dtype, copy=False)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        bits = 8 * self.nbytes / self.size if self.size else 0.0
        return (
            f"QuantizedArray({self.format}, shape {self.shape}, blocked along axis {self.axis}, "
            f"{self.nbytes} bytes, {bits:.3g} bits an element)"
        )
