"""Which states stay on their devices because there is room, and what then bounds a step's memory.

Decided with every new layout. What has host memory keeps it, so a decision is only ever taken back
in one direction: states that stayed may be swapped later, where others came to share the room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from swapopt_common import (
    DeviceRoom,
    SwapConfigError,
    SwapOptimizerConfig,
    first_fit,
    frugal_swap_times,
)
from swapopt_torch.layout import LEAST_DIVIDED_NBYTES, separate_nbytes
from swapopt_torch.local_tensor import local_of
from swapopt_torch.residency import kept_resident
from swapopt_torch.units import TorchUnit

States = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
BoundOf = Callable[[Sequence[TorchUnit], int], int]
"""Returns the most bytes that a step over units has in flight, for a ``swap_times``."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """All units, those that stay without a slot that swaps; and what bounds a step's memory."""

    units: list[TorchUnit]
    swap_times: int


def arrange(
    room: DeviceRoom,
    config: SwapOptimizerConfig,
    units: Sequence[TorchUnit],
    states: States,
    bound_of: BoundOf,
) -> Arrangement:
    """Choose what stays: whole parameters, in the optimizer's order, as long as they fit.

    Args:
        room: what the user gave.
        config: bounds the memory of a step, unless a budget does.
        units: all units, their slots as if there were no room.
        states: the optimizer's, where they exist.
        bound_of: tells what a choice would come to.

    Raises:
        SwapConfigError: no ``swap_times`` keeps a step within the budget.
    """
    if not room.names_given:
        return Arrangement(list(units), config.swap_times)
    choice = _Choice(room, units, states)
    if room.device_memory_budget is None:
        target_nbytes = room.resident_target_bytes(choice.total_nbytes, config.swap_times)
        return Arrangement(choice.keeping(target_nbytes)[0], config.swap_times)
    return _within(room.device_memory_budget, choice, bound_of)


def _within(budget_nbytes: int, choice: _Choice, bound_of: BoundOf) -> Arrangement:
    total_nbytes = choice.total_nbytes
    swap_times = frugal_swap_times(total_nbytes)
    target_nbytes = choice.room.resident_target_bytes(total_nbytes, swap_times)
    while target_nbytes > 0:
        units, kept_nbytes = choice.keeping(target_nbytes)
        excess_nbytes = kept_nbytes + bound_of(units, swap_times) - budget_nbytes
        if excess_nbytes <= 0:
            return Arrangement(units, swap_times)
        # Batches are uneven, and a parameter may be larger than one: more is in flight than the
        # formula says, however little is taken away.
        target_nbytes = kept_nbytes - max(excess_nbytes, total_nbytes // 64)
    return Arrangement(choice.units, _least_swap_times(budget_nbytes, choice, bound_of))


def _least_swap_times(budget_nbytes: int, choice: _Choice, bound_of: BoundOf) -> int:
    """Return the smallest value, within an eighth, with which a step fits where nothing stays."""
    units, total_nbytes = choice.units, choice.total_nbytes
    # Beyond the first of these parameters are not cut any more, and batches may grow again.
    finest = max(1, total_nbytes // LEAST_DIVIDED_NBYTES)
    most = max(finest, len(units))
    swap_times = min(finest, 1 + 2 * total_nbytes // max(1, budget_nbytes))
    least_nbytes = total_nbytes
    while (bound_nbytes := bound_of(units, swap_times)) > budget_nbytes:
        least_nbytes = min(least_nbytes, bound_nbytes)
        if swap_times >= most:
            raise _too_small(budget_nbytes, total_nbytes, least_nbytes)
        swap_times = min(swap_times + 1 + swap_times // 8, most)
    return swap_times


def _too_small(budget_nbytes: int, total_nbytes: int, bound_nbytes: int) -> SwapConfigError:
    return SwapConfigError(
        f"device_memory_budget={budget_nbytes:,} bytes is too small: with {total_nbytes:,} bytes "
        f"of states, a step has {bound_nbytes:,} of them in flight even in the smallest batches. "
        "Give at least that, or swap fewer states (state_keys, a larger min_numel)."
    )


class _Choice:
    """The states that may stay, and what keeping some of them makes of the units."""

    def __init__(self, room: DeviceRoom, units: Sequence[TorchUnit], states: States) -> None:
        self.room = room
        self.units = list(units)
        self._states = states
        sizes = [_swapped_nbytes(unit) for unit in units]
        self.total_nbytes = sum(sizes)
        self._sizes = [
            size if _may_stay(unit, states.get(unit.param, {})) else 0
            for unit, size in zip(units, sizes, strict=True)
        ]

    def keeping(self, target_nbytes: int) -> tuple[list[TorchUnit], int]:
        """Return the units if so many bytes of them stay, and how many really do."""
        (name,) = self.room.names_given
        units = list(self.units)
        chosen = first_fit(self._sizes, target_nbytes)
        for index in chosen:
            unit = units[index]
            units[index] = kept_resident(unit, self._states.get(unit.param, {}), f"kept by {name}")
        return units, sum(self._sizes[index] for index in chosen)


def _swapped_nbytes(unit: TorchUnit) -> int:
    """Return the device bytes of what swaps of a unit; none of one that takes no part in steps."""
    if not unit.takes_part:
        return 0
    return separate_nbytes((slot.dtype, slot.numel) for slot in unit.swapped())


def _may_stay(unit: TorchUnit, state: Mapping[str, torch.Tensor]) -> bool:
    """Say whether nothing of a unit is in host memory, ours or another's."""
    return all(
        slot.region is None
        and (slot.tensor is None or local_of(state[slot.name]).device == unit.device)
        for slot in unit.swapped()
    )
