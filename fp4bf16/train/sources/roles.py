"""Which part of a run may see a caption."""

from __future__ import annotations

import hashlib

from ..data import ROLES, words_of

#: Tenths of the captions, in the order of `ROLES`: policy, reward, heldout, evaluation.
SHARES = (7, 1, 1, 1)


def role(caption: str) -> str:
    """One of `ROLES`, by a hash of the caption's words: policy 70 %, reward, heldout, evaluation 10 % each.

    The same words have the same role in every set, on every machine, whatever their case and punctuation; a
    caption without any word of letters a to z or digits counts as it stands.

    >>> role("A cat, sitting") == role("a cat sitting")
    True
    """
    words = " ".join(words_of(caption)) or " ".join(caption.split())
    digest = hashlib.sha256(words.encode("utf-8", "replace")).digest()
    tenth = int.from_bytes(digest[:8], "little") % 10
    for name, share in zip(ROLES, SHARES, strict=True):
        if tenth < share:
            return name
        tenth -= share
    raise AssertionError("the shares make ten")
