"""The command line: ``python -m swapopt_torch <command>``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from swapopt_torch import __version__
from swapopt_torch.bench import command as bench_command
from swapopt_torch.demo import command as demo_command
from swapopt_torch.plan import command as plan_command


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
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each adds its own and names the function it runs."""
    parser = argparse.ArgumentParser(
        prog="python -m swapopt_torch",
        description="Keep optimizer states in host memory, and stream them during the step.",
    )
    parser.add_argument("--version", action="version", version=f"swapopt-torch {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    demo_command.add_parser(commands)
    bench_command.add_parser(commands)
    plan_command.add_parser(commands)
    return parser
