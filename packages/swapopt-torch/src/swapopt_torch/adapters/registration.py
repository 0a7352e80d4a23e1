"""What a parameter and its states must be like to become a unit, and whether they still are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from swapopt_common import SwapConfigError
from swapopt_torch.local_tensor import layout_of
from swapopt_torch.residency import holds_mirror
from swapopt_torch.units import TorchSlot, TorchUnit

# torch's own type of a group: hyperparameters of any kind under their names.
ParamGroup: TypeAlias = dict[str, Any]

_MOMENT_KEYS = ("exp_avg", "exp_avg_sq")
_AMSGRAD_KEYS = (*_MOMENT_KEYS, "max_exp_avg_sq")

MISSING_KEY_HINTS = {
    "max_exp_avg_sq": "; max_exp_avg_sq needs amsgrad=True",
    "master_param": "; only MindFormers AdamW owns master parameters",
}


def state_keys(group: Mapping[str, object]) -> tuple[str, ...]:
    """Return the states that the update of a group's parameters needs."""
    return _AMSGRAD_KEYS if group.get("amsgrad") else _MOMENT_KEYS


def all_state_keys(groups: Sequence[ParamGroup]) -> tuple[str, ...]:
    """Return the states that some group has."""
    return max((state_keys(group) for group in groups), key=len, default=_MOMENT_KEYS)


def param_name(group: ParamGroup, index: int, position: int) -> str:
    """Return what messages call a parameter: its own name, or its place."""
    names = group.get("param_names")
    return str(names[position]) if names else f"param_groups[{index}]['params'][{position}]"


def check_devices(param: torch.Tensor, slots: Sequence[TorchSlot], name: str) -> None:
    """Raise SwapConfigError if a state that does not swap is not with its parameter."""
    for slot in slots:
        if slot.swappable or slot.tensor is None or slot.tensor.device == param.device:
            continue
        raise SwapConfigError(
            f"{slot.name} of {name} is on {slot.tensor.device} and does not swap "
            f"({slot.resident_reason}); its update needs it on {param.device}. Move it there."
        )


def check_distinct(params: Sequence[torch.Tensor], serves: str) -> None:
    """Raise SwapConfigError if a parameter is there twice."""
    if len(set(params)) < len(params):
        raise SwapConfigError(
            f"This {serves} holds a parameter twice; its states would have two owners. Give every "
            "parameter to one group, once."
        )


def kind_of(param: torch.Tensor) -> tuple[object, ...]:
    """Return what a state born from the parameter takes over from it."""
    if is_lazy(param):
        return ()
    return (param.dtype, param.shape, param.stride(), layout_of(param))


def state_is_ours(unit: TorchUnit, state: Mapping[str, object] | None) -> bool:
    """Say whether the optimizer's state holds what the unit's slots hold."""
    if not state:
        return not unit.has_state
    return unit.has_state and all(
        holds_mirror(slot, state.get(slot.name))
        if slot.swappable
        else state.get(slot.name) is slot.tensor
        for slot in unit.slots
    )
