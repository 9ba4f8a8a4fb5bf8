"""Exceptions. Every message is a sentence: the operand's name, both values, the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ShapeError(ValueError):
    """Shapes, axes or strides of the operands do not fit together."""


class DTypeError(TypeError):
    """An operand's dtype is not accepted here."""


class NonFiniteError(ValueError):
    """An operand holds NaN or Inf where ``nan="raise"`` is in force."""


class UnsupportedArchError(RuntimeError):
    """The kernel does not exist for this GPU's compute capability."""


class CudaError(RuntimeError):
    """A CUDA call failed; the message holds the runtime's own text."""


class LibraryError(RuntimeError):
    """The compiled library is missing or was built from another version."""


class ConfigError(ValueError):
    """A training configuration, or a variable of the environment, cannot be used."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or belongs to another run."""


class RewardError(RuntimeError):
    """A reward returned something other than one finite number a picture."""


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint for a misspelt name: ``"; did you mean 'x'?"`` or the list of what is known.

    >>> nearest("nvfp5", ["nvfp4", "mxfp4"])
    "; did you mean 'nvfp4'?"
    """
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "; known: " + ", ".join(map(repr, known))
