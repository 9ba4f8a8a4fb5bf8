"""Data of one's own: captioned pictures and preference pairs, streamed from where they lie.

`open_pictures` and `open_pairs` look at a path and pick the kind; whatever it is, its `stream` gives batches
in a shuffled order that can be left and taken up again, and counts what could not be used.
"""

from __future__ import annotations

import os

from ...errors import ConfigError, nearest
from ...extras import require
from ..data import STYLES
from .counts import FAULTS, SKIPPED, Counts
from .decode import ENDINGS
from .emoji import Emoji
from .files import FileSet, find, walk
from .folder import TABLES, FolderPairs, FolderPictures
from .parquet import ParquetPairs, ParquetPictures
from .readers import Reader
from .roles import SHARES, role
from .source import PairSource, PictureSource, Source
from .stream import Stream
from .tables import CAPTIONED, CHOSEN, LABELLED, Layout, Table, columns_of, open_table
from .tar import TarShards

__all__ = [
    "FAULTS",
    "SHARES",
    "SKIPPED",
    "Counts",
    "PairSource",
    "PictureSource",
    "Source",
    "Stream",
    "open_pairs",
    "open_pictures",
    "role",
]

_TABLE_ENDINGS = ("csv", "tsv", "jsonl")
_PICTURES = (
    f"a folder of pictures with captions (name.txt beside name.jpg, or {', '.join(TABLES)}), .tar shards "
    f"(not compressed) of webdataset or img2dataset, or .parquet files with an image and a text column"
)
_PAIRS = (
    ".parquet files with the columns jpg_0, jpg_1, label_0, caption, or a folder of pictures with a table "
    "(.csv, .tsv, .jsonl) with the columns chosen, rejected, caption or image_0, image_1, label_0, caption"
)


def open_pictures(path: str | os.PathLike, size: int, seed: int = 0, shuffle: int = 2048) -> PictureSource:
    """Captioned pictures at `size` pixels a side.

    path: one of
    - a folder of pictures (jpg, jpeg, png, webp, gif; folders in it too) with captions in ``name.txt`` beside
      each, or in ``metadata.csv``, ``captions.csv`` (``file_name,text``) or ``metadata.jsonl``; or such a
      table;
    - a tar shard, a folder of them, or a pattern such as ``shards/{00000..00012}.tar``;
    - a parquet file with pictures (columns image and text), a folder or a pattern of them;
    - "emoji": the pictures that ship, both styles.

    seed, shuffle: of the order; shards are shuffled among `shuffle` pictures (3 size^2 bytes each), the
    others completely; 0 keeps the order of the files.

    Raises `ConfigError` when nothing fits, `ImportError` when Pillow (or, for parquet, pyarrow) is missing.

    >>> source = open_pictures("emoji", 16)
    >>> with source.stream() as stream:
    ...     pictures, captions = stream.next(2)
    >>> pictures.shape, pictures.dtype, len(captions)
    ((2, 16, 16, 3), dtype('float32'), 2)
    """
    _check(size, seed, shuffle)
    setting, text = PictureSource.setting, os.fspath(path)
    reader = Emoji(size, None) if text == "emoji" else _pictures(setting, text)
    return PictureSource(text, reader, size, seed, shuffle)


def open_pairs(
    path: str | os.PathLike, size: int, seed: int = 0, shuffle: int = 2048, winner: str = "noto"
) -> PairSource:
    """Preference pairs at `size` pixels a side.

    path: one of
    - a parquet file as Pick-a-Pic has them (``jpg_0, jpg_1, label_0, caption``), a folder or a pattern of
      them;
    - a folder of pictures with a CSV (or .tsv, .jsonl) that names them, ``chosen, rejected, caption`` or
      ``image_0, image_1, label_0, caption``; or that table;
    - "emoji": the pairs that ship, the style `winner` chosen.

    label_0 is 1 where picture 0 was preferred, 0 where picture 1 was; ties (0.5) are dropped and counted.
    Otherwise as `open_pictures`.

    >>> with open_pairs("emoji", 16).stream() as stream:
    ...     chosen, rejected, captions = stream.next(3)
    >>> chosen.shape == rejected.shape == (3, 16, 16, 3)
    True
    """
    _check(size, seed, shuffle)
    if winner not in STYLES:
        raise ConfigError(f"winner: {winner!r} is not a style of the emoji pairs{nearest(winner, STYLES)}")
    setting, text = PairSource.setting, os.fspath(path)
    reader = Emoji(size, winner) if text == "emoji" else _pairs(setting, text)
    return PairSource(text, reader, size, seed, shuffle)


def _check(size: int, seed: int, shuffle: int) -> None:
    for name, value, low, high in (
        ("size", size, 1, 4096),
        ("seed", seed, 0, 2**64 - 1),
        ("shuffle", shuffle, 0, 2**31 - 1),
    ):
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"{name}: is {value!r}, but it must be a whole number from {low} to {high}")


def _pictures(setting: str, path: str) -> Reader:
    require("PIL.Image", "reading pictures")
    files = find(setting, path)
    tars, parquets, pictures = files.only("tar"), files.only("parquet"), files.only(*ENDINGS)
    if not files.folder:
        files, table = _beside(files)
        if table:
            return FolderPictures(files, _tables(setting, files, [table], (CAPTIONED,), needed=True))
        pictures = pictures.only()
    if pictures.entries and tars.entries:
        raise ConfigError(
            f"{setting}: {path} holds both {len(tars.entries):,} .tar and {len(pictures.entries):,} "
            f"pictures; name a folder or a pattern that has only one of them"
        )
    if tars.entries:
        return TarShards(tars)
    if pictures.entries:
        names = [e.name for e in files.entries if e.name.rpartition("/")[2].lower() in TABLES]
        return FolderPictures(files, _tables(setting, files, names, (CAPTIONED,), needed=True))
    if parquets.entries:
        return _parquet(setting, ParquetPictures(parquets), path)
    raise _nothing(setting, path, files, _PICTURES)


def _pairs(setting: str, path: str) -> Reader:
    require("PIL.Image", "reading pictures")
    files = find(setting, path)
    parquets, layouts = files.only("parquet"), (CHOSEN, LABELLED)
    names, whole = [e.name for e in files.only(*_TABLE_ENDINGS).entries], files.folder
    if not whole:
        files, table = _beside(files)
        names = [table] if table else []
    tables = _tables(setting, files, names, layouts, needed=not whole)
    if tables and parquets.entries:
        raise ConfigError(
            f"{setting}: {path} holds both {len(parquets.entries):,} .parquet and {sorted(tables)[0]}, which "
            f"names pairs; name the one that is meant"
        )
    if tables:
        return FolderPairs(files, tables)
    if parquets.entries:
        return _parquet(setting, ParquetPairs(parquets), path)
    if names:
        raise ConfigError(
            f"{setting}: {path}: no table of {', '.join(names[:3])} names pairs; {names[0]} has the columns "
            f"{columns_of(files.path(names[0]))}, but {CHOSEN}, or {LABELLED} are needed"
        )
    raise _nothing(setting, path, files, _PAIRS)


def _beside(files: FileSet) -> tuple[FileSet, str]:
    """For a table that was named itself: the files of its folder, and its name; otherwise `files` and ""."""
    if len(files.entries) != 1 or files.entries[0].ending not in _TABLE_ENDINGS:
        return files, ""
    return walk(files.root), files.entries[0].name


def _tables(
    setting: str, files: FileSet, names: list[str], layouts: tuple[Layout, ...], needed: bool
) -> dict[str, Table]:
    """Those of the files `names` that are tables of one of the layouts; `ConfigError` for one that is needed
    and is not.
    """
    found = {}
    for name in names:
        table = open_table(files.path(name), layouts)
        if table:
            found[name] = table
        elif needed:
            raise ConfigError(
                f"{setting}: {files.path(name)} has the columns {columns_of(files.path(name))}, but "
                f"{', or '.join(map(str, layouts))} are needed; name its columns so, or take it away"
            )
    return found


def _parquet(setting: str, reader: ParquetPairs | ParquetPictures, path: str) -> Reader:
    if not reader.units and reader.columns_seen:
        raise ConfigError(
            f"{setting}: {path} has the columns {', '.join(reader.columns_seen)[:200]}; looked for "
            f"{reader.looked_for}"
        )
    return reader


def _nothing(setting: str, path: str, files: FileSet, accepted: str) -> ConfigError:
    held = f"holds {files.describe()}" if files.folder else f"is {files.describe()}"
    return ConfigError(f"{setting}: {path} {held}, which cannot be read as such a set; give {accepted}")
