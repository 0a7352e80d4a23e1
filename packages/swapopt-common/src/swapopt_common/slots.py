"""What is swapped: slots (one optimizer state tensor each) and update units (one parameter each).

The types are generic over the framework's tensor and event types, so that this package needs
neither framework.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


class SlotState(str, Enum):
    """Where the only valid value of a swappable state is.

    PENDING: nowhere yet; the state is born, as zeros on the host, with its first gradient.
    HOST:    in the host mirror; the device holds no byte of it.
    H2D:     in the host mirror, and a copy to the device has been issued.
    DEVICE:  on the device (during an update, or a state that never swaps).
    D2H:     on the device, and a copy to the host mirror has been issued.
    """

    PENDING = "pending"
    HOST = "host"
    H2D = "h2d"
    DEVICE = "device"
    D2H = "d2h"


_SUCCESSORS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.PENDING: frozenset({SlotState.HOST}),
    SlotState.HOST: frozenset({SlotState.H2D}),
    # Back to HOST without an update: the copy failed or the step was abandoned; the mirror holds.
    SlotState.H2D: frozenset({SlotState.DEVICE, SlotState.HOST}),
    SlotState.DEVICE: frozenset({SlotState.D2H}),
    # Back to DEVICE: the copy could not be issued, the device still holds the only value.
    SlotState.D2H: frozenset({SlotState.HOST, SlotState.DEVICE}),
}


# eq=False: slots are identities (two states may hold equal values), and stay hashable.
@dataclass(eq=False, slots=True)
class SwapSlot(Generic[TensorT, EventT]):
    """One optimizer state tensor that may be swapped.

    Attributes:
        name: the state's key, e.g. ``"exp_avg"``.
        tensor: what the update reads and writes now: the host mirror between steps, the device
            tensor (or staging view) during an update. ``None`` while PENDING.
        cpu_tensor: the host mirror; ``None`` for a state that never swaps.
        storage_nbytes: bytes of device storage the state needs during an update.
        swappable: False for a state that stays resident on its device.
        state: see `SlotState`; changed by `move_slots` only.
        event: the last copy's event: whoever reads what that copy wrote waits for it.
        shape, dtype, device, numel: of the (local) state tensor; the device is the one that
            updates it.
        host_offset: element offset of the mirror in its host region.
        packed: moved through the staging arenas rather than through a storage of its own.
        logical_tensor: the wrapper the optimizer sees when ``tensor`` is only its local part.
    """

    name: str
    tensor: TensorT | None = None
    cpu_tensor: TensorT | None = None
    storage_nbytes: int = 0
    swappable: bool = True
    state: SlotState = SlotState.DEVICE
    event: EventT | None = None
    shape: tuple[int, ...] = ()
    dtype: object | None = None
    device: object | None = None
    numel: int = 0
    host_offset: int = 0
    packed: bool = False
    logical_tensor: TensorT | None = None


class _Sized(Protocol):
    """What a unit needs to know of a slot in order to be partitioned."""

    swappable: bool
    storage_nbytes: int


SlotT = TypeVar("SlotT", bound=_Sized)


@dataclass(eq=False, slots=True)
class UpdateUnit(Generic[TensorT, SlotT]):
    """One parameter with everything its update needs; the pipeline never splits a unit.

    Attributes:
        adapter_index: torch: the index of the parameter's group; MindSpore: the index of the
            parameter in the optimizer's list.
        param: the parameter.
        grad: its gradient in this step, ``None`` where it has none.
        slots: every state the update needs, in the optimizer's own order, swappable or not.
    """

    adapter_index: int
    param: TensorT
    grad: TensorT | None = None
    slots: list[SlotT] = field(default_factory=list)

    @property
    def swappable_nbytes(self) -> int:
        """Bytes of this unit's states that move in a step."""
        return sum(slot.storage_nbytes for slot in self.slots if slot.swappable)


def move_slots(
    slots: Iterable[SwapSlot[TensorT, EventT]], to: SlotState, event: EventT | None = None
) -> None:
    """Move slots to their next state; the one place where ``SwapSlot.state`` changes.

    Args:
        slots: the slots to move.
        to: their new state.
        event: the event after which that state is true, if it is not true at once.

    Raises:
        AssertionError: a slot cannot go from its present state to ``to`` (a fault of swapopt).
    """
    for slot in slots:
        if to not in _SUCCESSORS[slot.state]:
            raise AssertionError(f"slot {slot.name}: {slot.state.value} -> {to.value} is no step")
        slot.state = to
        slot.event = event
