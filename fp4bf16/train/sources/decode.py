"""Encoded pictures and captions, as others made them, to what the trainer learns from.

A picture becomes `size` x `size` RGB in this order: turned upright (EXIF), the largest centred square cut
out, made RGB (grey repeated, palettes looked up, CMYK and YCbCr converted, 16 bits rounded to 8, transparent
parts laid on white), then resized. Shrinking takes the mean over boxes of the area; a square smaller than
`size` is enlarged bilinearly. A large JPEG is decoded at 1/2, 1/4 or 1/8, which costs a fraction of the time,
where at least 2 `size` pixels a side are left for the mean.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from ...extras import require
from .counts import Skip

#: Endings of the names of pictures, in lower case.
ENDINGS = ("jpg", "jpeg", "png", "webp", "gif")
MAX_BYTES = 64 << 20  # of one encoded picture
MAX_PIXELS = 1 << 26  # of one decoded picture: 67 million; more is a mistake or a decompression bomb
MAX_CAPTION = 1 << 16  # bytes of a caption
MAX_JSON = 4 << 20  # bytes of a JSON file beside a picture; EXIF may stand in it
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # no other decoder is ever run on somebody's bytes
_ORIENTATION = 0x0112  # EXIF tag
#: EXIF orientation -> name of the transposition that turns the picture upright (EXIF 2.32, section 4.6.4).
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def decode(data: bytes | Path | np.ndarray, size: int) -> np.ndarray:
    """One picture: uint8 (size, size, 3), RGB; an array is passed on as it is.

    data: the bytes of a JPEG, PNG, WebP or GIF (its first frame), or the file that holds them.

    Raises `Skip` ("unreadable", "truncated", "too_large", "missing") and nothing else.
    """
    if isinstance(data, np.ndarray):
        return data
    if isinstance(data, Path):
        data = _read(data)
    if len(data) > MAX_BYTES:
        raise Skip("too_large")
    pillow = require("PIL.Image", "reading pictures")
    try:
        with pillow.open(io.BytesIO(data), formats=_FORMATS) as image:  # the header alone
            if image.width * image.height > MAX_PIXELS:
                raise Skip("too_large")
            image.draft(None, (2 * size, 2 * size))
            return _square(pillow, image, size)
    except Skip:
        raise
    except pillow.DecompressionBombError:
        raise Skip("too_large") from None
    except Exception as error:  # the decoders raise a dozen kinds on damaged bytes, SyntaxError among them
        raise Skip("truncated" if "truncated" in str(error).lower() else "unreadable") from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise Skip("missing") from None
    except OSError:
        raise Skip("unreadable") from None


def _square(pillow: Any, image: Any, size: int) -> np.ndarray:
    try:
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION))
    except Exception:  # a damaged EXIF block does not spoil the picture
        turn = None
    image.load()  # what follows sees a picture, not a file
    if turn:
        image = image.transpose(pillow.Transpose[turn])
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = _rgb(pillow, image.crop((left, top, left + side, top + side)))
    if side != size:
        filters = pillow.Resampling
        image = image.resize((size, size), filters.BOX if side > size else filters.BILINEAR)
    return np.array(image, np.uint8)


def _rgb(pillow: Any, image: Any) -> Any:
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        values = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return pillow.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = pillow.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def clean(caption: Any) -> str:
    """A caption on one line, single spaces, valid Unicode; "" for anything that is not one.

    >>> clean("  a cat\\nand a\\tdog ")
    'a cat and a dog'
    """
    if not isinstance(caption, str) or len(caption) > MAX_CAPTION:
        return ""
    return " ".join(caption.encode("utf-8", "replace").decode().split())


def caption_of(text: bytes | None, record: bytes | None) -> str:
    """The caption in the text beside a picture, or else under "caption" in the JSON beside it; "" for none.

    >>> caption_of(b"a cat", None), caption_of(b" ", b'{"caption": "a dog"}'), caption_of(None, b"[1]")
    ('a cat', 'a dog', '')
    """
    if text is not None and len(text) <= MAX_CAPTION:
        caption = clean(text.decode("utf-8-sig", "replace"))
        if caption:
            return caption
    if record is None or len(record) > MAX_JSON:
        return ""
    try:
        known = json.loads(record)
    except (ValueError, RecursionError):
        return ""
    return clean(known.get("caption")) if isinstance(known, dict) else ""
