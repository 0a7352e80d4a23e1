"""Watching a training step: every operator's memory, and when each operator ran on its stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Lane: TypeAlias = Literal["h2d", "compute", "d2h"]
Phase: TypeAlias = Literal["forward", "backward", "update", "between steps"]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One operation of an optimizer step.

    Attributes:
        lane: the copy direction, or compute.
        operation: its name.
        nbytes: bytes it moved (copies) or touched (compute, where known).
        start_seconds, end_seconds: since the step began.
    """

    lane: Lane
    operation: str
    nbytes: int
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Device memory in use at one moment.

    Attributes:
        seconds: host time.
        nbytes: bytes in use by tensors, or by streams that have yet to finish with them.
        phase: what the training loop was doing.
        step: which training step, from 0.
    """

    seconds: float
    nbytes: int
    phase: Phase
    step: int


class RowRecorder(AbstractContextManager["RowRecorder"], Protocol):
    """Records the operations issued on a device while it is entered."""

    def rows(self) -> list[StepRow]:
        """Return what ran, in order of start; the device is idle."""


class MemorySampler(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Samples device memory after every operator issued while it is entered.

    Args:
        read_nbytes: returns the bytes in use now.
        clock_seconds: returns the host's time now.
    """

    def __init__(self, read_nbytes: Callable[[], int], clock_seconds: Callable[[], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read_nbytes = read_nbytes
        self._clock_seconds = clock_seconds
        self._phase: Phase = "between steps"
        self._step = 0
        self.samples: list[MemorySample] = []

    def enter_phase(self, phase: Phase, step: int) -> None:
        """Note what comes next; the moment itself is sampled in the phase before and in it."""
        self.sample()
        self._phase, self._step = phase, step
        self.sample()

    def sample(self) -> None:
        """Take one sample."""
        self.samples.append(
            MemorySample(self._clock_seconds(), self._read_nbytes(), self._phase, self._step)
        )

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.sample()
        return result


class EventRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times every operator of one device between two events on the operator's stream.

    Works on any accelerator with timing events. The events cost a launch each, so a step
    recorded this way takes a little longer than one that is not; and an operator on an idle
    stream counts from the event before it, so up to the time of a launch too long.

    Args:
        device: whose operators to time.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._module = torch.get_device_module(device)
        self._timed: list[tuple[Lane, str, int, torch.Event, torch.Event]] = []
        self._origin = self._event()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kind = self._classify(func, args)
        if kind is None:
            return func(*args, **(kwargs or {}))
        start = self._event()
        result = func(*args, **(kwargs or {}))
        self._timed.append((*kind, start, self._event()))
        return result

    def rows(self) -> list[StepRow]:
        """Return what ran, in order of start; the device is idle."""
        rows = [
            StepRow(lane, operation, nbytes, self._seconds(start), self._seconds(end))
            for lane, operation, nbytes, start, end in self._timed
        ]
        return sorted(rows, key=lambda row: row.start_seconds)

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def _seconds(self, event: torch.Event) -> float:
        return self._origin.elapsed_time(event) / 1e3

    def _classify(
        self, func: Callable[..., object], args: Sequence[Any]
    ) -> tuple[Lane, str, int] | None:
        """Return lane, name and bytes; None for an operator that does not run on the device."""
        name = str(func).removeprefix("aten.")
        if name.startswith("copy_."):
            destination, source = args[0], args[1]
            on_device = (source.device == self._device, destination.device == self._device)
            if on_device == (False, True):
                return "h2d", name, destination.nbytes
            if on_device == (True, False):
                return "d2h", name, source.nbytes
        tensors = [value for arg in args for value in _flatten(arg)]
        touched = [tensor for tensor in tensors if tensor.device == self._device]
        if not touched or getattr(func, "is_view", False):
            return None
        return "compute", name, sum(tensor.nbytes for tensor in touched)


def _flatten(argument: object) -> list[torch.Tensor]:
    items = argument if isinstance(argument, (list, tuple)) else (argument,)
    return [item for item in items if isinstance(item, torch.Tensor)]
