"""The attributes that a wrapper leaves to the optimizer it wraps."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mindspore import nn


class DelegatingOptimizer(nn.Optimizer):
    """An optimizer that reads and sets attributes of another one, where it has none itself.

    ``nn.Optimizer.__init__`` is not called: it would make groups and counters of its own.

    Args:
        optimizer: the one to stand for; its parameters and cells are this one's, too.
    """

    _base: nn.Optimizer
    _state_ids: frozenset[int]

    def __init__(self, optimizer: nn.Optimizer) -> None:
        nn.Cell.__init__(self, auto_prefix=False)
        # Not as a cell inside this one: the names of its parameters would change.
        object.__setattr__(self, "_base", optimizer)
        self._params, self._cells = optimizer._params, optimizer._cells
        self._state_ids = frozenset()

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until states can be read."""

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped optimizer's attribute; states are complete (invariant 3)."""
        if name in ("_base", "_state_ids"):  # asked for before they are there
            raise AttributeError(name)
        value = getattr(self._base, name)
        if isinstance(value, (tuple, list)) and any(id(item) in self._state_ids for item in value):
            self.synchronize()
        return value

    def __setattr__(self, name: str, value: object) -> None:
        """Set it where it is: updates read ``eps`` and its like from the wrapped optimizer."""
        if self._is_the_wrapped_ones(name):
            setattr(self._base, name, value)
        else:
            super().__setattr__(name, value)  # type: ignore[no-untyped-call]

    def _is_the_wrapped_ones(self, name: str) -> bool:
        own = vars(self)
        if "_base" not in own or name in own:
            return False
        # The wrapped optimizer's construct is the one that refuses, and stays that.
        return name in vars(self._base) and name != "construct"
