"""Races: what the detector found, and how it says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ._native import native

RaceMode = Literal["raise", "collect", "off"]
_MODES: dict[str, int] = {"off": 0, "collect": 1, "raise": 2}


class RaceError(RuntimeError):
    """Two accesses to the same bytes that nothing orders.

    Raised by the device operation or synchronisation that races (also out of ``backward()``).
    Accesses by CPU operators are found in a place that cannot raise: they are raised by the next
    device operation.
    """


@dataclass(frozen=True)
class Race:
    """One conflict. ``range`` is in bytes from the start of the block of ``memory``."""

    kind: str
    operation: str
    stream: str
    earlier_operation: str
    earlier_stream: str
    memory: str
    range: tuple[int, int]
    message: str

    def __str__(self) -> str:
        return self.message


def set_race_mode(mode: RaceMode) -> None:
    """Raise RaceError at the racing operation, collect for `races()`, or look for none.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in _MODES:
        raise ValueError(f"race mode must be one of {sorted(_MODES)}, found {mode!r}")
    native().set_race_mode(_MODES[mode])


def races() -> list[Race]:
    """The races found since the last call, oldest first, in either mode; clears them."""
    return [
        Race(kind, operation, stream, earlier, earlier_stream, memory, (begin, end), message)
        for (
            kind,
            operation,
            stream,
            earlier,
            earlier_stream,
            memory,
            begin,
            end,
            message,
        ) in native().take_races()
    ]


def set_late_copies(on: bool) -> None:
    """Late mode: an asynchronous copy happens as late as the order of the program allows.

    Its destination holds NaN until then, so that reading it too early gives wrong numbers.
    Switching the mode first completes the copies that are pending.

    Raises:
        ValueError: the device is dry.
    """
    if on and native().is_dry():
        raise ValueError("late copies need values to spoil, and this device is dry: leave them off")
    native().set_late_copies(on)


def host_access(tensor: torch.Tensor, write: bool) -> None:
    """Tell the detector that the host reads or writes `tensor` in a way it cannot see.

    For raw accesses such as ``.numpy()`` views, ``.tolist()``, memory maps or ctypes. `tensor` is
    a CPU tensor in pinned or registered memory; on other memory nothing happens.
    """
    native().host_access(tensor, write)
