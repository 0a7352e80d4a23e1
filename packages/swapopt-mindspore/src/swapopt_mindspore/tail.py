"""The offloads that may be under way when a step returns."""

from __future__ import annotations

from collections.abc import Iterable

from swapopt_mindspore.device import Device
from swapopt_mindspore.host_buffer import HostBuffer
from swapopt_mindspore.streams import Event


class Tail:
    """When the offloads issued last are done, and the host memory that they write to.

    It keeps that memory: an optimizer may be dropped, and its states with it, while copies to
    them are under way. The host may be several steps ahead of them, so it is that of all steps
    since somebody waited.

    Args:
        device: whose copies they are.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._event: Event | None = None
        self._buffers: set[HostBuffer] = set()

    def add(self, event: Event, buffers: Iterable[HostBuffer]) -> None:
        """Count offloads in: ``event`` has been recorded behind them and all that came before."""
        self._buffers.update(buffers)
        self._event = event

    def wait(self) -> None:
        """Block the host until all of them are done."""
        if self._event is not None:
            self._event.synchronize()
            # Only now: a wait that is interrupted has not happened.
            self.forget()

    def forget(self) -> None:
        """Let go of offloads that are known to be done."""
        self._event = None
        self._buffers = set()

    def abandon(self) -> None:
        """Let the device keep the memory as long as they need it; nobody is left to wait."""
        if self._event is not None:
            self._device.keep_until(self._event, self._buffers)
            self.forget()
