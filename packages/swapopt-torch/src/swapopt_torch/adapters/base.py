"""What all Adam optimizers of torch have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, TypeAlias

import torch
from torch.optim import adam as torch_adam

from swapopt_common import OptimizerSwapAdapter, SwapConfigError, SwapOptimizerConfig
from swapopt_torch.layout import TorchUnit
from swapopt_torch.residency import find_shared_storages, make_slots

# torch's own type of a group: hyperparameters of any kind under their names.
ParamGroup: TypeAlias = dict[str, Any]

_MOMENT_KEYS = ("exp_avg", "exp_avg_sq")
_AMSGRAD_KEYS = (*_MOMENT_KEYS, "max_exp_avg_sq")


class TorchAdamBaseAdapter(OptimizerSwapAdapter[torch.optim.Optimizer, TorchUnit]):
    """Adam with or without decoupled weight decay, AMSGrad, and the fused kernel.

    Args:
        optimizer: the optimizer to serve; its groups and state stay its own.
        config: what the user wants swapped.
    """

    serves: ClassVar[str]
    """How messages call the optimizer class."""
    refused_flags: ClassVar[tuple[str, ...]]
    """Settings of a group that must not be True."""
    packed_by_default: ClassVar[bool] = True

    def __init__(self, optimizer: torch.optim.Optimizer, config: SwapOptimizerConfig) -> None:
        self._optimizer = optimizer
        self._config = config
        self._active: list[TorchUnit] = []
        self._registered: tuple[tuple[int, bool], ...] = ()
        self.units: list[TorchUnit] = []

    def validate(self) -> None:
        """Refuse groups and state keys that cannot be served."""
        groups = self._groups
        for index, group in enumerate(groups):
            self.refuse_group(group, f"param group {index}")
        for key in self._config.state_keys or ():
            if not any(key in _state_keys(group) for group in groups):
                raise SwapConfigError(
                    f"state_keys names {key!r}, which no parameter group of this {self.serves} "
                    f"has. It has {', '.join(_all_state_keys(groups))}"
                    f"{_MISSING_KEY_HINTS.get(key, '')}."
                )

    def refuse_group(self, group: Mapping[str, object], where: str) -> None:
        """Raise SwapConfigError if a group has a setting that cannot be swapped."""
        for flag in self.refused_flags:
            if group.get(flag):
                raise SwapConfigError(
                    f"{where} of {self.serves} has {flag}=True; swap_optimizer needs it False "
                    "(or None), because it updates the parameters batch by batch."
                )

    def register_units(self) -> list[TorchUnit]:
        """Make a unit for every parameter from the groups and the state as they are now.

        Raises:
            SwapConfigError: a parameter has some of the states its update needs, but not all.
        """
        states = self._optimizer.state
        known = {unit.param: {slot.name: slot for slot in unit.slots} for unit in self.units}
        params = [(i, j, p) for i, g in enumerate(self._groups) for j, p in enumerate(g["params"])]
        shared = find_shared_storages([states[p] for _, _, p in params if p in states])
        units = []
        for index, position, param in params:
            group = self._groups[index]
            state = states.get(param, {})
            name = _param_name(group, index, position)
            keys = _state_keys(group)
            _check_complete(state, keys, name)
            slots = make_slots(param, keys, state, self._config, shared, known.get(param, {}))
            units.append(
                TorchUnit(
                    adapter_index=index,
                    param=param,
                    slots=slots,
                    name=name,
                    device=param.device,
                    has_state=bool(state),
                )
            )
        self.units = units
        self._registered = self._signature()
        return units

    def registration_is_stale(self) -> bool:
        """Say whether what `register_units` found has changed: groups, AMSGrad, devices."""
        return self._signature() != self._registered or any(
            unit.param.device != unit.device for unit in self.units
        )

    def prepare_step(self) -> None:
        """Collect the gradients.

        Raises:
            SwapConfigError: a group was edited into something refused, or a gradient is sparse.
        """
        for index, group in enumerate(self._groups):
            self.refuse_group(group, f"param group {index}")
        active = []
        for unit in self.units:
            grad = unit.grad = unit.param.grad
            if grad is not None:
                if grad.layout is not torch.strided:
                    raise SwapConfigError(
                        f"{unit.name} has a gradient of layout {grad.layout}; {self.serves} "
                        "updates dense gradients only. Use sparse=False in its embedding."
                    )
                active.append(unit)
        self._active = active

    def iter_update_units(self) -> Sequence[TorchUnit]:
        """Return the units with a gradient."""
        return self._active

    def newcomers(self) -> list[TorchUnit]:
        """Return the units with a gradient and no state yet."""
        return [unit for unit in self._active if not unit.has_state]

    def create_state(self, unit: TorchUnit) -> None:
        """Put the unit's first states into the optimizer, as torch does at a first gradient.

        Swapped ones are the host mirrors; the others are zeros on the parameter's device.
        """
        group = self._groups[unit.adapter_index]
        state = self._optimizer.state[unit.param]
        state["step"] = self._first_step(unit.param, group)
        for slot in unit.slots:
            if not slot.swappable:
                slot.tensor = torch.zeros_like(unit.param, memory_format=torch.preserve_format)
            state[slot.name] = slot.tensor
        unit.has_state = True

    def expose_mirrors(self, unit: TorchUnit) -> None:
        """Let the optimizer's state hold the host mirrors of the unit's swapped states."""
        if unit.has_state:
            state = self._optimizer.state[unit.param]
            for slot in unit.swapped():
                state[slot.name] = slot.cpu_tensor

    def step_batch(self, batch: Sequence[TorchUnit]) -> None:
        """Update a batch with one functional call per parameter group in it."""
        for index, units in groupby(batch, key=lambda unit: unit.adapter_index):
            self._update(self._groups[index], list(units))

    def finish_step(self) -> None:
        """Do nothing: torch's Adam keeps nothing that belongs to the whole step."""

    def drop_gradients(self) -> None:
        """Forget this step's gradients, so that zero_grad frees them."""
        for unit in self._active:
            unit.grad = None
        self._active = []

    def _update(self, group: ParamGroup, units: Sequence[TorchUnit]) -> None:
        amsgrad = group["amsgrad"]
        beta1, beta2 = group["betas"]
        states = self._optimizer.state
        torch_adam.adam(
            [unit.param for unit in units],
            [unit.grad for unit in units if unit.grad is not None],
            [_tensor(unit, 0) for unit in units],
            [_tensor(unit, 1) for unit in units],
            [_tensor(unit, 2) for unit in units] if amsgrad else [],
            [states[unit.param]["step"] for unit in units],
            # None means torch's own choice, which is foreach: here it means one tensor at a time.
            foreach=False,
            fused=bool(group["fused"]),
            capturable=False,
            differentiable=False,
            has_complex=any(unit.param.is_complex() for unit in units),
            amsgrad=amsgrad,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )

    def _first_step(self, param: torch.Tensor, group: ParamGroup) -> torch.Tensor:
        # As torch keeps it: the fused kernel reads the counter on the device, the loop on the
        # host, where reading it costs nothing.
        if group["fused"]:
            return torch.zeros((), dtype=torch.float32, device=param.device)
        default = torch.get_default_dtype()
        dtype = default if default == torch.float64 else torch.float32
        return torch.tensor(0.0, dtype=dtype)

    def _signature(self) -> tuple[tuple[int, bool], ...]:
        return tuple((len(group["params"]), bool(group["amsgrad"])) for group in self._groups)

    @property
    def _groups(self) -> list[ParamGroup]:
        return self._optimizer.param_groups


_MISSING_KEY_HINTS = {
    "max_exp_avg_sq": "; max_exp_avg_sq needs amsgrad=True",
    "master_param": "; only MindFormers AdamW owns master parameters",
}


def _state_keys(group: Mapping[str, object]) -> tuple[str, ...]:
    return _AMSGRAD_KEYS if group["amsgrad"] else _MOMENT_KEYS


def _check_complete(state: Mapping[str, object], keys: Sequence[str], name: str) -> None:
    missing = [key for key in keys if key not in state]
    if state and missing:
        raise SwapConfigError(
            f"{name} has optimizer states {', '.join(state)} but not {', '.join(missing)}. AMSGrad "
            "must be chosen before the first step; set amsgrad=False or load a matching checkpoint."
        )


def _all_state_keys(groups: Sequence[ParamGroup]) -> tuple[str, ...]:
    return max((_state_keys(group) for group in groups), key=len, default=_MOMENT_KEYS)


def _param_name(group: ParamGroup, index: int, position: int) -> str:
    names = group.get("param_names")
    return str(names[position]) if names else f"param_groups[{index}]['params'][{position}]"


def _tensor(unit: TorchUnit, position: int) -> torch.Tensor:
    tensor = unit.slots[position].tensor
    assert tensor is not None, "a state exists before its parameter is updated"
    return tensor
