"""Checkpoints that count steps per parameter, turned into ones that count per group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

StateDict: TypeAlias = dict[str, Any]  # torch's own type of a checkpoint


def count_per_group(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """Return a checkpoint with a count in every group and none in the states.

    A hook for ``register_load_state_dict_pre_hook``: it changes neither argument.

    Raises:
        ValueError: the parameters of a group without a count have counts that differ.
    """
    del optimizer
    state: dict[object, Mapping[str, Any]] = dict(state_dict["state"])
    groups = []
    for index, group in enumerate(state_dict["param_groups"]):
        counted = [n for n in group["params"] if n in state and "step" in state[n]]
        if "step" not in group:
            steps = {int(state[number]["step"]) for number in counted}
            groups.append({**group, "step": _common_step(steps, index)})
        else:
            groups.append(group)
        for number in counted:
            state[number] = {key: v for key, v in state[number].items() if key != "step"}
    return {**state_dict, "state": state, "param_groups": groups}


def _common_step(steps: set[int], index: int) -> int:
    if len(steps) > 1:
        raise ValueError(
            f"The checkpoint counts {min(steps)} to {max(steps)} steps for the parameters of "
            f"group {index}, but this AdamW counts once for the whole group. Set "
            f"state_dict['param_groups'][{index}]['step'] to the count to go on with."
        )
    return max(steps, default=0)
