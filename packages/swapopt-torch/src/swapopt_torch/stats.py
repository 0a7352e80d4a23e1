"""What swaps, what stays, what moved and how long it took; counts cost nothing on the hot path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swapopt_torch.units import TorchUnit

if TYPE_CHECKING:
    from swapopt_torch.engine import SwapEngine

_KIB = 2**10
_MIB = 2**20


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
class StepTimes:
    """How long the copies of one step took, by the device's own events, over all its devices.

    Attributes:
        h2d_seconds, d2h_seconds: while copies of that direction were under way.
        exposed_seconds: while updates waited for copies.
    """

    h2d_seconds: float
    d2h_seconds: float
    exposed_seconds: float

    @property
    def hidden_share(self) -> float:
        """Share of the transfer time, both directions added up, that no update waited for."""
        transfer_seconds = self.h2d_seconds + self.d2h_seconds
        exposed_share = self.exposed_seconds / transfer_seconds if transfer_seconds else 0.0
        return max(0.0, 1.0 - exposed_share)


@dataclass(frozen=True, slots=True)
class ResidentState:
    """A state that stays on its device.

    Attributes:
        parameter: how messages call its parameter.
        key: the state's key.
        nbytes: its bytes, also if it does not exist yet.
        reason: why it does not swap.
    """

    parameter: str
    key: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class SwapStats:
    """A swapped optimizer in figures; printed, a table.

    Attributes:
        packed: whether states move through staging arenas.
        swap_times: what bounds the memory of a step: the config's, or what a budget came to.
        batches: how many batches the states are divided into.
        swapped_states, swapped_nbytes: states that live in host memory now.
        pinned_nbytes: pinned host memory they lie in.
        resident: the states that stay on their device.
        arenas: how many staging arenas there are, 0 where states do not move packed.
        arena_nbytes: bytes of one of them.
        bound_nbytes: most bytes of swapped state on the devices at any time in a step.
        last_step: what the last step copied.
        last_times: how long that took; None before the first step, and where the device cannot
            time events.
    """

    packed: bool
    swap_times: int
    batches: int
    swapped_states: int
    swapped_nbytes: int
    pinned_nbytes: int
    resident: tuple[ResidentState, ...]
    arenas: int
    arena_nbytes: int
    bound_nbytes: int
    last_step: TransferCounts
    last_times: StepTimes | None

    @property
    def resident_states(self) -> dict[str, int]:
        """How many states stay for each reason."""
        return dict(Counter(state.reason for state in self.resident))

    def __str__(self) -> str:
        """Return the figures as a table."""
        resident_nbytes = sum(state.nbytes for state in self.resident)
        rows = [
            ("movement", self._movement()),
            ("on the device in a step", f"at most {_size(self.bound_nbytes)}"),
            ("swapped", f"{_states(self.swapped_states)}, {_size(self.swapped_nbytes)}"),
            ("pinned host memory", _size(self.pinned_nbytes)),
            ("resident", f"{_states(len(self.resident))}, {_size(resident_nbytes)}"),
            *((f"  {reason}", _states(count)) for reason, count in self.resident_states.items()),
            *self._step_rows(),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _movement(self) -> str:
        if self.bound_nbytes == 0:
            return "none"
        arenas = f"packed, {self.arenas} arenas of {_size(self.arena_nbytes)}"
        way = arenas if self.packed else "per tensor"
        batches = _count(self.batches, "batch", "batches")
        return f"{way}, {batches} (swap_times={self.swap_times})"

    def _step_rows(self) -> list[tuple[str, str]]:
        counts, times = self.last_step, self.last_times
        if counts.h2d_copies == 0:
            return []
        h2d_seconds, d2h_seconds = (times.h2d_seconds, times.d2h_seconds) if times else (0.0, 0.0)
        to_device = _transfer(counts.h2d_nbytes, counts.h2d_copies, h2d_seconds)
        to_host = _transfer(counts.d2h_nbytes, counts.d2h_copies, d2h_seconds)
        rows = [("last step, to the device", to_device), ("last step, to the host", to_host)]
        if times is not None:
            waited = f"{times.exposed_seconds * 1e3:.3f} ms, {times.hidden_share:.0%} hidden"
            rows.append(("  waited for by updates", waited))
        return rows


def collect_stats(units: Sequence[TorchUnit], engine: SwapEngine) -> SwapStats:
    """Gather the figures of one swapped optimizer.

    Moves nothing. Blocks the host until the last step's copies are done, whose times it reads.
    """
    engine.settle()
    slots = [(unit, slot) for unit in units for slot in unit.slots]
    layout, runtime = engine.layout, engine.runtime
    regions = {slot.region for _, slot in slots if slot.region is not None}
    home = [slot.storage_nbytes for _, slot in slots if slot.region is not None]
    return SwapStats(
        packed=layout.packed,
        swap_times=layout.swap_times,
        batches=len(layout.batches),
        swapped_states=len(home),
        swapped_nbytes=sum(home),
        pinned_nbytes=sum(region.pinned_nbytes for region in regions),
        resident=tuple(
            ResidentState(unit.name, slot.name, slot.storage_nbytes, slot.resident_reason)
            for unit, slot in slots
            if slot.resident_reason is not None
        ),
        arenas=layout.arena_count if layout.packed else 0,
        arena_nbytes=layout.arena_nbytes if layout.packed else 0,
        bound_nbytes=layout.bound_nbytes,
        last_step=runtime.counts if runtime is not None else TransferCounts(),
        last_times=runtime.last_times() if runtime is not None else None,
    )


def _count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _states(count: int) -> str:
    return _count(count, "state", "states")


def _size(nbytes: int) -> str:
    if nbytes >= _MIB:
        return f"{nbytes / _MIB:,.1f} MiB"
    return f"{nbytes / _KIB:,.1f} KiB" if nbytes >= _KIB else f"{nbytes} bytes"


def _transfer(nbytes: int, copies: int, seconds: float) -> str:
    text = f"{_size(nbytes)} in {_count(copies, 'copy', 'copies')}"
    if seconds:
        text += f", {seconds * 1e3:.3f} ms, {nbytes / seconds * 1e-9:.1f} GB/s"
    return text
