"""Damaged and hostile files: nothing but `ConfigError` comes out, nothing hangs, nothing is written."""

from __future__ import annotations

import io
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import source_sets as sets
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fp4bf16.errors import ConfigError
from fp4bf16.train.sources import decode, open_pairs, open_pictures
from fp4bf16.train.sources.counts import Skip

SECONDS = 20  # for one hostile file, on a machine that is busy with other things


@contextmanager
def _watched(folder: Path):
    """Fails when the block takes long, or leaves anything new or changed in `folder` or where we are."""

    def stop(*_):
        raise AssertionError(f"still at it after {SECONDS} s")

    def seen():
        files = [p for p in folder.rglob("*") if p.is_file()]
        return sorted((str(p), p.read_bytes()) for p in files), sorted(os.listdir())

    before = seen()
    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert seen() == before


def _exercise(opener, path) -> int:
    """Everything that a run does with a set; how many samples it got."""
    taken = 0
    try:
        source = opener(path, 8, shuffle=3)
    except ConfigError:
        return 0
    try:
        for caption in source.captions():
            assert caption and source.role(caption)
    except ConfigError:
        pass
    try:
        for *pictures, captions in source.once(4):
            assert all(np.isfinite(p).all() and p.shape[0] == len(captions) for p in pictures)
            taken += len(captions)
    except ConfigError:
        pass
    with source.stream() as some:
        try:
            some.next(5)
            with source.stream(some.state()) as again:
                assert again.next(2)[-1] == some.next(2)[-1]
            assert taken
        except ConfigError:
            assert not taken
    return taken


def _mutated(blob: bytes, draw: np.random.Generator) -> bytes:
    """`blob` with some of it changed, cut out, doubled or cut off."""
    data = bytearray(blob)
    for _ in range(int(draw.integers(1, 6))):
        at, length = int(draw.integers(0, len(data) + 1)), int(draw.integers(1, 40))
        kind = draw.integers(0, 5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << int(draw.integers(0, 8))
        elif kind == 1:
            data[at : at + length] = draw.bytes(length)
        elif kind == 2:
            del data[at : at + length * 10]
        elif kind == 3:
            data[at:at] = data[at : at + length * 20]
        elif len(data) > 1:
            data = data[: int(draw.integers(1, len(data) + 1))]
    return bytes(data)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """One good set of each kind, to be damaged."""
    rng, root = np.random.default_rng(0), tmp_path_factory.mktemp("seeds")
    sets.shards(root / "tar", rng, 1, 4, bad=False)
    sets.pick_a_pic(root / "parquet", rng, 12, files=1)
    sets.table(root / "csv", rng, 4)
    sets.pair_table(root / "pairs", rng, 4)
    return root


numbers = st.integers(0, 2**32 - 1)
fewer = settings(max_examples=settings.default.max_examples // 2)  # each takes a tenth of a second


@fewer
@given(seed=numbers)
def test_damaged_tars(seeds, tmp_path_factory, seed):
    draw, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("set")
    (folder / "a.tar").write_bytes(_mutated((seeds / "tar/00000.tar").read_bytes(), draw))
    with _watched(folder):
        _exercise(open_pictures, folder)


@fewer
@given(seed=numbers)
def test_damaged_headers_of_tars(seeds, tmp_path_factory, seed):
    """Headers whose checksum is right, and whose other fields are anything."""
    draw, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("set")
    data = bytearray((seeds / "tar/00000.tar").read_bytes())
    heads = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    for at in draw.choice(heads, int(draw.integers(1, 4))):
        field, length = ((0, 100), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155))[draw.integers(0, 6)]
        kinds = (draw.bytes(length), bytes(draw.choice([*b"01234567 \0Lxg"], length).astype(np.uint8)))
        data[at + field : at + field + length] = kinds[draw.integers(0, 2)]
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = f"{sum(data[at : at + 512]):06o}\0 ".encode()
    (folder / "a.tar").write_bytes(data)
    with _watched(folder):
        _exercise(open_pictures, folder)


@fewer
@given(seed=numbers)
def test_damaged_parquet(seeds, tmp_path_factory, seed):
    draw, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("set")
    blob = (seeds / "parquet/train-00000.parquet").read_bytes()
    # Half of the damage goes into the footer, where a few bytes decide about everything.
    footer = len(blob) - 8 - int.from_bytes(blob[-8:-4], "little")
    tail = draw.integers(0, 2) == 1
    changed = _mutated(blob[footer:-8] if tail else blob[:footer], draw)
    whole = (
        blob[:footer] + changed + len(changed).to_bytes(4, "little") + b"PAR1"
        if tail
        else changed + blob[footer:]
    )
    (folder / "a.parquet").write_bytes(whole)
    with _watched(folder):
        _exercise(open_pairs, folder)


@fewer
@given(seed=numbers, kind=st.sampled_from(["csv", "pairs"]))
def test_damaged_tables(seeds, tmp_path_factory, seed, kind):
    draw, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("set")
    for path in (seeds / kind).iterdir():
        blob = path.read_bytes()
        (folder / path.name).write_bytes(_mutated(blob, draw) if path.suffix == ".csv" else blob)
    with _watched(folder):
        _exercise(open_pictures if kind == "csv" else open_pairs, folder)


@given(
    blob=st.binary(max_size=2000),
    name=st.sampled_from(
        ["a.tar", "a.parquet", "metadata.csv", "captions.csv", "metadata.jsonl", "pairs.csv", "pairs.jsonl",
         "x.png", "0.txt", "0.json", "0.gif"]
    ),
)  # fmt: skip
def test_any_bytes_under_any_name(tmp_path_factory, blob, name):
    folder = tmp_path_factory.mktemp("set")
    (folder / "0.png").write_bytes(sets.encode(np.zeros((4, 4, 3), np.uint8)))
    (folder / name).write_bytes(blob)
    for opener in (open_pictures, open_pairs):
        for path in (folder, folder / name):
            with _watched(folder):
                _exercise(opener, path)


ROW = st.text(st.sampled_from('ab,;\t|"\n\r\0\\{}[]:0123456789.eé\ufeff'), max_size=40)


@given(
    rows=st.lists(ROW, max_size=8),
    header=st.sampled_from(
        ["file_name,text", "chosen;rejected;caption", "image_0,image_1,label_0,caption",
         '{"file_name":"0.png","text":"x"}',
         '{"chosen":"0.png","rejected":"0.png","caption":1e999}', "file_name\ttext\ttext", ""]
    ),
    name=st.sampled_from(["metadata.csv", "metadata.jsonl"]),
)  # fmt: skip
def test_any_rows_under_a_good_header(tmp_path_factory, rows, header, name):
    folder = tmp_path_factory.mktemp("set")
    (folder / "0.png").write_bytes(sets.encode(np.zeros((4, 4, 3), np.uint8)))
    (folder / name).write_text("\n".join([header, *rows]), encoding="utf-8", newline="")
    with _watched(folder):
        _exercise(open_pictures, folder)
        _exercise(open_pairs, folder)


def _pictures() -> list[bytes]:
    rng, blobs = np.random.default_rng(0), []
    pixels = sets.noise(rng, 24, 20)
    for kind, options in (
        ("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("PNG", {"interlace": 1}), ("WEBP", {}),
        ("WEBP", {"lossless": True}), ("GIF", {}),
    ):  # fmt: skip
        blobs.append(sets.encode(pixels, kind, **options))
    exif = Image.Exif()
    exif[0x0112] = 6
    blobs.append(sets.encode(pixels, "JPEG", exif=exif))
    for mode in ("CMYK", "L"):
        buffer = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(buffer, "JPEG")
        blobs.append(buffer.getvalue())
    frames = [Image.fromarray(sets.noise(rng, 24, 20)) for _ in range(3)]
    for kind in ("GIF", "WEBP"):
        buffer = io.BytesIO()
        frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
        blobs.append(buffer.getvalue())
    return blobs


PICTURES = _pictures()


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=4 * settings.default.max_examples)
@given(seed=numbers, number=st.integers(0, len(PICTURES) - 1))
def test_damaged_pictures(seed, number):
    blob = _mutated(PICTURES[number], np.random.default_rng(seed))
    try:
        found = decode.decode(blob, 8)
    except Skip:
        return
    assert found.shape == (8, 8, 3) and found.dtype == np.uint8


@pytest.mark.filterwarnings("ignore")
@given(blob=st.binary(max_size=300), number=st.integers(0, len(PICTURES) - 1), head=st.integers(0, 60))
def test_any_bytes_as_a_picture(blob, number, head):
    try:
        found = decode.decode(PICTURES[number][:head] + blob, 8)
    except Skip:
        return
    assert found.shape == (8, 8, 3)


@given(
    text=st.one_of(st.none(), st.binary(max_size=300)), record=st.one_of(st.none(), st.binary(max_size=300))
)
def test_any_bytes_as_a_caption(text, record):
    caption = decode.caption_of(text, record)
    assert caption == " ".join(caption.encode().decode().split())
