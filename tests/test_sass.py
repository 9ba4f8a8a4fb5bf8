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
from pathlib import Path

import pytest

from fp4bf16.backends import cuda

ROOT = Path(__file__).resolve().parents[1]
LAUNCHED, CONSUMER = 168, 240  # registers a thread: at the launch; most after setmaxnreg


def _tool(name: str) -> Path | None:
    """cuobjdump or nvdisasm: of the wheel that extra `test` brings, or of the toolkit."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    wheel = next((Path(str(f.locate())) for f in files if f.name == name), None)
    found = shutil.which(name)
    return wheel or (Path(found) if found else None)


def _run(*arguments: str) -> str:
    tools = [_tool(name) for name in ("cuobjdump", "nvdisasm")]
    if None in tools:
        pytest.fail("cuobjdump and nvdisasm are missing; run: python -m pip install '.[test]'")
    path = os.pathsep.join([str(tools[1].parent), os.environ.get("PATH", "")])  # cuobjdump calls nvdisasm
    command = [str(tools[0]), *arguments, str(cuda.find_library())]
    environment = os.environ | {"PATH": path}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


@pytest.fixture(scope="module")
def resources() -> dict[str, dict[str, dict[str, int]]]:
    """Architecture -> kernel -> {"REG": ..., "STACK": ..., "LOCAL": ...}."""
    if cuda.find_library() is None:
        pytest.skip("no nvcc: the CUDA library was not built")
    table: dict[str, dict[str, dict[str, int]]] = {}
    kernels: dict[str, dict[str, int]] = {}
    name = ""
    for line in _run("-res-usage").splitlines():
        if match := re.match(r"\s*arch = (\w+)", line):
            kernels = table.setdefault(match[1], {})
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif "REG:" in line:
            kernels[name] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
    return table


@pytest.fixture(scope="module")
def code(resources) -> dict[str, list[str]]:
    """Kernel that Hopper alone has -> its instructions, with modifiers and without operands."""
    table: dict[str, list[str]] = {}
    opcodes: list[str] = []
    hopper = sorted(resources["sm_90a"].keys() - resources["sm_80"].keys())
    for line in _run("-sass", "-arch", "sm_90a", "-fun", ",".join(hopper)).splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            opcodes = table.setdefault(match[1], [])
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)(.*?);", line):
            opcodes.append(match[1] + (" " + match[2].strip() if match[1].startswith("USETMAXREG") else ""))
    return table


def _matrix(opcodes: list[str]) -> list[str]:
    return [op for op in opcodes if op.startswith(("QGMMA", "HGMMA"))]


def test_the_gemm_uses_both_kinds_of_tensor_core(code):
    gemm = {name: {op.split(".")[0] for op in _matrix(opcodes)} for name, opcodes in code.items()
            if "sm90_dual_gemm" in name}  # fmt: skip
    assert gemm, "no sm90_dual_gemm in the library"
    assert all("HGMMA" in kinds for kinds in gemm.values()), gemm
    assert any({"QGMMA", "HGMMA"} <= kinds for kinds in gemm.values()), gemm
    shapes = {op for name in gemm for op in _matrix(code[name]) if op.startswith("QGMMA")}
    assert all(".E4M3" in op for op in shapes), shapes


def test_hopper_kernels_have_no_local_memory(code, resources):
    for name, opcodes in code.items():
        assert _matrix(opcodes), f"{name} is for Hopper alone and uses no tensor core"
        local = [op for op in opcodes if op.startswith(("LDL", "STL"))]
        assert not local and resources["sm_90a"][name]["STACK"] == 0, f"{name}: {len(local)} {local[:2]}"
        assert resources["sm_90a"][name]["REG"] <= LAUNCHED, name


def test_consumers_do_not_ask_for_more_registers_than_there_are(code):
    for name, opcodes in code.items():
        text = " ".join(op for op in opcodes if op.startswith("USETMAXREG"))
        asked = [int(number, 16) for number in re.findall(r"0x[0-9a-f]+", text)]
        if not asked:
            assert "sm90_dual_gemm" not in name, name
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
