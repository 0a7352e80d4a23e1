"""torch.optim.Adam and torch.optim.AdamW."""

from __future__ import annotations

from typing import ClassVar

import torch

from swapopt_torch.adapters.base import TorchAdamBaseAdapter

_HOOKED_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


class _TorchNativeAdapter(TorchAdamBaseAdapter):
    """What the two native optimizers have in common: torch's own functional update."""

    optimizer_class: ClassVar[type[torch.optim.Adam]]

    @classmethod
    def matches(cls, optimizer: object) -> bool:
        """Accept the class, and subclasses that leave its update alone."""
        if not isinstance(optimizer, cls.optimizer_class):
            return False
        kind = type(optimizer)
        same_step = _own_step(kind) is _own_step(torch.optim.Adam)
        return same_step and kind._init_group is torch.optim.Adam._init_group


def _own_step(kind: type) -> object:
    """Return the step function of an optimizer class without the wrapper torch puts around it.

    Judged by the class, so that a scheduler's patch on an instance is no override; and by the
    wrapper's code, since a decorator of the user's may carry over the wrapper's attributes.
    """
    step = vars(kind).get("step") or kind.step  # type: ignore[attr-defined]
    while getattr(step, "__code__", None) is _HOOKED_STEP_CODE:
        step = step.__wrapped__
    return step


class TorchNativeAdamAdapter(_TorchNativeAdapter):
    """Serves torch.optim.Adam."""

    serves = "torch.optim.Adam"
    optimizer_class = torch.optim.Adam
    refused_flags = ("foreach", "fused", "capturable", "differentiable")


class TorchNativeAdamWAdapter(_TorchNativeAdapter):
    """Serves torch.optim.AdamW, fused or not."""

    serves = "torch.optim.AdamW"
    optimizer_class = torch.optim.AdamW
    refused_flags = ("foreach", "capturable", "differentiable")
