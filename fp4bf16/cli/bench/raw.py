"""The library's calls on PyTorch tensors, without the package's front end."""

from __future__ import annotations

from typing import Any

from ...backends import cuda

FORMATS = {"nvfp4_exact": 0, "nvfp4": 1, "mxfp4": 2, "fp8": 3}
BLOCKS = {"nvfp4_exact": 16, "nvfp4": 16, "mxfp4": 32, "fp8": 0}
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


def _kind(tensor: Any) -> int:
    return DTYPES[str(tensor.dtype).removeprefix("torch.")]


class Raw:
    """Structs of the C ABI filled in from tensors, which the caller keeps alive."""

    def __init__(self, torch: Any, device: str = "cuda"):
        self.torch, self.device = torch, device
        loaded = cuda.load()
        self.ffi, self.lib = loaded.ffi, loaded.lib

    def stream(self) -> int:
        return self.torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0

    def wait(self) -> None:
        """Until the device has done what was launched."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def _pointer(self, tensor: Any, kind: str = "void*") -> Any:
        return self.ffi.NULL if tensor is None else self.ffi.cast(kind, tensor.data_ptr())

    def gemm_args(self, d: Any, a8: Any = None, b8: Any = None, a16: Any = None, b16: Any = None,
                  row: Any = None, col: Any = None, fast: bool = False, config: int = 0) -> Any:  # fmt: skip
        """fp4bf16_gemm_args of D (m, n) = row x col * A8 B8^T + A16 B16^T, all matrices K-major."""
        args = self.ffi.new("fp4bf16_gemm_args*")
        args.m, args.n = d.shape
        args.d, args.d_dtype, args.d_stride = self._pointer(d), _kind(d), d.stride(0)
        if a8 is not None:
            args.k8 = a8.shape[1]
            args.a8, args.a8_stride = self._pointer(a8, "uint8_t*"), a8.stride(0)
            args.b8, args.b8_stride = self._pointer(b8, "uint8_t*"), b8.stride(0)
        if a16 is not None:
            args.k16 = a16.shape[1]
            args.a16, args.a16_stride = self._pointer(a16), a16.stride(0)
            args.b16, args.b16_stride = self._pointer(b16), b16.stride(0)
        if row is not None:
            args.row_scale, args.row_scale_step = self._pointer(row, "float*"), 1
        if col is not None:
            args.col_scale, args.col_scale_step = self._pointer(col, "float*"), 1
        args.alpha, args.accumulate, args.config = 1.0, int(fast), config
        return args

    def gemm(self, args: Any) -> None:
        self._done(self.lib.fp4bf16_gemm(args, self.ffi.cast("void*", self.stream())))

    def quantize_args(self, x: Any, format: str, *, packed: Any = None, scale: Any = None,
                      expanded: Any = None, outer: Any = None, tensor: bool = False, fast: bool = True,
                      down_t: Any = None, hidden: Any = None) -> tuple[Any, Any]:  # fmt: skip
        """(fp4bf16_quantize_args of the rows of x, the workspace that they point to)."""
        args = self.ffi.new("fp4bf16_quantize_args*")
        args.x, (args.rows, args.k_size) = self._pointer(x), x.shape
        args.after, args.x_stride, args.k_stride = 1, x.stride(0), 1
        args.dtype, args.format, args.search = _kind(x), FORMATS[format], int(fast)
        args.mid, args.inner = (x.shape[0], 1) if tensor else (1, x.shape[0])
        args.packed, args.block_scale = self._pointer(packed, "uint8_t*"), self._pointer(scale, "uint8_t*")
        args.outer_scale = self._pointer(outer, "float*")
        if expanded is not None:
            args.expanded, args.expanded_stride = self._pointer(expanded, "uint8_t*"), expanded.stride(0)
        if down_t is not None:
            args.down_t, args.rank = self._pointer(down_t), down_t.shape[0]
            args.down_stride = down_t.stride(0)
            args.hidden, args.hidden_stride = self._pointer(hidden), hidden.stride(0)
        size = self.lib.fp4bf16_quantize_workspace_size(args)
        if size < 0:
            raise ValueError(self.ffi.string(self.lib.fp4bf16_last_error()).decode())
        workspace = self.torch.empty(size, dtype=self.torch.uint8, device=self.device) if size else None
        args.workspace = self._pointer(workspace)
        return args, workspace

    def quantize(self, args: Any) -> None:
        self._done(self.lib.fp4bf16_quantize(args, self.ffi.cast("void*", self.stream())))

    def _done(self, status: int) -> None:
        if status:
            raise RuntimeError(self.ffi.string(self.lib.fp4bf16_last_error()).decode())

    def outputs(self, x: Any, format: str, *, tensor: bool = False) -> dict[str, Any]:
        """Empty results of quantising x (rows, k): packed, scale, outer, and expanded where there is one."""
        rows, k = x.shape
        block = BLOCKS[format]
        padded = -(-k // (block or 1)) * (block or 1)
        empty = lambda *shape: self.torch.empty(shape, dtype=self.torch.uint8, device=x.device)  # noqa: E731
        out = {"packed": empty(rows, padded // 2 if block else padded)}
        if block:
            out["scale"] = empty(rows, padded // block)
        if format != "mxfp4":
            out["outer"] = self.torch.empty(1 if tensor else rows, dtype=self.torch.float32, device=x.device)
        if format == "nvfp4_exact":
            out["expanded"] = empty(rows, -(-padded // 16) * 16)
        return out
