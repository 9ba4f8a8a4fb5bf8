"""Bytes that one dual-track product moves through device memory, against operands and result counted once.

    python bench/zero_copy.py [--json FILE] [--commit HASH]

Needs ncu, PyTorch and a GPU. ncu empties the L2 cache before each kernel and reads the memory's own counters
(dram__bytes_read.sum, dram__bytes_write.sum) around it. Two shapes of rank 64 with a BF16 result:

- 32768 x 3072 x 768: the result (201 MB) is several times the L2 cache, and W stays in it, so that nothing
  excuses a second read or write. Held to 1.1 times.
- 4096 x 4096 x 4096: operands and result together exceed the cache and every operand is used 16 or 32 times
  over; what is read again depends on the order of the tiles. Shown, not held.

What of the result still lies in the cache when the counter is read counts as written. Beside each stands the
same result from an FP4 product and a BF16 product added to it. Exit 1 above the limit, or where the dual
product is not one kernel.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPES = ((32768, 3072, 768), (4096, 4096, 4096))
HOW = ("dual", "separate")
RANK, LIMIT = 64, 1.1
METRICS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "write"}
RESULTS = ROOT / "bench" / "results" / "nvidia-h200" / "zero_copy.json"


def child() -> None:
    """Every product once inside the region that ncu profiles, a spinning kernel behind each."""
    import torch

    from fp4bf16.cli.bench.operands import Operands
    from fp4bf16.cli.bench.raw import Raw

    raw, cudart = Raw(torch), torch.cuda.cudart()
    for shape in SHAPES:
        s = Operands(torch, raw, *shape)
        bytes_, scales = (s.a4["expanded"], s.w4["expanded"]), (s.a4["outer"], s.w4["outer"])
        fp4 = raw.gemm_args(s.d, *bytes_, None, None, *scales)
        dual = raw.gemm_args(s.d, *bytes_, s.t, s.u, *scales)
        want = s.exact4 + s.branch
        for how in HOW:
            for profiled in (False, True):  # the first loads the kernels
                s.d.fill_(float("nan"))
                torch.cuda.synchronize()
                if profiled:
                    cudart.cudaProfilerStart()
                raw.gemm(dual if how == "dual" else fp4)
                if how == "separate":
                    s.d.addmm_(s.t, s.u.T)
                torch.cuda._sleep(100)
                torch.cuda.synchronize()
                cudart.cudaProfilerStop()
            error = s.distance(want)
            if not error < 1e-2:
                raise SystemExit(f"zero_copy: the {how} product is wrong: relative error {error:.3g}")


def parse(text: str) -> list[list[dict]]:
    """ncu's CSV -> the kernels of each product: their names and the bytes read and written."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    kernels: dict[str, dict] = {}
    for row in csv.DictReader(lines):
        kernel = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0]})
        if row["Metric Name"] in METRICS:
            kernel[METRICS[row["Metric Name"]]] = int(float(row["Metric Value"].replace(",", "")))
    products: list[list[dict]] = [[]]
    for kernel in kernels.values():
        if "spin_kernel" in kernel["kernel"]:
            products.append([])
        else:
            products[-1].append(kernel)
    return products[:-1]


def profile() -> list[list[dict]]:
    """The kernels of each product, in the order of SHAPES and HOW."""
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    command += ["--print-units", "base", "--metrics", ",".join(METRICS), sys.executable, __file__, "--child"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    products = [] if done.returncode else parse(done.stdout)
    if len(products) != len(SHAPES) * len(HOW):
        raise SystemExit(f"zero_copy: ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return products


def once(shape: tuple[int, int, int]) -> tuple[int, int]:
    """(bytes of the operands, of the result): E4M3, the scales, the BF16 branch; BF16."""
    m, n, k = shape
    return (m + n) * (k + 4 + 2 * RANK), 2 * m * n


def account(shape: tuple[int, int, int], products: list[list[dict]]) -> dict:
    operands, result = once(shape)
    row = {"shape": list(shape), "rank": RANK, "operand_bytes": operands, "result_bytes": result}
    for how, kernels in zip(HOW, products, strict=True):
        read, write = (sum(k.get(key, 0) for k in kernels) for key in ("read", "write"))
        moved = read + max(write, result * len(kernels))  # each kernel of either way writes all of D
        row[how] = {"kernels": [k["kernel"] for k in kernels], "read": read, "write": write,
                    "ratio": moved / (operands + result)}  # fmt: skip
    row["held"] = len(row["dual"]["kernels"]) == 1 and 0.99 < row["dual"]["ratio"] <= LIMIT
    return row


def line(row: dict) -> str:
    dual, separate = row["dual"], row["separate"]
    return (f"dual r{RANK} {'x'.join(map(str, row['shape']))}: read {dual['read'] / 1e6:.1f} MB of "
            f"{row['operand_bytes'] / 1e6:.1f}, wrote {dual['write'] / 1e6:.1f} of "
            f"{row['result_bytes'] / 1e6:.1f}; {dual['ratio']:.3f} x in {len(dual['kernels'])} kernel; "
            f"FP4 product, BF16 product added: {separate['ratio']:.3f} x in {len(separate['kernels'])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default=str(RESULTS), metavar="FILE", help=f"default: {RESULTS}")
    parser.add_argument("--commit", help="what the results name, where git is not at hand")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return 0
    import torch

    from fp4bf16.cli.bench import cuda, record

    problem = cuda.problem()
    if problem is not None:
        print(f"zero_copy: {problem}", file=sys.stderr)
        return 2
    about = record.gpu(torch)
    about["commit"] = options.commit or about["commit"]
    found = profile()
    rows = [account(shape, found[2 * i : 2 * i + 2]) for i, shape in enumerate(SHAPES)]
    for row in rows:
        print(line(row))
    held = rows[0]["held"]
    print(f"at most {LIMIT} x at {'x'.join(map(str, SHAPES[0]))}: {'held' if held else 'MISSED'}")
    record.write_json(options.json, {"machine": about, "limit": LIMIT, "held": held, "rows": rows})
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
