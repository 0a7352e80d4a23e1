"""The part of an optimizer that a wrapper leaves to the optimizer it wraps."""

from __future__ import annotations

from typing import Any

import torch

from swapopt_torch.adapters.registration import ParamGroup


class DelegatingOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups, defaults and hooks are another one's own objects.

    ``torch.optim.Optimizer.__init__`` is not called: it would build groups and state of its own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._base = optimizer
        self._share_hooks()
        self._patch_step_function()

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The wrapped optimizer's own list of groups."""
        return self._base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        self._base.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self._base.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks: whether the update unscales gradients by itself."""
        return bool(getattr(self._base, "_step_supports_amp_scaling", False))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients; see torch.optim.Optimizer.zero_grad."""
        self._base.zero_grad(set_to_none=set_to_none)

    def _share_hooks(self) -> None:
        base = self._base
        self._optimizer_step_pre_hooks = base._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = base._optimizer_step_post_hooks
        self._optimizer_state_dict_pre_hooks = base._optimizer_state_dict_pre_hooks
        self._optimizer_state_dict_post_hooks = base._optimizer_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks = base._optimizer_load_state_dict_pre_hooks
        self._optimizer_load_state_dict_post_hooks = base._optimizer_load_state_dict_post_hooks
