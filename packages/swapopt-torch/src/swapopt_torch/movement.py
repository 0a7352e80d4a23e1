"""What the pipeline asks of a movement, and the batches of one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from swapopt_torch.host_memory import HostRegion
from swapopt_torch.streams import CopyStreams
from swapopt_torch.units import Batch, Share, TorchSlot

Piece = tuple[torch.Tensor, torch.Tensor]
"""A device tensor and the pinned host tensor of the same shape it is copied from and to."""


RegionMoves = Mapping[HostRegion, HostRegion]
"""Where states go that may not return to the region they came from, at the same offsets."""

STAY: RegionMoves = {}


class Progress(IntEnum):
    """How far a batch got in this step; recovery after a failure depends on it."""

    WAITING = 0
    PREFETCHING = 1
    UPDATING = 2
    UPDATED = 3
    OFFLOADED = 4
    RELEASED = 5


class BatchEvents:
    """The events of one batch on one device, made once and recorded anew in each step.

    Attributes:
        allocated, prefetched, updated, offloaded: what other streams wait for.
        prefetching, offloading: when the copies began, for their times.
        wanted, granted: when the caller's stream began and ended to wait for the prefetch.
        leaving, left: when it began and ended to wait for the offload, if it had to.
    """

    def __init__(self, device: torch.device) -> None:
        self.allocated = torch.Event(device)
        self.updated = torch.Event(device)
        self.prefetching = torch.Event(device, enable_timing=True)
        self.prefetched = torch.Event(device, enable_timing=True)
        self.offloading = torch.Event(device, enable_timing=True)
        self.offloaded = torch.Event(device, enable_timing=True)
        self.wanted = torch.Event(device, enable_timing=True)
        self.granted = torch.Event(device, enable_timing=True)
        self.leaving = torch.Event(device, enable_timing=True)
        self.left = torch.Event(device, enable_timing=True)


@dataclass(eq=False, slots=True)
class DevicePart:
    """The states of one step's batch that live on one device.

    Attributes:
        batch: the batch of the layout they belong to.
        streams: the device's copy streams.
        slots: the states to move.
        whole: whether these are all materialised states of the batch on this device, so that
            what was built for the whole batch can be used again.
    """

    batch: Batch
    streams: CopyStreams
    slots: list[TorchSlot]
    events: BatchEvents
    whole: bool


@dataclass(eq=False, slots=True)
class StepBatch:
    """What one batch updates in this step: its shares of units that have a gradient."""

    shares: list[Share]
    parts: list[DevicePart] = field(default_factory=list)
    progress: Progress = Progress.WAITING


class Movement(ABC):
    """Where the states of a batch are while they are on the device.

    Methods are called by the pipeline, with the caller's stream current: memory is allocated and
    freed there. ``position`` is the batch's place among the batches of this step.
    """

    reuses_memory: bool
    """Whether a batch takes over the memory of the batch a window's length before it."""

    @abstractmethod
    def begin(self, batch_count: int) -> None:
        """Prepare for a step over so many batches; nothing is on the device."""

    @abstractmethod
    def acquire(self, position: int, part: DevicePart) -> bool:
        """Make device memory for the part; return whether any had to be allocated.

        Raises:
            torch.OutOfMemoryError: what was allocated so far is freed by `release_all`.
        """

    @abstractmethod
    def pieces(self, position: int, part: DevicePart, moved: RegionMoves) -> Sequence[Piece]:
        """Return what to copy; the memory has been acquired.

        Args:
            position: the batch's place.
            part: what moves.
            moved: `STAY` for a prefetch; for an offload, the regions not to write to.
        """

    @abstractmethod
    def bind(self, position: int, part: DevicePart) -> None:
        """Let every slot's ``tensor`` be its device tensor."""

    @abstractmethod
    def release(self, position: int, part: DevicePart, readers: Sequence[torch.Stream]) -> None:
        """Free the part's device memory; ``readers`` are streams that may still use it."""

    @abstractmethod
    def release_all(self) -> None:
        """Free all device memory after a failure; the device is idle."""
