"""The static layout: which states swap, in which batch, and where in host memory they live.

Made when an optimizer is wrapped. A parameter that gets its first gradient later joins the batches
it was planned for (docs/design.md, "The layout is static").
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from swapopt_common import partition, window_of
from swapopt_torch.division import Cut, Size, divide, grain_nbytes
from swapopt_torch.host_memory import (
    aligned_numel,
)
from swapopt_torch.placing import place
from swapopt_torch.units import Batch, Share, TorchUnit

logger = logging.getLogger("swapopt_torch")

ARENA_ALIGNMENT_BYTES = 512

WINDOW_BATCHES = 2
"""The memory of a step is that of two batches of the states divided by ``swap_times``."""

LEAST_DIVIDED_NBYTES = 64 * 1024
"""Batches of less than this hold whole parameters: a cut would cost more than it saves."""


def packed_nbytes(states: Iterable[tuple[torch.dtype, int]]) -> int:
    """Return the bytes of staging arena that states, or parts of them, need.

    Args:
        states: dtype and number of elements of each. Those of one dtype lie together, each on a
            64-byte boundary, and dtypes begin on 512-byte boundaries.
    """
    per_dtype: dict[torch.dtype, int] = {}
    for dtype, numel in states:
        nbytes = aligned_numel(numel, dtype) * dtype.itemsize
        per_dtype[dtype] = per_dtype.get(dtype, 0) + nbytes
    return sum(round_up(nbytes) for nbytes in per_dtype.values())


def separate_nbytes(states: Iterable[tuple[torch.dtype, int]]) -> int:
    """Return the device bytes that states take in storages of their own (512-byte blocks).

    Neighbours that share a storage take less.
    """
    return sum(round_up(numel * dtype.itemsize) for dtype, numel in states)


def round_up(nbytes: int) -> int:
    """Round bytes up to a multiple of 512."""
    return -(-nbytes // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES


class SwapLayout:
    """Batches over all swapped states of one optimizer.

    ``swap_times`` bounds the memory: a step holds twice the states' bytes divided by it. Batches
    may be smaller than that, with as many more in flight (see `window_of`), and a parameter that
    does not fit into one is cut.

    Args:
        swap_times: what bounds the memory.
        packed: whether states move through staging arenas or in storages of their own.
        pageable_fallback: see `host_memory.allocate_region`.

    Attributes:
        swap_times: as given.
        batches: in the optimizer's order.
        window: how many batches may be on the device at a time; packed, each has a staging arena.
        arena_nbytes: bytes of one staging arena: what the largest batch needs.
        devices: the devices that the swapped states are updated on.
        places: for each planned unit, its shares and their batches.
    """

    def __init__(self, swap_times: int, *, packed: bool, pageable_fallback: bool) -> None:
        self.swap_times = swap_times
        self._pageable_fallback = pageable_fallback
        self.packed = packed
        self.batches: list[Batch] = []
        self.window = 2
        self.arena_nbytes = 0
        self.devices: set[torch.device] = set()
        self.places: dict[TorchUnit, list[tuple[Batch, Share]]] = {}

    @property
    def version(self) -> int:
        """Grows whenever that of a batch does."""
        return sum(batch.version for batch in self.batches)

    @property
    def bound_nbytes(self) -> int:
        """Most bytes of swapped state on the devices at any time.

        Packed: all arenas. Per-tensor: the largest batches, as many as may be there at a time,
        since parameters without a gradient may drop the batches between any of them from a step.
        """
        if self.packed:
            return self.arena_count * self.arena_nbytes
        sizes = sorted(separate_nbytes(_planned_states(batch)) for batch in self.batches)
        return sum(sizes[-self.window :])

    @property
    def arena_count(self) -> int:
        """How many staging arenas a step takes at most: no more than there are batches."""
        return min(self.window, sum(1 for batch in self.batches if any(_planned_states(batch))))

    def explain_arenas(self) -> str:
        """Return what a user needs to know when the arenas do not fit."""
        whole_nbytes = max(
            (
                packed_nbytes(_states_of(share))
                for batch in self.batches
                for share in batch.shares
                if share.is_whole
            ),
            default=0,
        )
        advice = (
            "That is what the states of one parameter take that is not cut, which no swap_times "
            "makes smaller; packed_swap=False needs less where batches are uneven"
            if whole_nbytes == self.arena_nbytes
            else "A larger swap_times makes them smaller"
        )
        devices = ", ".join(sorted(map(str, self.devices)))
        return (
            f"The staging arenas do not fit on {devices}: a step takes {self.arena_count} of "
            f"{self.arena_nbytes:,} bytes. {advice}."
        )

    def plan(self, units: Sequence[TorchUnit]) -> None:
        """Divide all units, in their order, into batches; called once."""
        for cuts in self._divided(units):
            batch = Batch()
            self.batches.append(batch)
            for number, start, stop in cuts:
                self._assign(units[number], batch, start, stop)
            self.arena_nbytes = max(self.arena_nbytes, packed_nbytes(_planned_states(batch)))
        self.devices.update(slot.device for unit in units for slot in unit.swapped())

    def _assign(self, unit: TorchUnit, batch: Batch, start: int, stop: int) -> None:
        ends = stop == _numel(unit)
        share = Share(unit, start, stop, is_whole=start == 0 and ends, is_last=ends)
        unit.is_cut = not share.is_whole
        self.places.setdefault(unit, []).append((batch, share))
        batch.shares.append(share)
        batch.take_slots(share)

    def forget(self) -> None:
        """Let go of all units."""
        for unit in self.places:
            unit.is_cut = False
        self.places.clear()

    def _divided(self, units: Sequence[TorchUnit]) -> Iterable[Sequence[Cut]]:
        sizes = [_size(unit, packed=self.packed) for unit in units]
        total_nbytes = sum(size.nbytes for size in sizes)
        memory_nbytes = WINDOW_BATCHES * -(-total_nbytes // self.swap_times)
        self.window = window_of(total_nbytes, self.swap_times)
        capacity_nbytes = -(-memory_nbytes // self.window)
        if capacity_nbytes >= LEAST_DIVIDED_NBYTES:
            # With two batches in flight there are ``swap_times`` of them; more may be a few more.
            at_most = self.swap_times if self.window == WINDOW_BATCHES else None
            return divide(sizes, capacity_nbytes + grain_nbytes(sizes), at_most)
        indices = {id(unit): index for index, unit in enumerate(units)}
        runs = partition(units, self.swap_times) if units else []
        return [[Cut(indices[id(unit)], 0, _numel(unit)) for unit in run] for run in runs]

    def materialise(self, units: Sequence[TorchUnit]) -> None:
        """Give swapped states of planned units that have none host memory.

        They lie, as zeros, in one region per dtype, in the order of the units.

        Raises:
            HostMemoryError: no memory; nothing has changed.
        """
        wanting = [(u, slot) for u in units for slot in u.swapped() if slot.region is None]
        placed = place([slot for _, slot in wanting], pageable_fallback=self._pageable_fallback)
        for slot, region, host_offset in placed:
            slot.host_offset = host_offset
            slot.packed = self.packed
            slot.live_in(region)
        for unit in dict.fromkeys(unit for unit, _ in wanting):
            for batch, share in self.places[unit]:
                batch.take_slots(share)


def _numel(unit: TorchUnit) -> int:
    """Return how many elements each state of a unit has; 0 if it has no states."""
    return unit.slots[0].numel if unit.slots else 0


def _size(unit: TorchUnit, *, packed: bool) -> Size:
    states = [(slot.dtype, slot.numel) for slot in unit.swapped()]
    in_arena = sum(aligned_numel(numel, dtype) * dtype.itemsize for dtype, numel in states)
    element_nbytes = sum(dtype.itemsize for dtype, _ in states)
    return Size(
        nbytes=in_arena if packed else separate_nbytes(states),
        numel=_numel(unit),
        element_nbytes=element_nbytes if unit.is_divisible else 0,
    )


def _states_of(share: Share) -> list[tuple[torch.dtype, int]]:
    return [(slot.dtype, share.stop - share.start) for slot in share.unit.swapped()]


def _planned_states(batch: Batch) -> list[tuple[torch.dtype, int]]:
    return [state for share in batch.shares for state in _states_of(share)]
