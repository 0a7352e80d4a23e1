"""The static layout: which states swap, in which batch, and where in host memory they live.

Made when an optimizer is wrapped; states that turn out later to be on the device are added to it
(docs/design.md, "The layout is static").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from swapopt_mindspore import sizes
from swapopt_mindspore.device import Device
from swapopt_mindspore.division import WINDOW_BATCHES, SizedUnit, divide
from swapopt_mindspore.host_buffer import HostBuffer
from swapopt_mindspore.slots import MindSporeSlot, MindSporeUnit


@dataclass(eq=False, slots=True)
class Region:
    """States of one dtype in one batch: neighbours in a host buffer, and so in an arena.

    Attributes:
        buffer: the host memory of their mirrors, from its offset 0.
        slots: the states, in the order in which they lie there.
        arena_offset_bytes: where they begin in a staging arena.
        storages: how they divide among device storages when they do not move packed.
    """

    buffer: HostBuffer
    slots: list[MindSporeSlot]
    arena_offset_bytes: int
    storages: list[list[MindSporeSlot]]

    def move_to(self, buffer: HostBuffer) -> None:
        """Let the mirrors lie in another buffer of the same size; their values go along."""
        buffer.take_over(self.buffer)
        self.buffer = buffer
        for slot in self.slots:
            slot.live_in(buffer)
            slot.tensor = slot.cpu_tensor


@dataclass(eq=False, slots=True)
class Batch:
    """A contiguous run of units that is on the device together.

    Attributes:
        units: its units, in the optimizer's order, whether they have a gradient or not.
        regions: its states: one region per dtype, and further ones for states added later.
    """

    units: list[MindSporeUnit]
    regions: list[Region] = field(default_factory=list)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of staging arena it needs: its regions, each from a 512-byte boundary."""
        return sizes.packed_nbytes(region.slots for region in self.regions)

    @property
    def separate_nbytes(self) -> int:
        """Device bytes of its states when they do not move packed, in 512-byte blocks."""
        return sizes.separate_nbytes(slots for region in self.regions for slots in region.storages)

    def slots(self) -> list[MindSporeSlot]:
        """Return its states that swap."""
        return [slot for region in self.regions for slot in region.slots]


class SwapLayout:
    """Batches over all swapped states of one optimizer.

    ``swap_times`` bounds the memory of a step: two of that many batches. Large states are divided
    into smaller batches than that, with more of them in flight.

    Args:
        device: where they are updated.
        packed: whether states move through staging arenas or in storages of their own.
        takes_views: whether updates take views, so that small states may share a storage.

    Attributes:
        swap_times: what bounds the memory.
        batches: in the order of their making.
        window: how many batches may be on the device at a time; packed, each has a staging arena.
    """

    def __init__(self, device: Device, *, packed: bool, takes_views: bool) -> None:
        self._device = device
        self._small_nbytes = sizes.SMALL_STATE_NBYTES if takes_views else 0
        self.packed = packed
        self.swap_times = 1
        self.batches: list[Batch] = []
        self.window = WINDOW_BATCHES

    @property
    def arena_nbytes(self) -> int:
        """Bytes of one staging arena: what the largest batch needs."""
        return max((batch.packed_nbytes for batch in self.batches), default=0)

    @property
    def arena_count(self) -> int:
        """How many staging arenas a step takes at most: no more than there are batches."""
        return min(self.window, sum(1 for batch in self.batches if batch.regions))

    @property
    def bound_nbytes(self) -> int:
        """Most bytes of swapped state on the device at any time.

        Packed: the arenas. Per-tensor: the largest batches, as many as may be there at a time,
        since parameters without a gradient may drop those between them from a step.
        """
        return self._bound(
            (b.packed_nbytes if self.packed else b.separate_nbytes for b in self.batches),
            self.window,
        )

    def bound_of(self, units: Sequence[SizedUnit], swap_times: int) -> int:
        """Return what `bound_nbytes` would be if these were planned."""
        batches, window = divide(units, swap_times)
        slots_of = ([slot for unit in batch for slot in unit.slots] for batch in batches)
        return self._bound(map(self._nbytes_in_flight, slots_of), window)

    def _bound(self, batches_nbytes: Iterable[int], window: int) -> int:
        largest = sorted(filter(None, batches_nbytes))[-window:]
        return len(largest) * max(largest, default=0) if self.packed else sum(largest)

    def _nbytes_in_flight(self, slots: Sequence[MindSporeSlot]) -> int:
        """Return the device bytes of a batch's states; awaited ones get regions of their own."""
        regions = [
            region
            for awaited in (False, True)
            for region in sizes.by_dtype(s for s in slots if s.awaited is awaited).values()
        ]
        if self.packed:
            return sizes.packed_nbytes(regions)
        shared = (sizes.sharing(region, self._small_nbytes) for region in regions)
        return sizes.separate_nbytes(slots for storages in shared for slots in storages)

    @property
    def has_mirrors(self) -> bool:
        """Whether any state has host memory."""
        return any(batch.regions for batch in self.batches)

    def slots(self) -> list[MindSporeSlot]:
        """Return the states that have host memory."""
        return [slot for batch in self.batches for slot in batch.slots()]

    def lent_regions(self) -> list[Region]:
        """Return the regions in whose host memory a snapshot is alive."""
        return [r for batch in self.batches for r in batch.regions if r.buffer.is_lent]

    def explain_arenas(self) -> str:
        """Return what a user needs to know when the arenas do not fit."""
        largest = max(self.batches, key=lambda batch: batch.packed_nbytes)
        holds_several = sum(1 for unit in largest.units if unit.swapped()) > 1
        advice = (
            "A larger swap_times makes them smaller"
            if holds_several or self.window > WINDOW_BATCHES
            else "That is what the largest parameter's states take, which no swap_times makes "
            "smaller; packed_swap=False needs less where batches are uneven"
        )
        return (
            f"The staging arenas do not fit on {self._device.name}: a step takes "
            f"{self.arena_count} of {self.arena_nbytes:,} bytes. {advice}."
        )

    def plan(self, units: Sequence[MindSporeUnit], swap_times: int) -> None:
        """Divide all units of an optimizer into batches; forgets batches without host memory."""
        assert not self.has_mirrors, "states with host memory stay in their batch"
        runs, self.window = divide(self.sized(units), swap_times)
        self.swap_times = swap_times
        self.batches = [Batch([sized.unit for sized in run]) for run in runs]
        for index, batch in enumerate(self.batches):
            for unit in batch.units:
                unit.batch_index = index

    def sized(self, units: Iterable[MindSporeUnit]) -> list[SizedUnit]:
        """Return units with the device bytes of their states, in an arena or in storages."""
        nbytes_of = sizes.nbytes_in_arena if self.packed else sizes.nbytes_alone
        found = ((unit, unit.planned()) for unit in units)
        return [SizedUnit(unit, slots, sum(map(nbytes_of, slots))) for unit, slots in found]

    def materialise(self) -> list[MindSporeSlot]:
        """Give host memory to swapped states that have none; return them.

        They lie, as zeros, in one buffer per batch and dtype, in the order of the units.

        Raises:
            HostMemoryError: no memory; nothing has changed.
        """
        placed = [
            (batch, slots, self._device.allocate_host(sum(map(sizes.aligned_numel, slots)), dtype))
            for batch in self.batches
            for dtype, slots in sizes.by_dtype(_homeless(batch.units)).items()
        ]
        for batch, slots, buffer in placed:
            offsets = accumulate(map(sizes.aligned_numel, slots), initial=0)
            for slot, host_offset in zip(slots, offsets, strict=False):
                slot.host_offset = host_offset
                slot.packed = self.packed
                slot.live_in(buffer)
            storages = sizes.sharing(slots, self._small_nbytes)
            batch.regions.append(Region(buffer, slots, batch.packed_nbytes, storages))
        return [slot for _, slots, _ in placed for slot in slots]


def _homeless(units: Iterable[MindSporeUnit]) -> list[MindSporeSlot]:
    return [slot for unit in units for slot in unit.swapped() if slot.buffer is None]
