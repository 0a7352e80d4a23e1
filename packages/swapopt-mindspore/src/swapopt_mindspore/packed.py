"""Movement B: whole host buffers travel through two staging arenas.

Batches alternate between the arenas. States lie in an arena as they lie in their host buffer, so
a batch is one copy per direction and dtype, or one per run where gradients are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mindspore import Tensor

from swapopt_mindspore.device import Arena, Device, DeviceMemoryError
from swapopt_mindspore.host_buffer import nbytes_of, numpy_dtype
from swapopt_mindspore.layout import Batch, Region, SwapLayout
from swapopt_mindspore.movement import Movement, Piece, StepBatch
from swapopt_mindspore.schedule import WINDOW
from swapopt_mindspore.slots import MindSporeSlot


class _StagedBatch:
    """The views of one batch in one arena, made once: they last as the arena comes and goes."""

    def __init__(self, batch: Batch, arena: Arena) -> None:
        self._batch = batch
        self._arena = arena
        self.views: dict[MindSporeSlot, Tensor] = {
            slot: arena.view(slot.dtype, _arena_offset_bytes(region, slot), slot.shape)
            for region in batch.regions
            for slot in region.slots
        }
        self.whole_pieces = [self._piece(region, region.slots) for region in batch.regions]

    def pieces(self, slots: Sequence[MindSporeSlot]) -> list[Piece]:
        """Return one copy per contiguous run of the given states."""
        moving = set(slots)
        return [
            self._piece(region, run)
            for region in self._batch.regions
            for run in _runs(region.slots, moving)
        ]

    def _piece(self, region: Region, run: Sequence[MindSporeSlot]) -> Piece:
        first, last = run[0], run[-1]
        shape = (last.host_offset + last.numel - first.host_offset,)
        staged = self._arena.view(first.dtype, _arena_offset_bytes(region, first), shape)
        host = region.buffer.tensor(first.host_offset, shape)
        return Piece(staged, host, nbytes_of(shape, first.dtype))


def _arena_offset_bytes(region: Region, slot: MindSporeSlot) -> int:
    return region.arena_offset_bytes + slot.host_offset * numpy_dtype(slot.dtype).itemsize


def _runs(
    slots: Sequence[MindSporeSlot], moving: set[MindSporeSlot]
) -> Iterator[list[MindSporeSlot]]:
    """Yield what remains, of slots that lie next to each other, when some do not move."""
    run: list[MindSporeSlot] = []
    for slot in slots:
        if slot in moving:
            run.append(slot)
        elif run:
            yield run
            run = []
    if run:
        yield run


class PackedMovement(Movement):
    """Copies the buffers of a batch into one of two arenas of the largest batch's size.

    Args:
        device: where the arenas are.
        layout: tells their size; a layout that grew wants a new movement.
    """

    reuses_memory = True

    def __init__(self, device: Device, layout: SwapLayout) -> None:
        self._layout = layout
        self._arenas = [device.new_arena(layout.arena_nbytes) for _ in range(WINDOW)]
        self._staged: dict[tuple[Batch, int], _StagedBatch] = {}

    def acquire(self, position: int, batch: StepBatch) -> bool:
        """Allocate the arena of this position unless an earlier batch left it."""
        del batch
        arena = self._arenas[position % WINDOW]
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
        self._arenas[position % WINDOW].free()

    def forget_mirrors(self) -> None:
        """Let go of all views; they are made again as batches come."""
        self._staged.clear()

    def release_all(self, batches: Sequence[StepBatch]) -> None:
        """Empty both arenas."""
        del batches
        for arena in self._arenas:
            arena.free()

    def _stage(self, position: int, batch: StepBatch) -> _StagedBatch:
        index = position % WINDOW
        staged = self._staged.get((batch.batch, index))
        if staged is None:
            staged = _StagedBatch(batch.batch, self._arenas[index])
            self._staged[batch.batch, index] = staged
        return staged
