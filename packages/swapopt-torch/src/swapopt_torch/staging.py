"""Device memory that exists during a step only, and how the states of a batch lie in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapopt_torch.host_memory import aligned_numel
from swapopt_torch.layout import round_up
from swapopt_torch.movement import DevicePart, Piece, RegionMoves
from swapopt_torch.units import Batch, TorchSlot


class Block:
    """A block of device memory that is allocated and freed in every step.

    Views share its storage object, so they stay valid from step to step while the storage is
    emptied and filled; they are made once per layout.
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._storage = self._bytes.untyped_storage()

    @property
    def is_empty(self) -> bool:
        """Whether it has no memory."""
        return self._storage.nbytes() == 0

    def allocate(self, nbytes: int) -> None:
        """Take memory from the pool of the caller's current stream."""
        self._storage.resize_(nbytes)

    def free(self, readers: Sequence[torch.Stream] = ()) -> None:
        """Give the memory back; ``readers`` are streams that may still use it."""
        if self.is_empty:
            return
        for stream in readers:
            self._bytes.record_stream(stream)
        self._storage.resize_(0)

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a contiguous view; the block must have memory (``set_`` would grow it)."""
        assert not self.is_empty, "views are made while the block has memory"
        tensor = torch.empty(0, dtype=dtype, device=self._bytes.device)
        strides = torch.empty(shape, device="meta").stride()
        return tensor.set_(self._storage, offset_bytes // dtype.itemsize, shape, strides)


class GroupPlan:
    """Where states lie in one block, and the views and copies made from that.

    In a block every dtype has a region on a 512-byte boundary, and states lie in it as they lie in
    host memory, so neighbours there are one copy.

    Args:
        slots: the states, which have host memory.
        choices: how many blocks they may be in, by turns.
    """

    def __init__(self, slots: Sequence[TorchSlot], choices: int) -> None:
        self.device = slots[0].device
        self.slots = frozenset(slots)
        self._offsets_bytes: dict[TorchSlot, int] = {}
        self._views: list[dict[TorchSlot, torch.Tensor]] = [{} for _ in range(choices)]
        self._whole_pieces: list[list[Piece] | None] = [None] * choices
        by_dtype: dict[torch.dtype, list[TorchSlot]] = {}
        for slot in slots:
            by_dtype.setdefault(slot.dtype, []).append(slot)
        offset_bytes = 0
        for dtype, row in by_dtype.items():
            offset_bytes = round_up(offset_bytes)
            for slot in row:
                self._offsets_bytes[slot] = offset_bytes
                offset_bytes += aligned_numel(slot.numel, dtype) * dtype.itemsize
        self.nbytes = offset_bytes

    def views(self, choice: int, block: Block) -> dict[TorchSlot, torch.Tensor]:
        """Return the view of every state in the block, which is number ``choice``."""
        views = self._views[choice]
        if not views:
            for slot, offset_bytes in self._offsets_bytes.items():
                views[slot] = block.view(slot.dtype, offset_bytes, slot.shape)
        return views

    def pieces(
        self, choice: int, block: Block, part: DevicePart, moved: RegionMoves
    ) -> list[Piece]:
        """Return one copy per dtype and contiguous run of the part's states."""
        if moved or not part.whole:
            moving = set(part.slots)
            slots = [slot for slot in self._offsets_bytes if slot in moving]
            return self._pieces(block, slots, moved)
        pieces = self._whole_pieces[choice]
        if pieces is None:
            slots = list(self._offsets_bytes)
            pieces = self._whole_pieces[choice] = self._pieces(block, slots, moved)
        return pieces

    def _pieces(self, block: Block, slots: Sequence[TorchSlot], moved: RegionMoves) -> list[Piece]:
        return [self._piece(block, run, moved) for run in _contiguous_runs(slots)]

    def _piece(self, block: Block, run: Sequence[TorchSlot], moved: RegionMoves) -> Piece:
        first, last = run[0], run[-1]
        assert first.region is not None
        region = moved.get(first.region, first.region)
        numel = last.host_offset + last.numel - first.host_offset
        host = region.flat.narrow(0, first.host_offset, numel)
        return block.view(first.dtype, self._offsets_bytes[first], (numel,)), host


def slots_as_in_host_memory(batch: Batch) -> list[TorchSlot]:
    """Return the states a batch moves, neighbours in host memory next to each other.

    Whatever the order of the parameters has become: what lies together there moves in one copy.
    """
    by_region: dict[object, list[TorchSlot]] = {}
    for share in batch.shares:
        for slot in share.slots:
            by_region.setdefault(slot.region, []).append(slot)
    for slots in by_region.values():
        slots.sort(key=lambda slot: slot.host_offset)
    return [slot for slots in by_region.values() for slot in slots]


def are_neighbours(slot: TorchSlot, following: TorchSlot) -> bool:
    """Say whether one state follows another in host memory."""
    end = slot.host_offset + aligned_numel(slot.numel, slot.dtype)
    return following.region is slot.region and following.host_offset == end


def _contiguous_runs(slots: Sequence[TorchSlot]) -> list[list[TorchSlot]]:
    """Split slots, in their order in a block, where they are not neighbours in a host region."""
    runs: list[list[TorchSlot]] = []
    for slot in slots:
        if runs and are_neighbours(runs[-1][-1], slot):
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs
