"""What all Adam optimizers of torch have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import ClassVar

import torch

from swapopt_common import OptimizerSwapAdapter, SwapConfigError, SwapOptimizerConfig
from swapopt_torch.adapters.operands import Operands, may_be_cut, operands_of
from swapopt_torch.adapters.registration import (
    MISSING_KEY_HINTS,
    ParamGroup,
    all_state_keys,
    check_devices,
    check_distinct,
    kind_of,
    param_name,
    state_is_ours,
    state_keys,
)
from swapopt_torch.local_tensor import is_dtensor, local_of
from swapopt_torch.residency import find_shared_storages, make_slots
from swapopt_torch.units import Share, TorchSlot, TorchUnit


class TorchAdamBaseAdapter(OptimizerSwapAdapter[torch.optim.Optimizer, TorchUnit, Share]):
    """Adam with or without decoupled weight decay and AMSGrad: its parameters as units.

    Args:
        optimizer: the optimizer to serve; its groups and state stay its own.
        config: what the user wants swapped.

    Attributes:
        units: one per parameter, in the optimizer's order.
        grad_scale, found_inf: what a GradScaler gave for this step, each one element on a device.
    """

    serves: ClassVar[str]
    """How messages call the optimizer class."""
    refused_flags: ClassVar[Mapping[str, str]] = {}
    """Settings of a group that must not be True, and why."""
    further_keys: ClassVar[tuple[str, ...]] = ()
    """What a state holds beside the moments."""
    packed_by_default: ClassVar[bool] = True

    def __init__(self, optimizer: torch.optim.Optimizer, config: SwapOptimizerConfig) -> None:
        self._optimizer = optimizer
        self._config = config
        self._active: list[TorchUnit] = []
        self._not_to_cut: set[torch.Tensor] = set()
        self._registered: list[tuple[object, ...]] | None = None
        self.units: list[TorchUnit] = []
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None

    @abstractmethod
    def first_entries(self, unit: TorchUnit, group: ParamGroup) -> dict[str, torch.Tensor]:
        """Return what torch keeps beside the moments in the state of a first gradient."""

    @abstractmethod
    def update(self, group: ParamGroup, operands: Operands) -> None:
        """Call the optimizer's functional update on parameters of one group."""

    def validate(self) -> None:
        """Refuse groups and state keys that cannot be served."""
        for index, group in enumerate(self._groups):
            self.refuse_group(group, f"param group {index}")
        for key in self._config.state_keys or ():
            if not any(key in state_keys(group) for group in self._groups):
                raise SwapConfigError(
                    f"state_keys names {key!r}, which no parameter group of this {self.serves} "
                    f"has. It has {', '.join(all_state_keys(self._groups))}"
                    f"{MISSING_KEY_HINTS.get(key, '')}."
                )

    def refuse_group(self, group: Mapping[str, object], where: str) -> None:
        """Raise SwapConfigError if a group has a setting that cannot be swapped."""
        for flag, reason in self.refused_flags.items():
            if group.get(flag):
                raise SwapConfigError(
                    f"{where} of {self.serves} has {flag}=True; swap_optimizer needs it False "
                    f"(or None): {reason}."
                )

    def check_complete(self, state: Mapping[str, object], group: ParamGroup, name: str) -> None:
        """Raise SwapConfigError if a state has some of what its update needs, but not all."""
        needed = (*self.further_keys, *state_keys(group))
        missing = [key for key in needed if key not in state]
        if state and len(missing) == len(needed):
            raise SwapConfigError(
                f"{name} has the states {', '.join(map(str, state))}: those of another optimizer. "
                f"{self.serves} needs {', '.join(needed)}."
            )
        if state and missing:
            raise SwapConfigError(
                f"{name} has optimizer states {', '.join(map(str, state))} but not "
                f"{', '.join(missing)}. AMSGrad must be chosen before the first step; set "
                "amsgrad=False or load a matching checkpoint."
            )

    def register_units(self) -> list[TorchUnit]:
        """Make a unit for every parameter from the groups and the state as they are now.

        Raises:
            SwapConfigError: a parameter is there twice, has some of the states its update needs
                but not all, or has one that cannot swap on another device.
        """
        states = self._optimizer.state
        known = {unit.param: {slot.name: slot for slot in unit.slots} for unit in self.units}
        params = [(i, j, p) for i, g in enumerate(self._groups) for j, p in enumerate(g["params"])]
        shared = find_shared_storages([states[p] for _, _, p in params if p in states])
        check_distinct([param for _, _, param in params], self.serves)
        units = []
        for index, position, param in params:
            group = self._groups[index]
            state = states.get(param, {})
            name = param_name(group, index, position)
            keys = state_keys(group)
            self.check_complete(state, group, name)
            slots = make_slots(param, keys, state, self._config, shared, known.get(param, {}))
            check_devices(param, slots, name)
            unit = TorchUnit(
                adapter_index=index,
                param=param,
                slots=slots,
                name=name,
                device=local_of(param).device,
                is_dtensor=is_dtensor(param),
                has_state=bool(state),
                kind=kind_of(param),
            )
            unit.is_divisible = param not in self._not_to_cut and may_be_cut(unit)
            units.append(unit)
        self.units = units
        self._registered = self._signature()
        return units

    def registration_is_stale(self) -> bool:
        """Say whether what `register_units` found has been changed by others since.

        Groups with other parameters or AMSGrad switched, and for the parameters of this step:
        models that moved or, before the first gradient, changed dtype or layout; states that were
        put in place of ours or taken away. Also tensors that cannot be updated range by range any
        more, of a parameter that is: it will not be cut again.
        """
        not_to_cut = {u.param for u in self._active if u.is_cut and not may_be_cut(u)}
        self._not_to_cut |= not_to_cut
        states = self._optimizer.state
        return (
            bool(not_to_cut)
            or self._signature() != self._registered
            or any(
                local_of(unit.param).device != unit.device
                or not state_is_ours(unit, states.get(unit.param))
                or (not unit.has_state and unit.kind != kind_of(unit.param))
                for unit in self._active
            )
        )

    def invalidate(self) -> None:
        """Trust nothing that is registered: something failed half-way."""
        self._registered = None

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
        for slot in unit.slots:
            if not slot.swappable:
                slot.tensor = torch.zeros_like(unit.param, memory_format=torch.preserve_format)
        entries = self.first_entries(unit, self._groups[unit.adapter_index])
        for slot in unit.slots:
            state = slot.exposed if slot.swappable else slot.tensor
            assert state is not None, "made here, or given host memory before"
            entries[slot.name] = state
        # All at once: a state with some of its entries would be of no use to anybody.
        self._optimizer.state[unit.param] = entries
        unit.has_state = True

    def expose_mirrors(self, unit: TorchUnit) -> None:
        """Let the optimizer's state hold the host mirrors of the unit's swapped states."""
        if unit.has_state:
            state = self._optimizer.state[unit.param]
            for slot in unit.swapped():
                state[slot.name] = slot.exposed

    def mirrors(self) -> dict[int, TorchSlot]:
        """Return the slots that have host mirrors, by the identity of what the state holds."""
        return {
            id(slot.exposed): slot
            for unit in self.units
            for slot in unit.slots
            if slot.exposed is not None
        }

    def restore_states(self) -> None:
        """Put device tensors with the mirrors' values into the optimizer's state, for good."""
        states = self._optimizer.state
        restored = [
            (unit, slot, slot.framed(slot.cpu_tensor.to(slot.device)))
            for unit in self.units
            for slot in unit.swapped()
            if slot.cpu_tensor is not None
            and states.get(unit.param, {}).get(slot.name) is slot.exposed
        ]
        for unit, slot, tensor in restored:
            states[unit.param][slot.name] = tensor

    def step_batch(self, batch: Sequence[Share]) -> None:
        """Update a batch with one functional call per parameter group in it.

        A second one follows for DTensors that cannot be updated by their local tensors alone.
        """
        for index, shares in groupby(batch, key=lambda share: share.unit.adapter_index):
            for operands in operands_of(list(shares)):
                self.update(self._groups[index], operands)

    def finish_step(self) -> None:
        """Do nothing: torch's Adam keeps nothing that belongs to the whole step."""

    def drop_gradients(self) -> None:
        """Forget this step's gradients and what came with them, so that zero_grad frees them."""
        for unit in self._active:
            unit.grad = None
        self._active = []
        self.grad_scale = self.found_inf = None

    def _signature(self) -> list[tuple[object, ...]]:
        return [(bool(group["amsgrad"]), *map(id, group["params"])) for group in self._groups]

    @property
    def _groups(self) -> list[ParamGroup]:
        return self._optimizer.param_groups
