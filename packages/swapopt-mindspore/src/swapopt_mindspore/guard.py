"""What is refused: graph mode, and stepping or wrapping a wrapped optimizer a second time."""

from __future__ import annotations

import weakref
from types import MethodType
from typing import NoReturn

from mindspore import nn
from mindspore.context import GRAPH_MODE, get_context

from swapopt_common import SwapConfigError

_swapped_bases: weakref.WeakSet[nn.Optimizer] = weakref.WeakSet()


def refuse_graph_mode() -> None:
    """Raise SwapConfigError if MindSpore compiles whatever it is called with."""
    if get_context("mode") == GRAPH_MODE:
        raise SwapConfigError(
            "MindSpore is in GRAPH_MODE, whose compiled steps would keep the memory that the "
            "states had when they were compiled. Call mindspore.set_context(mode="
            "mindspore.PYNATIVE_MODE) to swap optimizer states."
        )


def refuse_swapped(optimizer: nn.Optimizer) -> None:
    """Raise SwapConfigError if an optimizer has been wrapped already."""
    if optimizer in _swapped_bases:
        raise SwapConfigError(
            f"This {type(optimizer).__name__} is swapped already; wrap an optimizer once, and use "
            "the optimizer that swap_optimizer returned."
        )


def mark_swapped(optimizer: nn.Optimizer) -> None:
    """Let `refuse_swapped` refuse this optimizer, too: the wrapper itself."""
    _swapped_bases.add(optimizer)


def take_step_away(optimizer: nn.Optimizer) -> None:
    """Let the wrapped optimizer refuse to step."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            "This optimizer's states are swapped to the host: call the optimizer that "
            "swap_optimizer returned, not the one that was wrapped."
        )

    _swapped_bases.add(optimizer)
    optimizer.construct = refuse  # type: ignore[method-assign]


def give_step_back(optimizer: nn.Optimizer) -> None:
    """Undo `take_step_away`, done or not."""
    _swapped_bases.discard(optimizer)
    optimizer.__dict__.pop("construct", None)


def step_eagerly(optimizer: nn.Optimizer) -> None:
    """Let an optimizer whose class compiles its step take its steps without compiling them."""
    plain = getattr(type(optimizer).construct, "__wrapped__", None)
    if plain is not None:
        optimizer.construct = MethodType(plain, optimizer)  # type: ignore[method-assign]
