"""The compiled library: where it is, whether it fits this package, its functions behind Python exceptions.

Nothing here runs at ``import fp4bf16``. The library needs no driver to load, so a machine without a GPU
can say what it holds; its functions then answer with one sentence.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .._version import __version__
from ..errors import CudaError, LibraryError, UnsupportedArchError

#: What this file expects of src/cuda/fp4bf16.h and fp4bf16_network.h (FP4BF16_ABI_VERSION there).
ABI_VERSION = 6

PACKAGE = Path(__file__).resolve().parent.parent
_NAMES = {"win32": "fp4bf16.dll", "darwin": "libfp4bf16.dylib"}
NAME = _NAMES.get(sys.platform, "libfp4bf16.so")
_ERRORS = {1: ValueError, 2: CudaError, 3: UnsupportedArchError, 4: CudaError}


@dataclass(frozen=True)
class Device:
    """One GPU. `memory`, `l2_cache` and `shared_memory_per_block` are in bytes."""

    index: int
    name: str
    compute_capability: str
    multiprocessors: int
    memory: int
    l2_cache: int
    shared_memory_per_block: int


def _reinstall() -> str:
    root = PACKAGE.parent
    what = str(root) if (root / "CMakeLists.txt").is_file() else "fp4bf16"
    return f"reinstall it with: python -m pip install --force-reinstall --no-deps {what}"


def _installed_folder() -> Path | None:
    """``fp4bf16/`` of the installed distribution, also when a checkout shadows it on the path."""
    try:
        folder = Path(str(importlib.metadata.distribution("fp4bf16").locate_file("fp4bf16")))
    except importlib.metadata.PackageNotFoundError:
        return None
    return folder if folder.is_dir() else None


def find_library() -> Path | None:
    """Path of the library: ``FP4BF16_LIBRARY``, beside the package, in the installed one, or None."""
    named = os.environ.get("FP4BF16_LIBRARY")
    if named:
        path = Path(named)
        if not path.is_file():
            raise LibraryError(f"FP4BF16_LIBRARY: {named} is no file; unset it or give the path of {NAME}")
        return path
    for folder in (PACKAGE, _installed_folder()):
        if folder is not None and (folder / NAME).is_file():
            return folder / NAME
    return None


def source_digest(package: Path | None = None) -> str | None:
    """Digest of the CUDA sources beside `package` (this one), as bindings/build_ffi.py makes it; None outside
    a checkout.
    """
    folder = (package or PACKAGE).parent / "src" / "cuda"
    if not (folder / "fp4bf16.h").is_file():
        return None
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".h", ".cuh", ".cu")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:12]


def _bindings(library: Path) -> ModuleType:
    """``_ffi.py`` beside `library`: the two are made by one build."""
    path = library.with_name("_ffi.py")
    if not path.is_file():
        raise LibraryError(f"{library} is there, but its bindings {path} are not; {_reinstall()}")
    spec = importlib.util.spec_from_file_location("fp4bf16._ffi", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Library:
    """The opened library. Functions are called by their name without the ``fp4bf16_`` prefix."""

    def __init__(self, path: Path):
        self.path = path
        self.ffi = _bindings(path).ffi
        try:
            self.lib = self.ffi.dlopen(str(path))
        except OSError as error:
            raise LibraryError(f"{path} cannot be opened: {error}; {_reinstall()}") from None
        self.abi_version = int(self.lib.fp4bf16_abi_version())
        self.version = self._text(self.lib.fp4bf16_version())
        self.source_digest = self._text(self.lib.fp4bf16_source_digest())
        self._check()

    def _text(self, pointer: Any) -> str:
        return self.ffi.string(pointer).decode()

    def _check(self) -> None:
        if (self.abi_version, self.version) != (ABI_VERSION, __version__):
            raise LibraryError(
                f"{self.path} was built for fp4bf16 {self.version} with ABI {self.abi_version}, but this "
                f"package ({PACKAGE}) is {__version__} with ABI {ABI_VERSION}; {_reinstall()}"
            )
        here = source_digest()
        if here is not None and here != self.source_digest:
            raise LibraryError(
                f"{self.path} was built from CUDA sources {self.source_digest}, but those of "
                f"{PACKAGE.parent} are {here}; {_reinstall()}"
            )

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``fp4bf16_<name>``; device addresses and streams are plain integers, 0 is NULL.

        Raises:
            ValueError: an argument is out of range. CudaError: no usable GPU, or the runtime failed.
            UnsupportedArchError: the library holds no code for this GPU.
        """
        function = getattr(self.lib, f"fp4bf16_{name}")
        kinds = self.ffi.typeof(function).args
        cast = [
            self.ffi.cast(kind, int(value)) if kind.kind == "pointer" and isinstance(value, int) else value
            for kind, value in zip(kinds, arguments, strict=True)
        ]
        status = function(*cast)
        if status:
            raise _ERRORS.get(status, CudaError)(self._text(self.lib.fp4bf16_last_error()))

    def cuda_versions(self) -> tuple[int, int]:
        """``(driver, runtime)`` as 1000 * major + 10 * minor; driver is 0 where there is none."""
        driver, runtime = self.ffi.new("int32_t*"), self.ffi.new("int32_t*")
        self.call("cuda_versions", driver, runtime)
        return driver[0], runtime[0]

    def device_count(self) -> int:
        """Usable GPUs; `CudaError` with the reason where there is no driver."""
        count = self.ffi.new("int32_t*")
        self.call("device_count", count)
        return count[0]

    def device(self, index: int) -> Device:
        """What GPU `index` is; `CudaError` where there is none of that number."""
        info = self.ffi.new("fp4bf16_device*")
        self.call("device_query", index, info)
        return Device(
            index, self._text(info.name), f"{info.major}.{info.minor}", info.multiprocessors, info.memory,
            info.l2_cache, info.shared_memory_per_block,
        )  # fmt: skip


@cache
def load() -> Library:
    """The library, opened once; `LibraryError` says what is missing or which two versions differ."""
    path = find_library()
    if path is None:
        raise LibraryError(
            f"no {NAME} beside {PACKAGE} or in an installed fp4bf16: it was installed without the CUDA "
            f"toolkit; install nvcc (CUDA 12.8 or later) and a host compiler, then {_reinstall()}"
        )
    return Library(path)


def devices() -> list[Device]:
    """The GPUs that the library can use; an empty list without a library, a driver or a GPU."""
    try:
        library = load()
        return [library.device(i) for i in range(library.device_count())]
    except (LibraryError, CudaError):
        return []


def available() -> bool:
    """Whether device arrays could run: a library that fits and a GPU."""
    return bool(devices())


def state() -> dict[str, Any]:
    """The library for ``fp4bf16 info``: never raises, every problem is a sentence under ``"problem"``."""
    report: dict[str, Any] = {"path": None, "problem": None, "gpus": []}
    try:
        path = find_library()
        report["path"] = None if path is None else str(path)
        library = load()
        report |= {"version": library.version, "abi": library.abi_version, "sources": library.source_digest}
        report["driver"], report["runtime"] = library.cuda_versions()
        report["gpus"] = [asdict(library.device(i)) for i in range(library.device_count())]
    except (LibraryError, CudaError) as error:
        report["problem"] = str(error)
    return report
