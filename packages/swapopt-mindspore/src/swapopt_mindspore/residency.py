"""Which states swap and which stay on their device, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mindspore import Parameter, Tensor

from swapopt_mindspore.device import Device
from swapopt_mindspore.local_tensor import local_part
from swapopt_mindspore.slots import MindSporeSlot


@dataclass(frozen=True)
class Surroundings:
    """What decides about a state, beside the state itself.

    Attributes:
        device: the device that swaps, if any.
        min_numel: from how many elements on a state swaps.
        shared_storages: see `find_shared_storages`.
    """

    device: Device | None
    min_numel: int
    shared_storages: frozenset[int]


def find_shared_storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Return the addresses of storages that more than one of the tensors lies in."""
    distinct = {id(tensor): tensor for tensor in tensors}
    uses = Counter(_storage_address(local_part(tensor)) for tensor in distinct.values())
    return frozenset(address for address, count in uses.items() if count > 1)


def make_slot(
    key: str, parameter: Parameter, unselected: str | None, around: Surroundings
) -> MindSporeSlot:
    """Make the slot of one state; its valid value is where the optimizer keeps it.

    Args:
        key: the state's key.
        parameter: the optimizer's own state.
        unselected: why the user's configuration leaves the state alone; None if it does not.
        around: what else decides.
    """
    tensor = local_part(parameter)
    reason = unselected or _resident_reason(tensor, around)
    return MindSporeSlot(
        name=key,
        tensor=tensor,
        storage_nbytes=tensor.nbytes,
        swappable=reason is None,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        device=around.device,
        numel=tensor.size,
        logical_tensor=None if tensor is parameter else parameter,
        parameter=parameter,
        resident_reason=reason,
        awaited=_is_awaited(reason, around.device),
    )


def appeared(slot: MindSporeSlot, around: Surroundings) -> bool:
    """Let a resident state swap whose device storage has appeared since; return whether it does.

    MindSpore gives some states their device storage with their first update only.
    """
    if not slot.awaited:
        return False
    slot.resident_reason = _resident_reason(slot.operand(), around)
    slot.awaited = _is_awaited(slot.resident_reason, around.device)
    slot.swappable = slot.resident_reason is None
    return slot.swappable


def _resident_reason(tensor: Tensor, around: Surroundings) -> str | None:
    device = around.device
    if device is None:
        return "on the CPU"
    size_and_kind = {
        "not floating point": not tensor.is_floating_point(),
        "empty": tensor.size == 0,
        f"smaller than min_numel={around.min_numel}": tensor.size < around.min_numel,
        _not_on(device): not device.holds(tensor),
    }
    reason = next((reason for reason, found in size_and_kind.items() if found), None)
    return reason or _storage_reason(tensor, around.shared_storages)


def _not_on(device: Device) -> str:
    return f"not on {device.name}"


def _is_awaited(reason: str | None, device: Device | None) -> bool:
    return device is not None and reason == _not_on(device)


def _storage_reason(tensor: Tensor, shared_storages: frozenset[int]) -> str | None:
    if not tensor.is_contiguous():
        return "not contiguous"
    storage_nbytes: int = tensor.untyped_storage().nbytes()
    alone = tensor.storage_offset() == 0 and storage_nbytes == tensor.nbytes
    if not alone or _storage_address(tensor) in shared_storages:
        return "shares its storage"
    return None


def _storage_address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address
