"""Small sets of pictures and pairs, as users have them, for the tests of the sources."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

WORDS = ("red", "cat", "dog", "on", "a", "mat", "green", "tree", "bird", "house")


def encode(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    """uint8 pixels as the bytes of a file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def noise(rng: np.random.Generator, height: int, width: int, channels: int = 3) -> np.ndarray:
    return rng.integers(0, 256, (height, width, channels), np.uint8)


def picture(rng: np.random.Generator, kind: str = "PNG") -> bytes:
    """A small picture whose pixels no other picture has."""
    return encode(noise(rng, *rng.integers(5, 12, 2)), kind)


def caption(rng: np.random.Generator, number: int) -> str:
    """A few words and a number, so that captions tell samples apart."""
    return " ".join([*rng.choice(WORDS, 3), str(number)])


def write_tar(path: Path, files: list[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT) -> Path:
    """A tar with these members in this order, as webdataset writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def shards(folder: Path, rng: np.random.Generator, number: int = 3, each: int = 5, bad: bool = True) -> Path:
    """Tar shards as img2dataset leaves them, with a broken picture and one without a caption if `bad`."""
    for shard in range(number):
        files: list[tuple[str, bytes]] = []
        for i in range(each):
            key = f"{shard:05d}{i:04d}"
            data = picture(rng, ("JPEG", "PNG", "WEBP")[i % 3])
            if bad and (shard, i) == (0, 1):
                data = b"\xff\xd8 no picture"
            files.append((f"{key}.{('jpg', 'png', 'webp')[i % 3]}", data))
            if not (bad and (shard, i) == (1, 2)):
                files.append((f"{key}.txt", caption(rng, 100 * shard + i).encode()))
            files.append((f"{key}.json", json.dumps({"key": key, "status": "success"}).encode()))
        write_tar(folder / f"{shard:05d}.tar", files)
        (folder / f"{shard:05d}_stats.json").write_text("{}")
        (folder / f"{shard:05d}.parquet").write_bytes(b"PAR1 metadata that nobody reads")
    return folder


def sidecars(folder: Path, rng: np.random.Generator, number: int = 9, bad: bool = True) -> Path:
    """A folder with a folder in it, and ``name.txt`` beside ``name.png``."""
    for i in range(number):
        path = folder / ("deeper" if i % 2 else "") / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"broken" if bad and i == 3 else picture(rng))
        if not (bad and i == 4):
            path.with_suffix(".txt").write_text(caption(rng, i))
    return folder


def table(folder: Path, rng: np.random.Generator, number: int = 7) -> Path:
    """A folder with ``metadata.csv``; a picture has two captions, and a row names one that is not there."""
    folder.mkdir(parents=True)
    rows = ["file_name,text"]
    for i in range(number):
        (folder / f"{i}.png").write_bytes(picture(rng))
        rows.append(f'{i}.png,"{caption(rng, i)}, really"')
    rows += [f"0.png,{caption(rng, 100)}", "absent.png,a picture that is not there"]
    (folder / "metadata.csv").write_text("\n".join(rows), encoding="utf-8-sig")
    return folder


def pair_table(folder: Path, rng: np.random.Generator, number: int = 8) -> Path:
    """Pairs in a CSV with labels, the fourth a tie."""
    folder.mkdir(parents=True)
    rows = ["image_0;image_1;label_0;caption"]
    for i in range(number):
        for side in "ab":
            (folder / f"{i}{side}.png").write_bytes(picture(rng))
        rows.append(f"{i}a.png;{i}b.png;{(1, 0, 1.0, 0.5)[i % 4]};{caption(rng, i)}")
    (folder / "pairs.csv").write_text("\n".join(rows) + "\n")
    return folder


def pick_a_pic(
    folder: Path, rng: np.random.Generator, number: int = 12, files: int = 2, structs: bool = False
) -> Path:
    """Parquet files with row groups of five rows: every fifth row is a tie, and one picture is broken."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    for f in range(files):
        columns: dict[str, list] = {"jpg_0": [], "jpg_1": [], "label_0": [], "caption": [], "user_id": []}
        for i in range(number):
            for side in ("jpg_0", "jpg_1"):
                data = b"\xff\xd8\xff broken" if (f, i, side) == (0, 3, "jpg_1") else picture(rng, "JPEG")
                columns[side].append({"bytes": data, "path": None} if structs else data)
            columns["label_0"].append((1.0, 0.0, 1.0, 0.0, 0.5)[i % 5])
            columns["caption"].append(caption(rng, 100 * f + i))
            columns["user_id"].append(i)
        pq.write_table(pa.table(columns), folder / f"train-{f:05d}.parquet", row_group_size=5)
    return folder
