"""Progress of the runs: bars on a terminal, a few lines where output goes to a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from swapopt_mindspore.demo.results import RunKind

LINES_PER_RUN = 4


class RunProgress(ABC):
    """Told what the training loop does."""

    @abstractmethod
    def begin(self, kind: RunKind) -> None:
        """Note that a run begins."""

    @abstractmethod
    def step(self, loss: float) -> None:
        """Note that the run took a step."""


class _Bars(RunProgress):
    """A bar for each run; all are shown from the start."""

    def __init__(self, bars: Progress, kinds: Sequence[RunKind], steps: int) -> None:
        self._bars = bars
        self._tasks: dict[RunKind, TaskID] = {
            kind: bars.add_task(kind.value, total=steps, loss="", start=False) for kind in kinds
        }
        self._current = self._tasks[RunKind.NATIVE]

    def begin(self, kind: RunKind) -> None:
        self._current = self._tasks[kind]
        self._bars.start_task(self._current)

    def step(self, loss: float) -> None:
        self._bars.update(self._current, advance=1, loss=f"loss {loss:.4f}")


class _Lines(RunProgress):
    """A line now and then."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._taken = 0
        self._name = ""

    def begin(self, kind: RunKind) -> None:
        self._name = kind.value
        self._taken = 0

    def step(self, loss: float) -> None:
        self._taken += 1
        before, now = (
            count * LINES_PER_RUN // self._steps for count in (self._taken - 1, self._taken)
        )
        if now > before:
            self._console.print(
                f"{self._name:<10}  step {self._taken:>4} of {self._steps}  loss {loss:.4f}",
                highlight=False,
            )


@contextmanager
def show_progress(console: Console, kinds: Sequence[RunKind], steps: int) -> Iterator[RunProgress]:
    """Show the progress of runs of ``steps`` steps each, for as long as this is entered."""
    if not console.is_terminal:
        yield _Lines(console, steps)
        return
    bars = Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
    )
    with bars:
        yield _Bars(bars, kinds, steps)
