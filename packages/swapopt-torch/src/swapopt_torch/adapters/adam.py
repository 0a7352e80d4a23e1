"""torch.optim.Adam and torch.optim.AdamW."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch.optim import adam as torch_adam

from swapopt_common import SwapConfigError, SwapOptimizerConfig
from swapopt_torch.adapters.base import TorchAdamBaseAdapter
from swapopt_torch.adapters.operands import Operands
from swapopt_torch.adapters.registration import ParamGroup, param_name
from swapopt_torch.adapters.step_counters import StepCounters
from swapopt_torch.local_tensor import local_of
from swapopt_torch.units import Share, TorchUnit

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

    def __init__(self, optimizer: torch.optim.Optimizer, config: SwapOptimizerConfig) -> None:
        super().__init__(optimizer, config)
        self._counters = StepCounters()

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
        self._counters.settle()
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
        """Call torch's kernel for several tensors, or its functional loop."""
        if group["fused"]:
            self._update_fused(group, operands)
        else:
            self._update_one_by_one(group, operands)

    def finish_step(self) -> None:
        """Take back what the fused groups' counters must not count."""
        self._counters.settle()

    def invalidate(self) -> None:
        """Trust nothing that is registered, and count what has been updated."""
        super().invalidate()
        self._counters.settle()

    def _update_fused(self, group: ParamGroup, operands: Operands) -> None:
        fused = [bool(each["fused"]) for each in self._groups]
        units = (unit for unit in self._active if fused[unit.adapter_index])
        self._counters.advance(units, self._optimizer.state, self.found_inf)
        decoupled = group["decoupled_weight_decay"]
        kernel: Callable[..., None] = torch._fused_adamw_ if decoupled else torch._fused_adam_
        beta1, beta2 = group["betas"]
        updated = self._counters.updated
        for (device, _), alike in _alike(operands).items():
            counters = self._counters.of(alike.shares)
            settings = {
                "amsgrad": group["amsgrad"],
                "lr": _on_its_device(group["lr"], device),
                "beta1": _scalar(beta1),
                "beta2": _scalar(beta2),
                "weight_decay": group["weight_decay"],
                "eps": group["eps"],
                "maximize": group["maximize"],
                "grad_scale": _to(self.grad_scale, device),
                "found_inf": _to(self.found_inf, device),
            }
            largest = alike.states[2] if group["amsgrad"] else []
            lists = (alike.params, alike.grads, *alike.states[:2], largest, counters)
            # In one statement, so that what has been launched is known to be, whatever comes next.
            updated.append((kernel(*lists, **settings), alike.shares)[1])  # type: ignore[func-returns-value]

    def _update_one_by_one(self, group: ParamGroup, operands: Operands) -> None:
        amsgrad = group["amsgrad"]
        beta1, beta2 = group["betas"]
        torch_adam.adam(
            operands.params,
            operands.grads,
            operands.states[0],
            operands.states[1],
            operands.states[2] if amsgrad else [],
            [self._counter_of(share) for share in operands.shares],
            # None means torch's own choice, which is foreach: here it means one tensor at a time.
            foreach=False,
            fused=False,
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
        # As DTensor's dispatch does, so that autograd notices a parameter that was changed between
        # its forward and its backward.
        opened = zip(operands.shares, operands.params, strict=True)
        dtensors = [s.unit.param for s, p in opened if s.unit.is_dtensor and p is not s.unit.param]
        torch.autograd.graph.increment_version(dtensors)

    def _counter_of(self, share: Share) -> torch.Tensor:
        """Return the step counter that torch's loop advances.

        It does so in every call, and a parameter that is cut takes several: all but the last one
        advance a copy of the old count.
        """
        step: torch.Tensor = self._optimizer.state[share.unit.param]["step"]
        return step if share.is_last else step.clone()


def _alike(operands: Operands) -> dict[tuple[torch.device, torch.dtype], Operands]:
    """Divide operands by what one kernel takes: tensors of one device and dtype."""
    kinds = [(local_of(param).device, param.dtype) for param in operands.params]
    if len(set(kinds)) == 1:
        return {kinds[0]: operands}
    found: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, kind in enumerate(kinds):
        found.setdefault(kind, []).append(index)
    return {kind: operands.chosen(indices) for kind, indices in found.items()}


def _on_its_device(lr: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """Return a learning rate as the kernel takes it: one in host memory is a number to it."""
    is_elsewhere = isinstance(lr, torch.Tensor) and lr.device.type != "cpu"
    return lr.to(device, non_blocking=True) if is_elsewhere else lr  # type: ignore[union-attr]


def _scalar(value: float | torch.Tensor) -> float:
    return value.item() if isinstance(value, torch.Tensor) else value


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device, non_blocking=True)


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
