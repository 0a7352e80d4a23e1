"""The exceptions that both backends raise.

User mistakes are ``ValueError`` (or a subclass) and are raised before anything has changed.
Failures of the machine are ``RuntimeError`` subclasses and are raised after every state is
back where a reader finds it.
"""

from __future__ import annotations


class SwapConfigError(ValueError):
    """A configuration value, or an optimizer, that swapopt refuses; nothing has changed."""


class HostMemoryError(RuntimeError):
    """Pinned host memory could not be had; the message says how much was asked for and held."""


class SwapStepError(RuntimeError):
    """A step failed after parameters may have been updated.

    Attributes:
        updated_batches: indices (into this step's batches) whose update had completed; their
            parameters and states hold the new values.
        interrupted_batch: index of the batch whose update failed, if one did: each of its
            parameters holds the old or the new value, and its states with it. All other batches
            hold the old ones.
    """

    def __init__(
        self, message: str, updated_batches: tuple[int, ...], interrupted_batch: int | None
    ) -> None:
        super().__init__(message)
        self.updated_batches = updated_batches
        self.interrupted_batch = interrupted_batch
