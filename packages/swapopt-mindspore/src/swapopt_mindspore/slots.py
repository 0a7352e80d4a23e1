"""The slots and units of a MindSpore optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from swapopt_common import SwapSlot, UpdateUnit
from swapopt_mindspore.device import Device
from swapopt_mindspore.streams import Event


@dataclass(eq=False, slots=True)
class MindSporeSlot(SwapSlot[Tensor, Event]):
    """A state tensor of a MindSpore optimizer.

    Attributes:
        parameter: the optimizer's own state; its name is the state's name in a checkpoint.
        dtype, device: of the state during an update; the device is None where nothing swaps.
        resident_reason: why the state does not swap; None for one that does.
    """

    parameter: Parameter = field(kw_only=True)
    dtype: mstype.Type = mstype.float32
    device: Device | None = None
    resident_reason: str | None = None

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
    """

    name: str = ""
    master: MindSporeSlot | None = None
    batch_index: int | None = None

    def swapped(self) -> list[MindSporeSlot]:
        """Return the slots that move."""
        return [slot for slot in self.slots if slot.swappable]
