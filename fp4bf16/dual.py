"""A weight on two tracks at once: BF16 master, FP4 twin of the residual, low-rank BF16 branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import device, dual_cuda
from .backends import cuda_math
from .backends.threads import blas_limit
from .certify import WeightNorms, dual_norms, weight_norms
from .device import DeviceArray
from .errors import NonFiniteError, ShapeError
from .formats import Format, QuantizedArray, get_format
from .interop import BFLOAT16, common_framework, float_operand, unwrap
from .quantize import dequantize, quantize

_RANDOMISED_ABOVE = 1024  # longest side for which the whole SVD is computed
_OVERSAMPLING, _POWER_STEPS = 16, 3


def low_rank(w: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 factors (K, r), (r, N) of the best rank-r approximation of `w`, singular values shared evenly.

    Above 1024 a side by a randomised range finder with power steps (Halko, Martinsson and Tropp,
    arXiv:0909.4061, algorithms 4.4 and 5.1), from a fixed seed: the same weight always gives the same
    factors.
    """
    if rank == 0 or w.size == 0:
        return np.zeros((w.shape[0], 0), np.float32), np.zeros((0, w.shape[1]), np.float32)
    if max(w.shape) > _RANDOMISED_ABOVE and rank + _OVERSAMPLING < min(w.shape):
        w = w.astype(np.float32, copy=False)
        draw = np.random.Generator(np.random.Philox(key=0)).standard_normal
        q = w @ draw((w.shape[1], rank + _OVERSAMPLING), np.float32)
        for _ in range(_POWER_STEPS):
            q = w @ (w.T @ np.linalg.qr(q)[0])
        q = np.linalg.qr(q)[0]
        u, s, vt = np.linalg.svd(q.T @ w, full_matrices=False)
        u = q @ u
    else:
        u, s, vt = np.linalg.svd(w.astype(np.float64), full_matrices=False)
    root = np.sqrt(s[:rank])
    return (u[:, :rank] * root).astype(np.float32), (root[:, None] * vt[:rank]).astype(np.float32)


def _row_numbers(outliers: Any) -> np.ndarray:
    """The rows that `outliers` names, each once, ascending."""
    try:
        found = np.asarray(outliers)
    except (TypeError, ValueError):  # ragged, or an array on a GPU
        found = np.empty(1, object)
    if found.size and found.dtype.kind not in "iu" or found.ndim != 1:
        raise TypeError(f"DualWeight: outliers is {outliers!r}, but a number of rows or their indices are "
                        f"needed; pass an int or a list of ints")  # fmt: skip
    return np.unique(found.astype(np.int64))


class DualWeight:
    """W (K, N) as ``W ~ down @ up + twin``: what ``matmul(x, w)`` multiplies on the dual track.

    The product is ``Q(x) @ twin + bf16(x @ down) @ up`` (Li et al., "SVDQuant", arXiv:2411.05007): FP4 for
    the bulk, a BF16 branch of rank `rank` for the directions that carry most of the weight. Outlier rows of W
    (columns of x) are left out of both and multiplied in BF16.

    A convolution's weight (O, kh, kw, C) is taken as the matrix (K, N) = (kh kw C, O) of the product with
    patches; its twin keeps the four axes, blocked along C, one outer scale an output channel.

    Args:
        w: (K, N) or (O, kh, kw, C), float array of NumPy, PyTorch or CuPy. A bfloat16 array *is* the master,
            not copied: change it in place (an optimizer step) and call `refresh`. Others are rounded into a
            master of its own.
        rank: columns of `down`; 0 for no branch; at most min(K, N), larger is cut to that.
        format: FP4 format of the twin and of x in the product.
        outliers: how many rows of W stay in BF16, those of the largest norm, or their indices (columns of x
            that are known to hold outliers). Not for convolutions.

    Attributes:
        master: bfloat16, of w's shape. twin: `QuantizedArray` of the residual, blocked along K (along C).
        down: bfloat16 (K, rank).
        up: bfloat16 (rank, N). outlier_index: int64 (outliers,), on the host. Arrays are of the caller's
            framework. In device memory `refresh` writes all of them where they are, so that CUDA graphs and
            addresses stay valid.

    Raises:
        ShapeError: `w` has neither two nor four axes, or an outlier index lies outside K. NonFiniteError: `w`
            holds NaN or Inf.

    >>> import numpy as np, fp4bf16 as fb
    >>> w = fb.DualWeight(np.random.default_rng(0).standard_normal((64, 32)), rank=4)
    >>> w
    DualWeight(shape (64, 32), rank 4, nvfp4_exact twin, 0 outlier rows, 6144 bytes)
    >>> fb.matmul(np.ones((2, 64), np.float32), w).shape
    (2, 32)
    """

    def __init__(self, w: Any, rank: int = 32, format: str | Format = "nvfp4_exact",
                 outliers: int | Sequence[int] = 0):  # fmt: skip
        operand = device.float_operand(w, "w") if device.is_device(w) else float_operand(w, "w")
        if len(operand.shape) not in (2, 4):
            raise ShapeError(
                f"DualWeight: w has shape {operand.shape}, but two axes (K, N), or four (O, kh, kw, C), are "
                f"needed; reshape it to a matrix"
            )
        if not isinstance(rank, int | float | np.number) or not rank >= 0 or rank % 1:
            raise ValueError(f"DualWeight: rank is {rank!r}, but a whole number of at least 0 is needed; "
                             f"pass 0 for no branch")  # fmt: skip
        self.framework, self.shape, self.format = operand.framework, operand.shape, get_format(format)
        self._outliers, self._norms = outliers, {}
        self._branch: dual_cuda.Branch | None = None
        if type(operand) is DeviceArray:
            self.matrix_shape = dual_cuda.matrix_shape(self.shape)
            with device.on(operand):
                new = w if operand.dtype == "bfloat16" else device.astype(operand, "bfloat16").owner
        else:
            self.matrix_shape = dual_cuda.matrix_shape(self.shape)
            same = operand.array.dtype == BFLOAT16
            new = w if same else unwrap(operand.array.astype(BFLOAT16), self.framework)
        self.rank = min(int(rank), *self.matrix_shape)
        self.master = new
        self.refresh()

    @staticmethod
    def _matrix(w: np.ndarray) -> np.ndarray:
        """w as (K, N)."""
        return w if w.ndim == 2 else w.reshape(w.shape[0], int(np.prod(w.shape[1:], dtype=np.int64))).T

    def refresh(self, w: Any = None, factors: bool = True) -> DualWeight:
        """Make branch and twin anew from the master, after writing `w` into it if given; returns self.

        Args:
            w: new weight of the master's shape. factors: False keeps `down`, `up` and which rows are
                outliers, and quantises what they leave of the master: cheap enough for every optimizer step,
                while the factors may be many steps old.

        In device memory everything stays at its address. With factors it synchronises (the check for NaN and
        Inf, the SVD); without, it does not, NaN passes into the twin, and it can be captured in a CUDA graph.

        Raises:
            ShapeError, TypeError: `w` does not fit the master. NonFiniteError: NaN or Inf; the weight is left
            as it was. ValueError: the master is read-only.
        """
        if hasattr(self, "twin"):
            self.check()
        place = self.place
        if type(place) is DeviceArray:
            with device.on(place):
                self._refresh_device(place, w, factors)
        else:
            self._refresh_host(w, factors)
        self._norms: dict[str, WeightNorms] = {}  # the certificate's, made when first asked for
        return self

    def _refresh_device(self, master: DeviceArray, w: Any, factors: bool) -> None:
        if w is not None:
            device.check_together("refresh", [("w", w), ("master", master)])
            new = device.float_operand(w, "w")
            self._check_shape(new.shape)
            new = device.astype(new, "bfloat16")
            if factors:
                self._check_finite(new)
            device.assign(master, new)
        elif factors:
            self._check_finite(master)
        if factors:
            matrix = dual_cuda.matrix(master)
            self.outlier_index = self._choose_outliers(matrix)
            if self._branch is None:
                padding = 8 if len(self.shape) == 4 else 1
                self._branch = dual_cuda.make_branch(matrix, self.rank, self.outlier_index, padding)
                self.down, self.up = (x.owner for x in dual_cuda.views(self._branch))
                self.twin = dual_cuda.make_twin(master, self.format)
            else:
                dual_cuda.set_index(self._branch, self.outlier_index)
            dual_cuda.set_factors(self._branch, matrix)
        dual_cuda.set_twin(self.twin, self._branch, master)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if shape != self.shape:
            raise ShapeError(f"refresh: w has shape {shape} but the master has shape {self.shape}; "
                             f"pass a weight of the master's shape")  # fmt: skip

    def _refresh_host(self, w: Any, factors: bool) -> None:
        master = float_operand(self.master, "master").array
        if w is not None:
            operand = float_operand(w, "w")
            common_framework("refresh", operand, float_operand(self.master, "master"))
            new = operand.array
            if not master.flags.writeable:
                raise ValueError("refresh: master is read-only, but w goes into it; make a new DualWeight")
            self._check_shape(new.shape)
            new = new.astype(BFLOAT16)
            self._check_finite(new)  # before anything is written: a refused w leaves the weight as it was
            master[...] = new
        self._check_finite(master)
        dense = self._matrix(master).astype(np.float32)  # (K, N)
        if factors:
            self.outlier_index = self._choose_outliers(dense)
        self._outlier_rows = dense[self.outlier_index]  # (outliers, N) float32 of BF16 values
        dense[self.outlier_index] = 0
        if factors:
            with blas_limit(1):  # whose own threads would spin on, beside the kernels of the next call
                down, up = (m.astype(BFLOAT16) for m in low_rank(dense, self.rank))
            self._down, self._up = down.astype(np.float32), up.astype(np.float32)
        # From the rounded factors, so that the twin absorbs their rounding. Outlier rows stay exactly zero: D
        # is orthogonal to them only up to rounding.
        residual = dense - self._down @ self._up
        residual[self.outlier_index] = 0
        if factors:
            self._down[self.outlier_index] = 0
            down[self.outlier_index] = 0
            self.down, self.up = unwrap(down, self.framework), unwrap(up, self.framework)
        if len(self.shape) == 4:
            residual = np.ascontiguousarray(residual.T).reshape(self.shape)
            outer = "image" if self.format.default_outer == "row" else "default"
            twin = quantize(unwrap(residual, self.framework), self.format, axis=-1, outer=outer)
        else:
            twin = quantize(unwrap(residual, self.framework), self.format, axis=0)
        self.twin: QuantizedArray = twin

    @staticmethod
    def _check_finite(w: np.ndarray | DeviceArray) -> None:
        if type(w) is DeviceArray:
            bad = dual_cuda.not_finite(w)
        else:
            bad = w.size - int(np.isfinite(w.astype(np.float32)).sum())
        if bad:
            raise NonFiniteError(
                f"DualWeight: {bad} of the {w.size} elements of w are NaN or Inf; repair the weight first"
            )

    def _choose_outliers(self, dense: np.ndarray | DeviceArray) -> np.ndarray:
        k = dense.shape[0]
        if len(self.shape) == 4 and np.any(self._outliers):
            raise ShapeError(
                f"DualWeight: outliers is {self._outliers}, but a convolution's weight {self.shape} has no "
                f"outlier rows; pass outliers=0 and keep such layers on the BF16 track"
            )
        if not isinstance(self._outliers, int | np.integer):
            index = _row_numbers(self._outliers)
            if index.size and not (0 <= index[0] and index[-1] < k):
                bad = index[0] if index[0] < 0 else index[-1]
                raise ShapeError(
                    f"DualWeight: outliers holds row {bad}, but w {self.shape} has rows 0 to {k - 1}; "
                    f"leave it out"
                )
            return index
        if not 0 <= self._outliers <= k:
            raise ShapeError(f"DualWeight: outliers is {self._outliers}, but w {self.shape} has {k} rows; "
                             f"choose between 0 and {k}")  # fmt: skip
        if self._outliers == 0:
            return np.zeros(0, np.int64)
        if type(dense) is DeviceArray:
            norms = cuda_math.square_norms(dense)
        else:
            norms = np.square(dense, dtype=np.float64).sum(1)
        return np.sort(np.argsort(-norms, kind="stable")[: self._outliers])

    # ---- what the product needs ----------------------------------------------------------------------------
    def branch_factors(self) -> tuple[np.ndarray, np.ndarray]:
        """float32 (K, r + outliers), (r + outliers, N) on the host: the branch, the outlier rows as further
        ranks. Waits for the device where the weight lies on one."""
        if self._branch is not None:
            self._down, self._up = dual_cuda.host(self.down), dual_cuda.host(self.up)
            self._outlier_rows = self.master_values()[self.outlier_index]
        if not self.outlier_index.size:
            return self._down, self._up
        unit = np.zeros((self.matrix_shape[0], self.outlier_index.size), np.float32)
        unit[self.outlier_index, np.arange(self.outlier_index.size)] = 1
        return np.hstack([self._down, unit]), np.vstack([self._up, self._outlier_rows])

    def master_values(self) -> np.ndarray:
        """The master as a float32 matrix (K, N) on the host."""
        if self._branch is not None:
            return self._matrix(dual_cuda.host(self.master))
        return self._matrix(float_operand(self.master, "master").array).astype(np.float32)

    def norms(self, track: str = "dual") -> WeightNorms:
        """What a certificate needs on "dual" or (the twin alone) "fp4"; computed once after a `refresh`."""
        if track not in self._norms:
            decoded = dequantize(self.twin)
            on_host = decoded if self._branch is None else dual_cuda.host(decoded)
            twin = self._matrix(float_operand(on_host, "twin").array)
            master = self.master_values()
            dual = track == "dual"
            self._norms[track] = (
                dual_norms(master, twin, *self.branch_factors()) if dual else weight_norms(master, twin)
            )
        return self._norms[track]

    def check(self) -> None:
        """Raise where an attribute was replaced by what does not fit the others."""
        for name, part in (("master", self.master), ("twin", self.twin)):
            if tuple(part.shape) != tuple(self.shape):
                raise ShapeError(f"DualWeight: {name} has shape {tuple(part.shape)} but the weight has shape "
                                 f"{self.shape}; make a new DualWeight of it")  # fmt: skip
        if self._branch is not None:
            made, here = (self._branch.rank, self._branch.outliers), (self.rank, len(self.outlier_index))
            if made != here:
                raise ValueError(f"DualWeight: rank and outlier rows are {here}, but the branch was made for "
                                 f"{made}; make a new DualWeight")  # fmt: skip
            places = ("master", self.master), ("twin", self.twin.packed), ("up", self._branch.up_t)
            device.check_together("DualWeight", places)

    @property
    def place(self) -> Any:
        """The master as an `Operand` or `DeviceArray`: where the weight lies."""
        if device.is_device(self.master):
            return device.float_operand(self.master, "master")
        return float_operand(self.master, "master")

    @property
    def branch(self) -> dual_cuda.Branch:
        """The branch as the kernels read it, of a weight in device memory."""
        return self._branch

    def __getstate__(self) -> dict:
        state = dict(self.__dict__)
        if self._branch is not None:  # addresses are not copied, nor views as such
            state |= {"_branch": dual_cuda.kept(self._branch), "down": None, "up": None}
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        if self._branch is not None:
            k = self.matrix_shape[0]
            self._branch = dual_cuda.rebuilt(self._branch, self.rank, self.outlier_index, k)
            self.down, self.up = (x.owner for x in dual_cuda.views(self._branch))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> str:
        return "bfloat16"

    @property
    def nbytes(self) -> int:
        """Bytes of master, twin and branch (outlier rows are rows of the master)."""
        k, n = self.matrix_shape
        return 2 * k * n + self.twin.nbytes + 2 * self.rank * (k + n)

    def __repr__(self) -> str:
        return (
            f"DualWeight(shape {self.shape}, rank {self.rank}, {self.format} twin, "
            f"{self.outlier_index.size} outlier rows, {self.nbytes} bytes)"
        )
