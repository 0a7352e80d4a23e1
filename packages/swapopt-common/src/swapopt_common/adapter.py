"""The life cycle that every optimizer adapter implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

OptimizerT = TypeVar("OptimizerT")
UnitT = TypeVar("UnitT")
ShareT = TypeVar("ShareT")


class OptimizerSwapAdapter(ABC, Generic[OptimizerT, UnitT, ShareT]):
    """Knows one optimizer: what it keeps, what it refuses, and how it updates one batch.

    A batch is made of units, or of shares of units where a backend updates them range by range.

    A step calls, in order, `prepare_step`, `iter_update_units`, `step_batch` once per batch
    (between the pipeline's copies), and `finish_step`.
    """

    @classmethod
    @abstractmethod
    def matches(cls, optimizer: object) -> bool:
        """Say whether this adapter serves ``optimizer``; looks at the type, changes nothing."""

    @abstractmethod
    def validate(self) -> None:
        """Refuse what cannot be served.

        Raises:
            ValueError: what was found, what was expected and what to change. Nothing has changed.
        """

    @abstractmethod
    def prepare_step(self) -> None:
        """Collect gradients and per-step values; raises before anything has moved."""

    @abstractmethod
    def iter_update_units(self) -> Sequence[UnitT]:
        """Return the units that have a gradient in this step, in the optimizer's order."""

    @abstractmethod
    def step_batch(self, batch: Sequence[ShareT]) -> None:
        """Update one batch on the current stream; all its states are on the device."""

    @abstractmethod
    def finish_step(self) -> None:
        """Do what belongs to the whole step once every batch has been updated."""
