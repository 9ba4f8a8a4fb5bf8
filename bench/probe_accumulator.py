"""What the tensor cores of this GPU add up, against the model in python_ref/accumulator.py.

    python bench/probe_accumulator.py [--out FILE] [--raw FILE]

Single instructions with chosen operands show which bits survive; the rule of the model that gives most of
their results bit for bit is looked for field by field. Products of E2M1 operands at K = 4096 and 16384 then
compare device, model and exact integers at each promotion interval. `--raw` keeps the operands and results of
the single instructions (.npz). Needs an sm_90 GPU, CuPy and cuda.bindings; writes JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from python_ref import accumulator as model  # noqa: E402

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "bf16": ml_dtypes.bfloat16}
EXPONENTS = {"e4m3": (-6, 8), "e5m2": (-14, 14), "bf16": (-12, 12)}  # normal, of the operands
STEP = {"e4m3": 32, "e5m2": 32, "bf16": 16}
TILE = 64
CHOICES = {
    "depth": (4, 8, 16, 32),
    "rounding": ("zero", "floor"),
    "exponent": ("value", "sum", "sum_subnormal"),
    "output": (12, 13, 14, 23),
}


# ---- the device --------------------------------------------------------------------------------------------
def compile_cubin(source: str) -> bytes:
    """Machine code for sm_90a by NVRTC."""
    from cuda.bindings import nvrtc

    def check(result, *values):
        if int(result) != 0:
            raise RuntimeError(f"NVRTC: {result}: {log() if program is not None else ''}")
        return values[0] if values else None

    def log():
        size = nvrtc.nvrtcGetProgramLogSize(program)[1]
        text = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, text)
        return text.decode()

    program = None
    program = check(*nvrtc.nvrtcCreateProgram(source.encode(), b"probe_accumulator.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    check(*nvrtc.nvrtcCompileProgram(program, len(options), options))
    code = bytearray(check(*nvrtc.nvrtcGetCUBINSize(program)))
    check(*nvrtc.nvrtcGetCUBIN(program, code))
    return bytes(code)


class Device:
    """c + a b^T on the tensor cores, of values that `dtype` holds."""

    def __init__(self):
        import cupy

        self.cupy = cupy
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "probe.cubin"
            path.write_bytes(compile_cubin((HERE / "probe_accumulator.cu").read_text()))
            module = cupy.RawModule(path=str(path))
            self.kernels = {name: module.get_function(f"probe_{name}") for name in DTYPES}

    def __call__(self, a, b, dtype="e4m3", promote=None, c=None):
        bits = [np.ascontiguousarray(x.astype(DTYPES[dtype])).view(np.uint8) for x in (a, b)]
        c = np.zeros((len(a), len(b)), np.float32) if c is None else c
        left, right, start = (self.cupy.asarray(x) for x in (*bits, c))
        y = self.cupy.full(c.shape, np.nan, np.float32)
        steps = np.int32(bits[0].shape[1] // 32)
        interval = np.int32(0 if promote is None else promote // STEP[dtype])
        grid = (len(a) // TILE, len(b) // TILE)
        arguments = (left, right, start, y, np.int32(len(b)), steps, interval)
        self.kernels[dtype](grid, (128,), arguments)
        return self.cupy.asnumpy(y)

    def describe(self):
        properties = self.cupy.cuda.runtime.getDeviceProperties(0)
        return {
            "device": properties["name"].decode(), "cupy": self.cupy.__version__,
            "cuda_driver_api": self.cupy.cuda.runtime.driverGetVersion(),
        }  # fmt: skip


def expected(a, b, dtype="e4m3", promote=None, c=None, rule=None):
    """The model's result for the same operands."""
    rule = rule or (model.BF16 if dtype == "bf16" else model.FP8)
    return model.matmul(a, b, promote, rule, c, EXPONENTS[dtype][0] if dtype != "bf16" else -126)


# ---- single instructions -----------------------------------------------------------------------------------
def representable(x, dtype):
    return x.astype(DTYPES[dtype]).astype(np.float64)


def spread(rng, shape, dtype, low=None, high=None):
    """Random significands, signs and exponents."""
    low, high = EXPONENTS[dtype][0] if low is None else low, EXPONENTS[dtype][1] if high is None else high
    x = rng.uniform(1, 2, shape) * 2.0 ** rng.integers(low, high, shape) * rng.choice([-1, 1], shape)
    return representable(x, dtype)


def starts(rng, low, high):
    """C (64, 64) with 23 random fraction bits and exponents in low..high."""
    x = rng.uniform(1, 2, (TILE, TILE)) * 2.0 ** rng.integers(low, high + 1, (TILE, TILE))
    return (x * rng.choice([-1, 1], x.shape)).astype(np.float32)


def single(dtype, rng):
    """{name: (a, b, c)} of one or two instructions a result; 4096 results each."""
    k = STEP[dtype]
    low, high = EXPONENTS[dtype]
    shape = (TILE, k)
    none, zeros = np.zeros((TILE, TILE), np.float32), np.zeros(shape)
    first = np.zeros(shape)
    first[:, 0] = 1
    tiny = {"e4m3": 2.0**-9, "e5m2": 2.0**-16, "bf16": 2.0**-133}[dtype]
    subnormal = representable(rng.integers(-3 if dtype == "e5m2" else -7, 4, shape) * tiny, dtype)
    if dtype == "bf16":  # products of two subnormals lie under FP32's range
        subnormal = spread(rng, shape, dtype, -60, -50)
    mixed = np.where(rng.random(shape) < 0.5, subnormal, spread(rng, shape, dtype, low, low + 4))
    one_a, one_b = (spread(rng, shape, dtype, -3, 4) * first for _ in "ab")
    # a subnormal factor: does it count with its own exponent, or with the smallest normal one?
    codes, wide = {"e4m3": (8, (low, high)), "e5m2": (4, (low, high)), "bf16": (128, (110, 126))}[dtype]
    under = representable(rng.integers(1, codes, shape) * tiny, dtype) * first
    over = spread(rng, shape, dtype, *wide)
    around = int(np.log2(tiny)) + sum(wide) // 2
    # zeros beside the largest number must not set the exponent
    beside = zeros.copy()
    beside[:, 1:] = 2.0 ** (high - 1)
    near = spread(rng, shape, dtype, -1, 2)
    pairs = spread(rng, shape, dtype, -1, 1)
    pairs[:, 1::2] = -pairs[:, ::2]
    ones = np.where(np.arange(k) < k // 2, 1.0, representable(rng.uniform(0, 2.0**-4, shape), dtype))
    two = [spread(rng, (TILE, 2 * k), dtype, -2, 3) for _ in "ab"]
    return {
        "c alone": (zeros, zeros, starts(rng, -100, 100)),
        "one product, c larger": (one_a, one_b, starts(rng, 6, 40)),
        "one product, c smaller": (one_a, one_b, starts(rng, -40, 5)),
        "equal exponents": (near, spread(rng, shape, dtype, -1, 2), none),
        "mixed exponents": (spread(rng, shape, dtype), spread(rng, shape, dtype), none),
        "mixed exponents and c": (
            spread(rng, shape, dtype), spread(rng, shape, dtype), starts(rng, 2 * low, 2 * high),
        ),
        "positive": (abs(near), abs(spread(rng, shape, dtype, -1, 2)), abs(starts(rng, -2, 4))),
        "cancelling": (pairs, ones, starts(rng, -16, -2)),
        "subnormal factors": (mixed, spread(rng, shape, dtype, low, low + 6), none),
        "subnormal by subnormal": (subnormal, mixed, none),
        "subnormal beside c": (under, over, starts(rng, around - 16, around + 8)),
        "zero times largest": (one_a * 2.0**-3, beside + first, starts(rng, -16, 2)),
        "two instructions": (two[0], two[1], starts(rng, -4, 6)),
    }  # fmt: skip


def equal(y, z):
    """Share of results with the same bits; zeros of either sign are the same."""
    return float(np.mean((y == z) | (np.isnan(y) & np.isnan(z))))


def score(rule, dtype, probes, results):
    """{name: share of equal results} of `rule`."""
    names = list(probes)
    with ThreadPoolExecutor() as pool:
        y = pool.map(lambda name: expected(*probes[name][:2], dtype, None, probes[name][2], rule), names)
        return {name: equal(z, results[name]) for name, z in zip(names, y, strict=True)}


def fit(dtype, probes, results):
    """(rule, score, [(field, choice, mean score)]): from the model's rule by the best change of a field."""
    rule = model.BF16 if dtype == "bf16" else model.FP8
    best = score(rule, dtype, probes, results)
    while True:
        tried = []
        fractions = tuple(rule.fraction + d for d in (-2, -1, 1, 2))
        for field, choices in (("fraction", fractions), *CHOICES.items()):
            for choice in choices:
                if getattr(rule, field) == choice or (field == "depth" and choice > STEP[dtype]):
                    continue
                other = dataclasses.replace(rule, **{field: choice})
                found = score(other, dtype, probes, results)
                tried.append((float(np.mean(list(found.values()))), field, choice, found))
        mean, field, choice, found = max(tried, key=lambda t: t[0])
        if mean <= np.mean(list(best.values())):
            return rule, best, [(f, c, m) for m, f, c, _ in tried]
        rule, best = dataclasses.replace(rule, **{field: choice}), found


def surviving_bits(device, dtype):
    """Fraction bits of C that one instruction with A = B = 0 keeps: (positive, negative), and what remains
    of a C with every bit set, for both signs (toward zero: cut; floor: the negative one grows)."""
    zeros = np.zeros((TILE, STEP[dtype]))
    c = np.full((TILE, TILE), 2 - 2.0**-23, np.float32)
    c[1::2] *= -1
    y = device(zeros, zeros, dtype, None, c)
    return {"all bits set": [float(y[0, 0]).hex(), float(y[1, 0]).hex()]}


def lone_bits(device, dtype):
    """Largest d at which a product of 2^-d still changes C = 1 (and C = -1, product negative) in one step."""
    smallest = 9 if dtype == "e4m3" else 16  # 2^-9, a subnormal of E4M3
    d = np.arange(TILE)
    half = np.minimum(d, smallest)
    a, b = np.zeros((TILE, STEP[dtype])), np.zeros((TILE, STEP[dtype]))
    found = {}
    for sign in (1, -1):
        for other in (1, -1):
            a[:, 0], b[:, 0] = 2.0**-half, sign * 2.0 ** -np.minimum(d - half, smallest)
            y = device(a, b, dtype, None, np.full((TILE, TILE), other, np.float32))
            moved = np.diag(y).astype(np.float64) - other
            exact = np.diag(a[:, :1] @ b[:, :1].T)
            distance = -np.log2(np.abs(exact))
            name = f"c = {other:+d}, product {'+' if sign > 0 else '-'}2^-d"
            kept = distance[moved == exact]
            rest = sorted({float(m).hex() for m in moved[moved != exact]})
            found[name] = {"added exactly up to d": int(kept.max()), "beyond it c moves by": rest}
    return found


# ---- whole products ----------------------------------------------------------------------------------------
def adversarial(k, interval=128):
    """A large product first in each interval, then products just too small to be added to it."""
    a = np.full((TILE, k), 2.0**-7)
    b = np.full((TILE, k), 1.75 * 2.0**-7)
    a[:, ::interval] = b[:, ::interval] = 1
    return a, b


def exact_product(a, b, unit):
    """a b^T by int64 sums of multiples of `unit`, as float64 (its sums stay under 2^53 units squared)."""
    ints = [np.rint(x / unit).astype(np.int64) for x in (a, b)]
    for x, i in zip((a, b), ints, strict=True):
        assert np.array_equal(i * unit, x)
    return (ints[0] @ ints[1].T).astype(np.float64) * unit**2


def product_row(device, job, rule):
    """One row: device and model against exact integers."""
    scales, positive, k, dtype, promote, a, b, exact = job
    y = device(a, b, dtype, promote)
    z = expected(a, b, dtype, promote, None, rule)
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return {
        "operands": scales, "positive": positive, "K": k, "dtype": dtype, "promote": promote or 0,
        "device_error": model.relative_error(y, exact), "model_error": model.relative_error(z, exact),
        "equal": equal(y, z), "largest_difference": float(np.abs(y.astype(np.float64) - z).max()),
        "device_error_over_factor_norms": float(np.linalg.norm(y - exact) / size),
    }  # fmt: skip


def products(device, rules, rng):
    """Rows of every kind of operand, sign, K, dtype and promotion interval."""
    jobs = []
    for dtype, scales, positive, k in itertools.product(
        ("e4m3", "e5m2"), model.SCALES, (False, True), (4096, 16384)
    ):
        if dtype == "e5m2" and (scales == "nvfp4_exact" or k > 4096):
            continue  # not exact in E5M2; the same sums as E4M3
        a, b = (model.operands(rng, (TILE, k), scales, positive) for _ in "ab")
        exact = exact_product(a, b, 2.0**-5)
        jobs += [(scales, positive, k, dtype, p, a, b, exact) for p in (128, 256, 512, None)]
    a, b = adversarial(4096)
    jobs += [("adversarial", True, 4096, "e4m3", p, a, b, exact_product(a, b, 2.0**-9)) for p in (128, None)]
    for k, positive in itertools.product((4096, 16384), (False, True)):
        a, b = (representable(rng.standard_normal((TILE, k)), "bf16") for _ in "ab")
        a, b = (abs(a), abs(b)) if positive else (a, b)
        jobs.append(("gaussian", positive, k, "bf16", None, a, b, a @ b.T))
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda job: product_row(device, job, rules[job[3]]), jobs))


def cublas_rows(rule, rng, size=256, k=4096):
    """cuBLAS's FP8 product through PyTorch beside the model: its tiles are wider and its chains in flight."""
    try:
        import torch
    except ImportError:
        return []
    if not hasattr(torch, "_scaled_mm"):
        return []
    a, b = (model.operands(rng, (size, k), "nvfp4_exact") for _ in "ab")
    left, right = (torch.from_numpy(x).cuda().to(torch.float8_e4m3fn) for x in (a, b))
    one, rows = torch.ones((), device="cuda"), []
    for fast, promote in ((True, None), (False, 128)):
        y = torch._scaled_mm(left, right.T, one, one, out_dtype=torch.float32, use_fast_accum=fast)
        y, z = y.cpu().numpy(), expected(a, b, "e4m3", promote, None, rule)
        rows.append({
            "use_fast_accum": fast, "promote": promote or 0, "equal": equal(y, z),
            "error": model.relative_error(y, a @ b.T), "model_error": model.relative_error(z, a @ b.T),
        })  # fmt: skip
    return rows


def needed_promotion(rows, limit=1e-3):
    """{operands: largest interval (0: none needed) whose error stays under `limit` at every K and sign}."""
    found = {}
    for scales in model.SCALES:
        for promote in (0, 512, 256, 128):
            errors = [r["device_error"] for r in rows if (r["operands"], r["promote"]) == (scales, promote)]
            if max(errors) < limit:
                found[scales] = promote
                break
    return found


# ---- report ------------------------------------------------------------------------------------------------
def report(text):
    for dtype, found in text["single"].items():
        worst = sorted(found["assumed"].items(), key=lambda item: item[1])[:3]
        print(f"{dtype}: rule {found['rule']}")
        print(f"  equal: model's rule {found['assumed_mean']:.4f}, this one {found['fitted_mean']:.4f}")
        print("  the model's rule at worst: " + ", ".join(f"{n} {s:.3f}" for n, s in worst))
        print(f"  C alone, {found['surviving']}")
        for name, bits in found["lone"].items():
            moves = ",".join(bits["beyond it c moves by"][:3])
            print(f"  {name}: added up to d = {bits['added exactly up to d']}, then {moves}")
    print("operands     sign dtype     K | device error at 128, 256, 512, none | equal | largest difference")
    groups = {}
    for r in text["products"]:
        groups.setdefault((r["operands"], r["positive"], r["dtype"], r["K"]), []).append(r)
    for (operands, positive, dtype, k), group in groups.items():
        errors, sign = " ".join(f"{r['device_error']:7.1e}" for r in group), "+ " if positive else "+-"
        share, most = min(r["equal"] for r in group), max(r["largest_difference"] for r in group)
        print(f"{operands:12s} {sign} {dtype} {k:5d} | {errors} | {share:.4f} | {most:.1e}")
    for row in text["cublas"]:
        print(f"cuBLAS FP8 {row}")
    print(f"largest promotion interval with an error under 1e-3 (0: none): {text['promotion_for_1e-3']}")


def single_instructions(device, dtype, rng):
    """(fitted rule, what goes into the JSON, {name: array} of operands and results)."""
    probes = single(dtype, rng)
    results = {name: device(a, b, dtype, None, c) for name, (a, b, c) in probes.items()}
    assumed = score(model.BF16 if dtype == "bf16" else model.FP8, dtype, probes, results)
    rule, fitted, tried = fit(dtype, probes, results)
    found = {
        "rule": dataclasses.asdict(rule), "assumed": assumed, "fitted": fitted, "alternatives": tried,
        "assumed_mean": float(np.mean(list(assumed.values()))),
        "fitted_mean": float(np.mean(list(fitted.values()))),
        "surviving": surviving_bits(device, dtype), "lone": lone_bits(device, dtype),
    }  # fmt: skip
    raw = {
        f"{dtype}/{name}/{part}": value.astype(np.float32)
        for name, probe in probes.items()
        for part, value in zip("abcy", (*probe, results[name]), strict=True)
    }
    return rule, found, raw


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results/nvidia-h200/accumulator.json")
    parser.add_argument("--raw", type=pathlib.Path, help="keep the single instructions' operands and results")
    options = parser.parse_args(argv)
    device, rng = Device(), np.random.default_rng(2024)
    found, rules, raw = {}, {}, {}
    for dtype in DTYPES:
        rules[dtype], found[dtype], arrays = single_instructions(device, dtype, rng)
        raw |= arrays
    if options.raw:
        np.savez_compressed(options.raw, **raw)
    rows = products(device, rules, rng)
    text = {
        "what": "bench/probe_accumulator.py", **device.describe(),
        "promotion_for_1e-3": needed_promotion(rows), "single": found, "products": rows,
        "cublas": cublas_rows(rules["e4m3"], rng),
    }  # fmt: skip
    report(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(text, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
