"""Streams and events in virtual time; they fit the protocols of `swapopt_mindspore.streams`."""

from __future__ import annotations

from swapopt_mindspore.emulated.clock import Point
from swapopt_mindspore.emulated.order import ActorId
from swapopt_mindspore.emulated.world import World


class EmulatedEvent:
    """A point in the order and time of a stream.

    Attributes:
        point: where it was recorded last, if it was.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.point: Point | None = None

    def record(self, stream: EmulatedStream) -> None:
        """Be the point behind everything issued to ``stream`` so far."""
        self.point = self._world.scheduler.point_of(stream.actor)

    def synchronize(self) -> None:
        """Block the host until the point is reached; at once if it was never recorded."""
        if self.point is not None:
            self._world.host_waits(self.point, "synchronize event")

    def query(self) -> bool:
        """Say whether the point is reached; costs the host a little time."""
        return self.point is None or self._world.poll(self.point)

    def elapsed_time(self, end_event: EmulatedEvent) -> float:
        """Return the milliseconds from this event to ``end_event``.

        Raises:
            ValueError: one of them was never recorded.
        """
        if self.point is None or end_event.point is None:
            raise ValueError("both events must be recorded before the time between them is asked")
        return self._world.scheduler.elapsed_ns(self.point, end_event.point) * 1e-6


class EmulatedStream:
    """An order of work.

    Attributes:
        actor: what the scheduler calls it.
    """

    def __init__(self, world: World, actor: ActorId) -> None:
        self._world = world
        self.actor = actor

    def wait_event(self, event: EmulatedEvent) -> None:
        """Let work issued from now on follow ``event``, if it was recorded."""
        if event.point is not None:
            self._world.scheduler.stream_waits(self.actor, event.point)

    def synchronize(self) -> None:
        """Block the host until everything issued so far is done."""
        point = self._world.scheduler.point_of(self.actor)
        self._world.host_waits(point, "synchronize stream")
