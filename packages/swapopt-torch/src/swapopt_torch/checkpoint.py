"""state_dict and load_state_dict in torch's own format, from and to host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from swapopt_common import STATE_KEYS, SwapConfigError
from swapopt_torch.adapters.base import TorchAdamBaseAdapter
from swapopt_torch.adapters.registration import ParamGroup
from swapopt_torch.local_tensor import is_dtensor, layout_of, local_of, mesh_of
from swapopt_torch.units import TorchSlot

StateDict: TypeAlias = dict[str, Any]  # torch's own type of a checkpoint
ParamState: TypeAlias = dict[str, Any]
OptimizerState: TypeAlias = "defaultdict[torch.Tensor, ParamState]"


def save(
    groups: Sequence[ParamGroup],
    state: Mapping[torch.Tensor, ParamState],
    lend: Callable[[torch.Tensor], torch.Tensor | None],
) -> StateDict:
    """Return a snapshot: parameters by number, states in host memory.

    Args:
        groups: the parameter groups; hyperparameters are copied.
        state: the optimizer's state, its offloads complete.
        lend: returns a tensor over a host mirror's memory that stays as it is, and None for a
            tensor that is no host mirror, which is then copied.
    """
    numbers: dict[torch.Tensor, int] = {}
    for group in groups:
        for param in group["params"]:
            numbers.setdefault(param, len(numbers))
    return {
        "state": {
            # torch keeps what users put beside the parameters' states as it is.
            numbers.get(param, param): _snapshot_entries(entries, lend)
            for param, entries in state.items()
        },
        "param_groups": [
            {key: deepcopy(value) for key, value in group.items() if key != "params"}
            | {"params": [numbers[param] for param in group["params"]]}
            for group in groups
        ],
    }


def _snapshot_entries(
    entries: object, lend: Callable[[torch.Tensor], torch.Tensor | None]
) -> object:
    if not isinstance(entries, dict):
        return deepcopy(entries)
    return {key: _snapshot(value, lend) for key, value in entries.items()}


def _snapshot(value: object, lend: Callable[[torch.Tensor], torch.Tensor | None]) -> object:
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    lent = lend(value)
    if lent is not None:
        return lent
    return value.detach().to("cpu", copy=True)


@dataclass
class Loaded:
    """What a checkpoint leads to.

    Attributes:
        state: the state to take over: host mirrors where these fit, host tensors for other states
            that swap, and all others where torch puts them.
        groups: the groups to take over.
        fills: the mirrors and the values they are to hold; not written yet, so that nothing has
            changed when taking over fails.
    """

    state: OptimizerState
    groups: list[ParamGroup]
    fills: list[tuple[torch.Tensor, torch.Tensor]]


def check_is_one(saved: object) -> None:
    """Raise SwapConfigError if something is no optimizer's checkpoint at all."""
    if isinstance(saved, Mapping) and "state" in saved and "param_groups" in saved:
        return
    found = (
        f"a mapping with the keys {', '.join(map(repr, list(saved)[:5])) or 'none'}"
        if isinstance(saved, Mapping)
        else type(saved).__name__
    )
    raise SwapConfigError(
        "load_state_dict takes what an optimizer's state_dict() returned, with the keys "
        f"'state' and 'param_groups'; found {found}."
    )


def load(adapter: TorchAdamBaseAdapter, groups: Sequence[ParamGroup], saved: StateDict) -> Loaded:
    """Work out what loading ``saved`` leads to; nothing that swaps is put on a device.

    Args:
        adapter: knows which states swap.
        groups: the optimizer's groups as they are.
        saved: a checkpoint of this optimizer, or of the one it wraps.

    Raises:
        SwapConfigError: groups, parameters, keys or shapes disagree; nothing has changed.
    """
    saved_groups = [dict(group) for group in deepcopy(saved["param_groups"])]
    _check_groups(adapter, groups, saved_groups)
    numbers = [number for group in saved_groups for number in group["params"]]
    by_number = dict(zip(numbers, adapter.units, strict=True))
    for number, unit in by_number.items():
        entries = saved["state"].get(number, {})
        _check_states(unit.param, unit.name, entries)
        adapter.check_complete(entries, saved_groups[unit.adapter_index], unit.name)
    state: OptimizerState = defaultdict(dict)
    fills: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, entries in saved["state"].items():
        unit = by_number.get(number)
        if unit is None:
            state[number] = entries
            continue
        slots = {slot.name: slot for slot in unit.slots}
        fused = bool(saved_groups[unit.adapter_index].get("fused"))
        for key, value in entries.items():
            slot = slots.get(key)
            if slot is not None and _is_mirror(slot, unit.param, value):
                state[unit.param][key] = slot.exposed
            elif slot is not None and _fits_mirror(slot, unit.param, value):
                assert slot.cpu_tensor is not None, "it has a region"
                fills.append((slot.cpu_tensor, local_of(value)))
                state[unit.param][key] = slot.exposed
            else:
                state[unit.param][key] = _place(unit.param, slot, key, value, fused=fused)
    merged = [_merge(old, new) for old, new in zip(groups, saved_groups, strict=True)]
    return Loaded(state, merged, fills)


def _check_groups(
    adapter: TorchAdamBaseAdapter, groups: Sequence[ParamGroup], saved: Sequence[ParamGroup]
) -> None:
    here = [len(group["params"]) for group in groups]
    there = [len(group["params"]) for group in saved]
    if here != there:
        raise SwapConfigError(
            f"The checkpoint has parameter groups of sizes {there}, this optimizer of sizes "
            f"{here}; they must be the same. Build the optimizer as it was when it was saved."
        )
    for index, group in enumerate(saved):
        adapter.refuse_group(group, f"param group {index} of the checkpoint")


def _check_states(param: torch.Tensor, name: str, entries: Mapping[str, object]) -> None:
    for key in STATE_KEYS:
        value = entries.get(key, param)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise SwapConfigError(
                f"{key} of {name} is no dense tensor in the checkpoint but {type(value).__name__}."
            )
        if value.device.type == "meta":
            raise SwapConfigError(
                f"{key} of {name} is on the meta device in the checkpoint and has no values. Load "
                'it with map_location="cpu".'
            )
        if value.shape != param.shape:
            raise SwapConfigError(
                f"{key} of {name} has shape {tuple(value.shape)} in the checkpoint; the parameter "
                f"has shape {tuple(param.shape)}."
            )
        if is_dtensor(value) != is_dtensor(param):
            raise SwapConfigError(
                f"{key} of {name} is {_kind(value)} in the checkpoint; the parameter is "
                f"{_kind(param)}. Load it with set_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict, which makes one of the other."
            )
        if mesh_of(value) != mesh_of(param):
            raise SwapConfigError(
                f"{key} of {name} is on {_mesh_name(value)} in the checkpoint; the parameter is on "
                f"{_mesh_name(param)}, and torch updates DTensors of one mesh only. Save and load "
                "with torch.distributed.checkpoint, which takes states from one mesh to another."
            )


def _kind(tensor: torch.Tensor) -> str:
    return "a DTensor" if is_dtensor(tensor) else "no DTensor"


def _mesh_name(tensor: torch.Tensor) -> str:
    """Return all that makes meshes equal for torch; a mesh's own text leaves the ranks out."""
    mesh = mesh_of(tensor)
    assert mesh is not None, "tensors without a mesh do not differ in it"
    names = "" if mesh.mesh_dim_names is None else f" named {mesh.mesh_dim_names}"
    return f"a {mesh.device_type} mesh of ranks {mesh.mesh.tolist()}{names}"


def _place(
    param: torch.Tensor, slot: TorchSlot | None, key: str, value: object, *, fused: bool
) -> object:
    """Put one loaded value where it belongs, with the dtype torch would give it."""
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    if key == "step":
        return value.to(torch.float32, copy=True).to(param.device) if fused else value.clone()
    dtype = _loaded_dtype(param, value)
    if slot is None or not slot.swappable or layout_of(value) != layout_of(param):
        return value.to(param.device, dtype, copy=True)
    return value.to("cpu", dtype)


def _is_mirror(slot: TorchSlot, param: torch.Tensor, value: torch.Tensor) -> bool:
    """Say whether a loaded value lies in the slot's host mirror already.

    So does one of a snapshot of this optimizer that a checkpoint was read into.
    """
    mirror, local = slot.cpu_tensor, local_of(value)
    return (
        mirror is not None
        and local.device == mirror.device
        and local.data_ptr() == slot.host_address
        and local.dtype == mirror.dtype == _loaded_dtype(param, value)
        and local.stride() == mirror.stride()
        and layout_of(value) == layout_of(param)
    )


def _fits_mirror(slot: TorchSlot, param: torch.Tensor, value: torch.Tensor) -> bool:
    """Say whether a loaded value can go into the slot's host mirror: nobody else looks at it."""
    return (
        slot.region is not None
        and not slot.region.is_lent
        and slot.dtype == _loaded_dtype(param, value)
        and layout_of(value) == layout_of(param)
    )


def _loaded_dtype(param: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    # torch's rule: states take the dtype of a floating-point parameter.
    return param.dtype if param.is_floating_point() else value.dtype


def _merge(group: ParamGroup, saved: ParamGroup) -> ParamGroup:
    merged = {**saved, "params": group["params"]}
    if "param_names" in group:
        merged.setdefault("param_names", group["param_names"])
    return merged
