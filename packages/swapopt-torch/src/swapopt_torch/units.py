"""What is swapped and updated: slots, units, and the shares of units that make a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from swapopt_common import SlotState, SwapSlot, UpdateUnit
from swapopt_torch.host_memory import HostRegion
from swapopt_torch.local_tensor import Frame


@dataclass(eq=False, slots=True)
class TorchSlot(SwapSlot[torch.Tensor, torch.Event]):
    """A state tensor of a torch optimizer.

    For the state of a DTensor everything here is about its local tensor, and ``logical_tensor`` is
    the DTensor over the host mirror.

    Attributes:
        dtype, device: of the state during an update.
        resident_reason: why the state does not swap; None for one that does.
        frame: what makes a DTensor of a local tensor; None if the state is no DTensor.
        region: the host region its mirror lies in, once materialised.
        host_address: where its mirror begins, in bytes.
        whole: the slot of which this one is a range of elements, flat and no DTensor; None for
            a slot that is all of a state.
        ends_whole: whether the range is the last one of its slot.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    resident_reason: str | None = None
    frame: Frame | None = None
    region: HostRegion | None = None
    host_address: int = 0
    whole: TorchSlot | None = None
    ends_whole: bool = False

    def live_in(self, region: HostRegion) -> None:
        """Make the host mirror in a region, at the slot's offset; what it holds stays there."""
        self.cpu_tensor = region.mirror(self.host_offset, self.shape)
        self.host_address = self.cpu_tensor.data_ptr()
        self.logical_tensor = None if self.frame is None else self.frame.around(self.cpu_tensor)
        self.region = region

    @property
    def exposed(self) -> torch.Tensor | None:
        """What the optimizer's state holds between steps: the host mirror, or a DTensor over it."""
        return self.cpu_tensor if self.logical_tensor is None else self.logical_tensor

    def framed(self, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the state's shape as what the state is: itself, or a DTensor."""
        return local if self.frame is None else self.frame.around(local)

    def part(self, start: int, stop: int) -> TorchSlot:
        """Return a slot over some elements of this one, which has host memory."""
        assert self.region is not None, "a slot without host memory has nothing to move"
        part = TorchSlot(
            name=self.name,
            storage_nbytes=(stop - start) * self.dtype.itemsize,
            state=SlotState.HOST,
            shape=(stop - start,),
            dtype=self.dtype,
            device=self.device,
            numel=stop - start,
            host_offset=self.host_offset + start,
            packed=self.packed,
            whole=self,
            ends_whole=stop == self.numel,
        )
        part.live_in(self.region)
        part.tensor = part.cpu_tensor
        return part


@dataclass(eq=False, slots=True)
class TorchUnit(UpdateUnit[torch.Tensor, TorchSlot]):
    """One parameter of a torch optimizer.

    Attributes:
        name: how messages call the parameter.
        device: the device its states are updated on.
        kind: dtype, shape, strides and sharding of the parameter when the unit was made.
        is_dtensor: whether the parameter is a DTensor.
        is_divisible: whether it may be updated range by range (see `Share`).
        has_state: whether the optimizer has states for it (it had a gradient).
        is_cut: whether several batches update it, range by range.
    """

    name: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kind: tuple[object, ...] = ()
    is_dtensor: bool = False
    is_divisible: bool = False
    has_state: bool = False
    is_cut: bool = False

    @property
    def takes_part(self) -> bool:
        """Whether a step may update it: it trains, or did so before."""
        return self.param.requires_grad or self.has_state

    def swapped(self) -> list[TorchSlot]:
        """Return the slots that move."""
        return [slot for slot in self.slots if slot.swappable]


@dataclass(eq=False, slots=True)
class Share:
    """What one batch updates of a unit: all of it, or a range of its elements, in flat order.

    Attributes:
        unit: the parameter.
        start, stop: the elements.
        is_whole: whether these are all.
        is_last: whether the unit's update is complete after this share's.
        slots: what moves for it, as far as it has host memory: the unit's own slots, or slots
            over that range of theirs.
    """

    unit: TorchUnit
    start: int
    stop: int
    is_whole: bool
    is_last: bool
    slots: list[TorchSlot] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Batch:
    """What is on the device together: a run of units, of which the first and last may be ranges.

    Attributes:
        shares: in the optimizer's order, whether their units have a gradient or not.
        materialised: how many slots it moves: those that have host memory.
        version: grows whenever that changes, or the place of a mirror; cached plans compare it.
    """

    shares: list[Share] = field(default_factory=list)
    materialised: int = 0
    version: int = 0

    def take_slots(self, share: Share) -> None:
        """Find which slots of one of its shares have host memory by now."""
        home = [slot for slot in share.unit.swapped() if slot.region is not None]
        if not share.is_whole:
            home = [slot.part(share.start, share.stop) for slot in home]
        self.materialised += len(home) - len(share.slots)
        self.version += 1
        share.slots = home

    @property
    def units(self) -> list[TorchUnit]:
        """Its units, those in part included."""
        return [share.unit for share in self.shares]
