"""One product on three tracks, with NumPy arrays: its error on each, and the certificate that bounds it.

    python -m fp4bf16.examples.numpy_matmul
"""

from __future__ import annotations

import numpy as np

import fp4bf16 as fb


def main() -> None:
    """Print relative errors to the float64 product, and what the certificate says of the FP4 one."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 1024), dtype=np.float32)
    # A weight as trained ones are: a few strong directions over a noisy rest.
    strong = rng.standard_normal((1024, 8)) @ rng.standard_normal((8, 512))
    w = (strong / 4 + rng.standard_normal((1024, 512))).astype(np.float32)
    exact = x.astype(np.float64) @ w

    wq = fb.quantize(w, axis=-2)  # prepared once: 4.5 bits an element, blocks of 16 along K
    dual = fb.DualWeight(w, rank=16)  # BF16 master, FP4 twin of the rest, low-rank BF16 branch
    for name, weight in (("bf16", w), ("fp4", wq), ("dual", dual)):
        y = fb.matmul(x, weight)
        print(f"{name:<5} relative error {np.linalg.norm(y - exact) / np.linalg.norm(exact):.4f}")

    y, certificate = fb.matmul(x, w, track="fp4", certify=True)
    distance = np.linalg.norm(y - fb.matmul(x, w))
    print(f"FP4 is {distance:.1f} from BF16; certified: at most {certificate.bound:.1f}")


if __name__ == "__main__":
    main()
