"""The certificate of an FP4 product on a GPU: the arguments of `fp4bf16_certificate` and its launch.

Nothing is checked here that the library checks, and nothing is read back.
"""

from __future__ import annotations

import numpy as np

from ..device import DeviceArray
from .cuda_gemm import DTYPES, filled
from .cuda_tape import call


def upper(value: float) -> float:
    """The least float32 that is at least `value`: the kernel takes single precision, and what is rounded down
    would prove nothing.

    >>> upper(0.3) > 0.3, upper(0.25)
    (True, 0.25)
    """
    near = np.float32(value)
    return float(near if float(near) >= value else np.nextafter(near, np.float32(np.inf)))


def certificate(
    weight: DeviceArray, out: DeviceArray, stream: int, *, k: int, columns: int, elements: int,
    output: str, norms: DeviceArray | None = None, sums: DeviceArray | None = None,
    outer_scale: DeviceArray | None = None, factor: float = 1.0, gain: float = 0.0, slope: float = 1.0,
    squares: DeviceArray | None = None, square_stride: int = 1, threshold: float | None = None,
    flag: DeviceArray | None = None, counts: DeviceArray | None = None,
) -> None:  # fmt: skip
    """out (4,) float32 = bound, accumulation, their sum over |product|_F, |product|_F, of one product.

    Args:
        weight: (8,) float32, upper bounds: |W|_F, |W^|_F, the largest singular values of W, W^ and W - W^,
            the largest outer scale of W^, two zeros.
        k, columns, elements: length of the sums, columns and elements of the result. output: its dtype.
        norms: (parts, 2) float32 of `cuda_norm.group_norm`; or sums: (rows, 3) float64 of the quantiser.
        outer_scale: (1,) float32 of the activations, where `gain` does not hold what subnormal bytes can add.
        factor: `certify.conv_factor`. gain: g of formula (6) of docs/certificate.md; 0: sums in FP32.
        slope: of the activation that follows.
        squares: float32, of which every `square_stride`-th element from the first on is summed to
            |product|_F^2; None: the ratio is infinite.
        threshold: None, or the ratio over which flag (1,) int32 becomes 1 (NaN is over it), else 0.
        counts: (2,) int32, added to: 1, and the flag.
    """
    fields = {
        "weight": weight.address, "k": k, "columns": columns, "elements": elements,
        "factor": upper(factor), "gain": upper(gain), "output": DTYPES[output], "slope": upper(slope),
        "out": out.address, "threshold": -1.0 if threshold is None else -upper(-threshold),
        "square_stride": square_stride,
    }  # fmt: skip
    if norms is not None:
        fields |= {"norms": norms.address, "norm_parts": norms.size // 2}
    if sums is not None:
        fields |= {"sums": sums.address, "sum_rows": sums.size // 3}
    if squares is not None:
        fields |= {"squares": squares.address, "square_count": squares.size // square_stride}
    for name, x in (("outer_scale", outer_scale), ("flag", flag), ("counts", counts)):
        if x is not None:
            fields[name] = x.address
    call("certificate", filled("fp4bf16_certificate_args", fields), stream)
