"""The options of ``python -m swapopt_torch plan``, and what runs it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from swapopt_torch.command_line import INTERRUPTED, explain_missing, fail, positive_int

if TYPE_CHECKING:
    from swapopt_torch.command_line import Subparsers
    from swapopt_torch.plan.case import Case, Host

_PROFILES = ("h200", "ascend-910b", "half-duplex")
_OPTIMIZERS = ("adamw-fused", "adamw", "adam", "hyper-adamw")
_DTYPES = ("fp32", "bf16")
_SHAPES = ("llama", "uniform", "embedding")
_HOST_GB_PER_SECOND = 400
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

_DESCRIPTION = """\
Say what swapping will cost a model that need not fit here: device memory during the optimizer step,
pinned host memory, the time of the step, and which swap_times keeps within a budget.

One rank's share of the model is stepped on the dry virtual accelerator, which has the addresses and
the clock of a device, but no memory and no values. The first use of it builds it, which needs a C++
compiler and takes a minute or two.
"""

_EPILOG = """\
what is assumed
  sharding          every parameter is divided along its first dimension, rounded up, as FSDP2 does;
                    the rank planned for is the one that gets most
  --host-bandwidth  the host's memory serves the links of all ranks at once, in both directions; a
                    link is no faster than its rank's share
  times             are virtual: those of the profile, without Python's own time

examples
  python -m swapopt_torch plan --params 70e9 --shards 64 --ranks-per-host 8 --profile ascend-910b
  python -m swapopt_torch plan --params 7e9 --shards 8 --device-memory-budget 2GiB
"""


def add_parser(commands: Subparsers) -> None:
    """Add the command's parser."""
    plan = commands.add_parser(
        "plan",
        help="say what swapping will cost a model that need not fit here",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.set_defaults(run=_run)
    _add_model_options(plan.add_argument_group("model"))
    _add_machine_options(plan.add_argument_group("machine"))
    _add_swap_options(plan)
    plan.add_argument(
        "--output",
        type=Path,
        default=Path("swapopt-plan"),
        metavar="FOLDER",
        help="where to write plan.json and trade.png (%(default)s)",
    )


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--params",
        type=_count,
        required=True,
        metavar="N",
        help="parameters of the whole model, like 70e9",
    )
    group.add_argument(
        "--shards",
        type=positive_int,
        default=1,
        metavar="N",
        help="ranks that each hold a part of every parameter (%(default)s)",
    )
    group.add_argument(
        "--shape",
        choices=_SHAPES,
        default="llama",
        help="a transformer, equal matrices, or half of the parameters in one (%(default)s)",
    )
    group.add_argument(
        "--optimizer", choices=_OPTIMIZERS, default="adamw-fused", help="(%(default)s)"
    )
    group.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="fp32",
        help="of parameters, gradients and states (%(default)s)",
    )


def _add_machine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--profile",
        choices=_PROFILES,
        default="h200",
        help="speeds of the device and its link (%(default)s)",
    )
    group.add_argument(
        "--ranks-per-host",
        type=positive_int,
        default=1,
        metavar="N",
        help="ranks whose steps share the host's memory (%(default)s)",
    )
    group.add_argument(
        "--host-bandwidth",
        type=_nbytes,
        default=_HOST_GB_PER_SECOND * 10**9,
        metavar="BYTES",
        help="of the host's memory, per second, reads and writes together "
        f"({_HOST_GB_PER_SECOND}GB: two sockets of eight DDR5-4800 channels, at two thirds)",
    )


def _add_swap_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("swapping")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--swap-times",
        type=positive_int,
        metavar="N",
        help="a step holds two batches of so many on the device (16, unless there is a budget)",
    )
    choice.add_argument(
        "--device-memory-budget",
        type=_nbytes,
        metavar="BYTES",
        help="most that a step may need on the device beside what is there between steps, like "
        "2GiB or 2e9; the fastest swap_times that keeps within it is chosen",
    )
    way = group.add_mutually_exclusive_group()
    way.add_argument(
        "--packed",
        action="store_true",
        default=True,
        help="states move through two staging arenas (the default)",
    )
    way.add_argument(
        "--per-tensor", action="store_false", dest="packed", help="each state moves by itself"
    )


def _run(options: argparse.Namespace) -> int:
    missing = explain_missing("plan", ["rich", "matplotlib"])
    if missing is not None:
        return fail("plan", missing)
    from swapopt_torch import HostMemoryError
    from swapopt_torch.virtual import VirtualUnavailableError

    try:
        _plan(options)
    except KeyboardInterrupt:
        print("swapopt plan: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        return fail("plan", f"The folder {options.output} cannot be written ({error.strerror}).")
    except (ValueError, VirtualUnavailableError, HostMemoryError) as error:
        return fail("plan", str(error))
    return 0


def _plan(options: argparse.Namespace) -> None:
    from rich.console import Console

    from swapopt_torch.plan.picture import draw_trade
    from swapopt_torch.plan.plan import make_plan
    from swapopt_torch.plan.report import show, write_json

    case, host = _case_and_host(options)
    console = Console()
    options.output.mkdir(parents=True, exist_ok=True)
    with console.status("") as status:
        plan = make_plan(
            case,
            host,
            options.profile,
            swap_times=options.swap_times,
            budget_bytes=options.device_memory_budget,
            tell=lambda count: status.update(
                "stepping natively" if count is None else f"stepping with swap_times={count}"
            ),
        )
    show(console, plan)
    write_json(options.output / "plan.json", plan)
    draw_trade(options.output / "trade.png", plan)
    console.print(f"Written to {options.output}: plan.json, trade.png", soft_wrap=True)


def _case_and_host(options: argparse.Namespace) -> tuple[Case, Host]:
    from swapopt_torch.plan.case import Case, Host

    case = Case(
        params=options.params,
        shards=options.shards,
        shape=options.shape,
        optimizer=options.optimizer,
        dtype=options.dtype,
        packed=options.packed,
    )
    return case, Host(ranks=options.ranks_per_host, bytes_per_second=options.host_bandwidth)


def _count(text: str) -> int:
    """Return a number like 70e9 or 70000000000."""
    try:
        count = int(float(text))
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a number like 70e9, got {text!r}")
    return count


def _nbytes(text: str) -> int:
    """Return a number of bytes like 2GiB, 2e9 or 400GB."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGT]I?B)?", text, re.IGNORECASE)
    try:
        nbytes = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    except ValueError:
        nbytes = 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(
            f"expected a number of bytes like 2GiB, 2e9 or 400GB, got {text!r}"
        )
    return nbytes
