"""The static layout: which states swap, in which batch, and where in host memory they live.

Made when an optimizer is wrapped; states that turn out later to be on the device are added to it
(docs/design.md, "The layout is static").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from mindspore import dtype as mstype

from swapopt_mindspore.device import ARENA_ALIGNMENT_BYTES, Device
from swapopt_mindspore.division import WINDOW_BATCHES, SizedUnit, divide
from swapopt_mindspore.host_buffer import HostBuffer, numpy_dtype
from swapopt_mindspore.slots import MindSporeSlot, MindSporeUnit

SLOT_ALIGNMENT_BYTES = 64
"""Where states begin in a host buffer and in an arena: operators want no less on Ascend."""

SMALL_STATE_NBYTES = 2**20
"""States below this share a device storage with such neighbours of their batch, per tensor: alone,
the copy of each would cost more than its bytes do."""


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
        return sum(round_up(region.buffer.nbytes) for region in self.regions)

    @property
    def separate_nbytes(self) -> int:
        """Device bytes of its states when they do not move packed, in 512-byte blocks."""
        storages = (storage for region in self.regions for storage in region.storages)
        return sum(round_up(span_nbytes(slots)) for slots in storages)

    def slots(self) -> list[MindSporeSlot]:
        """Return its states that swap."""
        return [slot for region in self.regions for slot in region.slots]


def round_up(nbytes: int) -> int:
    """Round bytes up to a multiple of 512."""
    return -(-nbytes // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES


def aligned_numel(slot: MindSporeSlot) -> int:
    """Return the elements a state takes in a buffer: the next one begins on a boundary."""
    step = SLOT_ALIGNMENT_BYTES // numpy_dtype(slot.dtype).itemsize
    return -(-slot.numel // step) * step


def span_nbytes(slots: Sequence[MindSporeSlot]) -> int:
    """Return the bytes from the first to the last of states that are neighbours in a buffer."""
    first, last = slots[0], slots[-1]
    numel = last.host_offset + last.numel - first.host_offset
    return numel * numpy_dtype(first.dtype).itemsize


def _nbytes_in_arena(slot: MindSporeSlot) -> int:
    return aligned_numel(slot) * numpy_dtype(slot.dtype).itemsize


def _nbytes_alone(slot: MindSporeSlot) -> int:
    return round_up(slot.storage_nbytes)


class SwapLayout:
    """Batches over all swapped states of one optimizer.

    ``swap_times`` bounds the memory of a step: two of that many batches. Large states are divided
    into smaller batches than that, with more of them in flight.

    Args:
        device: where they are updated.
        swap_times: what bounds the memory.
        packed: whether states move through staging arenas or in storages of their own.
        takes_views: whether updates take views, so that small states may share a storage.

    Attributes:
        batches: in the order of their making.
        window: how many batches may be on the device at a time; packed, each has a staging arena.
    """

    def __init__(self, device: Device, swap_times: int, *, packed: bool, takes_views: bool) -> None:
        self._device = device
        self._small_nbytes = SMALL_STATE_NBYTES if takes_views else 0
        self._swap_times = swap_times
        self.packed = packed
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
        if self.packed:
            return self.arena_count * self.arena_nbytes
        return sum(sorted(batch.separate_nbytes for batch in self.batches)[-self.window :])

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

    def plan(self, units: Sequence[MindSporeUnit]) -> None:
        """Divide all units of an optimizer into batches; forgets batches without host memory."""
        assert not self.has_mirrors, "states with host memory stay in their batch"
        sized = [SizedUnit(unit, self._nbytes_of(unit)) for unit in units]
        runs, self.window = divide(sized, self._swap_times)
        self.batches = [Batch(run) for run in runs]
        for index, batch in enumerate(self.batches):
            for unit in batch.units:
                unit.batch_index = index

    def _nbytes_of(self, unit: MindSporeUnit) -> int:
        """Return the device bytes of its swapped states, in an arena or in their storages."""
        sizes = map(_nbytes_in_arena if self.packed else _nbytes_alone, unit.swapped())
        return sum(sizes)

    def materialise(self) -> list[MindSporeSlot]:
        """Give host memory to swapped states that have none; return them.

        They lie, as zeros, in one buffer per batch and dtype, in the order of the units.

        Raises:
            HostMemoryError: no memory; nothing has changed.
        """
        placed = [
            (batch, slots, self._device.allocate_host(sum(map(aligned_numel, slots)), dtype))
            for batch in self.batches
            for dtype, slots in _homeless_by_dtype(batch.units).items()
        ]
        for batch, slots, buffer in placed:
            offsets = accumulate(map(aligned_numel, slots), initial=0)
            for slot, host_offset in zip(slots, offsets, strict=False):
                slot.host_offset = host_offset
                slot.packed = self.packed
                slot.live_in(buffer)
            storages = _sharing(slots, self._small_nbytes)
            batch.regions.append(Region(buffer, slots, batch.packed_nbytes, storages))
        return [slot for _, slots, _ in placed for slot in slots]


def _sharing(slots: Sequence[MindSporeSlot], small_nbytes: int) -> list[list[MindSporeSlot]]:
    """Divide neighbours among storages: runs of states below a size together."""
    storages: list[list[MindSporeSlot]] = []
    for is_small, run in groupby(slots, lambda slot: slot.storage_nbytes < small_nbytes):
        states = list(run)
        storages += [states] if is_small else [[slot] for slot in states]
    return storages


def _homeless_by_dtype(units: Iterable[MindSporeUnit]) -> dict[mstype.Type, list[MindSporeSlot]]:
    by_dtype: dict[mstype.Type, list[MindSporeSlot]] = {}
    for unit in units:
        for slot in unit.swapped():
            if slot.buffer is None:
                by_dtype.setdefault(slot.dtype, []).append(slot)
    return by_dtype
