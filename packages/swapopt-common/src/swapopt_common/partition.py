"""Divides units into contiguous batches whose largest one is as small as possible.

The largest batch is what a staging arena has to hold, so it sets the memory of a step. Among the
divisions with the smallest largest batch an even one is taken: equal batches overlap best.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

from swapopt_common.errors import SwapConfigError


class SizedUnit(Protocol):
    """Anything that says how many bytes of it are swapped."""

    @property
    def swappable_nbytes(self) -> int:
        """Bytes that move in a step; 0 or more."""


UnitT = TypeVar("UnitT", bound=SizedUnit)


def partition(units: Sequence[UnitT], swap_times: int) -> list[list[UnitT]]:
    """Divide ``units``, in their order, into min(swap_times, len(units)) non-empty batches.

    The largest batch, in ``swappable_nbytes``, is as small as any such division allows. Takes
    O(n + b log n log s) time for n units, b batches and a largest unit of s bytes.

    Raises:
        SwapConfigError: ``swap_times`` is less than 1.
        ValueError: a unit has a negative size.
    """
    if swap_times < 1:
        raise SwapConfigError(f"swap_times must be an int >= 1; found {swap_times!r}")
    if not units:
        return []
    sizes_bytes = [unit.swappable_nbytes for unit in units]
    if min(sizes_bytes) < 0:
        raise ValueError(f"swappable_nbytes must be >= 0; found {min(sizes_bytes)}")
    ends = _even_ends(sizes_bytes, min(swap_times, len(units)))
    return [list(units[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _even_ends(sizes_bytes: Sequence[int], batches: int) -> list[int]:
    """Return where each batch ends, the last one at ``len(sizes_bytes)``."""
    prefix_bytes = list(accumulate(sizes_bytes, initial=0))
    capacity_bytes = _smallest_capacity(prefix_bytes, batches, largest_unit_bytes=max(sizes_bytes))
    earliest_starts = _earliest_starts(sizes_bytes, batches, capacity_bytes)
    total_bytes, units = prefix_bytes[-1], len(sizes_bytes)
    ends: list[int] = []
    start = 0
    for batches_after in range(batches - 1, 0, -1):
        # What follows must fit into the batches that are left, and give each of them a unit.
        lowest = max(start + 1, earliest_starts[batches_after])
        highest = min(_filled_end(prefix_bytes, start, capacity_bytes), units - batches_after)
        share_bytes = (total_bytes - prefix_bytes[start]) // (batches_after + 1)
        nearest = _nearest_cut(prefix_bytes, prefix_bytes[start] + share_bytes)
        start = min(max(nearest, lowest), highest)
        ends.append(start)
    return [*ends, units]


def _smallest_capacity(prefix_bytes: list[int], batches: int, *, largest_unit_bytes: int) -> int:
    """Return the smallest size of the largest batch, by bisection over sizes."""
    total_bytes = prefix_bytes[-1]
    low = max(largest_unit_bytes, -(-total_bytes // batches))
    # Filled batches are closed by a unit that no longer fits, so each holds more than
    # high - largest_unit >= total // batches: as many as `batches` of them hold everything.
    high = max(low, total_bytes // batches + largest_unit_bytes)
    while low < high:
        middle = (low + high) // 2
        if _fits(prefix_bytes, batches, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(prefix_bytes: list[int], batches: int, capacity_bytes: int) -> bool:
    end, units = 0, len(prefix_bytes) - 1
    for _ in range(batches):
        end = _filled_end(prefix_bytes, end, capacity_bytes)
        if end == units:
            return True
    return False


def _filled_end(prefix_bytes: list[int], start: int, capacity_bytes: int) -> int:
    """Return the end of the longest batch from ``start`` that holds at most the capacity."""
    return bisect_right(prefix_bytes, prefix_bytes[start] + capacity_bytes, start + 1) - 1


def _earliest_starts(sizes_bytes: Sequence[int], batches: int, capacity_bytes: int) -> list[int]:
    """Return, for each number of batches, the first unit from which that many hold the rest."""
    backward_prefix = list(accumulate(reversed(sizes_bytes), initial=0))
    units = len(sizes_bytes)
    taken, starts = 0, [units]
    for _ in range(1, batches):
        if taken < units:
            taken = _filled_end(backward_prefix, taken, capacity_bytes)
        starts.append(units - taken)
    return starts


def _nearest_cut(prefix_bytes: list[int], target_bytes: int) -> int:
    below = bisect_right(prefix_bytes, target_bytes) - 1
    above = min(below + 1, len(prefix_bytes) - 1)
    overshoot_bytes = prefix_bytes[above] - target_bytes
    return above if overshoot_bytes < target_bytes - prefix_bytes[below] else below
