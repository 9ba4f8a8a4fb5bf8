"""src/cuda/fp4bf16.h and fp4bf16_network.h -> the cffi out-of-line ABI module fp4bf16/_ffi.py, and the
header that tells the library what it was built from. Run by CMake; needs cffi and no compiler.

    python bindings/build_ffi.py --version 0.1.0 --module _ffi.py --build-info fp4bf16_build_info.h
"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "src" / "cuda"
HEADERS = [SOURCES / "fp4bf16.h", SOURCES / "fp4bf16_network.h"]


def declarations(header: Path) -> str:
    """What cffi parses: the text between the two markers, without comments and the export macro."""
    match = re.search(r"/\* cffi: begin \*/(.*)/\* cffi: end \*/", header.read_text("utf-8"), re.DOTALL)
    if match is None:
        raise SystemExit(f"build_ffi: {header} lacks the markers '/* cffi: begin */' and '/* cffi: end */'")
    text = re.sub(r"/\*.*?\*/", "", match.group(1), flags=re.DOTALL)
    return text.replace("FP4BF16_API ", "")


def source_digest(folder: Path = SOURCES) -> str:
    """Twelve hexadecimal digits over the CUDA sources; fp4bf16/backends/cuda.py does the same."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".h", ".cuh", ".cu")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:12]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", required=True, help="version of the package")
    parser.add_argument("--module", type=Path, required=True, help="Python module to write")
    parser.add_argument("--build-info", type=Path, help="C header to write")
    args = parser.parse_args()

    import cffi

    ffi = cffi.FFI()
    for header in HEADERS:
        ffi.cdef(declarations(header))
    ffi.set_source("fp4bf16._ffi", None)
    args.module.parent.mkdir(parents=True, exist_ok=True)
    ffi.emit_python_code(str(args.module))
    digest = source_digest()
    with args.module.open("a", encoding="utf-8") as f:
        f.write(f"\nVERSION = {args.version!r}\nSOURCE_DIGEST = {digest!r}\n")
    if args.build_info:
        write(
            args.build_info,
            f'#define FP4BF16_VERSION "{args.version}"\n#define FP4BF16_SOURCE_DIGEST "{digest}"\n',
        )


if __name__ == "__main__":
    main()
