"""HyperParallel's AdamW and ours: one step count per parameter group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import torch

from swapopt_common import SwapConfigError, SwapOptimizerConfig
from swapopt_torch.adapters.adam import own_step
from swapopt_torch.adapters.base import TorchAdamBaseAdapter
from swapopt_torch.adapters.operands import Operands
from swapopt_torch.adapters.registration import ParamGroup
from swapopt_torch.optim import AdamW, adamw
from swapopt_torch.optim.adamw import Settings, StepOnDevices, launch
from swapopt_torch.units import TorchUnit

# Modules with a class AdamW and the functional adamw it calls. HyperParallel's may be absent: an
# optimizer of it can only exist once somebody else has imported it.
_HOMES = (AdamW.__module__, "hyper_parallel.core.optimizer.adamw")


class TorchHyperAdamWAdapter(TorchAdamBaseAdapter):
    """Serves swapopt_torch.optim.AdamW and hyper_parallel.core.optimizer.adamw.AdamW.

    A group's count advances with the first update of some of its parameters: not at all in a
    step that fails before or in that update, once in every other step, however many batches the
    group is in. (An interrupt just between the kernel and the count leaves the count one behind.)
    """

    serves = "swapopt_torch.optim.AdamW (HyperParallel's AdamW)"

    def __init__(self, optimizer: torch.optim.Optimizer, config: SwapOptimizerConfig) -> None:
        super().__init__(optimizer, config)
        home = _home_of(optimizer)
        assert home is not None, "made for what it matches"
        self._home = home
        self._begun: dict[int, tuple[Settings, StepOnDevices]] = {}

    @classmethod
    def matches(cls, optimizer: object) -> bool:
        """Accept the classes, and subclasses that leave their update alone."""
        home = _home_of(optimizer)
        if home is None:
            return False
        kind, known = type(optimizer), home.AdamW
        same_init_group = getattr(kind, "_init_group", None) is getattr(known, "_init_group", None)
        return same_init_group and own_step(kind) is own_step(known)

    def validate(self) -> None:
        """Refuse groups and state keys, and a HyperParallel that lacks the functional update."""
        super().validate()
        if not callable(getattr(self._home, "adamw", None)):
            raise SwapConfigError(
                f"{self._home} has the class AdamW but no function adamw, which updates one batch "
                "of its parameters. Use swapopt_torch.optim.AdamW, or a HyperParallel that has it."
            )

    def first_entries(self, unit: TorchUnit, group: ParamGroup) -> dict[str, torch.Tensor]:
        """Return nothing: the group counts the steps."""
        return {}

    def drop_gradients(self) -> None:
        """Forget this step's gradients, settings and counts on devices."""
        super().drop_gradients()
        self._begun = {}

    def update(self, group: ParamGroup, operands: Operands) -> None:
        """Call the functional update of the optimizer's own module."""
        index = operands.shares[0].unit.adapter_index
        begun = self._begun.get(index)
        if begun is not None:
            self._call(group["step"], *begun, operands)
            return
        settings, step = _read_settings(group), group.get("step", 0) + 1
        on_devices = StepOnDevices(step)
        self._call(step, settings, on_devices, operands)
        # Only now: an update that raises has, as a rule, done nothing yet.
        group["step"] = step
        self._begun[index] = settings, on_devices

    def _call(
        self, step: int, settings: Settings, on_devices: StepOnDevices, operands: Operands
    ) -> None:
        functional: Callable[..., None] = self._home.adamw
        if functional is adamw:
            # Our own: the step count is brought to the device once, not for every batch.
            states = operands.states[: 3 if settings["amsgrad"] else 2]
            launch([operands.params, operands.grads, *states], on_devices, settings)
            return
        functional(
            operands.params,
            operands.grads,
            operands.states[0],
            operands.states[1],
            operands.states[2] if settings["amsgrad"] else [],
            step,
            **settings,
        )


def _home_of(optimizer: object) -> ModuleType | None:
    """Return the module whose AdamW an optimizer is, if there is one."""
    for name in _HOMES:
        home = sys.modules.get(name)
        kind = getattr(home, "AdamW", None)
        if isinstance(kind, type) and isinstance(optimizer, kind):
            return home
    return None


def _read_settings(group: ParamGroup) -> Settings:
    """Read hyperparameters once per step: one that is a tensor on a device makes the host wait."""
    beta1, beta2 = group["betas"]
    return Settings(
        amsgrad=group["amsgrad"],
        beta1=float(beta1),
        beta2=float(beta2),
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
