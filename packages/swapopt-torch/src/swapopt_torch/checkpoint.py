"""state_dict and load_state_dict in torch's own format, from and to host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import torch

from swapopt_common import SwapConfigError
from swapopt_torch.adapters.base import ParamGroup, TorchAdamBaseAdapter
from swapopt_torch.layout import TorchSlot

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
            numbers.get(param, param): {
                key: _snapshot(value, lend) for key, value in entries.items()
            }
            for param, entries in state.items()
        },
        "param_groups": [
            {key: deepcopy(value) for key, value in group.items() if key != "params"}
            | {"params": [numbers[param] for param in group["params"]]}
            for group in groups
        ],
    }


def _snapshot(value: object, lend: Callable[[torch.Tensor], torch.Tensor | None]) -> object:
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    lent = lend(value)
    if lent is not None:
        return lent
    if value.dim() == 0:
        return value.detach().clone()
    return value.detach().to("cpu", copy=True)


def load(
    adapter: TorchAdamBaseAdapter, groups: Sequence[ParamGroup], saved: StateDict
) -> tuple[OptimizerState, list[ParamGroup]]:
    """Return the state and groups that loading ``saved`` leads to.

    Values for states that swap are written into their host mirrors where these fit, and are host
    tensors elsewhere; nothing of them is put on a device. All others go where torch puts them.

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
        _check_states(unit.param, unit.name, saved["state"].get(number, {}))
    state: OptimizerState = defaultdict(dict)
    for number, entries in saved["state"].items():
        unit = by_number.get(number)
        if unit is None:
            state[number] = entries
            continue
        slots = {slot.name: slot for slot in unit.slots}
        fused = bool(saved_groups[unit.adapter_index].get("fused"))
        state[unit.param] = {
            key: _place(unit.param, slots.get(key), key, value, fused=fused)
            for key, value in entries.items()
        }
    return state, [_merge(old, new) for old, new in zip(groups, saved_groups, strict=True)]


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
    for key, value in entries.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != param.shape:
            raise SwapConfigError(
                f"{key} of {name} has shape {tuple(value.shape)} in the checkpoint; the parameter "
                f"has shape {tuple(param.shape)}."
            )


def _place(
    param: torch.Tensor, slot: TorchSlot | None, key: str, value: object, *, fused: bool
) -> object:
    """Put one loaded value where it belongs, with the dtype torch would give it."""
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    if key == "step":
        return value.to(torch.float32, copy=True).to(param.device) if fused else value.clone()
    dtype = param.dtype if param.is_floating_point() else value.dtype
    if slot is None or not slot.swappable:
        return value.to(param.device, dtype, copy=True)
    in_place = slot.region is not None and not slot.region.is_lent and slot.dtype == dtype
    if in_place and slot.cpu_tensor is not None:
        return slot.cpu_tensor.copy_(value)
    return value.to("cpu", dtype)


def _merge(group: ParamGroup, saved: ParamGroup) -> ParamGroup:
    merged = {**saved, "params": group["params"]}
    if "param_names" in group:
        merged.setdefault("param_names", group["param_names"])
    return merged
