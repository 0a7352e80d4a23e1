"""Movement B: whole host buffers travel through staging arenas.

Batches take the arenas in turn. States lie in an arena as they lie in their host buffer, so a
batch is one copy per direction and dtype, or one per run where gradients are missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor

from swapopt_mindspore.device import Arena, Device, DeviceMemoryError
from swapopt_mindspore.layout import Batch, SwapLayout
from swapopt_mindspore.movement import Movement, Piece, StepBatch
from swapopt_mindspore.slots import MindSporeSlot
from swapopt_mindspore.staging import StagedStates


class _StagedBatch:
    """One batch in one arena."""

    def __init__(self, batch: Batch, arena: Arena) -> None:
        self._regions = [
            StagedStates(region.buffer, region.slots, arena, region.arena_offset_bytes)
            for region in batch.regions
        ]
        self.whole_pieces = [staged.whole_piece for staged in self._regions]
        self.views: dict[MindSporeSlot, Tensor] = {}
        for staged in self._regions:
            self.views.update(staged.views)

    def pieces(self, slots: Sequence[MindSporeSlot]) -> list[Piece]:
        """Return one copy per contiguous run of the given states."""
        moving = set(slots)
        return [piece for staged in self._regions for piece in staged.pieces(moving)]


class PackedMovement(Movement):
    """Copies the buffers of a batch into one of several arenas of the largest batch's size.

    Args:
        device: where the arenas are.
        layout: tells their size and number; a layout that grew wants a new movement.
    """

    reuses_memory = True

    def __init__(self, device: Device, layout: SwapLayout) -> None:
        self._layout = layout
        self._arenas = [device.new_arena(layout.arena_nbytes) for _ in range(layout.window)]
        self._staged: dict[tuple[Batch, int], _StagedBatch] = {}

    def acquire(self, position: int, batch: StepBatch) -> bool:
        """Allocate the arena of this position unless an earlier batch left it."""
        del batch
        arena = self._arenas[position % len(self._arenas)]
        if not arena.is_empty:
            return False
        try:
            arena.allocate()
        except DeviceMemoryError as error:
            raise DeviceMemoryError(f"{self._layout.explain_arenas()} ({error})") from error
        return True

    def pieces(self, position: int, batch: StepBatch) -> Sequence[Piece]:
        """Return one copy per buffer and contiguous run."""
        staged = self._stage(position, batch)
        return staged.whole_pieces if batch.whole else staged.pieces(batch.slots)

    def bind(self, position: int, batch: StepBatch) -> None:
        """Let the update see the views of the arena."""
        views = self._stage(position, batch).views
        for slot in batch.slots:
            slot.tensor = views[slot]

    def release(self, position: int, batch: StepBatch) -> None:
        """Empty the arena of this position."""
        del batch
        self._arenas[position % len(self._arenas)].free()

    def forget_mirrors(self) -> None:
        """Let go of all views; they are made again as batches come."""
        self._staged.clear()

    def release_all(self, batches: Sequence[StepBatch]) -> None:
        """Empty all arenas."""
        del batches
        for arena in self._arenas:
            arena.free()

    def _stage(self, position: int, batch: StepBatch) -> _StagedBatch:
        index = position % len(self._arenas)
        staged = self._staged.get((batch.batch, index))
        if staged is None:
            staged = _StagedBatch(batch.batch, self._arenas[index])
            self._staged[batch.batch, index] = staged
        return staged
