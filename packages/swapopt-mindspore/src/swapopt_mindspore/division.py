"""Into which batches states are divided, and how many may be on the device at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swapopt_common import partition, window_of
from swapopt_mindspore.slots import MindSporeSlot, MindSporeUnit

WINDOW_BATCHES = 2
"""The memory of a step is that of two batches of the states divided by ``swap_times``."""


@dataclass(frozen=True, slots=True)
class SizedUnit:
    """A unit with the states of it that swap.

    Attributes:
        unit: the unit.
        slots: its states that swap, or will.
        swappable_nbytes: the device bytes that they take.
    """

    unit: MindSporeUnit
    slots: Sequence[MindSporeSlot]
    swappable_nbytes: int

    def staying(self) -> SizedUnit:
        """Return the unit with no state that swaps."""
        return SizedUnit(self.unit, (), 0)


class Division(NamedTuple):
    """A division of units.

    Attributes:
        batches: runs of units, in their order.
        window: how many batches may be on the device at a time.
    """

    batches: list[list[SizedUnit]]
    window: int


def divide(units: Sequence[SizedUnit], swap_times: int) -> Division:
    """Divide units so that a step takes the memory of two of ``swap_times`` batches.

    Where states are large that memory is shared by more and smaller batches, since the first and
    the last batch of a step are the ones whose copies nothing hides. Batches hold whole units:
    there are no more of them in flight than the largest unit allows.
    """
    coarse = partition(units, swap_times)
    memory_nbytes = WINDOW_BATCHES * max(map(_nbytes, coarse), default=0)
    largest_nbytes = max((sized.swappable_nbytes for sized in units), default=0)
    window = window_of(_nbytes(units), swap_times)
    if largest_nbytes:
        window = min(window, memory_nbytes // largest_nbytes)
    if window <= WINDOW_BATCHES:
        return Division(coarse, WINDOW_BATCHES)
    finer = partition(units, _fewest_batches(units, memory_nbytes // window))
    return Division(finer, window)


def _fewest_batches(units: Iterable[SizedUnit], capacity_nbytes: int) -> int:
    """Return in how many batches the units, none of which is larger, fit into the capacity."""
    batches, taken_nbytes = 1, 0
    for sized in units:
        taken_nbytes += sized.swappable_nbytes
        if taken_nbytes > capacity_nbytes:
            batches, taken_nbytes = batches + 1, sized.swappable_nbytes
    return batches


def _nbytes(units: Iterable[SizedUnit]) -> int:
    return sum(sized.swappable_nbytes for sized in units)
