"""What swaps, what stays, and what moved: counts that cost nothing on the hot path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swapopt_torch.layout import TorchUnit

if TYPE_CHECKING:
    from swapopt_torch.engine import SwapEngine


@dataclass(slots=True)
class TransferCounts:
    """Copies of one step and their bytes (alignment gaps inside a packed run included)."""

    h2d_copies: int = 0
    h2d_nbytes: int = 0
    d2h_copies: int = 0
    d2h_nbytes: int = 0

    def add_h2d(self, piece: torch.Tensor) -> None:
        """Count a copy from the host to the device."""
        self.h2d_copies += 1
        self.h2d_nbytes += piece.nbytes

    def add_d2h(self, piece: torch.Tensor) -> None:
        """Count a copy from the device to the host."""
        self.d2h_copies += 1
        self.d2h_nbytes += piece.nbytes


@dataclass(frozen=True, slots=True)
class SwapStats:
    """A swapped optimizer in figures.

    Attributes:
        packed: whether states move through staging arenas.
        batches: how many batches the states are divided into.
        swapped_states, swapped_nbytes: states that live in host memory now.
        resident_states: why states stay on their device, and how many for each reason.
        arena_nbytes: bytes of one staging arena (packed).
        bound_nbytes: most bytes of swapped state on the devices at any time in a step.
        last_step: what the last step copied.
    """

    packed: bool
    batches: int
    swapped_states: int
    swapped_nbytes: int
    resident_states: Mapping[str, int]
    arena_nbytes: int
    bound_nbytes: int
    last_step: TransferCounts


def collect_stats(units: Sequence[TorchUnit], engine: SwapEngine) -> SwapStats:
    """Gather the figures of one swapped optimizer; moves nothing, waits for nothing."""
    slots = [slot for unit in units for slot in unit.slots]
    home = [slot.storage_nbytes for slot in slots if slot.region is not None]
    reasons = Counter(slot.resident_reason for slot in slots if slot.resident_reason is not None)
    layout = engine.layout
    return SwapStats(
        packed=layout.packed,
        batches=len(layout.batches),
        swapped_states=len(home),
        swapped_nbytes=sum(home),
        resident_states=dict(reasons),
        arena_nbytes=layout.arena_nbytes if layout.packed else 0,
        bound_nbytes=layout.bound_nbytes,
        last_step=engine.runtime.counts if engine.runtime is not None else TransferCounts(),
    )
