"""Streams, events, and every wait between streams.

`mindspore.runtime.Stream` and `mindspore.runtime.Event` fit the two protocols as they are; the
emulated device brings its own. All ordering of the pipeline goes through `wait`, with the edge
it stands for, so that the set of waits can be read here, and so that tests can take one away and
see the race detector object.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol


class Edge(str, Enum):
    """Why one stream waits for another; docs/design.md invariant 4 lists them."""

    ALLOCATED = "a prefetch follows the allocation of the memory it writes"
    PREFETCHED = "an update follows the prefetch of its states"
    UPDATED = "an offload follows the update of its states"
    REUSED = "a prefetch follows the offload that emptied its staging arena"
    OFFLOADED = "memory is given back to the caller's stream after its offload"
    SETTLED = "a copy at wrapping follows the work that produced the states"


class Event(Protocol):
    """A point in the order of a stream, made once and recorded anew as often as needed."""

    # MindSpore checks the types of streams and events itself, hence Any between the two.
    def record(self, stream: Any) -> None:
        """Be the point behind everything issued to ``stream`` so far."""

    def synchronize(self) -> None:
        """Block the host until the point is reached; at once if it was never recorded."""

    def query(self) -> bool:
        """Say whether the point is reached; does not block."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to ``end_event``, both timed and reached."""


class Stream(Protocol):
    """An order of work on the device."""

    def wait_event(self, event: Any) -> None:
        """Let work issued from now on follow ``event``; pipelines use `wait`."""

    def synchronize(self) -> None:
        """Block the host until everything issued so far is done."""


def wait(stream: Stream, event: Event, edge: Edge) -> None:
    """Make ``stream`` wait for ``event``; ``edge`` says why and is what tests take away."""
    del edge
    stream.wait_event(event)
