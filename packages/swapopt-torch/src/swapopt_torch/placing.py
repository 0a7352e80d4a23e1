"""Host regions for slots, and where in them each slot lives."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice

import torch

from swapopt_torch.cutting import cut_to_fit
from swapopt_torch.host_memory import HostRegion, aligned_numel, allocate_region, registers_memory
from swapopt_torch.units import TorchSlot

logger = logging.getLogger("swapopt_torch")


def place(
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
            region = allocate_region(
                dtype,
                ends[-1],
                device,
                pageable_fallback=pageable_fallback,
                zeroed=any(slot.tensor is None for slot in run),
            )
            placed.extend((slot, region, offset) for slot, offset in zip(run, ends, strict=False))
    _log_rounding({region for _, region, _ in placed})
    return placed


def _log_rounding(regions: set[HostRegion]) -> None:
    states_nbytes = sum(region.flat.nbytes for region in regions)
    pinned_nbytes = sum(region.pinned_nbytes for region in regions)
    if pinned_nbytes > states_nbytes + len(regions) * mmap.PAGESIZE:
        logger.info(
            "swapopt: %s bytes of states take %s bytes of pinned memory (%.1f %% more), in %s "
            "blocks: this device cannot register host memory, and torch's pinned allocator gives "
            "it in powers of two",
            f"{states_nbytes:,}",
            f"{pinned_nbytes:,}",
            100 * (pinned_nbytes / states_nbytes - 1),
            len(regions),
        )


def _regions_of(row: list[TorchSlot], device: torch.device) -> Iterable[list[TorchSlot]]:
    """Divide slots of one dtype among regions: one, unless pinned memory comes in blocks."""
    if registers_memory(device):
        return [row]
    itemsize = row[0].dtype.itemsize
    lengths = cut_to_fit([aligned_numel(slot.numel, slot.dtype) * itemsize for slot in row])
    rest = iter(row)
    return [list(islice(rest, length)) for length in lengths]
