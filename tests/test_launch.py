"""How kernels are launched, by the sources and by the machine code: see src/cuda/launch.cuh."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_sass import _run

from fp4bf16.backends import cuda

SOURCES = Path(__file__).resolve().parents[1] / "src" / "cuda"
WAIT_CALL = "wait_for_previous()"
#: Kernels whose wait is in a function that they call first, by its name.
ELSEWHERE = {"branch_kernel": "begin"}
#: Never launched: it tells which code of the library a device runs.
LAUNCHED_NEVER = {"probe_kernel"}
#: Accesses to memory that other kernels may share, by the first part of their names.
GLOBAL = {"LD", "LDG", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "LDGSTS", "UBLKCP", "UTMALDG", "UTMASTG",
          "UTMAREDG", "UTMAPF", "UBLKPF"}  # fmt: skip
INDIRECT = ("BRX", "JMX")
WAIT = "ACQBULK"  # griddepcontrol.wait


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", text), flags=re.DOTALL)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    paths = [path for path in sorted(SOURCES.iterdir()) if path.suffix in (".cu", ".cuh", ".h")]
    return {path.name: _without_comments(path.read_text()) for path in paths}


def _close(text: str, at: int, pair: str) -> int:
    """Behind the bracket that closes the first one from `at` on."""
    depth = 0
    for match in re.finditer(f"[{re.escape(pair)}]", text[at:]):
        depth += 1 if match[0] == pair[0] else -1
        if depth == 0:
            return at + match.end()
    raise AssertionError("brackets do not match")


def _body(text: str, name: str, at: int) -> str:
    """Of the function whose name follows `at`."""
    start = re.search(rf"\b{name}\s*\(", text[at:])
    assert start, name
    behind = _close(text, at + start.start(), "()")
    return text[behind : _close(text, behind, "{}")]


def _kernels(text: str):
    """(name, body) of each."""
    for match in re.finditer(r"__global__\s+void\b", text):
        at = match.end()
        if bounds := re.match(r"\s*__launch_bounds__\s*", text[at:]):
            at = _close(text, at + bounds.end(), "()")
        name = re.match(r"\s*(\w+)\s*\(", text[at:])[1]
        yield name, _body(text, name, at)


def test_one_place_launches(sources):
    for name, text in sources.items():
        assert "<<<" not in text, f"{name}: launch with launch_kernel (launch.cuh)"
        if name != "launch.cuh":
            assert not re.search(r"\bcu(da)?LaunchK", text), f"{name}: launch with LaunchPlan (launch.cuh)"
            assert "griddepcontrol" not in text, name


def test_each_kernel_waits_for_the_one_before(sources):
    found = 0
    for file, text in sources.items():
        for name, body in _kernels(text):
            found += 1
            if name in LAUNCHED_NEVER:
                assert not re.search(rf"launch\w*(<[^;]*>)?\(\s*{name}\b", text), name
                continue
            if called := ELSEWHERE.get(name):
                assert f"{called}(" in body, name
                at = text.index(f"void {called}(") + len("void ")
                body = _body(text, called, at)
            assert WAIT_CALL in body, f"{file}: {name} does not wait for the kernel before"
    assert found > 50


# ---- machine code
def _instructions(function: str):
    """(address, whether conditional, operation, operands)"""
    line = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?\w+ )?([A-Z][\w.]*)([^;]*);")
    return [(int(m[1], 16), m[2] is not None, m[3].split(".")[0], m[4].strip())
            for m in line.finditer(function)]  # fmt: skip


def _before_the_wait(function: str) -> list[str]:
    """What touches memory and can be reached from the start without a wait; BSSY tells where BSYNC goes."""
    code = _instructions(function)
    where = {address: i for i, (address, *_) in enumerate(code)}
    seen, todo, found = set(), [(0, ())], []
    while todo:
        place = i, joins = todo.pop()
        if place in seen or i >= len(code):
            continue
        seen.add(place)
        address, conditional, operation, operands = code[i]
        if operation == WAIT:
            continue
        if operation in GLOBAL or operation in INDIRECT:  # an indirect jump: this test does not follow it
            found.append(f"{address:#x} {operation} {operands}")
        target = re.search(r"0x([0-9a-f]+)\)?$", operands)
        if operation == "BSSY":
            joins = tuple(sorted({**dict(joins), operands.split(",")[0]: int(target[1], 16)}.items()))
        elif operation == "BSYNC":
            todo.append((where[dict(joins)[operands]], joins))
        elif operation in ("BRA", "JMP", "CALL") and target:
            todo.append((where[int(target[1], 16)], joins))
            conditional = conditional or operation == "CALL" or re.search(r"\bU?P\d", operands) is not None
        if conditional or operation not in ("BRA", "JMP", "BSYNC", "EXIT", "RET"):
            todo.append((i + 1, joins))
    return found


@pytest.mark.slow
def test_nothing_is_read_or_written_before_the_wait():
    """Of all kernels on Hopper, whatever the compiler moved: it may move reads of memory that it takes for
    constant (ld.global.nc) across the wait."""
    if cuda.find_library() is None:
        pytest.skip("no nvcc: the CUDA library was not built")
    functions = _run("cuobjdump", "-sass", "-arch", "sm_90a", cuda.find_library()).split("Function : ")[1:]
    checked = 0
    for function in functions:
        name = function.split("\n", 1)[0]
        if any(f"{len(never)}{never}" in name for never in LAUNCHED_NEVER):
            continue
        assert WAIT in function, name
        assert not _before_the_wait(function), name
        checked += 1
    assert checked > 250


def test_the_search_before_the_wait_finds():
    """What _before_the_wait makes of the forms of code that the compiler writes."""
    lines = ["S2R R0, SR_TID.X", "BSSY B0, 0x50", "@P0 BRA 0x40", "STS [R1], RZ", "BSYNC B0", "ACQBULK",
             "LDG.E R2, desc[UR4][R2.64]", "EXIT"]  # fmt: skip

    def listed(lines):
        return "\n".join(f"        /*{16 * i:04x}*/                   {x} ;" for i, x in enumerate(lines))

    assert _before_the_wait(listed(lines)) == []
    early = [*lines[:4], "BSYNC B0", "LDG.E R4, desc[UR4][R4.64]", *lines[5:]]
    assert [x.split()[1] for x in _before_the_wait(listed(early))] == ["LDG"]
    skipped = ["@P0 BRA 0x20", "ACQBULK", "STG.E desc[UR4][R2.64], R4", "EXIT"]
    assert [x.split()[1] for x in _before_the_wait(listed(skipped))] == ["STG"]
