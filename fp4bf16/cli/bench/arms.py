"""What is timed side by side: cuBLAS, Triton and this package on the same operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import gemm
from . import operands as ops
from .raw import Raw
from .timing import Arm, refused, sets_needed

YARDSTICK = "cublas bf16"


def set_bytes(shape: tuple[int, int, int]) -> int:
    """Bytes of the leanest operand set of a shape: E4M3 operands and a BF16 result."""
    m, n, k = shape
    return m * k + n * k + 2 * m * n


def operand_sets(torch: Any, raw: Raw, shape: tuple[int, int, int], l2: int) -> list[ops.Operands]:
    """As many sets as the leanest arm needs to find its operands cold, 32 at most."""
    return [ops.Operands(torch, raw, *shape) for _ in range(min(sets_needed(set_bytes(shape), l2), 32))]


class Arms:
    """The arms of one shape; `sets` are its operand sets."""

    def __init__(self, torch: Any, raw: Raw, sets: list[ops.Operands]):
        self.torch, self.raw, self.sets, self.first = torch, raw, sets, sets[0]
        self.m, self.n, self.k = sets[0].shape

    def arm(self, name: str, run: Callable[[ops.Operands], Any], want: Callable[[], Any] | None,
            given: Callable[[], Any], a_bytes: float, b_bytes: float, extra: int = 0) -> Arm:  # fmt: skip
        """`a_bytes`, `b_bytes`: of an element. `want`, `given`: the sampled rows of the product that was
        meant (None: nothing to compare with), and of the one of the operands as the arm gets them."""
        m, n, k = self.m, self.n, self.k
        arm = Arm(name, lambda i: run(self.sets[i]), len(self.sets), 2.0 * m * n * k,
                  int(m * k * a_bytes + n * k * b_bytes) + 2 * m * n + extra)  # fmt: skip

        def check() -> tuple[float, float]:
            for operands in self.sets:
                operands.d.fill_(float("nan"))
            for i in range(len(self.sets)):
                arm.run(i)
            self.raw.wait()
            for operands in self.sets[1:]:  # written to the end, which any element of a set shows
                if bool(self.torch.isnan(operands.d).any()):
                    return float("inf"), float("inf")
            meant = self.first.distance(want()) if want is not None else float("nan")
            return meant, self.first.distance(given())

        arm.check = check
        return arm

    # ---- peers
    def cublas_bf16(self) -> Arm:
        exact = lambda: self.first.exact  # noqa: E731
        run = lambda s: self.torch.matmul(s.a, s.w.T, out=s.d)  # noqa: E731
        return self.arm(YARDSTICK, run, exact, exact, 2, 2)

    def cublas_fp8(self, scales: str, fast: bool) -> Arm:
        """torch._scaled_mm on the bytes that the FP4 track multiplies."""
        torch, e4m3 = self.torch, self.torch.float8_e4m3fn
        one = torch.ones((), dtype=torch.float32, device=self.raw.device)

        def run(s: ops.Operands) -> None:
            row = s.a4["outer"][:, None] if scales == "row" else one
            col = s.w4["outer"][None, :] if scales == "row" else one
            torch._scaled_mm(s.a4["expanded"].view(e4m3), s.w4["expanded"].view(e4m3).T, row, col,
                             out_dtype=torch.bfloat16, use_fast_accum=fast, out=s.d)  # fmt: skip

        name = f"cublas fp8 {scales}{' fast' if fast else ''}"
        if scales == "row":
            return self.arm(name, run, lambda: self.first.exact, lambda: self.first.exact4, 1, 1)
        return self.arm(name, run, None, lambda: self.first.exact4_unscaled, 1, 1)

    def triton(self, a_fp4: bool) -> Arm:
        name = f"triton dot_scaled {'fp4' if a_fp4 else 'bf16'} x fp4"
        try:
            from . import triton_kernels as kernels
        except ImportError as error:
            return Arm(name, None, note=refused(error))

        def call(config: tuple[int, ...], s: ops.Operands) -> None:
            a, scale = (s.a_mx["packed"], s.a_mx["scale"]) if a_fp4 else (s.a, None)
            kernels.launch(config, a, scale, s.w_mx["packed"], s.w_mx["scale"], s.d)

        best: list[tuple[int, ...]] = []

        def run(s: ops.Operands) -> None:
            if not best:
                best.append(fastest(self.torch, kernels.CONFIGS, lambda config: call(config, s)))
            call(best[0], s)

        def given() -> Any:
            first = self.first
            left = first.mx_values(first.a_mx, first.rows) if a_fp4 else first.a[first.rows].double()
            return left @ first.mx_values(first.w_mx).T

        return self.arm(name, run, lambda: self.first.exact, given, 17 / 32 if a_fp4 else 2, 17 / 32)

    # ---- ours
    def public(self, name: str, call: Callable[[ops.Operands], Any], fallback: Callable[[ops.Operands], Any],
               *rest: Any) -> Arm:  # fmt: skip
        """An arm through the public API; where that refuses, the library's own call, and a note."""
        try:
            call(self.first)
            run, note = call, ""
        except Exception as error:
            run, note = fallback, f"the library's call, for the API says {refused(error)}"
        self.raw.wait()
        arm = self.arm(name, run, *rest)
        arm.note = note
        return arm

    def _raw_fp4(self, s: ops.Operands, fast: bool = False, t: Any = None, u: Any = None) -> None:
        args = self.raw.gemm_args(s.d, s.a4["expanded"], s.w4["expanded"], t, u, s.a4["outer"],
                                  s.w4["outer"], fast)  # fmt: skip
        self.raw.gemm(args)

    def bf16(self) -> Arm:
        exact = lambda: self.first.exact  # noqa: E731
        call = lambda s: gemm.matmul(s.a, s.w.T, out=s.d)  # noqa: E731
        raw = lambda s: self.raw.gemm(self.raw.gemm_args(s.d, a16=s.a, b16=s.w))  # noqa: E731
        return self.public("bf16", call, raw, exact, exact, 2, 2)

    def fp4(self, fast: bool) -> Arm:
        accumulate = "fast" if fast else "promoted"

        def call(s: ops.Operands) -> None:
            gemm.matmul(s.aq, s.wq, accumulate=accumulate, dtype="bfloat16", out=s.d)

        return self.public("fp4 fast" if fast else "fp4", call, lambda s: self._raw_fp4(s, fast),
                           lambda: self.first.exact, lambda: self.first.exact4, 1, 1)  # fmt: skip

    def fp4_of_bf16(self) -> Arm:
        """A is quantised in the call."""

        def fallback(s: ops.Operands) -> None:
            parts = {name: s.a4[name] for name in ("expanded", "outer")}
            args, _ = self.raw.quantize_args(s.a, "nvfp4_exact", **parts)
            self.raw.quantize(args)
            self._raw_fp4(s)

        return self.public("fp4 of bf16 a", lambda s: gemm.matmul(s.a, s.wq, track="fp4", out=s.d), fallback,
                           lambda: self.first.exact, lambda: self.first.exact4, 2, 1)  # fmt: skip

    def dual(self, how: str) -> Arm:
        """Rank 64, T given: one kernel ("dual"), or the FP4 product and a BF16 product added to it."""
        torch = self.torch
        branch = 2 * ops.RANK * (self.m + self.n)
        runs = {
            "dual r64": lambda s: self._raw_fp4(s, t=s.t, u=s.u),
            "fp4, matmul, add": lambda s: (self._raw_fp4(s), s.d.add_(torch.matmul(s.t, s.u.T))),
            "fp4, addmm": lambda s: (self._raw_fp4(s), s.d.addmm_(s.t, s.u.T)),
        }
        arm = self.arm(how, runs[how], lambda: self.first.exact + self.first.branch,
                       lambda: self.first.exact4 + self.first.branch, 1, 1, branch)  # fmt: skip
        arm.flops += 2.0 * self.m * self.n * ops.RANK
        return arm

    def all(self, dual: bool, triton: bool) -> list[Arm]:
        """The arms in the order of the table."""
        arms = [self.cublas_bf16()]
        arms += [self.cublas_fp8(scales, fast) for scales in ("row", "tensor") for fast in (False, True)]
        if triton:
            arms += [self.triton(True), self.triton(False)]
        arms += [self.bf16(), self.fp4(False), self.fp4(True), self.fp4_of_bf16()]
        return arms + ([self.dual(h) for h in ("dual r64", "fp4, matmul, add", "fp4, addmm")] if dual else [])


def fastest(torch: Any, configs: Any, call: Callable[[Any], Any]) -> Any:
    """The configuration whose best of three calls is the shortest; one that cannot be launched is out."""
    best, least, why = None, float("inf"), None
    for config in configs:
        try:
            call(config)
        except Exception as error:
            why = error
            continue
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call(config)
            end.record()
            end.synchronize()
            if begin.elapsed_time(end) < least:
                best, least = config, begin.elapsed_time(end)
    if best is None:
        raise why or ValueError("no configuration")
    return best


# ---- quantisers
COPY = "copy"
#: name -> (format, fast search, what is written, one outer scale a tensor)
QUANTISERS = {
    "nvfp4_exact fast expanded": ("nvfp4_exact", True, "expanded", False),
    "nvfp4_exact fast packed": ("nvfp4_exact", True, "packed", False),
    "nvfp4_exact full expanded": ("nvfp4_exact", False, "expanded", False),
    "nvfp4_exact full packed": ("nvfp4_exact", False, "packed", False),
    "nvfp4 packed, outer row": ("nvfp4", True, "packed", False),
    "nvfp4 packed, outer tensor": ("nvfp4", True, "packed", True),
    "mxfp4 packed": ("mxfp4", True, "packed", False),
    "fp8": ("fp8", True, "packed", False),
}
WITH_T = "nvfp4_exact fast expanded and T"


def quantise_arms(torch: Any, raw: Raw, rows: int, k: int, l2: int, with_t: bool) -> list[Arm]:
    """The quantisers and a copy, of BF16 (rows, k); with T or without."""
    sets = min(sets_needed(3 * rows * k, l2), 32)
    xs = [torch.randn((rows, k), dtype=torch.bfloat16, device=raw.device) for _ in range(sets)]
    copies = [torch.empty_like(x) for x in xs]
    arms = [Arm(COPY, lambda i: copies[i].copy_(xs[i]), sets, nbytes=4 * rows * k)]
    arms += [_quantiser(torch, raw, xs, name, how) for name, how in QUANTISERS.items()]
    if with_t:
        down_t = (torch.randn((ops.RANK, k), device=raw.device) / k**0.5).to(torch.bfloat16)
        how = QUANTISERS["nvfp4_exact fast expanded"]
        arms.append(_quantiser(torch, raw, xs, WITH_T, how, down_t))
    return arms


def _quantiser(torch: Any, raw: Raw, xs: list[Any], name: str, how: Any, down_t: Any = None) -> Arm:
    try:
        return _made_quantiser(torch, raw, xs, name, *how, down_t)
    except ValueError as error:
        return Arm(name, None, note=refused(error))


def _made_quantiser(torch, raw, xs, name, format, fast, written, tensor, down_t) -> Arm:
    keep = ("packed", "scale", "outer") if written == "packed" else ("expanded", "outer")
    prepared = []
    for x in xs:
        parts = {n: p for n, p in raw.outputs(x, format, tensor=tensor).items() if n in keep}
        hidden = {}
        if down_t is not None:
            hidden["down_t"] = down_t
            hidden["hidden"] = torch.empty((len(x), ops.RANK), dtype=x.dtype, device=raw.device)
        args = raw.quantize_args(x, format, fast=fast, tensor=tensor, **parts, **hidden)
        prepared.append((args, parts, hidden, x))  # all kept: the struct holds addresses alone
    _, parts, hidden, x = prepared[0]
    written_bytes = sum(p.numel() * p.element_size() for p in (*parts.values(), *hidden.values()))
    arm = Arm(name, lambda i: raw.quantize(prepared[i][0][0]), len(xs), nbytes=2 * x.numel() + written_bytes)

    def check() -> tuple[float, float]:
        rows = torch.randperm(len(x), device=raw.device)[:8]
        if tensor:
            return float("nan"), float("nan")
        if down_t is None:
            return ops.same_bytes(parts, format, x, rows, fast)
        want = x[rows].double() @ down_t.double().T
        error = torch.linalg.norm(hidden["hidden"][rows].double() - want) / torch.linalg.norm(want)
        right = float(error) < 1e-2  # BF16 rounds T to 2e-3; NaN is not right
        return float(error), ops.same_bytes(parts, format, x, rows, fast)[1] if right else float("inf")

    arm.check = check
    return arm


# ---- Python
def overhead_calls(torch: Any, raw: Raw, m: int = 128, n: int = 128, k: int = 128) -> dict[str, Callable]:
    """The library's launch, the same through `matmul`, and PyTorch's product, on a small shape."""
    s = ops.Operands(torch, raw, m, n, k)
    args = raw.gemm_args(s.d, s.a4["expanded"], s.w4["expanded"], None, None, s.a4["outer"], s.w4["outer"])
    stream = raw.ffi.cast("void*", raw.stream())
    plain = raw.gemm_args(s.d, a16=s.a, b16=s.w)
    aq, wq, w = s.aq, s.wq, s.w.T
    return {
        "raw launch": lambda: raw.lib.fp4bf16_gemm(args, stream),
        "raw launch bf16": lambda: raw.lib.fp4bf16_gemm(plain, stream),
        "matmul fp4 prepared, out=": lambda: gemm.matmul(aq, wq, dtype="bfloat16", out=s.d),
        "matmul fp4 prepared": lambda: gemm.matmul(aq, wq, dtype="bfloat16"),
        "matmul fp4 of bf16 a": lambda: gemm.matmul(s.a, wq, track="fp4", out=s.d),
        "matmul bf16, out=": lambda: gemm.matmul(s.a, w, out=s.d),
        "matmul bf16": lambda: gemm.matmul(s.a, w),
        "torch.matmul, out=": lambda: torch.matmul(s.a, w, out=s.d),
    }
