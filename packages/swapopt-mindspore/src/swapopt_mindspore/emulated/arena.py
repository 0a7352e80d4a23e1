"""Arenas of the emulated device."""

from __future__ import annotations

from mindspore import Tensor
from mindspore import dtype as mstype

from swapopt_mindspore.device import Arena
from swapopt_mindspore.emulated.books import Allocation
from swapopt_mindspore.emulated.world import World
from swapopt_mindspore.host_buffer import Bytes, nbytes_of, tensor_over


class EmulatedArena(Arena):
    """An allocation that comes and goes, while its addresses stay.

    Args:
        world: the machine.
        allocation: its memory, given back.
        memory: the same bytes, for views.
    """

    def __init__(self, world: World, allocation: Allocation, memory: Bytes) -> None:
        super().__init__(memory.nbytes)
        self._world = world
        self._allocation = allocation
        self._memory = memory

    @property
    def is_empty(self) -> bool:
        """Whether it has no memory now."""
        return not self._allocation.is_live

    def allocate(self) -> None:
        """Take the memory; it holds NaN."""
        assert self.is_empty, "an arena is freed before it is allocated again"
        self._world.take(self._allocation)

    def free(self) -> None:
        """Give the memory back; views hold NaN from now on."""
        if not self.is_empty:
            self._world.give_back(self._allocation)

    def _view(self, dtype: mstype.Type, offset_bytes: int, shape: tuple[int, ...]) -> Tensor:
        assert not self.is_empty, "views are made while the arena has memory"
        piece = self._memory[offset_bytes : offset_bytes + nbytes_of(shape, dtype)]
        return tensor_over(piece, dtype, shape)
