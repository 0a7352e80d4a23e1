"""Which states stay on the device because there is room, and what then bounds a step's memory.

Decided once, when an optimizer is wrapped: its states exist by then, and so do its groups.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from swapopt_common import DeviceRoom, SwapConfigError, first_fit, frugal_swap_times
from swapopt_mindspore.division import SizedUnit
from swapopt_mindspore.layout import SwapLayout
from swapopt_mindspore.sizes import nbytes_alone
from swapopt_mindspore.slots import MindSporeUnit


class _Arrangement(NamedTuple):
    staying: Collection[int]
    swap_times: int


def make_room(
    room: DeviceRoom, swap_times: int, units: Sequence[MindSporeUnit], layout: SwapLayout
) -> int:
    """Let states stay: those of whole parameters as they fit, the largest first.

    A batch holds whole parameters, so the largest that swaps sets the memory of a step.

    Args:
        room: what the user gave.
        swap_times: what bounds the memory of a step, unless a budget does.
        units: all units; none has host memory.
        layout: tells what a choice would come to.

    Returns:
        What bounds the memory of a step with the states that swap.

    Raises:
        SwapConfigError: no ``swap_times`` keeps a step within the budget; nothing has changed.
    """
    if not room.names_given:
        return swap_times
    choice = _Choice(units, layout)
    if room.device_memory_budget is not None:
        found = _within(room, room.device_memory_budget, choice)
    else:
        target_nbytes = room.resident_target_bytes(choice.total_nbytes, swap_times)
        found = _Arrangement(choice.fitting(target_nbytes), swap_times)
    for index in found.staying:
        units[index].keep(f"kept by {room.names_given[0]}")
    return found.swap_times


def _within(room: DeviceRoom, budget_nbytes: int, choice: _Choice) -> _Arrangement:
    total_nbytes = choice.total_nbytes
    swap_times = frugal_swap_times(total_nbytes)
    target_nbytes = room.resident_target_bytes(total_nbytes, swap_times)
    while target_nbytes > 0:
        staying = choice.fitting(target_nbytes)
        held_nbytes = choice.held_nbytes(staying, swap_times)
        if held_nbytes <= budget_nbytes:
            return _Arrangement(staying, swap_times)
        # More is in flight than the formula says, since batches are uneven. Less that stays may
        # help by more or less than itself, so that several amounts are tried.
        excess_nbytes = max(held_nbytes - budget_nbytes, total_nbytes // 64)
        target_nbytes = choice.nbytes_of(staying) - excess_nbytes
    for staying in (set(), choice.tightest()):
        found = _least_swap_times(budget_nbytes, choice, staying)
        if found is not None:
            return _Arrangement(staying, found)
    raise _too_small(budget_nbytes, choice)


def _least_swap_times(budget_nbytes: int, choice: _Choice, staying: set[int]) -> int | None:
    """Return the smallest value, within an eighth, with which a step fits; None if none does."""
    swap_times = min(choice.most, 1 + 2 * choice.total_nbytes // max(1, budget_nbytes))
    while choice.held_nbytes(staying, swap_times) > budget_nbytes:
        if swap_times >= choice.most:
            return None
        swap_times = min(swap_times + 1 + swap_times // 8, choice.most)
    return swap_times


def _too_small(budget_nbytes: int, choice: _Choice) -> SwapConfigError:
    least_nbytes = choice.held_nbytes(choice.tightest(), choice.most)
    other_movement = ", or try packed_swap=False" if choice.is_packed else ""
    return SwapConfigError(
        f"device_memory_budget={budget_nbytes:,} bytes is too small: of {choice.total_nbytes:,} "
        f"bytes of states, {least_nbytes:,} are on the device in a step at least, since they move "
        "by whole parameters. Give at least that, or swap fewer states (state_keys, a larger "
        f"min_numel){other_movement}."
    )


class _Choice:
    """The units, and what keeping some of them comes to; units are named by their index.

    Attributes:
        is_packed: whether states move through staging arenas.
        total_nbytes: device bytes of all that could swap.
        most: the ``swap_times`` beyond which batches get no smaller: one parameter in each.
    """

    def __init__(self, units: Sequence[MindSporeUnit], layout: SwapLayout) -> None:
        self._units = layout.sized(units)
        self._layout = layout
        self._nbytes = [sum(map(nbytes_alone, unit.slots)) for unit in self._units]
        self._largest_first = sorted(range(len(units)), key=lambda index: -self._nbytes[index])
        self.is_packed = layout.packed
        self.total_nbytes = sum(self._nbytes)
        self.most = max(1, sum(1 for nbytes in self._nbytes if nbytes))

    def fitting(self, target_nbytes: int) -> set[int]:
        """Return the units that stay if so many bytes of states may."""
        sizes_bytes = [self._nbytes[index] for index in self._largest_first]
        return {self._largest_first[place] for place in first_fit(sizes_bytes, target_nbytes)}

    def tightest(self) -> set[int]:
        """Return what stays where memory is shortest: as few of the largest as take the least.

        With the others one by one in flight, two at a time.
        """

        def held_nbytes(count: int) -> int:
            pair = sizes_bytes[count : count + 2]
            in_flight_nbytes = len(pair) * max(pair, default=0) if self.is_packed else sum(pair)
            return kept_nbytes[count] + in_flight_nbytes

        sizes_bytes = [self._nbytes[index] for index in self._largest_first]
        kept_nbytes = list(accumulate(sizes_bytes, initial=0))
        count = min(range(len(kept_nbytes)), key=held_nbytes)
        return set(self._largest_first[:count])

    def nbytes_of(self, staying: Collection[int]) -> int:
        """Return the device bytes of the states of units."""
        return sum(self._nbytes[index] for index in staying)

    def held_nbytes(self, staying: Collection[int], swap_times: int) -> int:
        """Return the most bytes of states on the device if these stay and the others swap."""
        units: list[SizedUnit] = [
            unit.staying() if index in staying else unit for index, unit in enumerate(self._units)
        ]
        return self.nbytes_of(staying) + self._layout.bound_of(units, swap_times)
