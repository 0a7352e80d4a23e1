"""The benchmark from beginning to end, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from swapopt_torch.bench.contenders import (
    LEAST,
    MIN_NUMEL,
    NATIVE,
    OPTIMIZERS,
    Entry,
    choose_contenders,
)
from swapopt_torch.bench.device import BenchDevice
from swapopt_torch.bench.floor import Demand, Link, Optimum, find_optimum
from swapopt_torch.bench.measure import Measured, make_scene, measure
from swapopt_torch.bench.settings import BenchSettings
from swapopt_torch.bench.workloads import Workload

_VIRTUAL_ROUNDS, _CARD_ROUNDS = 2, 15


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What was measured, and what it is compared with.

    Attributes:
        workload: what was stepped.
        device_title, clock_name: where, and in whose time.
        is_virtual: whether times are computed and not measured.
        link: what the floor is computed for.
        demand: what a step has to do.
        floor_seconds: what a step takes at least.
        optimum: the best that equal pieces can do.
        rows: one for each contender, native first.
        absent: who was not measured, and why.
    """

    workload: Workload
    device_title: str
    clock_name: str
    is_virtual: bool
    link: Link
    demand: Demand
    floor_seconds: float
    optimum: Optimum
    rows: Sequence[Measured]
    absent: Sequence[str]

    @property
    def native(self) -> Measured:
        """The row of the native optimizer."""
        return self.row(NATIVE)

    def row(self, name: str) -> Measured:
        """Return the row of a contender."""
        return next(row for row in self.rows if row.name == name)

    def ratio(self, row: Measured) -> float:
        """Return the optimizer step over the floor."""
        return row.step / self.floor_seconds

    def exposed_seconds(self, row: Measured) -> float:
        """Return the transfer time that is not hidden: by how much a step is longer than native."""
        return max(0.0, row.step - self.native.step)


def run_bench(
    settings: BenchSettings,
    workload: Workload,
    device: BenchDevice,
    say: Callable[[str], None],
    entries: Sequence[Entry] | None = None,
) -> BenchResult:
    """Measure a workload.

    Args:
        settings: what the user wants.
        workload: what to step.
        device: where.
        say: is told whose turn it is.
        entries: whom to measure, native among them; None takes all that there are.
    """
    accelerator = device.accelerator
    chosen, absent = choose_contenders(
        accelerator.device.type, state_nbytes=workload.state_nbytes, dry=device.is_dry
    )
    rounds = settings.rounds or (_VIRTUAL_ROUNDS if accelerator.is_virtual else _CARD_ROUNDS)
    kind = OPTIMIZERS[settings.optimizer]
    scene = make_scene(workload, kind, settings.swap_times, accelerator.device)
    least, *rows = measure(
        [LEAST, *(chosen if entries is None else entries)],
        scene,
        workload,
        device,
        rounds=rounds,
        training_seconds=settings.training_seconds,
        say=say,
    )
    demand = Demand(
        nbytes=fmean(workload.moved_nbytes(MIN_NUMEL, step) for step in range(rounds)),
        update_seconds=least.step,
        issue_seconds=least.returns,
    )
    return BenchResult(
        workload=workload,
        device_title=accelerator.title,
        clock_name=accelerator.clock_name,
        is_virtual=accelerator.is_virtual,
        link=device.link,
        demand=demand,
        floor_seconds=demand.floor_seconds(device.link),
        optimum=find_optimum(device.link, demand, settings.swap_times),
        rows=rows,
        absent=() if entries is not None else absent,
    )
