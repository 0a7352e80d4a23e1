"""What swaps, what stays, what moved and how long it took; counts cost nothing on the hot path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swapopt_mindspore.layout import SwapLayout
from swapopt_mindspore.slots import MindSporeUnit

_KIB = 2**10
_MIB = 2**20


@dataclass(slots=True)
class TransferCounts:
    """Copies of one step and their bytes (alignment gaps inside a packed run included)."""

    h2d_copies: int = 0
    h2d_nbytes: int = 0
    d2h_copies: int = 0
    d2h_nbytes: int = 0

    def add_h2d(self, nbytes: int) -> None:
        """Count a copy from the host to the device."""
        self.h2d_copies += 1
        self.h2d_nbytes += nbytes

    def add_d2h(self, nbytes: int) -> None:
        """Count a copy from the device to the host."""
        self.d2h_copies += 1
        self.d2h_nbytes += nbytes


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long the copies of one step took, by the device's own events.

    Attributes:
        h2d_seconds, d2h_seconds: while copies of that direction were under way.
        exposed_seconds: while the caller's stream waited for copies.
    """

    h2d_seconds: float
    d2h_seconds: float
    exposed_seconds: float

    @property
    def hidden_share(self) -> float:
        """Share of the transfer time, both directions added up, that nothing waited for."""
        transfer_seconds = self.h2d_seconds + self.d2h_seconds
        exposed_share = self.exposed_seconds / transfer_seconds if transfer_seconds else 0.0
        return max(0.0, 1.0 - exposed_share)


@dataclass(frozen=True, slots=True)
class ResidentState:
    """A state that stays on its device.

    Attributes:
        parameter: the name of its parameter.
        key: the state's key.
        nbytes: its bytes.
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
        swap_times: what bounds the memory of a step: the config's, or what a budget came to; 0
            where there is no device that swaps.
        batches: how many batches the states are divided into.
        swapped_states, swapped_nbytes: states that live in host memory now.
        pinned_nbytes: pinned host memory they lie in.
        resident: the states that stay on their device.
        arena_nbytes: bytes of one staging arena (packed).
        bound_nbytes: most bytes of swapped state on the device at any time in a step.
        last_step: what the last step copied.
        last_times: how long that took; None before the first step.
    """

    packed: bool
    swap_times: int
    batches: int
    swapped_states: int
    swapped_nbytes: int
    pinned_nbytes: int
    resident: tuple[ResidentState, ...]
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
        way = f"packed, arenas of {_size(self.arena_nbytes)}" if self.packed else "per tensor"
        batches = _count(self.batches, "batch", "batches")
        bounded = f" (swap_times={self.swap_times})" if self.swap_times else ""
        resident_nbytes = sum(state.nbytes for state in self.resident)
        rows = [
            ("movement", f"{way}, {batches}{bounded}"),
            ("on the device in a step", f"at most {_size(self.bound_nbytes)}"),
            ("swapped", f"{_states(self.swapped_states)}, {_size(self.swapped_nbytes)}"),
            ("pinned host memory", _size(self.pinned_nbytes)),
            ("resident", f"{_states(len(self.resident))}, {_size(resident_nbytes)}"),
            *((f"  {reason}", _states(count)) for reason, count in self.resident_states.items()),
            *self._step_rows(),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _step_rows(self) -> list[tuple[str, str]]:
        counts, times = self.last_step, self.last_times
        if times is None or counts.h2d_copies == 0:
            return []
        waited = f"{times.exposed_seconds * 1e3:.3f} ms, {times.hidden_share:.0%} hidden"
        return [
            (
                "last step, to the device",
                _transfer(counts.h2d_nbytes, counts.h2d_copies, times.h2d_seconds),
            ),
            (
                "last step, to the host",
                _transfer(counts.d2h_nbytes, counts.d2h_copies, times.d2h_seconds),
            ),
            ("  waited for", waited),
        ]


def collect_stats(
    units: Sequence[MindSporeUnit],
    layout: SwapLayout | None,
    counts: TransferCounts,
    times: StepTimes | None,
) -> SwapStats:
    """Gather the figures of one swapped optimizer.

    Args:
        units: its units.
        layout: where its states are; None where nothing swaps.
        counts: what the last step copied.
        times: how long that took.
    """
    batches = layout.batches if layout is not None else []
    home = layout.slots() if layout is not None else []
    packed = layout is not None and layout.packed
    return SwapStats(
        packed=packed,
        swap_times=layout.swap_times if layout is not None else 0,
        batches=len(batches),
        swapped_states=len(home),
        swapped_nbytes=sum(slot.storage_nbytes for slot in home),
        pinned_nbytes=sum(region.buffer.nbytes for batch in batches for region in batch.regions),
        resident=tuple(
            ResidentState(unit.name, slot.name, slot.storage_nbytes, slot.resident_reason)
            for unit in units
            for slot in unit.slots
            if slot.resident_reason is not None
        ),
        arena_nbytes=layout.arena_nbytes if layout is not None and packed else 0,
        bound_nbytes=layout.bound_nbytes if layout is not None else 0,
        last_step=counts,
        last_times=times,
    )


def _size(nbytes: int) -> str:
    if nbytes >= _MIB:
        return f"{nbytes / _MIB:,.1f} MiB"
    return f"{nbytes / _KIB:,.1f} KiB" if nbytes >= _KIB else f"{nbytes} bytes"


def _count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _states(count: int) -> str:
    return _count(count, "state", "states")


def _transfer(nbytes: int, copies: int, seconds: float) -> str:
    text = f"{_size(nbytes)} in {_count(copies, 'copy', 'copies')}"
    if seconds:
        text += f", {seconds * 1e3:.3f} ms, {nbytes / seconds * 1e-9:.1f} GB/s"
    return text
