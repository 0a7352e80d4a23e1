"""torch.optim.Adam and torch.optim.AdamW."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch.optim import adam as torch_adam

from swapopt_common import SwapConfigError
from swapopt_torch.adapters.base import TorchAdamBaseAdapter
from swapopt_torch.adapters.operands import Operands
from swapopt_torch.adapters.registration import ParamGroup, param_name
from swapopt_torch.layout import TorchUnit

_DYNAMO = os.path.join("torch", "_dynamo", "")
_HOOKED_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


_REFUSED: Mapping[str, str] = {
    "foreach": "it updates all parameters at once, and their states come batch by batch",
    "capturable": "a captured graph would not move the states",
    "differentiable": "the states leave the device while a history would refer to them",
}


class _TorchNativeAdapter(TorchAdamBaseAdapter):
    """What the two native optimizers have in common: torch's own functional update."""

    optimizer_class: ClassVar[type[torch.optim.Adam]]
    further_keys = ("step",)

    @classmethod
    def matches(cls, optimizer: object) -> bool:
        """Accept the class, and subclasses that leave its update alone."""
        if not isinstance(optimizer, cls.optimizer_class):
            return False
        kind = type(optimizer)
        same_step = own_step(kind) is own_step(torch.optim.Adam)
        own_init, init = kind._init_group, torch.optim.Adam._init_group
        return same_step and _without_torch_wrappers(own_init) is _without_torch_wrappers(init)

    def validate(self) -> None:
        """Refuse groups, state keys and step counters that cannot be served."""
        super().validate()
        for index, group in enumerate(self._groups):
            for position, param in enumerate(group["params"] if group["fused"] else ()):
                self._check_step(param, param_name(group, index, position))

    def prepare_step(self) -> None:
        """Collect the gradients; see that a fused update finds its step counters."""
        super().prepare_step()
        fused = [group["fused"] for group in self._groups]
        for unit in self._active:
            if fused[unit.adapter_index]:
                self._check_step(unit.param, unit.name)

    def _check_step(self, param: torch.Tensor, name: str) -> None:
        step = self._optimizer.state.get(param, {}).get("step")
        if isinstance(step, torch.Tensor) and step.device != param.device:
            raise SwapConfigError(
                f"step of {name} is on {step.device}, but its group is fused: the kernel reads "
                f"it on {param.device}. Move it there; set fused before the first step; or load "
                "the optimizer's own state_dict() after it."
            )

    def first_entries(self, unit: TorchUnit, group: ParamGroup) -> dict[str, torch.Tensor]:
        """Make the step counter where torch keeps it.

        The fused kernel reads it on the device; the loop reads it on the host, where that costs
        nothing.
        """
        if group["fused"]:
            return {"step": torch.zeros((), dtype=torch.float32, device=unit.device)}
        default = torch.get_default_dtype()
        dtype = default if default == torch.float64 else torch.float32
        return {"step": torch.tensor(0.0, dtype=dtype, device="cpu")}

    def update(self, group: ParamGroup, operands: Operands) -> None:
        """Call torch's functional Adam; it advances the step counters."""
        amsgrad = group["amsgrad"]
        beta1, beta2 = group["betas"]
        states = self._optimizer.state
        torch_adam.adam(
            operands.params,
            operands.grads,
            operands.states[0],
            operands.states[1],
            operands.states[2] if amsgrad else [],
            [states[unit.param]["step"] for unit in operands.units],
            # None means torch's own choice, which is foreach: here it means one tensor at a time.
            foreach=False,
            fused=bool(group["fused"]),
            capturable=False,
            differentiable=False,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            has_complex=any(param.is_complex() for param in operands.params),
            amsgrad=amsgrad,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )
        if operands.are_local and not group["fused"]:
            # As DTensor's dispatch does, so that autograd notices a parameter that was changed
            # between its forward and its backward.
            dtensors = [unit.param for unit in operands.units if unit.is_dtensor]
            torch.autograd.graph.increment_version(dtensors)


def own_step(kind: type) -> object:
    """Return the step function of an optimizer class without the wrapper torch puts around it.

    Judged by the class, so that a scheduler's patch on an instance is no override; and by the
    wrapper's code, since a decorator of the user's may carry over the wrapper's attributes.
    """
    return _without_torch_wrappers(vars(kind).get("step") or kind.step)  # type: ignore[attr-defined]


def _without_torch_wrappers(function: object) -> object:
    """Take off the profiling wrapper of an optimizer's step, and torch.compile's own."""
    while True:
        code = getattr(function, "__code__", None)
        if code is _HOOKED_STEP_CODE:
            function = function.__wrapped__  # type: ignore[attr-defined]
        elif code is not None and _DYNAMO in code.co_filename:
            # The first torch.compile of a process wraps the methods of every optimizer class.
            function = function._torchdynamo_orig_callable  # type: ignore[attr-defined]
        else:
            return function


class TorchNativeAdamAdapter(_TorchNativeAdapter):
    """Serves torch.optim.Adam."""

    serves = "torch.optim.Adam"
    optimizer_class = torch.optim.Adam
    refused_flags: ClassVar[Mapping[str, str]] = {
        **_REFUSED,
        "fused": "not every device has a fused Adam kernel; AdamW may be fused",
    }


class TorchNativeAdamWAdapter(_TorchNativeAdapter):
    """Serves torch.optim.AdamW, fused or not."""

    serves = "torch.optim.AdamW"
    optimizer_class = torch.optim.AdamW
    refused_flags = _REFUSED
