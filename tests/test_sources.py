"""Pictures as others made them, folders of them with captions, and the choice of a kind by the path."""

from __future__ import annotations

import io
import json
import struct
import zlib

import numpy as np
import pytest
import source_sets as sets
from PIL import Image

from fp4bf16.errors import ConfigError
from fp4bf16.train import data
from fp4bf16.train.sources import decode, open_pairs, open_pictures, role
from fp4bf16.train.sources.counts import Counts, Skip


def _reason(blob: bytes, size: int = 8) -> str:
    with pytest.raises(Skip) as caught:
        decode.decode(blob, size)
    return caught.value.reason


# ------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize(("height", "width"), [(24, 24), (24, 40), (56, 33), (8, 8), (8, 19)])
def test_a_square_from_the_middle_is_averaged_over_boxes(rng, height, width):
    pixels, size = sets.noise(rng, height, width), 8
    found = decode.decode(sets.encode(pixels), size)
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = pixels[top : top + side, left : left + side].astype(np.float64)
    scale = side / size
    # An output pixel is the mean of those input pixels whose middle lies in its box.
    away = np.arange(side) + 0.5 - (np.arange(size)[:, None] + 0.5) * scale
    cover = ((away > -scale / 2) & (away <= scale / 2)).astype(np.float64)
    cover /= cover.sum(1, keepdims=True)
    want = np.einsum("ik,jl,klc->ijc", cover, cover, square)
    assert found.shape == (size, size, 3) and found.dtype == np.uint8
    assert np.abs(found - want).max() <= 1.01  # rounded after each of two passes
    if side == size:
        assert (found == square).all()


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 9), (3, 2), (7, 7)])
def test_small_pictures_are_enlarged(rng, height, width):
    pixels = sets.noise(rng, height, width)
    found = decode.decode(sets.encode(pixels), 8)
    assert found.shape == (8, 8, 3)
    side, left = min(height, width), (width - min(height, width)) // 2
    if side == 1:
        assert (found == pixels[0, left]).all()
    assert found.min() >= pixels.min() and found.max() <= pixels.max()


#: EXIF orientation -> how the stored pixels are turned for viewing (EXIF 2.32, table of tag 0x0112).
UPRIGHT = {
    1: lambda x: x,
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: x.transpose(1, 0, 2),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).transpose(1, 0, 2),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_pictures_are_turned_upright(rng, orientation, kind):
    pixels, exif = sets.noise(rng, 8, 8), Image.Exif()
    exif[0x0112] = orientation
    blob = sets.encode(pixels, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    assert (decode.decode(blob, 8) == UPRIGHT[orientation](pixels)).all()


def test_a_damaged_exif_block_does_not_spoil_a_picture(rng):
    pixels = sets.noise(rng, 8, 8)
    for exif in (b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"\0" * 40):
        assert (decode.decode(sets.encode(pixels, exif=exif), 8) == pixels).all()


def _saved(image: Image.Image, kind: str = "PNG", **options) -> np.ndarray:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return decode.decode(buffer.getvalue(), 8)


def test_every_kind_of_pixel_becomes_rgb(rng):
    grey, rgb = sets.noise(rng, 8, 8)[..., 0], sets.noise(rng, 8, 8)
    alpha = sets.noise(rng, 8, 8)[..., :1]
    assert (_saved(Image.fromarray(grey)) == grey[..., None]).all()
    deep = rng.integers(0, 65536, (8, 8), np.uint16)
    assert (_saved(Image.fromarray(deep)) == np.round(deep / 257)[..., None]).all()
    bits = Image.fromarray(grey).convert("1")
    assert (_saved(bits) == np.asarray(bits)[..., None] * 255).all()
    white = rgb * (alpha / 255) + 255 * (1 - alpha / 255)
    assert np.abs(_saved(Image.fromarray(np.concatenate([rgb, alpha], 2))) - white).max() <= 1
    grey_alpha = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha[..., 0])])
    want = grey[..., None] * (alpha / 255) + 255 * (1 - alpha / 255)
    assert np.abs(_saved(grey_alpha) - want).max() <= 1
    palette = Image.fromarray(rgb).quantize(16)
    assert (_saved(palette) == np.asarray(palette.convert("RGB"))).all()
    clear = _saved(palette, transparency=int(np.asarray(palette)[0, 0]))
    hidden = np.asarray(palette) == np.asarray(palette)[0, 0]
    assert (clear[hidden] == 255).all() and (
        clear[~hidden] == np.asarray(palette.convert("RGB"))[~hidden]
    ).all()
    keyed = _saved(Image.fromarray(rgb), transparency=tuple(map(int, rgb[0, 0])))
    assert (keyed[0, 0] == 255).all() and (keyed[7, 7] == rgb[7, 7]).all()


def test_cmyk_and_grey_jpeg(rng):
    for colour, cmyk in (
        ((255, 0, 0), (0, 255, 255, 0)),
        ((255, 255, 255), (0, 0, 0, 0)),
        ((0, 0, 0), (0, 0, 0, 255)),
    ):
        found = _saved(Image.new("CMYK", (16, 16), cmyk), "JPEG", quality=95)
        assert np.abs(found.astype(int) - colour).max() <= 4
    assert np.abs(_saved(Image.new("L", (16, 16), 77), "JPEG").astype(int) - 77).max() <= 2


def test_the_first_frame_of_an_animation(rng):
    frames = [Image.fromarray(np.full((8, 8, 3), v, np.uint8)) for v in (10, 200)]
    for kind in ("GIF", "WEBP", "PNG"):
        found = _saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)
        assert np.abs(found.astype(int) - 10).max() <= 2


def test_two_pictures_in_one_jpeg_give_the_first(rng):
    """MPO, as cameras and telephones write it under the name of a JPEG."""
    first, second = (Image.fromarray(np.full((16, 16, 3), v, np.uint8)) for v in (40, 200))
    found = _saved(first, "MPO", save_all=True, append_images=[second])
    assert np.abs(found.astype(int) - 40).max() <= 2


def test_large_jpegs_come_out_as_their_mean(rng):
    smooth = np.kron(rng.integers(0, 256, (4, 4, 3)), np.ones((200, 200, 1))).astype(np.uint8)
    found = decode.decode(sets.encode(smooth, "JPEG", quality=98, subsampling=0), 8)
    assert np.abs(found.astype(int) - smooth[::100, ::100]).max() <= 6


def test_pictures_of_too_many_pixels_are_refused_before_they_are_decoded(rng):
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    assert (
        _reason(bomb + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))) == "too_large"
    )
    side = 1 + int(decode.MAX_PIXELS**0.5)
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    assert len(buffer.getvalue()) < 50_000 and _reason(buffer.getvalue()) == "too_large"


def test_reasons(rng, monkeypatch, tmp_path):
    good = sets.encode(sets.noise(rng, 64, 64), "JPEG")
    assert _reason(good[: len(good) // 2]) == "truncated"
    assert _reason(sets.encode(sets.noise(rng, 64, 64))[:3000]) == "truncated"
    assert _reason(b"") == _reason(b"no picture at all") == "unreadable"
    assert _reason(tmp_path / "absent.png") == "missing"
    tiff, bmp = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (8, 8)).save(tiff, "TIFF")
    Image.new("RGB", (8, 8)).save(bmp, "BMP")
    assert _reason(tiff.getvalue()) == _reason(bmp.getvalue()) == "unreadable", (
        "a decoder that is not meant to run"
    )
    monkeypatch.setattr(decode, "MAX_BYTES", len(good) - 1)
    assert _reason(good) == "too_large"


def test_captions_are_one_valid_line():
    assert decode.clean("\ud800 a\x00b") == "? a\x00b"
    assert decode.clean(None) == decode.clean(3) == decode.clean("x" * 70_000) == ""
    assert decode.caption_of(b"\xef\xbb\xbfcaf\xc3\xa9\r\n", None) == "café"
    assert decode.caption_of(None, b'{"caption": "' + b"x" * (5 << 20) + b'"}') == ""
    assert decode.caption_of(None, b"[" * 100_000) == ""


# -------------------------------------------------------------------------------------------------- folders


def _all(source, **where) -> dict[str, np.ndarray]:
    """Caption -> picture, of one pass."""
    found = {}
    for pictures, captions in source.once(4, **where):
        assert pictures.dtype == np.float32 and pictures.shape == (len(captions), source.size, source.size, 3)
        assert -1 <= pictures.min() and pictures.max() <= 1
        assert not found.keys() & set(captions)
        found |= dict(zip(captions, pictures, strict=True))
    return found


def _counts(source) -> Counts:
    """Of one pass."""
    order = source._order(0, None, None)
    while order.draw():
        pass
    return order.counts


@pytest.mark.parametrize("ending", ["jpg", "jpeg", "PNG", "webp", "gif"])
def test_a_folder_with_captions_beside_the_pictures(tmp_path, rng, ending):
    kind = {"jpg": "JPEG", "PNG": "PNG"}.get(ending, ending.upper())
    pixels = {}
    for i, folder in enumerate(("", "a", "a/b")):
        path = tmp_path / folder / f"{i}.x.{ending}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(sets.encode(sets.noise(rng, 8, 8), kind))
        path.with_suffix(".txt").write_text(f" picture\n{i} ", encoding="utf-8-sig")
        pixels[f"picture {i}"] = decode.decode(path, 8)
    (tmp_path / "._hidden.png").write_bytes(b"what a Mac leaves behind")
    (tmp_path / "readme.txt").write_text("no caption")
    found = _all(open_pictures(tmp_path, 8))
    assert found.keys() == pixels.keys()
    for name, picture in found.items():
        np.testing.assert_allclose(picture, pixels[name] / 127.5 - 1, rtol=0, atol=2e-7)


TABLES = {
    "metadata.csv": 'file_name,text\n0.png,zero\nsub/1.png,"one, and more"\n',
    "captions.csv": "file;caption\n0.png;zero\n./sub/1.png;one, and more\n",
    "captions.tsv": "Caption\tFile\tother\nzero\t0.png\tx\none, and more\tsub\\1.png\ty\n",
    "metadata.jsonl": '{"file_name": "0.png", "text": "zero", "n": 1}\n'
    '{"text": "one, and more", "file_name": "sub/1.png"}\n',
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_folder_with_a_table(tmp_path, rng, name, encoding):
    (tmp_path / "sub").mkdir()
    for path in ("0.png", "sub/1.png", "sub/2.png"):
        (tmp_path / path).write_bytes(sets.picture(rng))
    (tmp_path / name).write_text(TABLES[name], encoding=encoding)
    (tmp_path / "sub/2.txt").write_text("two, beside it")
    want = {"zero", "one, and more", "two, beside it"}
    assert _all(open_pictures(tmp_path, 8)).keys() == want
    assert _all(open_pictures(tmp_path / name, 8)).keys() == want
    assert set(open_pictures(tmp_path, 8).captions()) == want


def test_tables_of_inner_folders_count_from_there(tmp_path, rng):
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "x.png").write_bytes(sets.picture(rng))
        (tmp_path / part / "metadata.csv").write_text(f"file_name,text\nx.png,{part}\n")
    assert _all(open_pictures(tmp_path, 8)).keys() == {"train", "test"}


def test_names_in_a_table_lead_nowhere_else(tmp_path, rng):
    outside = tmp_path / "outside.png"
    outside.write_bytes(sets.picture(rng))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/in.png").write_bytes(sets.picture(rng))
    rows = [
        "file_name,text",
        "../outside.png,out",
        f"{outside},out too",
        "in.png,in",
        "../set/in.png,out again",
    ]
    (tmp_path / "set/metadata.csv").write_text("\n".join(rows))
    source = open_pictures(tmp_path / "set", 8)
    assert _all(source).keys() == {"in"}
    assert _counts(source).skipped == {"missing": 3}


def test_what_is_left_out_is_counted_by_reason(tmp_path, rng):
    sets.sidecars(tmp_path, rng, 9)
    good = sets.encode(sets.noise(rng, 64, 64), "JPEG")
    (tmp_path / "cut.jpg").write_bytes(good[: len(good) // 2])
    (tmp_path / "cut.txt").write_text("cut off")
    (tmp_path / "blank.jpg").write_bytes(good)
    (tmp_path / "blank.txt").write_text(" \n")
    source = open_pictures(tmp_path, 8)
    counts = _counts(source)
    assert counts.read == 11 and counts.good == 7
    assert counts.skipped == {"unreadable": 1, "truncated": 1, "no_caption": 2}
    assert counts.summary("pictures") == (
        "4 of 11 pictures skipped: 2 without a caption, 1 truncated picture, 1 unreadable picture"
    )
    with source.stream() as stream:
        stream.next(1)
        assert stream.counts.read >= 1
        stream.next(200)
        # 64 samples are read at a time, 7 to an epoch of 11.
        assert stream.counts.good == 256 and stream.counts.skipped["truncated"] in (36, 37)


def test_the_sentence_of_a_thousand():
    counts = Counts(1000, {"unreadable": 7, "no_caption": 5})
    assert (
        counts.summary("members") == "12 of 1,000 members skipped: 7 unreadable pictures, 5 without a caption"
    )
    assert Counts(3).summary("pairs") == "none of 3 pairs skipped"
    assert (
        Counts(3, {}, {"truncated_shards": 2}).summary() == "none of 3 samples skipped; 2 shards are cut off"
    )
    assert Counts.from_dict(json.loads(json.dumps(counts.to_dict()))) == counts


def test_rows_that_cannot_be_read(tmp_path, rng):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(sets.picture(rng))
    long = "x" * 200_000
    rows = ["file_name,text", "0.png,zero", "1.png", "", f"1.png,{long}", "2.png,two"]
    (tmp_path / "metadata.csv").write_text("\n".join(rows))
    source = open_pictures(tmp_path, 8)
    assert _all(source).keys() == {"zero", "two"}
    assert source.faults == {"bad_rows": 2}
    (tmp_path / "metadata.csv").unlink()
    lines = ['{"file_name": "0.png", "text": "zero"}', "{", "[1]", '{"file_name": "1.png"}', "[" * 99_999]
    lines += ['{"file_name": ["1.png"], "text": "one"}', '{"file_name": "2.png", "text": "two \\ud800"}']
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    source = open_pictures(tmp_path, 8)
    assert _all(source).keys() == {"zero", "two ?"}
    assert source.faults == {"bad_rows": 5}


def test_links(tmp_path, rng):
    sets.sidecars(tmp_path / "real", rng, 3, bad=False)
    (tmp_path / "set").mkdir()
    (tmp_path / "set/link").symlink_to(tmp_path / "real")
    (tmp_path / "set/again").symlink_to(tmp_path / "set")
    (tmp_path / "set/nowhere.png").symlink_to(tmp_path / "nothing")
    assert len(_all(open_pictures(tmp_path / "set", 8))) == 3


# ------------------------------------------------------------------------------------------ choice by path


@pytest.mark.parametrize("opener", [open_pictures, open_pairs])
def test_paths_that_hold_nothing(tmp_path, opener):
    setting = "data.pictures" if opener is open_pictures else "data.pairs"
    with pytest.raises(ConfigError, match=rf"{setting}: there is no .*absent; check the path"):
        opener(tmp_path / "absent", 8)
    with pytest.raises(ConfigError, match="no path"):
        opener("", 8)
    with pytest.raises(ConfigError, match="no path"):
        opener("a\0b", 8)
    with pytest.raises(ConfigError, match="an address, but only files of this machine"):
        opener("s3://bucket/{00000..00012}.tar", 8)
    with pytest.raises(ConfigError, match="holds no files, which cannot be read as such a set; give "):
        opener(tmp_path, 8)
    for name in ("a.zip", "b.zip", "c.tar.gz", "LICENSE"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"holds 4 files \(2 .zip, 1 .gz, 1 without ending\).*parquet"):
        opener(tmp_path, 8)
    with pytest.raises(ConfigError, match=r"is 1 file \(1 .zip\), which cannot"):
        opener(tmp_path / "a.zip", 8)
    with pytest.raises(ConfigError, match=r"there is no .*; check the pattern"):
        opener(tmp_path / "{0..2}.tar", 8)


def test_the_home_folder(tmp_path, rng, monkeypatch):
    sets.sidecars(tmp_path / "pictures", rng, 3, bad=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(_all(open_pictures("~/pictures", 8))) == 3


def test_one_kind_at_a_time(tmp_path, rng):
    sets.shards(tmp_path, rng, 1)
    sets.sidecars(tmp_path, rng, 3)
    with pytest.raises(ConfigError, match=r"holds both 1 .tar and 3 pictures; name a folder or a pattern"):
        open_pictures(tmp_path, 8)
    assert open_pictures(tmp_path / "*.tar", 8).noun == "members"
    with pytest.raises(ConfigError, match="which cannot be read as such a set"):
        open_pictures(tmp_path / "000.png", 8)


def test_columns_of_other_names(tmp_path, rng):
    (tmp_path / "0.png").write_bytes(sets.picture(rng))
    (tmp_path / "metadata.csv").write_text("name;words\n0.png;zero\n")
    with pytest.raises(
        ConfigError, match=r"metadata.csv has the columns name, words, but file_name/.*needed"
    ):
        open_pictures(tmp_path, 8)
    with pytest.raises(ConfigError, match=r"metadata.csv has the columns name, words, but chosen.*label_0"):
        open_pairs(tmp_path, 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", 0), ("size", 8.0), ("size", 5000), ("seed", -1), ("seed", 2**64), ("shuffle", -1)],
)
def test_settings_out_of_range(tmp_path, name, value):
    with pytest.raises(ConfigError, match=rf"{name}: is {value}, but it must be a whole number from"):
        open_pictures(tmp_path, **{"size": 8, name: value})


def test_nothing_good_says_what_was_there(tmp_path, rng):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(b"broken" if i else sets.picture(rng))
        if i:
            (tmp_path / f"{i}.txt").write_text(f"caption {i}")
    source = open_pictures(tmp_path, 8)
    want = (
        r"data.pictures: .* has not one good sample \(3 of 3 pictures skipped: 2 unreadable pictures, "
        r"1 without a caption\); looked for pictures \(.jpg, .*metadata.jsonl\)"
    )
    with source.stream() as stream:
        for _ in range(2):  # the error stays
            with pytest.raises(ConfigError, match=want):
                stream.next(1)
    with pytest.raises(ConfigError, match=want):
        list(source.once(2))
    assert list(source.captions()) == ["caption 1", "caption 2"]
    for i in range(1, 3):
        (tmp_path / f"{i}.txt").unlink()
    with pytest.raises(ConfigError, match="3 of 3 pictures skipped: 3 without a caption"):
        list(open_pictures(tmp_path, 8).captions())


# ---------------------------------------------------------------------------------------------------- roles


def test_roles_by_hash_have_their_shares(rng):
    captions = [f"{sets.caption(rng, i)} {i}" for i in range(20_000)]
    roles = [role(c) for c in captions]
    for name, share in zip(data.ROLES, (0.7, 0.1, 0.1, 0.1), strict=True):
        deviation = (share * (1 - share) / len(roles)) ** 0.5
        assert abs(roles.count(name) / len(roles) - share) < 5 * deviation
    assert [role(c.upper() + "!") for c in captions] == roles
    # What was published stays so: a role that moved would let judges see what the policy learns from.
    fixed = ("a cat", "dog", "", "樹", "two birds on a house", "mat 7")
    assert [role(c) for c in fixed] == ["policy", "reward", "reward", "policy", "heldout", "policy"]


def test_a_stream_of_one_role_and_one_word(tmp_path, rng):
    sets.sidecars(tmp_path, rng, 40, bad=False)
    source = open_pictures(tmp_path, 8, seed=3)
    captions = list(source.captions())
    for name in data.ROLES:
        mine = {c for c in captions if role(c) == name}
        if mine:
            assert _all(source, role=name).keys() == mine
            with source.stream(role=name) as stream:
                assert set(stream.next(len(mine))[1]) == mine
    cats = {c for c in captions if "cat" in c.split() and role(c) == "policy"}
    assert _all(source, role="policy", word="cat").keys() == cats
    with pytest.raises(
        ConfigError, match=r"word 'zebra' \(none of 0 pictures skipped, 40 have other captions"
    ):
        list(source.once(8, word="zebra"))
    with pytest.raises(ConfigError, match="role: 'polisy' is not known; did you mean 'policy'"):
        source.stream(role="polisy")


def test_emoji_are_a_source_with_their_own_split():
    pairs, source = data.load_pairs(16), open_pairs("emoji", 16, seed=1)
    assert [source.role(c) for c in pairs.captions] == list(pairs.roles)
    with source.stream(role="evaluation") as stream:
        chosen, rejected, captions = stream.next(81)
    assert sorted(captions) == sorted(
        c for c, r in zip(pairs.captions, pairs.roles, strict=True) if r == "evaluation"
    )
    rows = [pairs.captions.index(c) for c in captions]
    assert (chosen == pairs.images[0, rows]).all() and (rejected == pairs.images[1, rows]).all()
    with open_pairs("emoji", 16, winner="twemoji").stream() as stream:
        chosen, rejected, captions = stream.next(5)
    rows = [pairs.captions.index(c) for c in captions]
    assert (chosen == pairs.images[1, rows]).all() and (rejected == pairs.images[0, rows]).all()
    both = sum(len(captions) for _, captions in open_pictures("emoji", 16).once(100))
    assert both == 2 * 1678
    with pytest.raises(
        ConfigError, match="winner: 'nato' is not a style of the emoji pairs; did you mean 'noto'"
    ):
        open_pairs("emoji", 16, winner="nato")
    with pytest.raises(ConfigError, match="size: 20 does not divide"):
        open_pairs("emoji", 20)
