"""Movement A: states have storages of their own, filled before their update and emptied after.

Small states that are neighbours in host memory share one where the optimizer's operators allow it:
alone, each would cost as much of the host's time as a large one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from mindspore import Tensor

from swapopt_mindspore.device import Device, DeviceMemoryError
from swapopt_mindspore.layout import Batch, Region
from swapopt_mindspore.movement import Movement, Piece, StepBatch
from swapopt_mindspore.sizes import span_nbytes
from swapopt_mindspore.slots import MindSporeSlot
from swapopt_mindspore.staging import StagedStates


class PerTensorMovement(Movement):
    """Copies state by state, or small neighbours together."""

    reuses_memory = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._storages: dict[Batch, list[_Storage]] = {}

    def acquire(self, position: int, batch: StepBatch) -> bool:
        """Restore the storages of the batch's states."""
        del position
        storages = self._storages_of(batch)
        try:
            for storage in storages:
                storage.acquire()
        except DeviceMemoryError as error:
            nbytes = sum(span_nbytes(storage.slots) for storage in storages)
            raise DeviceMemoryError(
                f"The states of a batch, {nbytes:,} bytes, do not fit on {self._device.name}; a "
                "step holds several batches. A larger swap_times makes them smaller, down to the "
                f"states of one parameter. ({error})"
            ) from error
        return True

    def pieces(self, position: int, batch: StepBatch) -> Sequence[Piece]:
        """Return one copy per storage, or per run of a shared one."""
        del position
        moving = set(batch.slots)
        return [piece for each in self._storages_of(batch) for piece in each.pieces(moving)]

    def bind(self, position: int, batch: StepBatch) -> None:
        """Let the update see the device tensors."""
        del position
        tensors: dict[MindSporeSlot, Tensor] = {}
        for storage in self._storages_of(batch):
            tensors.update(storage.tensors())
        for slot in batch.slots:
            slot.tensor = tensors[slot]

    def release(self, position: int, batch: StepBatch) -> None:
        """Empty the storages."""
        del position
        for storage in self._storages_of(batch):
            storage.free()

    def forget_mirrors(self) -> None:
        """Let go of the tensors over runs of mirrors; they are made again as batches come."""
        for storages in self._storages.values():
            for storage in storages:
                storage.forget_mirrors()

    def release_all(self, batches: Sequence[StepBatch]) -> None:
        """Empty every storage there is."""
        del batches
        for storages in self._storages.values():
            for storage in storages:
                storage.free()

    def _storages_of(self, batch: StepBatch) -> list[_Storage]:
        """Return the storages that some state of the batch moves in."""
        storages = self._storages.get(batch.batch)
        if storages is None:
            storages = self._storages[batch.batch] = [
                _Shared(self._device, region, slots)
                if len(slots) > 1
                else _Own(self._device, slots[0])
                for region in batch.batch.regions
                for slots in region.storages
            ]
        if batch.whole:
            return storages
        moving = set(batch.slots)
        return [storage for storage in storages if not moving.isdisjoint(storage.slots)]


class _Storage(ABC):
    """Device memory that comes and goes with a batch.

    Attributes:
        slots: the states it is for.
    """

    slots: Sequence[MindSporeSlot]

    @abstractmethod
    def acquire(self) -> None:
        """Take the memory under the caller's current stream.

        Raises:
            DeviceMemoryError: there is not so much.
        """

    @abstractmethod
    def free(self) -> None:
        """Give the memory back, if there is any."""

    @abstractmethod
    def tensors(self) -> dict[MindSporeSlot, Tensor]:
        """Return what an update sees of the states; the memory is there."""

    @abstractmethod
    def pieces(self, moving: Collection[MindSporeSlot]) -> list[Piece]:
        """Return what moves of the states; the memory is there."""

    def forget_mirrors(self) -> None:  # noqa: B027 - most keep none
        """Let go of tensors over host memory."""


class _Own(_Storage):
    """A tensor that owns its storage: what every operator takes."""

    def __init__(self, device: Device, slot: MindSporeSlot) -> None:
        self.slots = [slot]
        self._device = device
        self._tensor: Tensor | None = None

    def acquire(self) -> None:
        slot = self.slots[0]
        if self._tensor is None:
            self._tensor = self._device.empty(slot.shape, slot.dtype)
        else:
            self._device.restore(self._tensor)

    def free(self) -> None:
        if self._tensor is not None:
            self._device.release(self._tensor)

    def tensors(self) -> dict[MindSporeSlot, Tensor]:
        assert self._tensor is not None, "acquire comes first"
        return {self.slots[0]: self._tensor}

    def pieces(self, moving: Collection[MindSporeSlot]) -> list[Piece]:
        del moving
        return [
            Piece(tensor, slot.mirror(), slot.storage_nbytes)
            for slot, tensor in self.tensors().items()
        ]


class _Shared(_Storage):
    """One block for several small states, which see views of it."""

    def __init__(self, device: Device, region: Region, slots: Sequence[MindSporeSlot]) -> None:
        self.slots = slots
        self._region = region
        self._arena = device.new_arena(span_nbytes(slots))
        self._staged: StagedStates | None = None

    def acquire(self) -> None:
        self._arena.allocate()

    def free(self) -> None:
        self._arena.free()

    def tensors(self) -> dict[MindSporeSlot, Tensor]:
        return self._stage().views

    def pieces(self, moving: Collection[MindSporeSlot]) -> list[Piece]:
        return self._stage().pieces(moving)

    def forget_mirrors(self) -> None:
        self._staged = None

    def _stage(self) -> StagedStates:
        if self._staged is None:
            self._staged = StagedStates(self._region.buffer, self.slots, self._arena, 0)
        return self._staged
