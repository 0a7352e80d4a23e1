"""Hooks that users registered on an optimizer before it was wrapped."""

from __future__ import annotations

from mindspore import nn

# The registries of a cell that belong to its call and to its state dict. MindSpore makes each when
# it is first asked for, and keeps it under the same name with "_lazy" in front.
_REGISTRIES = (
    "_forward_pre_hook",
    "_forward_pre_hook_with_kwargs",
    "_forward_hook",
    "_forward_hook_with_kwargs",
    "_forward_hook_always_called",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def share_hooks(wrapper: nn.Optimizer, optimizer: nn.Optimizer) -> None:
    """Let two optimizers have the same hooks from now on, whichever of the two they are set on.

    Hooks run when the wrapper is called, saved or loaded, and get the wrapper as their cell.
    """
    for name in _REGISTRIES:
        object.__setattr__(wrapper, f"_lazy{name}", getattr(optimizer, name))
