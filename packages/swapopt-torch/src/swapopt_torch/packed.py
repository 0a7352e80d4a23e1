"""Movement B: contiguous runs of host memory travel through two staging arenas.

Batches alternate between the arenas. Inside an arena every dtype has a region on a 512-byte
boundary, and states lie in it as they lie in host memory, so neighbours there are one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapopt_torch.host_memory import HostRegion, aligned_numel
from swapopt_torch.layout import WINDOW, Batch, SwapLayout, TorchSlot, round_up
from swapopt_torch.movement import DevicePart, Movement, Piece, RegionMoves


class _Arena:
    """A block of device memory that exists during a step only.

    Views share its storage object, so they stay valid from step to step while the storage is
    emptied and filled; they are made once per layout.
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._storage = self._bytes.untyped_storage()

    @property
    def is_empty(self) -> bool:
        return self._storage.nbytes() == 0

    def allocate(self, nbytes: int) -> None:
        self._storage.resize_(nbytes)

    def free(self, readers: Sequence[torch.Stream] = ()) -> None:
        if self.is_empty:
            return
        for stream in readers:
            self._bytes.record_stream(stream)
        self._storage.resize_(0)

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a contiguous view; the arena must be allocated (``set_`` would grow it)."""
        assert not self.is_empty, "views are made while the arena has memory"
        tensor = torch.empty(0, dtype=dtype, device=self._bytes.device)
        strides = torch.empty(shape, device="meta").stride()
        return tensor.set_(self._storage, offset_bytes // dtype.itemsize, shape, strides)


class _BatchPlan:
    """Where the states of one batch lie in an arena, and the views and copies made from that."""

    def __init__(self, batch: Batch) -> None:
        self.version = batch.version
        self.offsets_bytes: dict[TorchSlot, int] = {}
        self._views: list[dict[TorchSlot, torch.Tensor]] = [{} for _ in range(WINDOW)]
        self._whole_pieces: list[list[Piece] | None] = [None] * WINDOW
        self._lay_out(batch)

    def _lay_out(self, batch: Batch) -> None:
        by_region: dict[HostRegion, list[TorchSlot]] = {}
        for unit in batch.units:
            for slot in unit.slots:
                if slot.region is not None:
                    by_region.setdefault(slot.region, []).append(slot)
        by_dtype: dict[torch.dtype, list[TorchSlot]] = {}
        for region, slots in by_region.items():
            # As they lie in host memory, whatever the order of the parameters has become: what is
            # next to each other there is so here, and moves in one copy.
            slots.sort(key=lambda slot: slot.host_offset)
            by_dtype.setdefault(region.flat.dtype, []).extend(slots)
        offset_bytes = 0
        for dtype, slots in by_dtype.items():
            offset_bytes = round_up(offset_bytes)
            for slot in slots:
                self.offsets_bytes[slot] = offset_bytes
                offset_bytes += aligned_numel(slot.numel, dtype) * dtype.itemsize

    def views(self, index: int, arena: _Arena) -> dict[TorchSlot, torch.Tensor]:
        """Return the view of every state of the batch in arena number ``index``."""
        views = self._views[index]
        if not views:
            for slot, offset_bytes in self.offsets_bytes.items():
                views[slot] = arena.view(slot.dtype, offset_bytes, slot.shape)
        return views

    def pieces(
        self, index: int, arena: _Arena, part: DevicePart, moved: RegionMoves
    ) -> list[Piece]:
        """Return one copy per dtype and contiguous run of the part's states."""
        if moved or not part.whole:
            moving = set(part.slots)
            slots = [slot for slot in self.offsets_bytes if slot in moving]
            return self._pieces(arena, slots, moved)
        pieces = self._whole_pieces[index]
        if pieces is None:
            slots = list(self.offsets_bytes)
            pieces = self._whole_pieces[index] = self._pieces(arena, slots, moved)
        return pieces

    def _pieces(self, arena: _Arena, slots: Sequence[TorchSlot], moved: RegionMoves) -> list[Piece]:
        return [self._piece(arena, run, moved) for run in _contiguous_runs(slots)]

    def _piece(self, arena: _Arena, run: Sequence[TorchSlot], moved: RegionMoves) -> Piece:
        first, last = run[0], run[-1]
        assert first.region is not None
        region = moved.get(first.region, first.region)
        numel = last.host_offset + last.numel - first.host_offset
        host = region.flat.narrow(0, first.host_offset, numel)
        return arena.view(first.dtype, self.offsets_bytes[first], (numel,)), host


def _contiguous_runs(slots: Sequence[TorchSlot]) -> list[list[TorchSlot]]:
    """Split slots, in arena order, where they are not neighbours in one host region."""
    runs: list[list[TorchSlot]] = []
    for slot in slots:
        previous = runs[-1][-1] if runs else None
        if (
            previous is not None
            and previous.region is slot.region
            and previous.host_offset + aligned_numel(previous.numel, previous.dtype)
            == slot.host_offset
        ):
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


class PackedMovement(Movement):
    """Copies runs of states through two staging arenas of the largest batch's size.

    Args:
        layout: tells the size of an arena; its states are all on one device.
    """

    reuses_memory = True

    def __init__(self, layout: SwapLayout) -> None:
        (device,) = layout.devices
        self._layout = layout
        self._arenas = [_Arena(device) for _ in range(WINDOW)]
        self._plans: dict[Batch, _BatchPlan] = {}

    def acquire(self, position: int, part: DevicePart) -> bool:
        """Allocate the arena of this position unless an earlier batch left it."""
        del part
        arena = self._arenas[position % WINDOW]
        if not arena.is_empty:
            return False
        try:
            arena.allocate(self._layout.arena_nbytes)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"{self._layout.explain_arenas()} ({error})") from error
        return True

    def pieces(self, position: int, part: DevicePart, moved: RegionMoves) -> Sequence[Piece]:
        """Return one copy per dtype and contiguous run."""
        index = position % WINDOW
        return self._plan(part).pieces(index, self._arenas[index], part, moved)

    def bind(self, position: int, part: DevicePart) -> None:
        """Let the update see the views of the arena."""
        index = position % WINDOW
        views = self._plan(part).views(index, self._arenas[index])
        for slot in part.slots:
            slot.tensor = views[slot]

    def release(self, position: int, part: DevicePart, readers: Sequence[torch.Stream]) -> None:
        """Empty the arena of this position."""
        del part
        self._arenas[position % WINDOW].free(readers)

    def release_all(self, parts: Sequence[DevicePart]) -> None:
        """Empty both arenas."""
        del parts
        for arena in self._arenas:
            arena.free()

    def _plan(self, part: DevicePart) -> _BatchPlan:
        plan = self._plans.get(part.batch)
        if plan is None or plan.version != part.batch.version:
            plan = self._plans[part.batch] = _BatchPlan(part.batch)
        return plan
