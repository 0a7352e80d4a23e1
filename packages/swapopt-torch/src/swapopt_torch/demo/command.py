"""The options of ``python -m swapopt_torch demo``, and what runs it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swapopt_torch.command_line import INTERRUPTED, explain_missing, fail, positive_int
from swapopt_torch.demo.settings import (
    MIN_STEPS,
    MODEL_SIZES,
    OPTIMIZERS,
    DemoError,
    DemoSettings,
    ModelSize,
    parse_model_size,
)

if TYPE_CHECKING:
    from swapopt_torch.command_line import Subparsers

_DESCRIPTION = """\
Train a small GPT on the source files of Python's standard library three times from the same seed:
natively, with optimizer states swapped tensor by tensor, and swapped in packed batches. Print what
each run needed and whether the results are equal bit for bit, and write a report folder.

Runs on the accelerator that torch finds (CUDA, NPU or XPU), else on the virtual one, which needs a
C++ compiler and is built at first use, which takes a minute or two.
"""

_EPILOG = """\
what the table shows
  device memory     bytes in use by tensors, or by streams that have yet to finish with them
  optimizer step    from an idle device to an idle device, so the tail (the last copies to the
                    host) counts, although training does not wait for it: it runs beside the
                    next forward
  whole iteration   forward, backward and optimizer step, one after another, tail included
  hidden            1 - (optimizer step - native optimizer step) / transfer time; transfer time is
                    what the step's copies take by themselves, both directions added up;
                    "none" where the step grew by more than that
  virtual times     are computed by the virtual accelerator from the figures of its profile; they
                    are the same on every machine

exit status
  0 all runs are equal to native, 1 they are not, 2 the demo could not run

examples
  python -m swapopt_torch demo --steps 100 --swap-times 4
  python -m swapopt_torch demo --device virtual --profile ascend-910b
  python -m swapopt_torch demo --model-size layers=6,width=256,heads=4
"""


def add_parser(commands: Subparsers) -> None:
    """Add the command's parser."""
    demo = commands.add_parser(
        "demo",
        help="train a small model natively and with swapped states, and compare",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.set_defaults(run=_run)
    _add_training_options(demo.add_argument_group("training"))
    _add_device_options(demo.add_argument_group("device"))
    demo.add_argument(
        "--output",
        type=Path,
        default=DemoSettings().output,
        metavar="FOLDER",
        help="where to write the report (%(default)s)",
    )


def _add_training_options(group: argparse._ArgumentGroup) -> None:
    defaults = DemoSettings()
    group.add_argument(
        "--steps",
        type=_steps,
        default=defaults.steps,
        metavar="N",
        help=f"training steps of each run, at least {MIN_STEPS} (%(default)s)",
    )
    group.add_argument(
        "--model-size",
        type=_model_size,
        metavar="SIZE",
        help=f"{', '.join(MODEL_SIZES)}, or small with other dimensions: any of layers=N, width=N, "
        "heads=N, context=N, batch=N, with commas between (small; medium on a real card)",
    )
    group.add_argument(
        "--optimizer",
        choices=list(OPTIMIZERS),
        default=defaults.optimizer,
        help="what updates the parameters (%(default)s)",
    )
    group.add_argument(
        "--swap-times",
        type=positive_int,
        default=defaults.swap_times,
        metavar="N",
        help="a step holds two batches of so many on the device; more need less (%(default)s)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=defaults.seed,
        metavar="N",
        help="of the parameters and the order of the data (%(default)s)",
    )


def _add_device_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="auto, virtual, or a device as torch names it, like cuda:1 (%(default)s)",
    )
    group.add_argument(
        "--profile",
        metavar="NAME",
        help="speeds of the virtual accelerator: h200, ascend-910b or half-duplex (h200)",
    )


def _demo_settings(options: argparse.Namespace) -> DemoSettings:
    return DemoSettings(
        steps=options.steps,
        model_size=options.model_size,
        swap_times=options.swap_times,
        profile=options.profile,
        device=options.device,
        optimizer=options.optimizer,
        output=options.output,
        seed=options.seed,
    )


def _run(options: argparse.Namespace) -> int:
    missing = explain_missing("demo", ["rich", "matplotlib"])
    if missing is not None:
        return fail("demo", missing)
    from rich.console import Console

    from swapopt_torch.demo.main import run_demo

    try:
        return 0 if run_demo(_demo_settings(options), Console()) else 1
    except DemoError as error:
        return fail("demo", str(error))
    except KeyboardInterrupt:
        print("swapopt demo: interrupted", file=sys.stderr)
        return INTERRUPTED
    except torch.OutOfMemoryError as error:
        return fail("demo", f"The device ran out of memory; try a smaller --model-size. ({error})")


def _steps(text: str) -> int:
    steps = positive_int(text)
    if steps < MIN_STEPS:
        raise argparse.ArgumentTypeError(
            f"expected at least {MIN_STEPS}, got {steps}: one step to warm up, one to time, and "
            "three that are observed"
        )
    return steps


def _model_size(text: str) -> ModelSize:
    try:
        return parse_model_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
