"""The command line: ``python -m swapopt_mindspore <command>``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from swapopt_mindspore import __version__
from swapopt_mindspore.demo.settings import (
    MIN_STEPS,
    MODEL_SIZES,
    OPTIMIZERS,
    DemoError,
    DemoSettings,
    ModelSize,
    parse_model_size,
)
from swapopt_mindspore.emulated import PROFILES

INTERRUPTED = 130  # as shells report it
EXTRA_MODULES = ("rich", "matplotlib")

_DEMO_DESCRIPTION = """\
Train a small GPT on the source files of Python's standard library from the same seed: natively,
with optimizer states swapped tensor by tensor, and, where the optimizer is MindFormers' AdamW,
swapped in packed batches. Print what each run needed and whether the results are equal bit for
bit, and write a report folder.

Runs on the emulated device, always: values are computed by MindSpore's CPU kernels, and memory
and time are those of the device that the profile describes.
"""

_DEMO_EPILOG = """\
what the table shows
  device memory     parameters, gradients, states, what forward keeps for backward, and what
                    swapping brings in for a step
  optimizer step    from an idle device to an idle device, the last copies to the host included
  whole iteration   forward, backward and optimizer step, one after another
  transfer time     while batches are being copied, both directions added up; hidden is the share
                    of it that no update waited for
  times             are virtual: launches, copies and memory traffic at the speeds of the
                    profile, the same on every machine
  reported          what the specification of swap_optimizer saw on real hardware

exit status
  0 all runs are equal to native, 1 they are not, 2 the demo could not run

examples
  python -m swapopt_mindspore demo --steps 100 --swap-times 4
  python -m swapopt_mindspore demo --optimizer adam --profile h200
  python -m swapopt_mindspore demo --model-size layers=6,width=512,heads=8
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status.

    Args:
        arguments: without the program's name; None takes them from the process.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    return _demo(_demo_settings(options))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m swapopt_mindspore",
        description="Keep optimizer states in host memory, and stream them during the step.",
    )
    parser.add_argument("--version", action="version", version=f"swapopt-mindspore {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small model natively and with swapped states, and compare",
        description=_DEMO_DESCRIPTION,
        epilog=_DEMO_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_demo_options(demo)
    return parser


def _add_demo_options(demo: argparse.ArgumentParser) -> None:
    defaults = DemoSettings()
    demo.add_argument(
        "--steps",
        type=_steps,
        default=defaults.steps,
        metavar="N",
        help=f"training steps of each run, at least {MIN_STEPS} (%(default)s)",
    )
    demo.add_argument(
        "--model-size",
        type=_model_size,
        default=defaults.model_size,
        metavar="SIZE",
        help=f"{', '.join(MODEL_SIZES)}, or small with other dimensions: any of layers=N, width=N, "
        "heads=N, context=N, batch=N, with commas between (small)",
    )
    demo.add_argument(
        "--optimizer",
        choices=list(OPTIMIZERS),
        help="what updates the parameters (mindformers-adamw where it is installed, else adam)",
    )
    demo.add_argument(
        "--swap-times",
        type=_positive,
        default=defaults.swap_times,
        metavar="N",
        help="a step holds two batches of so many on the device; more need less (%(default)s)",
    )
    demo.add_argument(
        "--seed",
        type=int,
        default=defaults.seed,
        metavar="N",
        help="of the parameters and the order of the data (%(default)s)",
    )
    demo.add_argument(
        "--profile",
        choices=list(PROFILES),
        default=defaults.profile,
        help="speeds of the emulated device (%(default)s)",
    )
    demo.add_argument(
        "--output",
        type=Path,
        default=defaults.output,
        metavar="FOLDER",
        help="where to write the report (%(default)s)",
    )


def _demo_settings(options: argparse.Namespace) -> DemoSettings:
    return DemoSettings(
        steps=options.steps,
        model_size=options.model_size,
        swap_times=options.swap_times,
        profile=options.profile,
        optimizer=options.optimizer,
        output=options.output,
        seed=options.seed,
    )


def _demo(settings: DemoSettings) -> int:
    missing = [name for name in EXTRA_MODULES if find_spec(name) is None]
    if missing:
        return _fail(
            f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)} "
            "(or install swapopt-mindspore[cli])"
        )
    from rich.console import Console

    from swapopt_mindspore.demo.main import run_demo

    try:
        return 0 if run_demo(settings, Console()) else 1
    except DemoError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("swapopt demo: interrupted", file=sys.stderr)
        return INTERRUPTED


def _fail(message: str) -> int:
    print(f"swapopt demo: {message}", file=sys.stderr)
    return 2


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _steps(text: str) -> int:
    steps = _positive(text)
    if steps < MIN_STEPS:
        raise argparse.ArgumentTypeError(
            f"expected at least {MIN_STEPS}, got {steps}: one step to warm up, and two whose "
            "memory is drawn"
        )
    return steps


def _model_size(text: str) -> ModelSize:
    try:
        return parse_model_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
