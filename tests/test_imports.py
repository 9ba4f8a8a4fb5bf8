"""The floors of the package: imports run one way, and `import fp4bf16` stays light."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fp4bf16"

#: From the ground up. A module may import from floors under its own and from its own floor.
FLOORS = [
    {"errors", "extras", "_version", "files"},
    {"averages", "formats", "interop", "layout", "tracks"},
    {"adapters", "backends", "device", "tune"},
    {"dispatch"},
    {"quantize", "certify", "fallbacks", "compare", "io", "foreign"},
    {"dual", "dual_cuda", "operands", "epilogue", "gemm", "gemm_cuda", "certified_cuda", "gemm_vjp",
     "gemm_vjp_cuda", "threshold_cuda", "conv", "conv_cuda", "conv_operands", "conv_vjp",
     "conv_vjp_cuda", "certified_conv_cuda", "attention", "attention_cuda"},
    {"nn", "frameworks", "testing"},
    {"routing", "consistency", "diffusion"},
    {"align"},
    {"train"},
    {"cli", "__main__", "examples"},
]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}


def _modules() -> list[pathlib.Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if "python_ref" not in p.relative_to(PACKAGE).parts]


def _imported(path: pathlib.Path) -> set[tuple[str, int]]:
    """Top-level names under ``fp4bf16`` that a file imports, with the line; imports in functions count."""
    depth = len(path.relative_to(PACKAGE).parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level == depth:  # relative to the package itself
                names = [node.module.split(".")[0]] if node.module else [a.name for a in node.names]
            elif node.level == 0 and (node.module or "").split(".")[0] == "fp4bf16":
                names = node.module.split(".")[1:2] or [a.name for a in node.names]
            else:
                continue
            found |= {(name, node.lineno) for name in names}
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("fp4bf16.")]
            found |= {(name, node.lineno) for name in names}
    return found


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in ("__init__", "_ffi"):  # _ffi is generated when the CUDA library is built
        return
    assert own in LEVEL, f"{own} stands on no floor: add it to FLOORS where it belongs"
    for name, line in _imported(path):
        if name not in LEVEL:  # a public name of the package, or python_ref, which all floors may read
            continue
        lazy_accessor = own == "formats" and name == "quantize"  # QuantizedArray.expanded and __array__
        allowed = LEVEL[name] <= LEVEL[own] or lazy_accessor
        assert allowed, f"{path.name}:{line} imports {name} from a floor above"


def test_reference_stands_alone():
    allowed = {"numpy", "ml_dtypes", "__future__"}
    standard = set(sys.stdlib_module_names)
    for path in sorted((ROOT / "python_ref").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name.split(".")[0] for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{path.name}:{node.lineno} leaves python_ref"
                names = [node.module.split(".")[0]] if node.level == 0 else []
            for name in names:
                assert name in allowed or name in standard, f"{path.name}:{node.lineno} imports {name}"


def test_import_is_light():
    code = (
        "import sys, fp4bf16\n"
        "heavy = {'numba', 'torch', 'jax', 'cupy', 'matplotlib', 'PIL', 'safetensors', 'tqdm', 'cuda'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_functions_win_over_modules_of_the_same_name():
    import fp4bf16 as fb
    import fp4bf16.quantize  # noqa: F401  (must not replace the function)

    assert callable(fb.quantize) and callable(fb.attention) and callable(fb.compare)


def test_public_names_exist():
    import fp4bf16 as fb

    for name in fb.__all__:
        assert getattr(fb, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = fb.quantise
