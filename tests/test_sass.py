"""The machine code of the built library, read without a GPU: tensor cores used, no local memory beside them,
nothing serialised.

What ptxas says of spills is an error in CI's build (FP4BF16_WERROR); that it serialised wgmma shows in an
"info" line alone, which cmake/strict_ptxas.sh makes an error there.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fp4bf16.backends import cuda

ROOT = Path(__file__).resolve().parents[1]
LAUNCHED, CONSUMER = 168, 240  # registers a thread: at the launch; most after setmaxnreg
BOTH, BF16 = {"QGMMA", "HGMMA"}, {"HGMMA"}
#: Kernel that Hopper alone has -> the products of its variants: FP8 and BF16, or BF16 alone.
PRODUCTS = {
    "sm90_dual_gemm": BOTH,
    "sm90_conv": BOTH,
    "sm90_wgrad": BF16,
    "sm90_attention_kernel": BF16,
    "sm90_attention_weights_kernel": BF16,
    "branch_kernel": BF16,
    "reduce_kernel": set(),  # of wgrad's partial sums
}


def _tool(name: str) -> Path | None:
    """cuobjdump or nvdisasm: of the wheel that extra `test` brings, or of the toolkit."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    wheel = next((Path(str(f.locate())) for f in files if f.name == name), None)
    found = shutil.which(name)
    return wheel or (Path(found) if found else None)


def _run(name: str, *arguments: object, folder: Path | None = None) -> str:
    tool = _tool(name)
    if tool is None:
        pytest.fail(f"{name} is missing; run: python -m pip install '.[test]'")
    command = [str(tool), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout


def _kernel(symbol: str) -> str:
    """The last name of a mangled one: lengths and names follow each other."""
    at, name = symbol.index("N") + 1, ""
    while match := re.match(r"\d+", symbol[at:]):
        at += match.end()
        name = symbol[at : at + int(match[0])]
        at += int(match[0])
    return name


@pytest.fixture(scope="module")
def resources() -> dict[str, dict[str, dict[str, int]]]:
    """Architecture -> kernel -> {"REG": ..., "STACK": ..., "LOCAL": ...}."""
    if cuda.find_library() is None:
        pytest.skip("no nvcc: the CUDA library was not built")
    table: dict[str, dict[str, dict[str, int]]] = {}
    kernels: dict[str, dict[str, int]] = {}
    name = ""
    for line in _run("cuobjdump", "-res-usage", cuda.find_library()).splitlines():
        if match := re.match(r"\s*arch = (\w+)", line):
            kernels = table.setdefault(match[1], {})
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif "REG:" in line:
            kernels[name] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
    return table


@pytest.fixture(scope="module")
def code(resources, tmp_path_factory) -> dict[str, list[str]]:
    """Kernel that Hopper alone has -> its instructions, with modifiers and without operands. Of those that a
    file makes of one template, the smallest: the others differ in the size of their tiles, and take seconds.
    """
    folder = tmp_path_factory.mktemp("cubins")
    _run("cuobjdump", "-xelf", "sm_90a", cuda.find_library(), folder=folder)
    files = [path for path in sorted(folder.iterdir()) if b"sm90_" in path.read_bytes()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = pool.map(_smallest, files)
        return {symbol: opcodes for text in texts for symbol, opcodes in _functions(text)}


def _smallest(cubin: Path) -> str:
    command = ["readelf", "-sW", str(cubin)]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kernels: dict[str, tuple[int, str]] = {}
    for row in table.splitlines():
        if match := re.match(r" *(\d+): \w+ +(\w+) FUNC .* (_Z\w+)$", row):
            name, this = _kernel(match[3]), (int(match[2], 0), match[1])
            kernels[name] = min(kernels.get(name, this), this)
    return _run("nvdisasm", "-c", "-fun", ",".join(number for _, number in kernels.values()), cubin)


def _functions(text: str) -> Iterator[tuple[str, list[str]]]:
    instruction = re.compile(r"^ +/\*[0-9a-f]{4,}\*/ +(?:@!?\w+ )?([A-Z][\w.]*)(.*?) ?;", re.MULTILINE)
    for part in re.split(r"^\.text\.", text, flags=re.MULTILINE)[1:]:
        symbol, body = part.split(":", 1)
        found = instruction.findall(body)
        yield symbol, [op + rest if op.startswith("USETMAXREG") else op for op, rest in found]


def _matrix(opcodes: list[str]) -> list[str]:
    return [op for op in opcodes if op.startswith(("QGMMA", "HGMMA"))]


def test_the_products_of_each_kernel(code):
    found = {name: [] for name in PRODUCTS}
    for symbol, opcodes in code.items():
        found[_kernel(symbol)].append({op.split(".")[0] for op in _matrix(opcodes)})
    for name, variants in found.items():
        most = PRODUCTS[name]
        assert most in variants, (name, variants)
        # what multiplies FP8 has a BF16 branch beside it
        assert all(kinds == most or kinds == BF16 & most for kinds in variants), (name, variants)
    fp8 = {op for opcodes in code.values() for op in _matrix(opcodes) if op.startswith("QGMMA")}
    assert all(op.endswith(".F32.E4M3.E4M3") for op in fp8), fp8
    bf16 = {op for opcodes in code.values() for op in _matrix(opcodes) if op.startswith("HGMMA")}
    assert all(op.endswith(".F32.BF16") for op in bf16), bf16


def test_hopper_kernels_have_no_local_memory(code, resources):
    hopper = {name: used for name, used in resources["sm_90a"].items() if "sm90_" in name}
    assert {_kernel(name) for name in hopper} == set(PRODUCTS)
    for name, used in hopper.items():
        assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= LAUNCHED, (name, used)
    for name, opcodes in code.items():
        local = [op for op in opcodes if op.startswith(("LDL", "STL"))]
        assert not local, f"{name}: {len(local)} {local[:2]}"


def test_consumers_do_not_ask_for_more_registers_than_there_are(code):
    for name, opcodes in code.items():
        text = " ".join(op for op in opcodes if op.startswith("USETMAXREG"))
        asked = [int(number, 16) for number in re.findall(r"0x[0-9a-f]+", text)]
        if not asked:
            assert not _matrix(opcodes), name
            continue
        assert max(asked) <= CONSUMER and min(asked) >= 24, (name, asked)
        assert 2 * max(asked) + min(asked) <= 65536 // 128, (name, asked)


def test_products_are_not_serialised(code):
    """A serialised kernel waits after every wgmma: seven waits for seven products where this was provoked."""
    for name, opcodes in code.items():
        products = len(_matrix(opcodes))
        waits = sum(op.startswith("WARPGROUP.DEPBAR") for op in opcodes)
        assert not products or waits <= products / 2, f"{name}: {waits} waits for {products} products"


def test_hopper_kernels_are_built_for_hopper_alone(resources):
    for arch, kernels in resources.items():
        hopper = [name for name in kernels if "sm90_" in name]
        assert not hopper or arch == "sm_90a", f"{arch}: {hopper[:2]}"
        assert arch != "sm_90a" or hopper


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_build_can_fail_on_serialised_products(tmp_path):
    """The launcher of CI's build: an accumulator that is touched too early fails, harmless code passes."""
    fence = "wgmma.fence.sync.aligned;"
    wait = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    product = (
        'asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "'
        '"{%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"'
        ' : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));'
    )
    for early, status in (("d[0] += 1.0f;", 1), ("", 0)):
        source = tmp_path / "product.cu"
        source.write_text(
            "__global__ void product(float* out, unsigned long long a, unsigned long long b) {\n"
            f'float d[4] = {{}};\nasm volatile("{fence}");\n{product}\n{early}\n'
            f'asm volatile("{wait}" ::: "memory");\n'
            "for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = d[i];\n}\n"
        )
        command = [str(ROOT / "cmake" / "strict_ptxas.sh"), "nvcc", "-std=c++17", "-gencode"]
        command += ["arch=compute_90a,code=sm_90a", "-c", str(source), "-o", str(tmp_path / "product.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert ("error: ptxas serialised wgmma" in done.stderr) == bool(status)
