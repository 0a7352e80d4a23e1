"""What the commands of the command line have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    # What ArgumentParser.add_subparsers returns; a command's add_parser adds its parser to it, and
    # sets its default `run` to a function from the parsed options to the exit status.
    Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

FAILED = 2  # the exit status of argparse, too
INTERRUPTED = 130  # as shells report it


def positive_int(text: str) -> int:
    """Return an option's value: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def fail(command: str, message: str) -> int:
    """Say on standard error why a command could not do what was asked; return its exit status."""
    print(f"swapopt {command}: {message}", file=sys.stderr)
    return FAILED


def explain_missing(command: str, modules: Sequence[str]) -> str | None:
    """Return what to install if modules of the command line's extra are missing, else None."""
    missing = [name for name in modules if find_spec(name) is None]
    if not missing:
        return None
    return (
        f"the {command} needs {' and '.join(missing)}: pip install {' '.join(missing)} "
        "(or install swapopt-torch[cli])"
    )
