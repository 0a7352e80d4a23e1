"""The slots and units of a MindSpore optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from swapopt_common import SwapSlot, UpdateUnit
from swapopt_mindspore.device import Device
from swapopt_mindspore.host_buffer import HostBuffer
from swapopt_mindspore.local_tensor import local_part
from swapopt_mindspore.streams import Event


@dataclass(eq=False, slots=True)
class MindSporeSlot(SwapSlot[Tensor, Event]):
    """A state tensor of a MindSpore optimizer.

    Attributes:
        parameter: the optimizer's own state; its name is the state's name in a checkpoint.
        dtype, device: of the state during an update; the device is None where nothing swaps.
        resident_reason: why the state does not swap; None for one that does.
        awaited: whether it swaps as soon as its first update has brought it to the device.
        buffer: the host buffer its mirror lies in, once it has one.
        host_address: where its mirror begins, in bytes.
    """

    parameter: Parameter = field(kw_only=True)
    dtype: mstype.Type = mstype.float32
    device: Device | None = None
    resident_reason: str | None = None
    awaited: bool = False
    buffer: HostBuffer | None = None
    host_address: int = 0

    @property
    def home(self) -> Tensor:
        """The optimizer's own tensor; for a swapped state its data are the host mirror's."""
        return local_part(self.parameter)

    @property
    def is_home_moved(self) -> bool:
        """Whether somebody has given the optimizer's own tensor other data than the mirror's."""
        return bool(self.home.data_ptr() != self.host_address)

    def live_in(self, buffer: HostBuffer) -> None:
        """Make the host mirror in a buffer, at the slot's offset; what it holds stays there."""
        self.cpu_tensor = buffer.tensor(self.host_offset, self.shape)
        self.host_address = self.cpu_tensor.data_ptr()
        self.buffer = buffer

    def mirror(self) -> Tensor:
        """Return the host mirror of a swapped state."""
        assert self.cpu_tensor is not None, "a swapped state has host memory"
        return self.cpu_tensor

    def operand(self) -> Tensor:
        """Return what the update's operator reads and writes now: the valid value's tensor."""
        assert self.tensor is not None, "states of MindSpore's optimizers exist from the beginning"
        return self.tensor


@dataclass(eq=False, slots=True)
class MindSporeUnit(UpdateUnit[Tensor, MindSporeSlot]):
    """One parameter of a MindSpore optimizer; ``adapter_index`` is its place in the list.

    Attributes:
        name: how messages call the parameter.
        master: the slot of its fp32 master, also one of ``slots``; None where it has none.
        batch_index: which batch of the layout it belongs to; None before it is planned.
        launches: about how many operators its update issues; for virtual time only.
    """

    name: str = ""
    master: MindSporeSlot | None = None
    batch_index: int | None = None
    launches: int = 1

    def gradient(self) -> Tensor:
        """Return the local part of its gradient; the unit takes part in this step."""
        assert self.grad is not None, "only units with a gradient are updated"
        return local_part(self.grad)

    def swapped(self) -> list[MindSporeSlot]:
        """Return the slots that move."""
        return [slot for slot in self.slots if slot.swappable]

    def planned(self) -> list[MindSporeSlot]:
        """Return the slots that move, or will once they are on the device."""
        return [slot for slot in self.slots if slot.swappable or slot.awaited]

    def keep(self, reason: str) -> None:
        """Let all of its states stay on the device; none has moved yet."""
        for slot in self.planned():
            slot.swappable, slot.awaited, slot.resident_reason = False, False, reason
