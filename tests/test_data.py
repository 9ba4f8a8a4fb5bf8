"""The emoji pairs, their split by caption, and the caption words."""

import hashlib
import importlib.util
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fp4bf16.errors import ConfigError
from fp4bf16.train import data


@pytest.fixture(scope="module")
def pairs():
    return data.load_pairs(16)


def test_pixels_are_the_published_ones():
    with np.load(data.ASSETS / "pairs32.npz") as archive:
        x, captions = archive["x"], archive["cap"]
    assert x.shape == (2, 1678, 32, 32, 3) and x.dtype == np.uint8
    assert hashlib.sha256(x.tobytes()).hexdigest().startswith("cf6e3ed283b6c262")
    assert list(captions) == sorted(set(captions))
    assert (data.ASSETS / "pairs32.npz").stat().st_size < 2.2e6
    notice = (data.ASSETS / "NOTICE").read_text()
    assert "Apache License" in notice and "Attribution 4.0" in notice and "Changes:" in notice


def test_split_is_complete_disjoint_and_stable():
    lines = (data.ASSETS / "split.tsv").read_bytes()
    assert hashlib.sha256(lines).hexdigest().startswith("4fdf1ab435994a45"), "published results used another"
    rows = [line.split("\t") for line in lines.decode().splitlines()[1:]]
    captions = [caption for caption, _ in rows]
    assert len(captions) == len(set(captions)) == 1678
    assert tuple(captions) == data.load_pairs(32).captions
    assert {role for _, role in rows} == set(data.ROLES)


def test_split_sizes(pairs):
    faces = pairs.select(word="face")
    assert len(faces) == 121
    assert {r: faces.roles.count(r) for r in data.ROLES} == {
        "policy": 100, "reward": 0, "heldout": 0, "evaluation": 21,
    }
    others = pairs.select(without="face")
    assert len(others) == 1678 - 121
    assert {r: others.roles.count(r) for r in data.ROLES} == {
        "policy": 397, "evaluation": 60, "reward": 550, "heldout": 550,
    }
    selected = [set(pairs.select(role=r).captions) for r in data.ROLES]
    assert sum(map(len, selected)) == len(set().union(*selected)) == len(pairs)


def _tool():
    path = Path(__file__).resolve().parents[1] / "tools" / "build_emoji_pairs.py"
    spec = importlib.util.spec_from_file_location("build_emoji_pairs", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_split_table_is_what_the_tool_makes(pairs, rng):
    tool = _tool()
    captions = list(pairs.captions)
    rng.shuffle(captions)
    roles = tool.split(captions)
    assert roles == data.split_table()
    families = {}
    for caption in captions:
        if "face" not in data.words_of(caption):
            families.setdefault(tool.family(caption), set()).add(roles[caption])
    torn = {name: found for name, found in families.items() if len(found) > 1}
    assert not torn, f"families with more than one role: {torn}"


def _package(path, icons, version="1.2.9"):
    with tarfile.open(path, "w:gz") as tar:
        for name, value in (("package.json", {"version": version}), ("icons.json", icons)):
            payload = json.dumps(value).encode()
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(payload)
            tar.addfile(member, io.BytesIO(payload))
    return path


def test_tool_reads_a_package_and_refuses_another_version(tmp_path):
    tool = _tool()
    icons = {
        "width": 36, "height": 36,
        "icons": {"cat-face": {"body": "<g/>"}, "old": {"body": "<g/>", "hidden": True},
                  "hand-dark-skin-tone": {"body": "<g/>"}, "wide": {"body": "<g/>", "height": 20}},
    }
    read = tool.read_icons(_package(tmp_path / "a.tgz", icons), "noto")
    assert sorted(read) == ["cat face", "wide"]
    assert 'viewBox="0 0 36 36"' in read["cat face"] and 'viewBox="0 0 36 20"' in read["wide"]
    with pytest.raises(SystemExit, match="version of noto is 1.0.0, but the pictures are of 1.2.9"):
        tool.read_icons(_package(tmp_path / "b.tgz", icons, "1.0.0"), "noto")


def test_box_downsampling_is_the_mean(rng):
    x = rng.integers(0, 256, (2, 3, 32, 32, 3)).astype(np.uint8)
    small = data.downsample(x, 16)
    i, j = rng.integers(0, 16, 2)
    box = x[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].astype(np.float64)
    np.testing.assert_array_equal(small[:, :, i, j], box.mean(axis=(2, 3)).astype(np.float32))
    np.testing.assert_array_equal(data.downsample(x, 32), x)
    with pytest.raises(ConfigError, match=r"size: 12 does not divide 32 x 32 pixels; choose one of \[1, 2"):
        data.downsample(x, 12)


def test_pictures_are_float32_in_range(pairs):
    assert pairs.images.dtype == np.float32 and pairs.images.shape == (2, 1678, 16, 16, 3)
    assert pairs.images.min() >= -1 and pairs.images.max() == 1
    assert pairs.images.mean(axis=(0, 2, 3, 4)).std() > 0.05
    full = data.load_pairs(32)
    assert full.size == 32 and set(np.unique(np.round((full.images + 1) * 127.5, 3) % 1)) == {0.0}
    np.testing.assert_allclose(data.downsample(full.images, 16), pairs.images, atol=3e-7)
    np.testing.assert_array_equal(pairs.style("twemoji"), pairs.images[1])
    faces = pairs.select(word="face", role="evaluation")
    row = pairs.captions.index(faces.captions[5])
    np.testing.assert_array_equal(faces.images[:, 5], pairs.images[:, row])


def test_select_says_what_is_wrong(pairs):
    with pytest.raises(ConfigError, match="'polcy' is not in the split table; did you mean 'policy'"):
        pairs.select(role="polcy")
    with pytest.raises(ConfigError, match="no caption has role None, the word 'zebroid'"):
        pairs.select(word="zebroid")
    with pytest.raises(ConfigError, match="'notto' is not a style of the emoji pairs; did you mean 'noto'"):
        pairs.style("notto")


def test_vocabulary_is_sorted_and_encodes_bags_of_words(pairs):
    vocabulary = data.vocabulary()
    assert len(vocabulary) == 1451 and list(vocabulary.words) == sorted(set(vocabulary.words))
    codes = vocabulary.encode(pairs.captions)
    assert codes.shape == (1678, 1451) and codes.dtype == np.float32
    assert set(np.unique(codes)) == {0.0, 1.0} and codes.any(axis=0).all()
    row = codes[pairs.captions.index("grinning face with smiling eyes")]
    words = [vocabulary.words[i] for i in np.flatnonzero(row)]
    assert words == ["eyes", "face", "grinning", "smiling", "with"]
    assert not vocabulary.encode([""]).any()
    np.testing.assert_array_equal(vocabulary.encode(["Face, smiling!"]), vocabulary.encode(["smiling face"]))


def test_unknown_words_are_named_with_the_nearest():
    vocabulary = data.vocabulary()
    with pytest.raises(ConfigError, match="'smilling face': the .* 1451 words has no 'smilling'.*'smiling'"):
        vocabulary.encode(["cat face", "smilling face"])
    with pytest.raises(ConfigError, match="has no 'kcdqgwv'; no known word comes near"):
        vocabulary.encode(["kcdqgwv"])
    with pytest.raises(ConfigError, match="pass a list of captions"):
        vocabulary.encode("cat face")
