"""AdamW with one integer step count per parameter group, over torch's fused kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import torch
from torch.optim.optimizer import ParamsT

from swapopt_torch.device_traits import is_capturing, traits_of
from swapopt_torch.local_tensor import is_dtensor, is_local_work, local_of
from swapopt_torch.optim.step_counts import count_per_group

# torch's own type of a group: hyperparameters of any kind under their names.
ParamGroup: TypeAlias = dict[str, Any]
_Row: TypeAlias = tuple[torch.Tensor, ...]


class Settings(TypedDict):
    """A group's hyperparameters in one step, as the functional update takes them."""

    amsgrad: bool
    beta1: float
    beta2: float
    lr: float
    weight_decay: float
    eps: float
    maximize: bool


class AdamW(torch.optim.Optimizer):
    """AdamW as HyperParallel has it: fused, with one step count per parameter group.

    ``group["step"]`` counts the steps in which the group had a gradient. As long as all its
    parameters get their gradients in the same steps, results equal
    ``torch.optim.AdamW(fused=True)`` bit for bit; a parameter that joins later is corrected for
    the group's count, not for its own.

    States are made with a parameter's first gradient, with its shape, dtype and device:
    ``exp_avg``, ``exp_avg_sq``, and ``max_exp_avg_sq`` with AMSGrad. The optimizer owns them.

    A GradScaler checks gradients on the host before it steps this optimizer: a kernel that skips
    an update could not take back the count.

    Args:
        params: parameters, named parameters or groups of them.
        lr: learning rate, at least 0; a tensor of one element is read in each step.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: decoupled weight decay, at least 0.
        amsgrad: divide by the largest second moment so far.
        maximize: follow the gradient upwards.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        _check_at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas(betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        self.register_load_state_dict_pre_hook(count_per_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copy, a pickle or a checkpoint."""
        is_new = "param_groups" not in vars(self)
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("amsgrad", False)
            group.setdefault("maximize", False)
            group.setdefault("step", 0)
        if is_new:
            self.register_load_state_dict_pre_hook(count_per_group)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group, whose count starts at 0; see torch.optim.Optimizer.add_param_group."""
        super().add_param_group(param_group)
        param_group.setdefault("step", 0)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, on the caller's current streams.

        Args:
            closure: must be None.

        Raises:
            ValueError: a closure was given, or a gradient is not dense; nothing has changed.
            RuntimeError: the stream is being captured; nothing has changed.
        """
        if closure is not None:
            raise ValueError(
                f"AdamW.step takes no closure, but got {closure!r}. Compute the loss and its "
                "gradients first, then call step()."
            )
        updates = [(group, _with_gradient(group)) for group in self.param_groups]
        with torch.no_grad():
            for group, params in updates:
                if params:
                    _update(self.state, group, params)


def adamw(  # noqa: PLR0913 - the signature is HyperParallel's
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    max_exp_avg_sqs: Sequence[torch.Tensor],
    step: int,
    *,
    amsgrad: bool,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """Update parameters and their states in place: one kernel per device and dtype.

    DTensors are updated by their local tensors, unless the tensors of one parameter are sharded
    in different ways: DTensor's dispatch then redistributes, or refuses.

    Runs on the caller's current stream of each device, without waiting for it. Tensors at the
    same place of the lists have the same shape, dtype and device; the caller owns them. Autograd
    must be off.

    Args:
        params: the parameters, of any shape and floating dtype.
        grads: their gradients.
        exp_avgs: their first moments.
        exp_avg_sqs: their second moments.
        max_exp_avg_sqs: the largest second moments with ``amsgrad``, else empty.
        step: which update this is, from 1 on, for all of them.
        amsgrad: divide by the largest second moment so far.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        eps: added to the denominator.
        maximize: follow the gradients upwards.

    Raises:
        ValueError: the lists differ in length; nothing has changed.
    """
    lists = [params, grads, exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if amsgrad else [])]
    _check_lengths(lists)
    settings = Settings(
        amsgrad=amsgrad,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
    )
    launch(lists, StepOnDevices(step), settings)


class StepOnDevices:
    """A step count as the kernel reads it: a tensor on each device, made once.

    Args:
        step: the count.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._tensors: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the count on a device."""
        if device not in self._tensors:
            # A fill on the device: a copy from the host would make the host wait for it.
            dtype = traits_of(device).fused_step_dtype
            self._tensors[device] = torch.full((), self._step, dtype=dtype, device=device)
        return self._tensors[device]


def launch(
    lists: Sequence[Sequence[torch.Tensor]], step: StepOnDevices, settings: Settings
) -> None:
    """Do what `adamw` does, with a step count that several calls may share.

    Args:
        lists: parameters, gradients, and the moments in the order of `adamw`.
        step: which update this is, from 1 on, for all of them.
        settings: the hyperparameters.
    """
    alike: dict[tuple[torch.device, torch.dtype, bool], list[_Row]] = {}
    for row in map(_opened, zip(*lists, strict=True)):
        param = row[0]
        alike.setdefault((param.device, param.dtype, is_dtensor(param)), []).append(row)
    for (device, _, _), rows in alike.items():
        chosen = [list(tensors) for tensors in zip(*rows, strict=True)]
        torch._fused_adamw_(
            chosen[0],
            chosen[1],
            chosen[2],
            chosen[3],
            chosen[4] if settings["amsgrad"] else [],
            [step.on(device)] * len(rows),
            **settings,
        )


def _opened(row: _Row) -> _Row:
    """Return what the kernel takes of a parameter: DTensors' local tensors if it needs no more."""
    return tuple(map(local_of, row)) if is_local_work(row) else row


def _check_lengths(lists: Sequence[Sequence[torch.Tensor]]) -> None:
    lengths = [len(tensors) for tensors in lists]
    if len(set(lengths)) > 1:
        names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
        found = ", ".join(f"{length} {name}" for length, name in zip(lengths, names, strict=False))
        raise ValueError(f"adamw needs one of each for every parameter, but got {found}.")


def _check_at_least_zero(**hyperparameters: float | torch.Tensor) -> None:
    for name, value in hyperparameters.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(f"{name} must have one element, but has {value.numel()}.")
        if not float(value) >= 0.0:
            raise ValueError(f"{name} must be at least 0, but is {float(value)}.")


def _check_betas(betas: tuple[float | torch.Tensor, float | torch.Tensor]) -> None:
    for index, beta in enumerate(betas):
        if isinstance(beta, torch.Tensor) and beta.numel() != 1:
            raise ValueError(f"betas[{index}] must have one element, but has {beta.numel()}.")
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(
                f"betas[{index}] must be at least 0 and below 1, but is {float(beta)}."
            )


def _with_gradient(group: ParamGroup) -> list[torch.Tensor]:
    """Return the group's parameters to update, once all of them are found to be fit for it."""
    params: list[torch.Tensor] = [p for p in group["params"] if p.grad is not None]
    for param in params:
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise ValueError(
                f"A parameter of shape {tuple(param.shape)} has a gradient of layout "
                f"{param.grad.layout}; AdamW updates dense gradients only. Use sparse=False in "
                "its embedding."
            )
    for device in {param.device for param in params}:
        if is_capturing(device):
            raise RuntimeError(
                f"A graph is being captured on {device}: every replay would be the same step, "
                "since AdamW counts steps on the host. Capture the model without step()."
            )
    return params


def _update(
    state: Mapping[torch.Tensor, dict[str, torch.Tensor]],
    group: ParamGroup,
    params: list[torch.Tensor],
) -> None:
    states = [_begun(state[param], param, amsgrad=group["amsgrad"]) for param in params]
    beta1, beta2 = group["betas"]
    group["step"] += 1
    adamw(
        params,
        [param.grad for param in params if param.grad is not None],
        [entries["exp_avg"] for entries in states],
        [entries["exp_avg_sq"] for entries in states],
        [entries["max_exp_avg_sq"] for entries in states] if group["amsgrad"] else [],
        group["step"],
        amsgrad=group["amsgrad"],
        beta1=float(beta1),
        beta2=float(beta2),
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _begun(
    entries: dict[str, torch.Tensor], param: torch.Tensor, *, amsgrad: bool
) -> dict[str, torch.Tensor]:
    """Return a parameter's states, made now if this is its first gradient."""
    if not entries:
        for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())):
            entries[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
    return entries
