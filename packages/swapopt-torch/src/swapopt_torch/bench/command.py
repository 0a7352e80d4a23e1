"""The options of ``python -m swapopt_torch bench``, and what runs it."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swapopt_torch.bench.settings import BenchSettings
from swapopt_torch.bench.workloads import NAMES, Workload, find_workload
from swapopt_torch.command_line import INTERRUPTED, fail, positive_int
from swapopt_torch.demo.settings import DemoError

if TYPE_CHECKING:
    from swapopt_torch.command_line import Subparsers

_OPTIMIZER_NAMES = ("adamw-fused", "hyper-adamw", "adamw")

_DESCRIPTION = """\
Step one optimizer natively, with its states swapped tensor by tensor and packed, in the order of
the RFC, with a plain .to() before and after the step, and with what other packages are installed;
all on the same parameters and gradients. Print what each needed beside the least that a step can
take, and write bench.json and, where matplotlib is installed, bench.png.

Runs on the accelerator that torch finds (CUDA, NPU or XPU), else on the virtual one, which needs a
C++ compiler and is built at first use, which takes a minute or two. Nothing is trained, so the
figures say nothing about numbers; the demo compares those.
"""

_EPILOG = """\
what the table shows
  optimizer step    from an idle device to an idle device, the last copies to the host included
  floor             the longest of: all states to the device, all states to the host, the native
                    update; where the link serves one direction at a time, its two times add up
  exposed transfer  by how much an optimizer step is longer than the native one
  training step     optimizer step and what stands in for forward and backward, again and again:
                    last copies are hidden that run beside the next forward
  optimum           the best that equal pieces in the memory of two arenas can do by arithmetic,
                    with a bounded share of the host's time spent on issuing them
  device memory     bytes in use; parameters, gradients and the contender's own
  per piece         a piece is what one copy brings to the device
  Python            process time of step() itself; not shown where this machine's processor
                    computes the updates, too

examples
  python -m swapopt_torch bench --workload rfc --profile ascend-910b
  python -m swapopt_torch bench --workload uniform-4GiB --device cuda --rounds 20
"""


def add_parser(commands: Subparsers) -> None:
    """Add the command's parser."""
    bench = commands.add_parser(
        "bench",
        help="measure an optimizer step, native, swapped and otherwise, beside its floor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.set_defaults(run=_run)
    _add_options(bench)


def _add_options(parser: argparse.ArgumentParser) -> None:
    defaults = BenchSettings()
    parser.add_argument(
        "--workload",
        type=_workload,
        default=defaults.workload,
        metavar="NAME",
        help=f"{', '.join(NAMES)}, uniform-SIZE with any size of states, or tiny-COUNT with any "
        "number of small tensors (%(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=_OPTIMIZER_NAMES,
        default=defaults.optimizer,
        help="what updates the parameters (%(default)s)",
    )
    parser.add_argument(
        "--swap-times",
        type=positive_int,
        default=defaults.swap_times,
        metavar="N",
        help="batches the states are divided into (%(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=positive_int,
        metavar="N",
        help="how often each is measured (2; 15 on a real card, where they take turns)",
    )
    parser.add_argument(
        "--training-ms",
        type=_milliseconds,
        default=defaults.training_seconds * 1e3,
        metavar="MS",
        help="length of what stands in for forward and backward (%(default).2f, as the RFC's)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="auto, virtual, or a device as torch names it, like cuda:1 (%(default)s)",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="speeds of the virtual accelerator: h200, ascend-910b or half-duplex (h200)",
    )
    parser.add_argument(
        "--dry",
        action=argparse.BooleanOptionalAction,
        help="a virtual accelerator of sizes and times alone, without memory and values; without "
        "it the states have to fit into this machine, several times (--dry)",
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument(
        "--output",
        type=Path,
        default=defaults.output,
        metavar="FOLDER",
        help="where to write bench.json and bench.png (%(default)s)",
    )


def _run(options: argparse.Namespace) -> int:
    settings = BenchSettings(
        workload=options.workload,
        optimizer=options.optimizer,
        swap_times=options.swap_times,
        rounds=options.rounds,
        training_seconds=options.training_ms * 1e-3,
        device=options.device,
        profile=options.profile,
        dry=options.dry,
        output=options.output,
        markdown=options.markdown,
    )
    try:
        _bench(settings, find_workload(settings.workload))
        return 0
    except DemoError as error:
        return fail("bench", str(error))
    except KeyboardInterrupt:
        print("swapopt bench: interrupted", file=sys.stderr)
        return INTERRUPTED
    except torch.OutOfMemoryError as error:
        return fail("bench", f"The device ran out of memory; try a smaller --workload. ({error})")


def _bench(settings: BenchSettings, workload: Workload) -> None:
    from swapopt_torch.bench.device import choose_device
    from swapopt_torch.bench.report import content_of, print_result
    from swapopt_torch.bench.run import run_bench

    try:
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(
            f"The folder {settings.output} cannot be written ({error.strerror}); choose another "
            "with --output."
        ) from error
    device = choose_device(settings)
    result = run_bench(settings, workload, device, _say)
    print_result(result, settings)
    written = settings.output / "bench.json"
    written.write_text(json.dumps(content_of(result, settings), indent=2) + "\n")
    print(f"\nFigures in {written}", file=sys.stderr)
    if find_spec("matplotlib") is None:
        print("No picture: matplotlib is not installed.", file=sys.stderr)
        return
    from swapopt_torch.bench.picture import draw

    draw(settings.output / "bench.png", result)
    print(f"Picture in {settings.output / 'bench.png'}", file=sys.stderr)


def _say(name: str) -> None:
    print(f"measuring {name}", file=sys.stderr, flush=True)


def _workload(text: str) -> str:
    try:
        return find_workload(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value
