"""States that are neighbours in an arena as they are in host memory: one copy moves them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from mindspore import Tensor

from swapopt_mindspore.device import Arena
from swapopt_mindspore.host_buffer import HostBuffer, nbytes_of, numpy_dtype
from swapopt_mindspore.movement import Piece
from swapopt_mindspore.slots import MindSporeSlot


class StagedStates:
    """Views of some states in an arena, made once: they last as the arena comes and goes.

    Args:
        buffer: the host memory of their mirrors.
        slots: the states, in the order in which they lie there.
        arena: not empty now.
        offset_bytes: where the first of them begins in it.

    Attributes:
        views: what an update sees of each.
        whole_piece: the copy that moves all of them.
    """

    def __init__(
        self, buffer: HostBuffer, slots: Sequence[MindSporeSlot], arena: Arena, offset_bytes: int
    ) -> None:
        self._buffer = buffer
        self._slots = slots
        self._arena = arena
        self._offset_bytes = offset_bytes
        self.views: dict[MindSporeSlot, Tensor] = {
            slot: arena.view(slot.dtype, self._place_of(slot), slot.shape) for slot in slots
        }
        self.whole_piece = self._piece(slots)

    def pieces(self, moving: Collection[MindSporeSlot]) -> list[Piece]:
        """Return one copy per contiguous run of the states that move."""
        return [self._piece(run) for run in _runs(self._slots, moving)]

    def _piece(self, run: Sequence[MindSporeSlot]) -> Piece:
        first, last = run[0], run[-1]
        shape = (last.host_offset + last.numel - first.host_offset,)
        staged = self._arena.view(first.dtype, self._place_of(first), shape)
        host = self._buffer.tensor(first.host_offset, shape)
        return Piece(staged, host, nbytes_of(shape, first.dtype))

    def _place_of(self, slot: MindSporeSlot) -> int:
        distance = slot.host_offset - self._slots[0].host_offset
        return self._offset_bytes + distance * numpy_dtype(slot.dtype).itemsize


def _runs(
    slots: Sequence[MindSporeSlot], moving: Collection[MindSporeSlot]
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
