"""Movement A: each state has a storage of its own, filled before its update and emptied after."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor

from swapopt_mindspore.device import Device, DeviceMemoryError
from swapopt_mindspore.movement import Movement, Piece, StepBatch
from swapopt_mindspore.slots import MindSporeSlot


class PerTensorMovement(Movement):
    """Copies state by state; at most two batches of states are on the device."""

    reuses_memory = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def acquire(self, position: int, batch: StepBatch) -> bool:
        """Restore the storage of every state of the batch."""
        del position
        try:
            for slot in batch.slots:
                self._restore(slot)
        except DeviceMemoryError as error:
            nbytes = sum(slot.storage_nbytes for slot in batch.slots)
            raise DeviceMemoryError(
                f"The states of a batch, {nbytes:,} bytes, do not fit on {self._device.name}; a "
                "step holds two batches. A larger swap_times makes them smaller, down to the "
                f"states of one parameter. ({error})"
            ) from error
        return True

    def _restore(self, slot: MindSporeSlot) -> None:
        if slot.device_tensor is None:
            slot.device_tensor = self._device.empty(slot.shape, slot.dtype)
        else:
            self._device.restore(slot.device_tensor)

    def pieces(self, position: int, batch: StepBatch) -> Sequence[Piece]:
        """Return one copy per state."""
        del position
        return [
            Piece(_device_tensor(slot), slot.mirror(), slot.storage_nbytes) for slot in batch.slots
        ]

    def bind(self, position: int, batch: StepBatch) -> None:
        """Let the update see the device tensors."""
        del position
        for slot in batch.slots:
            slot.tensor = slot.device_tensor

    def release(self, position: int, batch: StepBatch) -> None:
        """Empty the storages."""
        del position
        for slot in batch.slots:
            self._device.release(_device_tensor(slot))

    def release_all(self, batches: Sequence[StepBatch]) -> None:
        """Empty every storage there is."""
        for batch in batches:
            for slot in batch.slots:
                if slot.device_tensor is not None:
                    self._device.release(slot.device_tensor)


def _device_tensor(slot: MindSporeSlot) -> Tensor:
    assert slot.device_tensor is not None, "acquire comes first"
    return slot.device_tensor
