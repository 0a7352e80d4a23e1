"""Movement A: each state has a storage of its own, filled before its update and emptied after."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapopt_torch.layout import TorchSlot
from swapopt_torch.movement import DevicePart, Movement, Piece, RegionMoves


class PerTensorMovement(Movement):
    """Copies state by state; at most two batches of states are on the device."""

    reuses_memory = False

    def acquire(self, position: int, part: DevicePart) -> bool:
        """Restore the storage of every state of the part."""
        del position
        try:
            for slot in part.slots:
                _restore(slot)
        except torch.OutOfMemoryError as error:
            nbytes = sum(slot.storage_nbytes for slot in part.slots)
            raise torch.OutOfMemoryError(
                f"The states of a batch, {nbytes:,} bytes, do not fit on {part.streams.device}; a "
                "step holds two batches. A larger swap_times makes them smaller, down to the "
                f"states of one parameter. ({error})"
            ) from error
        return True

    def pieces(self, position: int, part: DevicePart, moved: RegionMoves) -> Sequence[Piece]:
        """Return one copy per state."""
        del position
        return [(_device_tensor(slot), _host_tensor(slot, moved)) for slot in part.slots]

    def bind(self, position: int, part: DevicePart) -> None:
        """Let the update see the device tensors."""
        del position
        for slot in part.slots:
            slot.tensor = slot.device_tensor

    def release(self, position: int, part: DevicePart, readers: Sequence[torch.Stream]) -> None:
        """Empty the storages; the blocks return to the pool of the caller's stream."""
        del position
        for slot in part.slots:
            tensor = _device_tensor(slot)
            for stream in readers:
                tensor.record_stream(stream)
            tensor.untyped_storage().resize_(0)

    def release_all(self, parts: Sequence[DevicePart]) -> None:
        """Empty every storage that is not empty."""
        for part in parts:
            for slot in part.slots:
                if slot.device_tensor is not None:
                    slot.device_tensor.untyped_storage().resize_(0)


def _restore(slot: TorchSlot) -> None:
    if slot.device_tensor is None:
        slot.device_tensor = torch.empty(slot.shape, dtype=slot.dtype, device=slot.device)
    else:
        slot.device_tensor.untyped_storage().resize_(slot.storage_nbytes)


def _device_tensor(slot: TorchSlot) -> torch.Tensor:
    assert slot.device_tensor is not None, "acquire comes first"
    return slot.device_tensor


def _host_tensor(slot: TorchSlot, moved: RegionMoves) -> torch.Tensor:
    assert slot.cpu_tensor is not None, "only materialised slots move"
    assert slot.region is not None
    new_region = moved.get(slot.region)
    if new_region is None:
        return slot.cpu_tensor
    return new_region.mirror(slot.host_offset, slot.shape)
