"""Preference pairs: parquet as Pick-a-Pic has them, and tables that name pictures."""

from __future__ import annotations

import json

import numpy as np
import pytest
import source_sets as sets

from fp4bf16.errors import ConfigError
from fp4bf16.train.sources import decode, open_pairs, open_pictures

SHADES = (10, 90, 170, 250)


def _flat(shade: int, kind: str = "PNG") -> bytes:
    return sets.encode(np.full((9, 9, 3), shade, np.uint8), kind)


def _pairs(source) -> dict[str, tuple[int, int]]:
    """Caption -> (chosen, rejected), each by its one shade."""
    found = {}
    for chosen, rejected, captions in source.once(3):
        assert chosen.dtype == rejected.dtype == np.float32 and chosen.shape == rejected.shape
        shades = [np.round((x.mean((1, 2, 3)) + 1) * 127.5).astype(int).tolist() for x in (chosen, rejected)]
        found |= dict(zip(captions, zip(*shades, strict=True), strict=True))
    return found


def _counts(source):
    order = source._order(0, None, None)
    while order.draw():
        pass
    return order.counts


@pytest.fixture
def flat(tmp_path):
    for i, shade in enumerate(SHADES):
        (tmp_path / f"{i}.png").write_bytes(_flat(shade))
    return tmp_path


TABLES = {
    "pairs.csv": 'chosen,rejected,caption\n0.png,1.png,first\n3.png,2.png,"second, too"\n',
    "votes.csv": "image_0;image_1;label_0;caption\n0.png;1.png;1;first\n2.png;3.png;0.0;second, too\n"
    "0.png;2.png;0.5;a tie\n0.png;2.png;;no label\n0.png;2.png;7;no label\n0.png;2.png;nan;no label\n"
    "0.png;9.png;1;not there\n0.png;1.png;1;\n",
    "metadata.jsonl": "\n".join(
        json.dumps(row)
        for row in (
            {"image_0": "0.png", "image_1": "1.png", "label_0": 0.9, "prompt": "first"},
            {"image_0": "2.png", "image_1": "3.png", "label_0": 0, "prompt": "second, too"},
            {"image_0": "2.png", "image_1": "3.png", "label_0": 0.5, "prompt": "second, too"},
        )
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_pairs(flat, name):
    (flat / name).write_text(TABLES[name], encoding="utf-8-sig")
    (flat / "other.csv").write_text("epoch,loss\n1,2\n")
    for path in (flat, flat / name):
        source = open_pairs(path, 8)
        assert _pairs(source) == {"first": (10, 90), "second, too": (250, 170)}
        assert list(source.captions()) == ["first", "second, too"]
    skipped = _counts(source).skipped
    assert (
        skipped
        == {
            "pairs.csv": {},
            "votes.csv": {"tie": 1, "no_label": 3, "missing": 1, "no_caption": 1},
            "metadata.jsonl": {"tie": 1},
        }[name]
    )


def test_a_pair_with_a_broken_picture_is_left_out(flat):
    (flat / "1.png").write_bytes(b"broken")
    (flat / "p.csv").write_text("chosen,rejected,caption\n0.png,1.png,a\n1.png,0.png,b\n2.png,3.png,c\n")
    source = open_pairs(flat, 8)
    assert _pairs(source) == {"c": (170, 250)}
    assert _counts(source).summary("pairs") == "2 of 3 pairs skipped: 2 unreadable pictures"


def _write(path, columns, **options):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path, **options)


ROWS = {
    "jpg_0": [_flat(s) for s in (10, 90, 10, 10, 10, 10)],
    "jpg_1": [_flat(s) for s in (170, 250, 90, 90, 90, 90)],
    "label_0": [1.0, 0.0, 0.5, None, 1.0, float("nan")],
    "caption": ["first", "second", "tie", "no label", None, "no label either"],
}
WANT = {"first": (10, 170), "second": (250, 90)}


@pytest.mark.parametrize("kind", ["bytes", "struct", "large", "whole numbers"])
def test_pick_a_pic(tmp_path, kind):
    pa = pytest.importorskip("pyarrow")
    columns = dict(ROWS, model_0=["x"] * 6, are_different=[True] * 6)
    if kind == "struct":
        columns |= {k: [{"bytes": b, "path": None} for b in ROWS[k]] for k in ("jpg_0", "jpg_1")}
    elif kind == "large":
        columns |= {k: pa.array(ROWS[k], pa.large_binary()) for k in ("jpg_0", "jpg_1")}
        columns["caption"] = pa.array(ROWS["caption"]).dictionary_encode()
    elif kind == "whole numbers":
        columns["label_0"] = pa.array([1, 0, None, None, 1, None], pa.int32())
    _write(tmp_path / "train-00000.parquet", columns, row_group_size=4)
    source = open_pairs(tmp_path, 8)
    assert _pairs(source) == WANT
    if kind != "whole numbers":
        assert _counts(source).skipped == {"tie": 1, "no_label": 2, "no_caption": 1}
        assert list(source.captions()) == ["first", "second", "tie", "no label", "no label either"]


def test_rows_without_a_label_by_their_own_column(tmp_path):
    _write(tmp_path / "a.parquet", ROWS | {"has_label": [True, False, True, True, True, None]})
    source = open_pairs(tmp_path / "a.parquet", 8)
    assert _pairs(source) == {"first": WANT["first"]}
    assert _counts(source).skipped == {"tie": 1, "no_label": 3, "no_caption": 1}


def test_pictures_that_are_no_bytes(tmp_path):
    wrong = [None, "text", None, None, None, None]
    _write(tmp_path / "a.parquet", ROWS | {"jpg_1": wrong})
    with pytest.raises(ConfigError, match=r"6 of 6 pairs skipped: 2 without a label, 2 unreadable pictures"):
        _pairs(open_pairs(tmp_path, 8))
    _write(tmp_path / "a.parquet", ROWS | {"jpg_1": list(range(6)), "caption": [[1]] * 6})
    with pytest.raises(ConfigError, match="6 without a caption"):
        _pairs(open_pairs(tmp_path, 8))


def test_files_that_do_not_fit(tmp_path):
    _write(tmp_path / "good.parquet", ROWS)
    _write(tmp_path / "other.parquet", {"image": [b""], "text": ["x"]})
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing more PAR1")
    source = open_pairs(tmp_path, 8)
    assert source.faults == {"other_columns": 1, "unreadable_files": 1}
    assert _pairs(source) == WANT
    assert "1 file has other columns, 1 file cannot be read" in _counts(source).summary("pairs")
    (tmp_path / "good.parquet").unlink()
    with pytest.raises(
        ConfigError, match=r"has the columns image, text; looked for rows with the columns jpg_0, jpg_1"
    ):
        open_pairs(tmp_path, 8)
    (tmp_path / "other.parquet").unlink()
    with pytest.raises(
        ConfigError, match=r"not one good sample \(none of 0 pairs skipped; 1 file cannot be read\)"
    ):
        open_pairs(tmp_path, 8)


def test_a_row_group_that_breaks_off_gives_what_precedes(tmp_path, rng):
    sets.pick_a_pic(tmp_path, rng, 60, files=1)
    path = tmp_path / "train-00000.parquet"
    whole = len(_pairs(open_pairs(path, 8)))
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 3000] = rng.bytes(3000)
    path.write_bytes(data)
    source = open_pairs(path, 8)
    left = _pairs(source)
    assert 0 < len(left) < whole
    counts = _counts(source)
    assert counts.faults.get("damaged_groups", 0) + counts.skipped.get("unreadable", 0) > 1


def test_parquet_with_captioned_pictures(tmp_path, rng):
    blobs = [sets.picture(rng) for _ in range(4)]
    images = [{"bytes": b, "path": "x.png"} for b in blobs[:3]] + [None]
    _write(tmp_path / "a.parquet", {"image": images, "text": ["zero", "one", "", "three"]})
    source = open_pictures(tmp_path, 8)
    (pictures, captions), *rest = source.once(9)
    assert captions == ["zero", "one"] and not rest
    assert (pictures[1] == decode.decode(blobs[1], 8).astype(np.float32) * np.float32(1 / 127.5) - 1).all()
    assert _counts(source).skipped == {"no_caption": 1, "no_picture": 1}


def test_without_pyarrow_there_is_a_command(tmp_path, monkeypatch):
    import sys

    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        ImportError, match=r"reading parquet files needs the package pyarrow.*'fp4bf16\[data\]'"
    ):
        open_pairs(tmp_path, 8)


def test_one_kind_of_pairs_at_a_time(flat):
    (flat / "p.csv").write_text("chosen,rejected,caption\n0.png,1.png,a\n")
    _write(flat / "a.parquet", ROWS)
    with pytest.raises(
        ConfigError, match=r"holds both 1 .parquet and p.csv, which names pairs; name the one"
    ):
        open_pairs(flat, 8)
    assert _pairs(open_pairs(flat / "p.csv", 8)) == {"a": (10, 90)}
    assert _pairs(open_pairs(flat / "a.parquet", 8)) == WANT
    assert _pairs(open_pairs(flat / "*.parquet", 8)) == WANT
