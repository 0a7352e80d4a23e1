"""Device memory that exists during a step only, and how the states of a batch lie in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

import torch

from swapopt_torch.host_memory import aligned_numel
from swapopt_torch.layout import round_up
from swapopt_torch.movement import STAY, DevicePart, Piece, RegionMoves
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
        return tensor.set_(
            self._storage, offset_bytes // dtype.itemsize, shape, _contiguous_strides(shape)
        )


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
        self._flats: list[dict[torch.dtype, torch.Tensor]] = [{} for _ in range(choices)]
        self._whole_pieces: list[list[Piece] | None] = [None] * choices
        self._partial_pieces: tuple[DevicePart, int, list[Piece]] | None = None
        self._extents_bytes: dict[torch.dtype, tuple[int, int]] = {}
        by_dtype: dict[torch.dtype, list[TorchSlot]] = {}
        for slot in slots:
            by_dtype.setdefault(slot.dtype, []).append(slot)
        offset_bytes = 0
        for dtype, row in by_dtype.items():
            start_bytes = offset_bytes = round_up(offset_bytes)
            for slot in row:
                self._offsets_bytes[slot] = offset_bytes
                offset_bytes += aligned_numel(slot.numel, dtype) * dtype.itemsize
            # The last state needs no room up to the next boundary, and a batch may end there.
            ends_bytes = self._offsets_bytes[row[-1]] + row[-1].numel * dtype.itemsize
            self._extents_bytes[dtype] = start_bytes, ends_bytes
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
        if moved:
            return self._pieces(choice, block, self._moving(part), moved)
        if not part.whole:
            return self._pieces_of_some(choice, block, part)
        pieces = self._whole_pieces[choice]
        if pieces is None:
            slots = list(self._offsets_bytes)
            pieces = self._whole_pieces[choice] = self._pieces(choice, block, slots, moved)
        return pieces

    def _pieces_of_some(self, choice: int, block: Block, part: DevicePart) -> list[Piece]:
        # What was prefetched in these pieces is offloaded in them, too.
        if self._partial_pieces is not None and self._partial_pieces[:2] == (part, choice):
            return self._partial_pieces[2]
        pieces = self._pieces(choice, block, self._moving(part), STAY)
        self._partial_pieces = part, choice, pieces
        return pieces

    def _moving(self, part: DevicePart) -> list[TorchSlot]:
        moving = set(part.slots)
        return [slot for slot in self._offsets_bytes if slot in moving]

    def _pieces(
        self, choice: int, block: Block, slots: Sequence[TorchSlot], moved: RegionMoves
    ) -> list[Piece]:
        flats = self._flats[choice]
        if not flats:
            for dtype, (start_bytes, end_bytes) in self._extents_bytes.items():
                numel = (end_bytes - start_bytes) // dtype.itemsize
                flats[dtype] = block.view(dtype, start_bytes, (numel,))
        return [self._piece(flats, run, moved) for run in _contiguous_runs(slots)]

    def _piece(
        self,
        flats: Mapping[torch.dtype, torch.Tensor],
        run: Sequence[TorchSlot],
        moved: RegionMoves,
    ) -> Piece:
        first, last = run[0], run[-1]
        assert first.region is not None
        region = moved.get(first.region, first.region)
        numel = last.host_offset + last.numel - first.host_offset
        host = region.flat.narrow(0, first.host_offset, numel)
        start_bytes, _ = self._extents_bytes[first.dtype]
        offset_numel = (self._offsets_bytes[first] - start_bytes) // first.dtype.itemsize
        return flats[first.dtype].narrow(0, offset_numel, numel), host


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


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    lengths = (max(1, length) for length in shape[:0:-1])
    return tuple(accumulate(lengths, mul, initial=1))[::-1] if shape else ()
