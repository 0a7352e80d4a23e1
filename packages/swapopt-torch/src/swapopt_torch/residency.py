"""Which states swap and which stay on their device, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn.parameter import is_lazy

from swapopt_common import SlotState, SwapOptimizerConfig
from swapopt_torch.local_tensor import are_alike, frame_of, holds_sums, layout_of, local_of
from swapopt_torch.units import TorchSlot, TorchUnit


def make_slots(
    param: torch.Tensor,
    keys: Sequence[str],
    state: Mapping[str, torch.Tensor],
    config: SwapOptimizerConfig,
    shared_storages: frozenset[int],
    known: Mapping[str, TorchSlot],
) -> list[TorchSlot]:
    """Make the slots of one parameter, one per key, in order.

    Args:
        param: the parameter; a state that does not exist yet will have its shape and dtype.
        keys: the state keys its update needs.
        state: the states that exist already.
        config: which keys swap, and from what size on.
        shared_storages: storages that more than one state lies in (see `find_shared_storages`).
        known: slots the parameter had before; one whose mirror is still its state is kept.

    Returns:
        Slots that are PENDING (the state does not exist), DEVICE (it does, outside a mirror), or
        kept as they were.
    """
    slots = []
    for key in keys:
        tensor, old = state.get(key), known.get(key)
        if old is not None and _fits(old, tensor, param):
            slots.append(old if holds_mirror(old, tensor) else _refilled(old, tensor))
        else:
            slots.append(_make_slot(param, key, tensor, config, shared_storages))
    return slots


def kept_resident(unit: TorchUnit, state: Mapping[str, torch.Tensor], reason: str) -> TorchUnit:
    """Return the unit with all its states staying on their device; none has host memory."""
    slots = [
        replace(
            slot,
            tensor=state.get(slot.name),
            swappable=False,
            resident_reason=reason,
            frame=None,
        )
        if slot.swappable
        else slot
        for slot in unit.slots
    ]
    return replace(unit, slots=slots)


def holds_mirror(slot: TorchSlot, value: object) -> bool:
    """Say whether a state is the slot's host mirror, and still lies where it was made."""
    mirror, exposed = slot.cpu_tensor, slot.exposed
    return (
        mirror is not None
        and exposed is not None
        and value is exposed
        and local_of(exposed) is mirror
        and mirror.data_ptr() == slot.host_address
    )


def _fits(slot: TorchSlot, tensor: torch.Tensor | None, param: torch.Tensor) -> bool:
    """Say whether a state fits the host memory that its slot has."""
    return (
        tensor is not None
        and slot.region is not None
        and slot.state is SlotState.HOST
        and (holds_mirror(slot, tensor) or not slot.region.is_lent)
        and slot.exposed is not None
        and are_alike(slot.exposed, tensor)
        and slot.device == local_of(param).device
        and slot.dtype == tensor.dtype
    )


def _refilled(slot: TorchSlot, tensor: torch.Tensor | None) -> TorchSlot:
    """Return a slot over the same host memory for a state that somebody put in its place."""
    assert slot.region is not None and tensor is not None, "a slot with host memory is refilled"
    local = local_of(tensor)
    refilled = replace(slot, tensor=local, state=SlotState.DEVICE, event=None)
    refilled.live_in(slot.region)
    return refilled


def find_shared_storages(states: Sequence[Mapping[str, object]]) -> frozenset[int]:
    """Return the identities of storages that more than one of the state tensors lies in."""
    uses = Counter(
        _storage_identity(local_of(value))
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    return frozenset(identity for identity, count in uses.items() if count > 1)


def _storage_identity(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _make_slot(
    param: torch.Tensor,
    key: str,
    tensor: torch.Tensor | None,
    config: SwapOptimizerConfig,
    shared_storages: frozenset[int],
) -> TorchSlot:
    if is_lazy(param):
        return TorchSlot(name=key, swappable=False, resident_reason="not initialised yet")
    like = param if tensor is None else tensor
    reason = _selection_reason(key, param, like, config) or _sharding_reason(param, like)
    frame = None
    device = local_of(param).device
    if reason is None:
        if tensor is not None and local_of(tensor).device == device:
            reason = _existing_reason(local_of(tensor), shared_storages)
            frame = frame_of(tensor)
        else:
            # Not there yet; or on the host while its parameter is on a device (just loaded, or
            # moved by hand), and then it is taken over whatever storage it lies in.
            born = _born_like(param)
            reason = None if local_of(born).is_contiguous() else "not contiguous"
            frame = frame_of(born)
    local = local_of(like)
    return TorchSlot(
        name=key,
        tensor=tensor if tensor is None or reason is not None else local,
        storage_nbytes=local.numel() * local.element_size(),
        swappable=reason is None,
        state=SlotState.PENDING if tensor is None else SlotState.DEVICE,
        shape=tuple(local.shape),
        dtype=local.dtype,
        device=device,
        numel=local.numel(),
        resident_reason=reason,
        frame=frame,
    )


def _selection_reason(
    key: str, param: torch.Tensor, like: torch.Tensor, config: SwapOptimizerConfig
) -> str | None:
    selected = config.state_keys is None or key in config.state_keys
    numel = local_of(like).numel()
    device_type = local_of(param).device.type
    obstacles = {
        "not selected by state_keys": not selected,
        "on the CPU": device_type == "cpu",
        "on the meta device": device_type == "meta",
        "not floating point": not like.is_floating_point(),
        "empty": numel == 0,
        f"smaller than min_numel={config.min_numel}": numel < config.min_numel,
        "a tensor subclass": _is_subclass(param) or _is_subclass(like),
    }
    return next((reason for reason, found in obstacles.items() if found), None)


def _is_subclass(tensor: torch.Tensor) -> bool:
    return type(local_of(tensor)) not in (torch.Tensor, torch.nn.Parameter)


def _sharding_reason(param: torch.Tensor, like: torch.Tensor) -> str | None:
    if holds_sums(param):
        return "a DTensor of sums that are yet to be reduced"
    return None if layout_of(param) == layout_of(like) else "sharded unlike its parameter"


def _born_like(param: torch.Tensor) -> torch.Tensor:
    """Return, without memory, what a state is born as: torch decides its strides here."""
    return torch.empty_like(param, device="meta", memory_format=torch.preserve_format)


def _existing_reason(tensor: torch.Tensor, shared_storages: frozenset[int]) -> str | None:
    if not tensor.is_contiguous():
        return "not contiguous"
    storage = tensor.untyped_storage()
    alone = tensor.storage_offset() == 0 and storage.nbytes() == tensor.nbytes
    if not alone or _storage_identity(tensor) in shared_storages:
        return "shares its storage"
    return None
