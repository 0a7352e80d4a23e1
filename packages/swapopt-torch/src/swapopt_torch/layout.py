"""The static layout: which states swap, in which batch, and where in host memory they live.

Made when an optimizer is wrapped. A parameter that gets its first gradient later joins the batch it
was planned for (docs/design.md, "The layout is static").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

import torch

from swapopt_common import SwapSlot, UpdateUnit, partition
from swapopt_torch.cutting import cut_to_fit
from swapopt_torch.host_memory import (
    HostRegion,
    aligned_numel,
    allocate_region,
    registers_memory,
)
from swapopt_torch.local_tensor import Frame

ARENA_ALIGNMENT_BYTES = 512

WINDOW = 2
"""Batches of states that may be on the device at a time; packed, each has a staging arena."""


@dataclass(eq=False, slots=True)
class TorchSlot(SwapSlot[torch.Tensor, torch.Event]):
    """A state tensor of a torch optimizer.

    For the state of a DTensor everything here is about its local tensor, and ``logical_tensor`` is
    the DTensor over the host mirror.

    Attributes:
        dtype, device: of the state during an update.
        resident_reason: why the state does not swap; None for one that does.
        frame: what makes a DTensor of a local tensor; None if the state is no DTensor.
        region: the host region its mirror lies in, once materialised.
        host_address: where its mirror begins, in bytes.
        device_tensor: per-tensor movement: the tensor the update sees; its storage is empty
            between steps.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    resident_reason: str | None = None
    frame: Frame | None = None
    region: HostRegion | None = None
    host_address: int = 0
    device_tensor: torch.Tensor | None = None

    def live_in(self, region: HostRegion) -> None:
        """Make the host mirror in a region, at the slot's offset; what it holds stays there."""
        self.cpu_tensor = region.mirror(self.host_offset, self.shape)
        self.host_address = self.cpu_tensor.data_ptr()
        self.logical_tensor = None if self.frame is None else self.frame.around(self.cpu_tensor)
        self.region = region

    @property
    def exposed(self) -> torch.Tensor | None:
        """What the optimizer's state holds between steps: the host mirror, or a DTensor over it."""
        return self.cpu_tensor if self.logical_tensor is None else self.logical_tensor

    def framed(self, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the state's shape as what the state is: itself, or a DTensor."""
        return local if self.frame is None else self.frame.around(local)


@dataclass(eq=False, slots=True)
class TorchUnit(UpdateUnit[torch.Tensor, TorchSlot]):
    """One parameter of a torch optimizer.

    Attributes:
        name: how messages call the parameter.
        device: the device its states are updated on.
        kind: dtype, shape, strides and sharding of the parameter when the unit was made.
        is_dtensor: whether the parameter is a DTensor.
        has_state: whether the optimizer has states for it (it had a gradient).
        batch_index: which batch of the layout it belongs to; None before it is planned.
    """

    name: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kind: tuple[object, ...] = ()
    is_dtensor: bool = False
    has_state: bool = False
    batch_index: int | None = None

    def swapped(self) -> list[TorchSlot]:
        """Return the slots that move."""
        return [slot for slot in self.slots if slot.swappable]


@dataclass(eq=False, slots=True)
class Batch:
    """A contiguous run of units that is on the device together.

    Attributes:
        units: its units, in the optimizer's order, whether they have a gradient or not.
        materialised: how many of its slots have host memory.
        version: grows whenever one of its slots gets host memory; cached plans compare it.
    """

    units: list[TorchUnit]
    materialised: int = 0
    version: int = 0


def packed_nbytes(slots: Iterable[TorchSlot]) -> int:
    """Return the bytes of staging arena the slots need: dtype regions aligned to 512 bytes."""
    per_dtype: dict[torch.dtype, int] = {}
    for slot in slots:
        nbytes = aligned_numel(slot.numel, slot.dtype) * slot.dtype.itemsize
        per_dtype[slot.dtype] = per_dtype.get(slot.dtype, 0) + nbytes
    return sum(round_up(nbytes) for nbytes in per_dtype.values())


def separate_nbytes(slots: Iterable[TorchSlot]) -> int:
    """Return the device bytes the slots take in storages of their own (512-byte blocks)."""
    return sum(round_up(slot.storage_nbytes) for slot in slots)


def round_up(nbytes: int) -> int:
    """Round bytes up to a multiple of 512."""
    return -(-nbytes // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES


class SwapLayout:
    """Batches over all swapped states of one optimizer.

    Args:
        swap_times: the number of batches to aim for.
        packed: whether states move through two staging arenas or in storages of their own.
        pageable_fallback: see `host_memory.allocate_region`.

    Attributes:
        batches: in the optimizer's order.
        arena_nbytes: bytes of one staging arena: what the largest batch needs.
        devices: the devices that the swapped states are updated on.
    """

    def __init__(self, swap_times: int, *, packed: bool, pageable_fallback: bool) -> None:
        self._swap_times = swap_times
        self._pageable_fallback = pageable_fallback
        self.packed = packed
        self.batches: list[Batch] = []
        self.arena_nbytes = 0
        self.devices: set[torch.device] = set()

    @property
    def bound_nbytes(self) -> int:
        """Most bytes of swapped state on the devices at any time: any two successive batches.

        Packed: min(2, batches) arenas. Per-tensor: the largest sum over two batches of which no
        other one with swapped states lies between, since parameters without a gradient may drop
        a batch from a step; that is the sum of the two largest.
        """
        if self.packed:
            return self.arena_count * self.arena_nbytes
        sizes = sorted(separate_nbytes(_swapped_of(batch)) for batch in self.batches)
        return sum(sizes[-WINDOW:])

    @property
    def arena_count(self) -> int:
        """How many staging arenas a step takes at most: two, or one for a single batch."""
        return min(WINDOW, sum(1 for batch in self.batches if _swapped_of(batch)))

    def explain_arenas(self) -> str:
        """Return what a user needs to know when the arenas do not fit."""
        largest_unit_nbytes = max(
            packed_nbytes(unit.swapped()) for batch in self.batches for unit in batch.units
        )
        advice = (
            "That is what the largest parameter's states take, which no swap_times makes smaller; "
            "packed_swap=False needs less where batches are uneven"
            if largest_unit_nbytes == self.arena_nbytes
            else "A larger swap_times makes them smaller"
        )
        devices = ", ".join(sorted(map(str, self.devices)))
        return (
            f"The staging arenas do not fit on {devices}: a step takes {self.arena_count} of "
            f"{self.arena_nbytes:,} bytes. {advice}."
        )

    def plan(self, units: Sequence[TorchUnit]) -> None:
        """Assign all units to ``swap_times`` batches, in their order; called once."""
        for run in partition(units, self._swap_times) if units else ():
            batch = Batch(run, sum(slot.region is not None for unit in run for slot in unit.slots))
            self.batches.append(batch)
            swapped = _swapped_of(batch)
            self.arena_nbytes = max(self.arena_nbytes, packed_nbytes(swapped))
            self.devices.update(slot.device for slot in swapped)
            for unit in run:
                unit.batch_index = len(self.batches) - 1

    def materialise(self, units: Sequence[TorchUnit]) -> None:
        """Give swapped states of planned units that have none host memory.

        They lie, as zeros, in one region per dtype, in the order of the units.

        Raises:
            HostMemoryError: no memory; nothing has changed.
        """
        wanting = [(u, slot) for u in units for slot in u.swapped() if slot.region is None]
        placed = _place([slot for _, slot in wanting], pageable_fallback=self._pageable_fallback)
        for slot, region, host_offset in placed:
            slot.host_offset = host_offset
            slot.packed = self.packed
            slot.live_in(region)
        for unit, _ in wanting:
            batch = self.batch_of(unit)
            batch.materialised += 1
            batch.version += 1

    def batch_of(self, unit: TorchUnit) -> Batch:
        """Return the batch of a planned unit."""
        assert unit.batch_index is not None, "a unit is planned before it moves"
        return self.batches[unit.batch_index]


def _swapped_of(batch: Batch) -> list[TorchSlot]:
    return [slot for unit in batch.units for slot in unit.swapped()]


def _place(
    slots: Sequence[TorchSlot], *, pageable_fallback: bool
) -> list[tuple[TorchSlot, HostRegion, int]]:
    """Allocate regions of one dtype each; return each slot's region and element offset."""
    by_dtype: dict[torch.dtype, list[TorchSlot]] = {}
    for slot in slots:
        by_dtype.setdefault(slot.dtype, []).append(slot)
    placed: list[tuple[TorchSlot, HostRegion, int]] = []
    for dtype, row in by_dtype.items():
        device = row[0].device
        for run in _regions_of(row, device):
            ends = [0, *accumulate(aligned_numel(slot.numel, dtype) for slot in run)]
            region = allocate_region(dtype, ends[-1], device, pageable_fallback=pageable_fallback)
            placed.extend((slot, region, offset) for slot, offset in zip(run, ends, strict=False))
    return placed


def _regions_of(row: list[TorchSlot], device: torch.device) -> Iterable[list[TorchSlot]]:
    """Divide slots of one dtype among regions: one, unless pinned memory comes in blocks."""
    if registers_memory(device):
        return [row]
    itemsize = row[0].dtype.itemsize
    lengths = cut_to_fit([aligned_numel(slot.numel, slot.dtype) * itemsize for slot in row])
    rest = iter(row)
    return [list(islice(rest, length)) for length in lengths]
