"""Movement A: states have storages of their own, filled before their update and emptied after.

Small states that are neighbours in host memory share one: alone, each would cost as much of the
host's time as a large one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from swapopt_torch.movement import DevicePart, Movement, Piece, RegionMoves
from swapopt_torch.staging import Block, GroupPlan, are_neighbours, slots_as_in_host_memory
from swapopt_torch.units import Batch, TorchSlot

SHARED_STORAGE_NBYTES = 2 * 2**20
"""States share a storage up to this size; a copy of so much costs little beside its bytes."""

_Group = tuple[GroupPlan, Block]


class PerTensorMovement(Movement):
    """Copies state by state, or neighbours together; frees what is offloaded."""

    reuses_memory = False

    def __init__(self) -> None:
        self._groups: dict[Batch, tuple[int, list[_Group]]] = {}
        self._in_use: dict[tuple[int, torch.device], list[_Group]] = {}

    def begin(self, batch_count: int) -> None:
        """Take note that nothing is on the device yet."""
        del batch_count
        self._in_use.clear()

    def acquire(self, position: int, part: DevicePart) -> bool:
        """Restore the storages of the part's states."""
        groups = self._in_use[position, part.streams.device] = self._groups_of(part)
        try:
            for plan, block in groups:
                block.allocate(plan.nbytes)
        except torch.OutOfMemoryError as error:
            nbytes = sum(plan.nbytes for plan, _ in groups)
            raise torch.OutOfMemoryError(
                f"The states of a batch, {nbytes:,} bytes, do not fit on {part.streams.device}; a "
                "step holds several batches. A larger swap_times makes them smaller, down to the "
                f"states of one parameter where it is not cut. ({error})"
            ) from error
        return True

    def pieces(self, position: int, part: DevicePart, moved: RegionMoves) -> Sequence[Piece]:
        """Return one copy per storage and contiguous run."""
        groups = self._in_use[position, part.streams.device]
        return [piece for plan, block in groups for piece in plan.pieces(0, block, part, moved)]

    def bind(self, position: int, part: DevicePart) -> None:
        """Let the update see the device tensors."""
        views: dict[TorchSlot, torch.Tensor] = {}
        for plan, block in self._in_use[position, part.streams.device]:
            views.update(plan.views(0, block))
        for slot in part.slots:
            slot.tensor = views[slot]

    def release(self, position: int, part: DevicePart, readers: Sequence[torch.Stream]) -> None:
        """Empty the storages; the blocks return to the pool of the caller's stream."""
        for _, block in self._in_use[position, part.streams.device]:
            block.free(readers)

    def release_all(self) -> None:
        """Empty every storage that is not empty."""
        for groups in self._in_use.values():
            for _, block in groups:
                block.free()

    def _groups_of(self, part: DevicePart) -> list[_Group]:
        batch = part.batch
        version, groups = self._groups.get(batch, (-1, []))
        if version != batch.version:
            groups = [
                (GroupPlan(slots, 1), Block(slots[0].device))
                for slots in _sharing(slots_as_in_host_memory(batch))
            ]
            self._groups[batch] = batch.version, groups
        if part.whole:
            return [group for group in groups if group[0].device == part.streams.device]
        return [group for group in groups if not group[0].slots.isdisjoint(part.slots)]


def _sharing(slots: Iterable[TorchSlot]) -> list[list[TorchSlot]]:
    """Divide states among storages: neighbours together as long as they are small."""
    groups: list[list[TorchSlot]] = []
    nbytes = 0
    for slot in slots:
        nbytes += slot.storage_nbytes
        if (
            groups
            and nbytes <= SHARED_STORAGE_NBYTES
            and slot.device == groups[-1][-1].device
            and are_neighbours(groups[-1][-1], slot)
        ):
            groups[-1].append(slot)
        else:
            groups.append([slot])
            nbytes = slot.storage_nbytes
    return groups
