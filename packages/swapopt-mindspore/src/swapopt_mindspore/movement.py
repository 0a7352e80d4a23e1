"""What the pipeline asks of a movement, and the batches of one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from mindspore import Tensor

from swapopt_mindspore.device import Device
from swapopt_mindspore.layout import Batch
from swapopt_mindspore.slots import MindSporeSlot, MindSporeUnit


class Piece(NamedTuple):
    """What one copy moves: a device tensor, and the host tensor of the same shape and dtype."""

    on_device: Tensor
    on_host: Tensor
    nbytes: int


class Progress(IntEnum):
    """How far a batch got in this step; recovery after a failure depends on it."""

    WAITING = 0
    PREFETCHING = 1
    UPDATING = 2
    UPDATED = 3
    OFFLOADED = 4
    RELEASED = 5


class BatchEvents:
    """The events of one batch, made once and recorded anew in each step.

    Attributes:
        allocated, prefetched, updated, offloaded: what other streams wait for.
        prefetching, offloading: when the copies began, for their times.
        wanted, granted: when the caller's stream began and ended to wait for the prefetch.
        leaving, left: when it began and ended to wait for the offload, if it had to.
    """

    def __init__(self, device: Device) -> None:
        self.allocated = device.new_event()
        self.updated = device.new_event()
        self.prefetching = device.new_event(timing=True)
        self.prefetched = device.new_event(timing=True)
        self.offloading = device.new_event(timing=True)
        self.offloaded = device.new_event(timing=True)
        self.wanted = device.new_event(timing=True)
        self.granted = device.new_event(timing=True)
        self.leaving = device.new_event(timing=True)
        self.left = device.new_event(timing=True)


@dataclass(eq=False, slots=True)
class StepBatch:
    """The units of one batch that have a gradient in this step.

    Attributes:
        batch: the batch of the layout whose states move.
        units: what is updated; units whose states all stay may have joined from other batches.
        slots: the states to move.
        pieces: what is copied, there and back; known once it is prefetched.
        whole: whether these are all states of the batch, so that what was built for the whole
            batch can be used again.
        torn: after a failure: states that some operators of an update may have written and others
            not; their mirrors hold what they were before.
    """

    batch: Batch
    units: list[MindSporeUnit]
    slots: list[MindSporeSlot]
    events: BatchEvents
    whole: bool
    progress: Progress = Progress.WAITING
    pieces: Sequence[Piece] = ()
    torn: list[MindSporeSlot] = field(default_factory=list)


class Movement(ABC):
    """Where the states of a batch are while they are on the device.

    ``position`` is the batch's place among the batches of this step.
    """

    reuses_memory: bool
    """Whether a batch takes over the memory of an earlier one, as soon as that is home."""

    @abstractmethod
    def acquire(self, position: int, batch: StepBatch) -> bool:
        """Make device memory for the batch; return whether any had to be allocated.

        Raises:
            DeviceMemoryError: what was allocated so far is freed by `release_all`.
        """

    @abstractmethod
    def pieces(self, position: int, batch: StepBatch) -> Sequence[Piece]:
        """Return what to copy; the memory has been acquired."""

    @abstractmethod
    def bind(self, position: int, batch: StepBatch) -> None:
        """Let every slot's ``tensor`` be its device tensor."""

    @abstractmethod
    def release(self, position: int, batch: StepBatch) -> None:
        """Free the batch's device memory; the caller's stream is behind every use of it."""

    def forget_mirrors(self) -> None:  # noqa: B027 - a movement that keeps none has nothing to do
        """Let go of tensors over host memory that were kept for later steps: mirrors have moved."""

    @abstractmethod
    def release_all(self, batches: Sequence[StepBatch]) -> None:
        """Free all device memory after a failure; the device is idle."""
