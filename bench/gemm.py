"""Products beside cuBLAS and Triton on a GPU, beside np.matmul on a CPU.

    python bench/gemm.py [--cpu] [--goals] [--csv FILE] [--plot FILE] [--json [FILE]] [--shapes MxNxK ...]
                         [--quick]

The same as ``python -m fp4bf16 bench gemm``, from the checkout; how it measures stands in
fp4bf16/cli/bench/timing.py. Each line: ``op shape track | us | TFLOP/s | GB/s | x cuBLAS | rel. error``.
On the CPU: exit 1 where the FP4 track on prepared operands takes over 1.5 times np.matmul at 1024^3, or where
a call keeps a float32 copy.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fp4bf16.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["bench", "gemm", *sys.argv[1:]]))
