"""Copy streams (one per direction and device) and every wait between streams.

All ordering of the pipeline goes through `wait`, with the edge it stands for, so that the set of
waits can be read here, and so that tests can take one away and see the race detector object.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from enum import Enum

import torch


class Edge(str, Enum):
    """Why one stream waits for another; docs/design.md invariant 4 lists them."""

    ALLOCATED = "a prefetch follows the allocation of the memory it writes"
    PREFETCHED = "an update follows the prefetch of its states"
    UPDATED = "an offload follows the update of its states"
    REUSED = "a prefetch follows the offload that emptied its staging arena"
    OFFLOADED = "memory is given back to the caller's stream after its offload"
    SETTLED = "a copy at wrapping follows the work that produced the states"


def wait(stream: torch.Stream, event: torch.Event, edge: Edge) -> None:
    """Make ``stream`` wait for ``event``; ``edge`` says why and is what tests take away."""
    del edge
    stream.wait_event(event)


def compute_stream(device: torch.device) -> torch.Stream:
    """Return the caller's current stream on ``device``: updates and allocations run there."""
    stream: torch.Stream = torch.get_device_module(device).current_stream(device)
    return stream


class CallersStreams:
    """The caller's current streams and device, to be made current again after a failure.

    A ``with`` block that is interrupted between its last line and its end does not do that.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._streams = {device: compute_stream(device) for device in devices}
        self._indices = {
            device.type: torch.get_device_module(device).current_device()
            for device in self._streams
        }

    def of(self, device: torch.device) -> torch.Stream:
        """Return the stream that was current on a device; asking torch costs more."""
        return self._streams[device]

    def restore(self) -> None:
        """Make them current; setting a stream sets its device, so the device comes last."""
        for device, stream in self._streams.items():
            torch.get_device_module(device).set_stream(stream)
        for device_type, index in self._indices.items():
            torch.get_device_module(device_type).set_device(index)


class CopyStreams:
    """The two copy streams of one device, shared by every swapped optimizer on it.

    Links are full duplex, so each direction has a stream of its own. Sharing them keeps the
    number of streams at two however many optimizers there are, and puts all offloads of a device
    into one order: the last one (`tail`) completes after all others.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.h2d = torch.Stream(device=device)
        self.d2h = torch.Stream(device=device)
        self._tail: torch.Event | None = None

    def offloaded(self, event: torch.Event) -> None:
        """Note the event of the newest offload."""
        self._tail = event

    def settle(self) -> None:
        """Block the host until every offload issued on this device has completed."""
        tail = self._tail
        if tail is not None:
            tail.synchronize()
            # Only now, and only if no other thread has issued more meanwhile: a wait that is
            # interrupted has not happened.
            if self._tail is tail:
                self._tail = None

    def drain(self) -> None:
        """Block the host until both copy streams and the caller's stream are idle."""
        self.h2d.synchronize()
        self.d2h.synchronize()
        compute_stream(self.device).synchronize()
        self._tail = None


@functools.cache
def copy_streams(device: torch.device) -> CopyStreams:
    """Return the copy streams of ``device``, made at first use and kept for the process."""
    return CopyStreams(device)
