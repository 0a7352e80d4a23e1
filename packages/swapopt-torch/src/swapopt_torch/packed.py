"""Movement B: contiguous runs of host memory travel through staging arenas, which batches share.

The arenas are taken by turns: a batch takes over the one that was used longest ago.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapopt_torch.layout import SwapLayout
from swapopt_torch.movement import DevicePart, Movement, Piece, RegionMoves
from swapopt_torch.staging import Block, GroupPlan, slots_as_in_host_memory
from swapopt_torch.units import Batch


class PackedMovement(Movement):
    """Copies runs of states through staging arenas of the largest batch's size.

    Args:
        layout: tells number and size of the arenas; its states are all on one device.
    """

    reuses_memory = True

    def __init__(self, layout: SwapLayout) -> None:
        (device,) = layout.devices
        self._layout = layout
        self._arenas = [Block(device) for _ in range(layout.arena_count)]
        self._plans: dict[Batch, tuple[int, GroupPlan]] = {}
        self._in_use: dict[int, GroupPlan] = {}
        self._batch_count = 0

    def begin(self, batch_count: int) -> None:
        """Take note of how many arenas the step needs."""
        self._batch_count = batch_count
        self._in_use.clear()

    def acquire(self, position: int, part: DevicePart) -> bool:
        """Allocate all arenas of the step for its first batch: later ones find theirs."""
        is_first = not self._in_use
        self._in_use[position] = self._plan(part.batch)
        if not is_first:
            return False
        try:
            for arena in self._arenas[: self._batch_count]:
                arena.allocate(self._layout.arena_nbytes)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"{self._layout.explain_arenas()} ({error})") from error
        return True

    def pieces(self, position: int, part: DevicePart, moved: RegionMoves) -> Sequence[Piece]:
        """Return one copy per dtype and contiguous run."""
        index = position % len(self._arenas)
        return self._in_use[position].pieces(index, self._arenas[index], part, moved)

    def bind(self, position: int, part: DevicePart) -> None:
        """Let the update see the views of the arena."""
        index = position % len(self._arenas)
        views = self._in_use[position].views(index, self._arenas[index])
        for slot in part.slots:
            slot.tensor = views[slot]

    def release(self, position: int, part: DevicePart, readers: Sequence[torch.Stream]) -> None:
        """Empty the arena of this position."""
        del part
        self._arenas[position % len(self._arenas)].free(readers)

    def release_all(self) -> None:
        """Empty all arenas."""
        for arena in self._arenas:
            arena.free()

    def _plan(self, batch: Batch) -> GroupPlan:
        version, plan = self._plans.get(batch, (-1, None))
        if plan is None or version != batch.version:
            plan = GroupPlan(slots_as_in_host_memory(batch), len(self._arenas))
            self._plans[batch] = batch.version, plan
        return plan
