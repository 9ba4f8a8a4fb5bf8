"""Tar shards: read as `tarfile` reads good ones, and to the last good member when they are not."""

from __future__ import annotations

import io
import json
import struct
import tarfile

import numpy as np
import pytest
import source_sets as sets
from hypothesis import given
from hypothesis import strategies as st

from fp4bf16.errors import ConfigError
from fp4bf16.train.sources import decode, files, open_pictures
from fp4bf16.train.sources.counts import Counts
from fp4bf16.train.sources.tar import members

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def _captions(source) -> list[str]:
    return [c for _, captions in source.once(7) for c in captions]


def _counts(source) -> Counts:
    order = source._order(0, None, None)
    while order.draw():
        pass
    return order.counts


@pytest.mark.parametrize("format", FORMATS)
def test_members_are_those_of_tarfile(tmp_path, rng, format):
    files = [(f"{i:09d}.jpg", rng.bytes(int(rng.integers(0, 1500)))) for i in range(9)]
    files[3] = ("d" * 60 + "/" + "e" * 70 + "/x.y.jpg", b"in the prefix, or a long name")
    if format != "ustar":
        files[5] = ("long/" * 60 + "x.jpg", b"longer than any header")
        files[6] = ("unicode/ü樹.jpg", b"")
    path = sets.write_tar(tmp_path / "a.tar", files, FORMATS[format])
    with path.open("rb") as file:
        found = list(members(file, path.stat().st_size, 0, counts := Counts()))
        assert [m.name for m in found] == [name for name, _ in files]
        for member, (_, data) in zip(found, files, strict=True):
            file.seek(member.data)
            assert file.read(member.size) == data
        # From any member on, the rest is the same.
        for i in range(len(found)):
            assert list(members(file, path.stat().st_size, found[i].start, Counts())) == found[i:]
    assert not counts.faults


def test_other_members_are_passed_over(tmp_path, rng):
    path = tmp_path / "a.tar"
    data = sets.picture(rng)
    with tarfile.open(path, "w") as archive:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo("0.jpg")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        for name, body in (
            ("1.png", data),
            ("1.txt", b"one"),
            ("readme", b"x"),
            (".hidden", b"x"),
            ("2.cls", b"7"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    source = open_pictures(path, 8)
    assert _captions(source) == ["one"]
    assert _counts(source).summary("members") == "none of 1 members skipped"


def test_shards_of_img2dataset(tmp_path, rng):
    sets.shards(tmp_path, rng, 3, 5)
    source = open_pictures(tmp_path, 8, shuffle=4)
    with_texts = list(source.captions())
    assert len(with_texts) == 14, "all but the one without a caption"
    got = _captions(source)
    assert len(got) == 13 and set(got) < set(with_texts)
    assert _counts(source).summary(source.noun) == (
        "2 of 15 members skipped: 1 without a caption, 1 unreadable picture"
    )
    assert list(source.captions(3)) == with_texts[:3] and list(source.captions(0)) == []
    # The pixels are the picture's own.
    with tarfile.open(tmp_path / "00002.tar") as archive:
        blob = archive.extractfile("000020001.png").read()
        caption = archive.extractfile("000020001.txt").read().decode()
    where = {c: p for pictures, captions in source.once(4) for p, c in zip(pictures, captions, strict=True)}
    want = decode.decode(blob, 8).astype(np.float32) / np.float32(127.5) - 1
    np.testing.assert_allclose(where[caption], want, rtol=0, atol=2e-7)


def test_captions_from_text_or_json(tmp_path, rng):
    data = sets.picture(rng)
    files = [
        ("a.txt", b"from text"), ("a.jpg", data), ("a.json", b'{"caption": "from json"}'),
        ("b.JPG", data), ("b.json", b'{"caption": "only json"}'),
        ("c.jpg", data), ("c.txt", b" \n"), ("c.json", json.dumps({"caption": "text is empty"}).encode()),
        ("d.jpg", data), ("d.json", b'{"caption": null}'),
        ("e.jpg", data), ("e.json", b"no json"),
        ("f.txt", b"no picture"),
        ("x/g.jpg", data), ("y/g.txt", b"another folder, another key"),
        ("h.0.jpg", data), ("h.txt", b"the ending is all behind the first dot"),
    ]  # fmt: skip
    source = open_pictures(sets.write_tar(tmp_path / "a.tar", files), 8)
    assert _captions(source) == list(source.captions()) == ["from text", "only json", "text is empty"]
    assert _counts(source).skipped == {"no_caption": 3, "no_picture": 3}


def _good(tmp_path, rng, n=4) -> tuple[bytes, list[tuple[int, str]]]:
    """A shard, and for each sample where its last byte ends."""
    files = [
        f for i in range(n) for f in ((f"{i}.png", sets.picture(rng)), (f"{i}.txt", f"number {i}".encode()))
    ]
    path = sets.write_tar(tmp_path / "a.tar", files)
    with tarfile.open(path) as archive:
        ends = [m.offset_data + m.size for m in archive.getmembers()]
    return path.read_bytes(), [(ends[2 * i + 1], f"number {i}") for i in range(n)]


def test_a_shard_that_breaks_off_gives_what_precedes(tmp_path, rng):
    whole, ends = _good(tmp_path, rng)
    path = tmp_path / "a.tar"
    last = 0
    for cut in {*rng.integers(1, ends[-1][0], 60).tolist(), *(e + d for e, _ in ends for d in (-1, 0, 1))}:
        path.write_bytes(whole[:cut])
        want = [name for end, name in ends if end <= cut]
        source = open_pictures(path, 8)
        if not want:
            with pytest.raises(ConfigError, match="has not one good sample"):
                list(source.once(5))
            continue
        last = max(last, len(want))
        assert _captions(source) == list(source.captions()) == want
        if cut % 512:
            assert _counts(source).faults.get("truncated_shards") == 1
    assert last == len(ends)


def test_damage_costs_the_member_that_it_hits(tmp_path, rng):
    whole, _ = _good(tmp_path, rng)
    path = tmp_path / "a.tar"
    with tarfile.open(path) as archive:
        heads = {m.name: m.offset for m in archive.getmembers()}
    for i in range(4):
        for name in (f"{i}.png", f"{i}.txt"):
            damaged = bytearray(whole)
            at = heads[name] + int(rng.integers(0, 148))  # in the name, mode, owner, size or time
            damaged[at] ^= 0x55
            path.write_bytes(damaged)
            source = open_pictures(path, 8)
            assert _captions(source) == [f"number {j}" for j in range(4) if j != i]
            assert _counts(source).faults == {"damaged_places": 1}


def _header(name: str, size: int, kind: bytes = b"0") -> bytes:
    """A header whose checksum is right, whatever it says."""
    field = f"{size:011o}\0".encode() if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block = bytearray(
        name.encode().ljust(100, b"\0") + b"0000644\0" * 3 + field + b"0" * 11 + b"\0" + b" " * 8
    )
    block += kind + b"\0" * 100 + b"ustar\0" + b"00"
    block = block.ljust(512, b"\0")
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def test_members_of_absurd_size_are_refused(tmp_path, rng, monkeypatch):
    whole, _ = _good(tmp_path, rng, 2)
    path = tmp_path / "a.tar"
    for size in (2**40, 2**62, 2**80):
        for kind in (b"0", b"L", b"x", b"g"):
            path.write_bytes(_header("big.jpg", size, kind) + whole)
            source = open_pictures(path, 8)
            assert _captions(source) == ["number 0", "number 1"]
            assert _counts(source).faults == {"damaged_places": 1}
    # One that is there in full is still no picture to be loaded.
    path.write_bytes(
        _header("big.jpg", 4096) + b"\0" * 4096 + _header("big.txt", 3) + b"big".ljust(512, b"\0") + whole
    )
    monkeypatch.setattr(decode, "MAX_BYTES", 4095)
    assert _counts(open_pictures(path, 8)).skipped == {"too_large": 1}
    monkeypatch.setattr(decode, "MAX_CAPTION", 2)
    with pytest.raises(ConfigError, match="3 without a caption"):
        list(open_pictures(path, 8).captions())


def test_pax_headers_that_lie(tmp_path, rng):
    data = sets.picture(rng)
    good = _header("0.png", len(data)) + data.ljust(-(-len(data) // 512) * 512, b"\0")
    good += _header("0.txt", 4) + b"zero".ljust(512, b"\0")
    path = tmp_path / "a.tar"
    for records in (
        b"0 path=x\n",
        b"-5 path=x\n",
        b"99999999999 path=x\n",
        b"x",
        b"12 path",
        b"9 size=-1\n",
        b" " * 20,
    ):
        path.write_bytes(_header("h", len(records), b"x") + records.ljust(512, b"\0") + good + b"\0" * 1024)
        assert _captions(open_pictures(path, 8)) == ["zero"]
    records = b"20 path=other/0.png\n"
    path.write_bytes(_header("h", len(records), b"x") + records.ljust(512, b"\0") + good)
    assert _counts_of(path) == {"no_caption": 1, "no_picture": 1}, (
        "the name in a pax header is the one that counts"
    )


def _counts_of(path) -> dict[str, int]:
    return _counts(open_pictures(path, 8)).skipped


def test_names_are_no_paths(tmp_path, rng):
    data = sets.picture(rng)
    outside = tmp_path / "outside"
    names = ["../outside/a", "/etc/b", "c/../../d", "..", "e\\f", str(outside / "g")]
    files = [f for n in names for f in ((f"{n}.png", data), (f"{n}.txt", n.encode()))]
    (tmp_path / "set").mkdir()
    path = sets.write_tar(tmp_path / "set/a.tar", files)
    assert _captions(open_pictures(path, 8)) == [n for n in names if n != ".."]
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.tar", "set"]


def test_patterns_of_shards(tmp_path, rng, monkeypatch):
    sets.shards(tmp_path / "shards", rng, 13, 1, bad=False)
    every = list(open_pictures(tmp_path / "shards", 8).captions())
    assert len(every) == 13
    for pattern, want in (
        ("{00000..00012}.tar", every),
        ("{00012..00000}.tar", every[::-1]),
        ("000{08..11}.tar", every[8:12]),
        ("0000{0,7}.tar", [every[0], every[7]]),
        ("0000[0-2].tar", every[:3]),
        ("*.tar", every),
        ("00003.tar", every[3:4]),
    ):
        assert list(open_pictures(str(tmp_path / "shards" / pattern), 8).captions()) == want
    monkeypatch.chdir(tmp_path)
    assert list(open_pictures("shards/{00000..00012}.tar", 8).captions()) == every
    with pytest.raises(
        ConfigError, match=r"stands for 16 files, but 3 are not there, .*/00013.tar the first"
    ):
        open_pictures(str(tmp_path / "shards/{00000..00015}.tar"), 8)
    monkeypatch.setattr(files, "_MOST", 1000)
    with pytest.raises(ConfigError, match="more than 1,000 files; name their folder"):
        open_pictures(str(tmp_path / "{0..9999999999}.tar"), 8)


def test_a_shard_that_goes_away_while_it_is_read(tmp_path, rng):
    sets.shards(tmp_path, rng, 3, 5, bad=False)
    source = open_pictures(tmp_path, 8)
    (tmp_path / "00001.tar").unlink()
    assert len(_captions(source)) == 10
    assert _counts(source).faults == {"unreadable_files": 1}


def test_garbage_named_tar(tmp_path, rng):
    (tmp_path / "a.tar").write_bytes(rng.bytes(300_000))
    (tmp_path / "b.tar").write_bytes(b"")
    (tmp_path / "c.tar").write_bytes(b"\0" * 10_240)
    with pytest.raises(
        ConfigError, match=r"none of 0 members skipped; 1 damaged place .*; looked for keys with"
    ):
        list(open_pictures(tmp_path, 8).once(1))


@given(
    names=st.lists(
        # tarfile takes a file whose name ends with a slash for a folder, or not, by its format
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=140).filter(
            lambda name: not name.endswith("/")
        ),
        max_size=6,
    ),
    sizes=st.lists(st.integers(0, 1200), min_size=6, max_size=6),
    format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_any_names(tmp_path_factory, names, sizes, format):
    files = [
        (name, struct.pack("B", i) * size) for i, (name, size) in enumerate(zip(names, sizes, strict=False))
    ]
    path = sets.write_tar(tmp_path_factory.mktemp("tar") / "a.tar", files, format)
    with tarfile.open(path) as archive:  # its names, for it takes slashes at the end away
        want = [(m.offset_data, m.size) for m in archive.getmembers() if m.isreg()]
    with path.open("rb") as file:
        found = list(members(file, path.stat().st_size, 0, counts := Counts()))
    assert [(m.data, m.size) for m in found] == want and not counts.faults
