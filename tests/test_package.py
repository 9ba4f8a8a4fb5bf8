"""The package as it is installed: found from a checkout, from an empty folder and after ``pip install -e``.

Tests that make a virtual environment carry the marker ``slow`` and are left out unless asked for with ``-m``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fp4bf16
from fp4bf16 import LibraryError
from fp4bf16.backends import cuda

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


# ---- what the files say
def test_the_version_stands_in_one_place():
    assert "version" in PYPROJECT["project"]["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", fp4bf16.__version__)
    text = f'"{fp4bf16.__version__}"'
    holders = [p.name for p in (ROOT / "fp4bf16").rglob("*.py") if f"= {text}" in p.read_text()]
    assert holders == ["_version.py"]


def test_extras():
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert set(extras) >= {"train", "cuda", "torch", "jax", "test", "peers", "all"}
    assert not [d for d in extras["test"] if re.match("torch|jax|cupy|tensorflow", d)]
    assert "torch==2.13.0" in extras["peers"]
    names = {re.split(r"[<>=]", d)[0] for d in PYPROJECT["project"]["dependencies"]}
    assert names == {"numpy", "ml_dtypes", "numba", "cffi"}


def test_the_reference_is_a_relative_link_in_the_checkout():
    link = ROOT / "fp4bf16" / "python_ref"
    assert link.is_symlink() and os.readlink(link) == os.path.join("..", "python_ref")
    assert (ROOT / "fp4bf16" / "py.typed").is_file()


# ---- which library is loaded
@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A package folder and an installed folder, both empty, in place of the real ones."""
    monkeypatch.delenv("FP4BF16_LIBRARY", raising=False)
    package, installed = tmp_path / "checkout" / "fp4bf16", tmp_path / "site" / "fp4bf16"
    package.mkdir(parents=True), installed.mkdir(parents=True)
    monkeypatch.setattr(cuda, "PACKAGE", package)
    monkeypatch.setattr(cuda, "_installed_folder", lambda: installed)
    cuda.load.cache_clear()
    yield package, installed
    cuda.load.cache_clear()


def test_beside_the_package_first_then_in_the_distribution(folders, monkeypatch, tmp_path):
    package, installed = folders
    assert cuda.find_library() is None
    (installed / cuda.NAME).touch()
    assert cuda.find_library() == installed / cuda.NAME
    (package / cuda.NAME).touch()
    assert cuda.find_library() == package / cuda.NAME
    other = tmp_path / "mine.so"
    other.touch()
    monkeypatch.setenv("FP4BF16_LIBRARY", str(other))
    assert cuda.find_library() == other
    monkeypatch.setenv("FP4BF16_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(LibraryError, match="absent.so is no file; unset it"):
        cuda.find_library()


def test_no_library_is_a_sentence(folders):
    with pytest.raises(LibraryError, match="without the CUDA toolkit; install nvcc.* --force-reinstall"):
        cuda.load()
    assert cuda.devices() == [] and not cuda.available()
    assert "nvcc" in cuda.state()["problem"]


def test_a_library_without_bindings_or_that_is_no_library(folders):
    package, _ = folders
    (package / cuda.NAME).write_bytes(b"not a library")
    with pytest.raises(LibraryError, match="bindings .*_ffi.py are not; reinstall"):
        cuda.load()
    script = str(ROOT / "bindings" / "build_ffi.py")
    command = [sys.executable, script, "--version", fp4bf16.__version__, "--module", str(package / "_ffi.py")]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(LibraryError, match="cannot be opened: .*; reinstall"):
        cuda.load()
    assert "cannot be opened" in cuda.state()["problem"]


@pytest.mark.parametrize(
    "version, abi, digest, sentence",
    [
        ("0.0.1", cuda.ABI_VERSION, None, r"for fp4bf16 0\.0\.1 with ABI {a}, but .* is {v} with ABI {a}"),
        (None, cuda.ABI_VERSION + 1, None, r"for fp4bf16 {v} with ABI {b}, but .* with ABI {a}; reinstall"),
        (None, cuda.ABI_VERSION, "0123456789ab", r"sources 0123456789ab, but those of .* are {d}; reinstall"),
    ],
)
def test_a_library_of_another_build_names_both_values(monkeypatch, version, abi, digest, sentence):
    monkeypatch.setattr(cuda, "PACKAGE", ROOT / "fp4bf16")  # also where the installed package is tested
    library = cuda.Library.__new__(cuda.Library)
    library.path, library.version, library.abi_version = Path("lib.so"), version or fp4bf16.__version__, abi
    library.source_digest = digest or cuda.source_digest()
    a, v = cuda.ABI_VERSION, re.escape(fp4bf16.__version__)
    with pytest.raises(LibraryError, match=sentence.format(a=a, b=a + 1, v=v, d=cuda.source_digest())):
        library._check()


def test_a_library_of_this_build_is_accepted():
    library = cuda.Library.__new__(cuda.Library)
    library.path, library.version, library.abi_version = Path("lib.so"), fp4bf16.__version__, cuda.ABI_VERSION
    library.source_digest = cuda.source_digest()
    library._check()


# ---- installing
PROBE = """
import json, pathlib, fp4bf16, fp4bf16.python_ref
from fp4bf16.backends import cuda
package = pathlib.Path(fp4bf16.__file__).parent
print(json.dumps({
    "package": str(package), "link": (package / "python_ref").is_symlink(),
    "reference": fp4bf16.python_ref.__file__, "library": str(cuda.find_library()), "state": cuda.state(),
}))
"""


class Environment:
    """A virtual environment that borrows the dependencies of this one: only our package is installed."""

    def __init__(self, folder: Path):
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        self.site = Path(self.run("-c", "import site; print(site.getsitepackages()[0])").stdout.strip())
        (self.site / "borrowed.pth").write_text("\n".join(site.getsitepackages()))

    def run(self, *arguments, check=True, cwd=None, **environment):
        dropped = ("PYTHONPATH", "FP4BF16_LIBRARY")
        env = {k: v for k, v in os.environ.items() if k not in dropped} | environment
        command = [str(self.python), *map(str, arguments)]
        cwd = cwd or self.folder
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, check=False)
        assert done.returncode == 0 or not check, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def pip(self, *arguments, check=True, **environment) -> tuple[int, str]:
        """Exit status and everything that ``pip install`` printed."""
        options = ("install", "-v", "--no-deps", "--force-reinstall")
        done = self.run("-m", "pip", *options, *arguments, check=check, **environment)
        return done.returncode, done.stdout + done.stderr

    def probe(self, cwd=None) -> dict:
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        return json.loads(self.run("-c", PROBE, cwd=cwd or empty).stdout)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.mark.slow
def test_installed_from_an_empty_folder_and_from_the_checkout(environment):
    _, built = environment.pip(ROOT)
    line = re.findall("fp4bf16: (building the CUDA library|the CUDA library is skipped)", built)
    assert len(line) == 1, "one line says whether the CUDA library is built"
    outside = environment.probe()
    assert outside["package"] == str(environment.site / "fp4bf16")
    assert not outside["link"] and outside["reference"].startswith(str(environment.site))

    inside = environment.probe(cwd=ROOT)
    assert inside["package"] == str(ROOT / "fp4bf16") and inside["link"]
    for state in (outside, inside):
        if line[0].startswith("building"):
            assert state["library"] == str(environment.site / "fp4bf16" / cuda.NAME)
            assert state["state"]["version"] == fp4bf16.__version__
        else:
            assert state["library"] == "None" and "nvcc" in state["state"]["problem"]
    script = environment.python.with_name("fp4bf16")
    version = subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout
    assert fp4bf16.__version__ in version


@pytest.mark.slow
def test_editable(environment):
    _, built = environment.pip("-e", ROOT)
    state = environment.probe()
    assert state["package"] == str(ROOT / "fp4bf16")
    if "building the CUDA library" in built:
        assert state["library"] == str(environment.site / "fp4bf16" / cuda.NAME)
        assert state["state"]["sources"] == cuda.source_digest()
    else:
        assert state["library"] == "None"


@pytest.mark.slow
def test_cuda_on_without_nvcc_fails_in_a_sentence(environment):
    path = str(environment.python.parent)  # no compiler on it
    status, text = environment.pip(
        ROOT, "--config-settings", "cmake.define.FP4BF16_CUDA=ON", check=False, PATH=path,
        SKBUILD_BUILD_DIR=str(environment.folder / "failed"),
    )  # fmt: skip
    assert status != 0
    assert re.search(r"FP4BF16_CUDA=ON,\s+but\s+(no nvcc was found|\S+\s+cannot)", text)


@pytest.mark.slow
def test_wheel_from_a_source_archive(environment):
    """sdist -> wheel: the reference is a real folder, the pictures are there, and the wheel is small."""
    environment.run("-m", "pip", "install", "-q", "build")
    out = environment.folder / "dist"
    environment.run("-m", "build", "-C", "cmake.define.FP4BF16_CUDA=OFF", "--outdir", out, ROOT,
                    SKBUILD_BUILD_DIR=str(environment.folder / "archive"))  # fmt: skip
    (wheel,) = out.glob("*.whl")
    # Pictures 2.1 MB, the weights that ship 2.0 MB as they are packed, everything else 0.4 MB, and some room.
    assert wheel.stat().st_size <= 6_500_000
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"fp4bf16/train/assets/emoji32.{end}" for end in ("safetensors", "json")} <= set(names)
    assert "fp4bf16/python_ref/quantize.py" in names and "fp4bf16/_ffi.py" in names
    ours = ["classes.tsv", "NOTICE"]
    ours += [f"classes_{role}.{end}" for role in ("reward", "heldout") for end in ("safetensors", "json")]
    assert {f"fp4bf16/align/assets/{name}" for name in ours} <= set(names)
    assert "fp4bf16/train/assets/NOTICE" in names and "fp4bf16/py.typed" in names
    assert not [n for n in names if n.startswith(("tests/", "bench/", "src/"))]
    shutil.rmtree(out)
