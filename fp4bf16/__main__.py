"""``python -m fp4bf16``: info, validate, bench, train, sample, route, eval."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ._version import __version__
from .errors import (
    CheckpointError,
    ConfigError,
    CudaError,
    DTypeError,
    LibraryError,
    NonFiniteError,
    ShapeError,
    nearest,
)

COMMANDS = ("info", "validate", "bench", "train", "sample", "route", "eval")
#: What a user can cause: shown as its sentence, without a traceback.
USER = (
    CheckpointError,
    ConfigError,
    CudaError,
    DTypeError,
    LibraryError,
    NonFiniteError,
    ShapeError,
    OSError,
)


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest command."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2, naming the command that was probably meant."""
        if message.startswith("argument {") and "invalid choice: " in message:
            given = message.split("invalid choice: ")[1].split(" ")[0].strip("'\"")
            known = message.split("{")[1].split("}")[0].split(",")
            message = f"{given!r} is not a command{nearest(given, known)}"
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """The command line with all its subcommands."""
    parser = Parser(prog="fp4bf16", description="FP4 for the bulk of the tensor work, BF16 to anchor it.")
    parser.add_argument("--version", action="version", version=f"fp4bf16 {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}",
                                       parser_class=Parser)  # fmt: skip
    from .cli import bench, eval, info, validate

    info.add_parser(subparsers)
    validate.add_parser(subparsers)
    bench.add_parser(subparsers)
    importlib.import_module("fp4bf16.train.cli").add_parsers(subparsers)
    eval.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    0: done. 1: a check failed. 2: what was asked for cannot be done, and a sentence said why. 130:
    interrupted. 141: whoever read the output went away.
    """
    for stream in (sys.stdout, sys.stderr):  # a character that they cannot show is no reason to fail
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(build_parser().parse_args(arguments))
    finally:
        _let_go()


def _let_go() -> None:
    """Flush what is printed; what cannot be is dropped, or the interpreter would complain of it."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: argparse.Namespace) -> int:
    try:
        status = args.function(args) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("fp4bf16: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, `head` for one, has seen what it wanted
        return 141
    except USER as error:
        print(f"fp4bf16: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
