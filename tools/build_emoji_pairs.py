"""Rebuild ``fp4bf16/train/assets`` from the two pinned npm packages of vector emoji.

    npm pack @iconify-json/noto@1.2.9 @iconify-json/twemoji@1.2.5
    python -m pip install resvg-py==0.5.0 pillow numpy
    python tools/build_emoji_pairs.py iconify-json-noto-1.2.9.tgz iconify-json-twemoji-1.2.5.tgz --out assets

Writes ``pairs32.npz`` (x: uint8 (2, n, 32, 32, 3), x[0] Noto, x[1] Twemoji; cap: n captions, sorted) and
``split.tsv`` (caption, role). Archives are read as streams: nothing is unpacked to disk. ``--compare FILE``
says whether the pictures equal those of an existing npz.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np

PACKAGES = {"noto": "1.2.9", "twemoji": "1.2.5"}
MAX_ICONS_BYTES = 64 << 20  # the larger icons.json has 11 MB; refuse anything absurd before parsing
ROLE_SIZES = {"reward": 550, "heldout": 550, "evaluation": 60}  # without faces; the rest is for the policy
EVALUATION_FACES = 21

# Captions that differ in these words alone show nearly the same drawing: such a family takes one role.
VARIANT_WORDS = frozenset(
    "man woman person men women people boy girl boys girls mx mrs male female facing right".split()
)


def read_icons(archive: Path, style: str) -> dict[str, str]:
    """Caption -> SVG text of one iconify package; hidden icons and skin-tone variants are left out."""
    with tarfile.open(archive) as tar:
        version = json.load(tar.extractfile("package/package.json"))["version"]
        if version != PACKAGES[style]:
            pinned = PACKAGES[style]
            raise SystemExit(f"{archive}: version of {style} is {version}, but the pictures are of {pinned}")
        member = tar.getmember("package/icons.json")
        if member.size > MAX_ICONS_BYTES:
            raise SystemExit(f"{archive}: icons.json has {member.size} bytes, more than {MAX_ICONS_BYTES}")
        sheet = json.load(tar.extractfile(member))
    icons = {}
    for name, icon in sheet["icons"].items():
        if icon.get("hidden") or "skin-tone" in name:
            continue
        width, height = icon.get("width", sheet["width"]), icon.get("height", sheet["height"])
        icons[name.replace("-", " ")] = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'width="{{size}}" height="{{size}}" viewBox="0 0 {width} {height}">{icon["body"]}</svg>'
        )
    return icons


def render(svg: str, size: int) -> np.ndarray:
    """One drawing on white: uint8 (size, size, 3)."""
    import resvg_py
    from PIL import Image

    text = svg.replace("{size}", str(size), 2)
    png = resvg_py.svg_to_bytes(svg_string=text, background="#ffffff", width=size, skip_system_fonts=True)
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB"))


def _order(text: str) -> str:
    return hashlib.sha256(f"fp4bf16 emoji split: {text}".encode()).hexdigest()


def family(caption: str) -> str:
    """What stays of a caption without gender and direction."""
    return " ".join(w for w in caption.split() if w not in VARIANT_WORDS) or caption


def split(captions: list[str]) -> dict[str, str]:
    """Caption -> role, by the captions alone: faces and families dealt out in the order of their SHA-256."""
    roles = {}
    faces = sorted((c for c in captions if "face" in c.split()), key=_order)
    for i, caption in enumerate(faces):
        roles[caption] = "evaluation" if i < EVALUATION_FACES else "policy"
    families: dict[str, list[str]] = {}
    for caption in captions:
        if caption not in roles:
            families.setdefault(family(caption), []).append(caption)
    left = dict(ROLE_SIZES)
    for name in sorted(families, key=_order):
        members = families[name]
        role = next((r for r, room in left.items() if room >= len(members)), "policy")
        for caption in members:
            roles[caption] = role
        if role in left:
            left[role] -= len(members)
    return roles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("noto", type=Path)
    parser.add_argument("twemoji", type=Path)
    parser.add_argument("--out", type=Path, default=Path("fp4bf16/train/assets"))
    parser.add_argument("--size", type=int, default=32, help="pixels a side (default 32)")
    parser.add_argument("--compare", type=Path, help="npz whose pictures must come out the same")
    args = parser.parse_args()

    sheets = [read_icons(args.noto, "noto"), read_icons(args.twemoji, "twemoji")]
    captions = sorted(set(sheets[0]) & set(sheets[1]))
    x = np.stack([[render(sheet[c], args.size) for c in captions] for sheet in sheets])
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"pairs{args.size}.npz"
    np.savez_compressed(target, x=x, cap=np.array(captions))
    roles = split(captions)
    lines = ["caption\trole", *(f"{c}\t{roles[c]}" for c in captions)]
    (args.out / "split.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{target}: {len(captions)} captions, {target.stat().st_size / 1e6:.2f} MB, "
          f"sha256 of the pixels {hashlib.sha256(x.tobytes()).hexdigest()[:16]}")
    if args.compare:
        with np.load(args.compare) as other:
            if other["x"].shape != x.shape or list(other["cap"]) != captions:
                sys.exit(f"{args.compare}: shape {other['x'].shape} or captions differ from {x.shape} here")
            differing = int((other["x"] != x).any(axis=(2, 3, 4)).sum())
        print(f"{differing} of {2 * len(captions)} pictures differ from {args.compare}")
        sys.exit(differing > 0)


if __name__ == "__main__":
    main()
