"""Host memory that snapshots share with the mirrors (invariant 8)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from swapopt_torch.host_memory import HostRegion, allocate_region
from swapopt_torch.movement import RegionMoves
from swapopt_torch.units import TorchSlot, TorchUnit


class Lending:
    """Knows which regions live snapshots lie in: copy on write."""

    def __init__(self) -> None:
        # Weak: memory that no slot lives in any more goes when the last snapshot of it goes.
        self._lent: weakref.WeakSet[HostRegion] = weakref.WeakSet()

    def lend(self, slot: TorchSlot) -> torch.Tensor:
        """Return a tensor over a state's host memory that no later step changes.

        While its storage lives, offloads go to fresh memory instead (copy on write).
        """
        assert slot.region is not None, "only a materialised state has host memory to lend"
        self._lent.add(slot.region)
        return slot.framed(slot.region.lend(slot.host_offset, slot.shape))

    def lent_regions(self) -> frozenset[HostRegion]:
        """Return the host memory that live snapshots lie in."""
        return frozenset(region for region in self._lent if region.is_lent)

    @property
    def has_lent(self) -> bool:
        """Whether a snapshot over the host memory may be alive."""
        return bool(self._lent)

    def regions_to_spare(
        self, units: Sequence[TorchUnit], device: torch.device, *, pageable_fallback: bool
    ) -> RegionMoves:
        """Return fresh regions for those of the units' states that live snapshots lie in.

        Args:
            units: whose states will be written.
            device: whose copy engine is to reach them.
            pageable_fallback: see `host_memory.allocate_region`.

        Raises:
            HostMemoryError: no memory for both; nothing has changed.
        """
        written = {slot.region for unit in units for slot in unit.swapped()}
        moved: dict[HostRegion, HostRegion] = {}
        for region in list(self._lent):
            if not region.is_lent:
                self._lent.discard(region)
            elif region in written:
                moved[region] = allocate_region(
                    region.flat.dtype,
                    region.flat.numel(),
                    device,
                    pageable_fallback=pageable_fallback,
                )
        return moved
