"""Keeps the wrapped optimizer from being stepped, or wrapped, a second time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NoReturn

import torch

from swapopt_common import SwapConfigError

_swapped_bases: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def refuse_swapped(optimizer: torch.optim.Optimizer) -> None:
    """Raise SwapConfigError if an optimizer has been wrapped already."""
    if optimizer in _swapped_bases:
        raise SwapConfigError(
            f"This {type(optimizer).__name__} is swapped already; wrap an optimizer once, and use "
            "the optimizer that swap_optimizer returned."
        )


def mark_swapped(optimizer: torch.optim.Optimizer) -> None:
    """Let `refuse_swapped` refuse this optimizer, too: the wrapper itself."""
    _swapped_bases.add(optimizer)


def take_step_away(optimizer: torch.optim.Optimizer) -> None:
    """Let the wrapped optimizer refuse to step."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            "This optimizer's states are swapped to the host: call step() on the optimizer that "
            "swap_optimizer returned, not on the one that was wrapped."
        )

    # A scheduler that was made before wrapping looks for its own patch here.
    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    _swapped_bases.add(optimizer)
    optimizer.step = refuse  # type: ignore[method-assign]


def give_step_back(optimizer: torch.optim.Optimizer, patched: Callable[..., object] | None) -> None:
    """Undo `take_step_away`, done or not; ``patched`` was over the class's step before it."""
    _swapped_bases.discard(optimizer)
    vars(optimizer).pop("step", None)
    if patched is not None:
        vars(optimizer)["step"] = patched
