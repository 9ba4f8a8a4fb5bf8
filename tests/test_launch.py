"""How kernels are launched, by the sources and by the machine code: see src/cuda/launch.cuh."""

from __future__ import annotations

import bisect
import re
import struct
from dataclasses import dataclass, field
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
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?\w+ )?([A-Z][\w.]*)([^;]*);")
WINDOW = 1024  # bytes that are read at a time: 64 instructions; whole, the library takes a minute


@dataclass
class Function:
    """The machine code of one, read as far as it is followed."""

    bytes: bytes
    #: Address -> (whether conditional, operation, operands, address that they end with or None)
    read: dict[int, tuple[bool, str, str, int | None]] = field(default_factory=dict)

    def add(self, text: str, moved: int = 0) -> None:
        """The instructions of a listing, which shows them, and where they jump to, `moved` bytes too far."""
        for m in INSTRUCTION.finditer(text):
            operands = m[4].strip()
            target = re.search(r"(-?0x[0-9a-f]+)\)?$", operands)
            to = None if target is None else int(target[1], 16) - moved
            self.read[int(m[1], 16) - moved] = m[2] is not None, m[3].split(".")[0], operands, to


def _sections(cubin: bytes):
    """(name, bytes) of each of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<I20xQQ", cubin, table + i * size) for i in range(count)]
    for name, offset, length in heads:
        begin = heads[names][1] + name
        yield cubin[begin : cubin.index(b"\0", begin)].decode(), cubin[offset : offset + length]


def _read(folder: Path, wanted: list[tuple[Function, int]]) -> None:
    """A window of each function from an address on, all in one call of the tool."""
    parts, begins, moved = [], [], []
    for function, address in wanted:
        begins.append(sum(map(len, parts[-1:])) + (begins[-1] if begins else 0))
        moved.append(begins[-1] - address)
        parts.append(function.bytes[address : address + WINDOW])
    (folder / "code.bin").write_bytes(b"".join(parts))
    text = _run("nvdisasm", "--binary", "SM90a", folder / "code.bin")
    lines: list[list[str]] = [[] for _ in wanted]
    for line in text.splitlines():
        if m := INSTRUCTION.search(line):
            lines[bisect.bisect_right(begins, int(m[1], 16)) - 1].append(line)
    for (function, _), by, found in zip(wanted, moved, lines, strict=True):
        function.add("\n".join(found), by)


def _before_the_wait(function: Function) -> tuple[list[str], bool, int | None]:
    """What touches memory and can be reached from the start without a wait; BSSY tells where BSYNC goes.
    Then whether a wait is reached, and an address that has to be read before more can be said, or None."""
    seen, todo, found, waits = set(), [(0, ())], [], False
    while todo:
        place = address, joins = todo.pop()
        if place in seen or address == len(function.bytes):
            continue
        assert 0 <= address < len(function.bytes) and address % 16 == 0, hex(address)
        if address not in function.read:
            return found, waits, address
        seen.add(place)
        conditional, operation, operands, target = function.read[address]
        if operation == WAIT:
            waits = True
            continue
        if operation in GLOBAL or operation in INDIRECT:  # an indirect jump: this test does not follow it
            found.append(f"{address:#x} {operation} {operands}")
        if operation == "BSSY":
            joins = tuple(sorted({**dict(joins), operands.split(",")[0]: target}.items()))
        elif operation == "BSYNC":
            todo.append((dict(joins)[operands], joins))
        elif operation in ("BRA", "JMP", "CALL") and target is not None:
            todo.append((target, joins))
            conditional = conditional or operation == "CALL" or re.search(r"\bU?P\d", operands) is not None
        if conditional or operation not in ("BRA", "JMP", "BSYNC", "EXIT", "RET"):
            todo.append((address + 16, joins))
    return found, waits, None


def test_nothing_is_read_or_written_before_the_wait(tmp_path):
    """Of all kernels on Hopper, whatever the compiler moved: it may move reads of memory that it takes for
    constant (ld.global.nc) across the wait."""
    if cuda.find_library() is None:
        pytest.skip("no nvcc: the CUDA library was not built")
    (tmp_path / "cubins").mkdir()
    _run("cuobjdump", "-xelf", "sm_90a", cuda.find_library(), folder=tmp_path / "cubins")
    functions = {
        name.removeprefix(".text."): Function(code)
        for path in sorted((tmp_path / "cubins").iterdir())
        for name, code in _sections(path.read_bytes())
        if name.startswith(".text.") and not any(f"{len(never)}{never}" in name for never in LAUNCHED_NEVER)
    }
    assert len(functions) > 250
    todo = dict.fromkeys(functions, 0)
    while todo:
        _read(tmp_path, [(functions[name], address) for name, address in todo.items()])
        results = {name: _before_the_wait(functions[name]) for name in todo}
        for name, (found, waits, missing) in results.items():
            assert not found, (name, found)
            assert waits or missing is not None, f"{name} does not wait"
        todo = {name: missing for name, (_, _, missing) in results.items() if missing is not None}


def test_the_search_before_the_wait_finds():
    """What _before_the_wait makes of the forms of code that the compiler writes."""
    lines = ["S2R R0, SR_TID.X", "BSSY B0, 0x50", "@P0 BRA 0x40", "STS [R1], RZ", "BSYNC B0", "ACQBULK",
             "LDG.E R2, desc[UR4][R2.64]", "EXIT"]  # fmt: skip

    def listed(lines):
        return "\n".join(f"        /*{16 * i:04x}*/                   {x} ;" for i, x in enumerate(lines))

    def search(lines):
        function = Function(bytes(16 * len(lines)))
        function.add(listed(lines))
        return _before_the_wait(function)

    def early(lines):
        found, waits, missing = search(lines)
        assert missing is None and waits
        return [x.split()[1] for x in found]

    assert search(lines) == ([], True, None)
    assert early([*lines[:4], "BSYNC B0", "LDG.E R4, desc[UR4][R4.64]", *lines[5:]]) == ["LDG"]
    assert early(["@P0 BRA 0x20", "ACQBULK", "STG.E desc[UR4][R2.64], R4", "EXIT"]) == ["STG"]
    assert search(["S2R R0, SR_TID.X", "EXIT"]) == ([], False, None)
    assert search(["@P0 BRA 0x20", "EXIT", "not read"]) == ([], False, 0x20)
    apart = Function(bytes(80))  # read from 0 and from 64, from where it jumps back
    apart.add(listed(["BRA 0x40", "EXIT", "ACQBULK"]))
    assert _before_the_wait(apart) == ([], False, 0x40)
    apart.add(listed(["BRA -0x20"]), -0x40)
    assert _before_the_wait(apart) == ([], True, None)
