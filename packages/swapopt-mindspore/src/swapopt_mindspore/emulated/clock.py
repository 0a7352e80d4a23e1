"""Virtual time and order: the host, the streams, their engines and events, and the timeline."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from swapopt_mindspore.emulated.engine import Engine
from swapopt_mindspore.emulated.order import HOST, ActorId, VectorClock
from swapopt_mindspore.emulated.profiles import Profile
from swapopt_mindspore.emulated.timeline import Lane, TimelineRow

_MOST_ROWS = 1_000_000


@dataclass(frozen=True)
class Work:
    """Something that a stream does.

    Attributes:
        lane: which engine does it.
        operation: what it is called.
        nbytes: bytes it moves.
        duration_ns: how long the engine is taken.
        launches: how often the host has to act for it.
    """

    lane: Lane
    operation: str
    nbytes: int
    duration_ns: int
    launches: int = 1


@dataclass
class Point:
    """Where a stream was when an event was recorded: in the order, and in time."""

    seen: VectorClock
    time_ns: int
    run: int


@dataclass
class _Actor:
    name: str
    seen: VectorClock = field(default_factory=VectorClock)
    # Of the host: now. Of a stream: when its last work ends.
    time_ns: int = 0


class Scheduler:
    """Books work on streams; deterministic: the same calls give the same nanoseconds.

    Args:
        profile: what things cost.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._actors = [_Actor("host")]
        self._engines: dict[Lane, Engine] = {"compute": Engine(), "h2d": Engine()}
        self._engines["d2h"] = Engine() if profile.full_duplex else self._engines["h2d"]
        self._rows: deque[TimelineRow] = deque(maxlen=_MOST_ROWS)
        self._run = 0

    def new_stream(self, name: str) -> ActorId:
        """Add a stream; it has done nothing and waits for nothing."""
        self._actors.append(_Actor(name))
        return len(self._actors) - 1

    def name_of(self, actor: ActorId) -> str:
        """Return what the actor is called."""
        return self._actors[actor].name

    def seen_by(self, actor: ActorId) -> VectorClock:
        """Return what is over before the actor's next act; not a copy."""
        return self._actors[actor].seen

    @property
    def now_ns(self) -> int:
        """The host's time."""
        return self._actors[HOST].time_ns

    def host_acts(self) -> None:
        """Let the host take a step of its own, such as an access to host memory."""
        self.seen_by(HOST).tick(HOST)

    def advance_host(self, ns: int) -> None:
        """Let the host be busy."""
        self._actors[HOST].time_ns += ns

    # ------------------------------------------------------------------ work on streams
    def order_next(self, stream: ActorId) -> None:
        """Let the stream's next act follow all that the host has issued or waited for."""
        self.host_acts()
        self._follow_host(stream)
        self.seen_by(stream).tick(stream)

    def book(self, stream: ActorId, work: Work) -> None:
        """Give the act that `order_next` began its time."""
        actor, profile = self._actors[stream], self._profile
        issued_from_ns = self.now_ns
        ready_ns = max(actor.time_ns, issued_from_ns + profile.host_issue_ns)
        self.advance_host(profile.host_issue_ns * work.launches)
        duration_ns = self._stretched_ns(work)
        start_ns = self._engines[work.lane].book(ready_ns, duration_ns, issued_from_ns)
        actor.time_ns = start_ns + duration_ns
        self._rows.append(
            TimelineRow(actor.name, work.lane, work.operation, work.nbytes, start_ns, actor.time_ns)
        )

    def mark_allocation(self, stream: ActorId) -> int:
        """Give an allocation its place in the stream's order; return its tick. Takes no time."""
        self._follow_host(stream)
        self.seen_by(stream).tick(stream)
        return self.seen_by(stream).at(stream)

    # ------------------------------------------------------------------ events and waits
    def point_of(self, stream: ActorId) -> Point:
        """Return the point behind everything issued to the stream so far."""
        self._follow_host(stream)
        actor = self._actors[stream]
        return Point(actor.seen.copy(), max(actor.time_ns, self.now_ns), self._run)

    def stream_waits(self, stream: ActorId, point: Point) -> None:
        """Let the stream's next act follow the point."""
        self._follow_host(stream)
        actor = self._actors[stream]
        actor.seen.join(point.seen)
        actor.time_ns = max(actor.time_ns, self._time_of(point))

    def host_waits(self, point: Point, operation: str) -> None:
        """Block the host until the point is reached."""
        self._host_joins(point.seen, self._time_of(point), operation)

    def host_waits_for_all(self) -> None:
        """Block the host until every stream is idle."""
        seen = VectorClock()
        for actor in self._actors:
            seen.join(actor.seen)
        self._host_joins(seen, max(actor.time_ns for actor in self._actors), "synchronize device")

    def poll(self, point: Point) -> bool:
        """Let the host ask whether the point is reached; if so, it is behind it."""
        self.advance_host(self._profile.poll_ns)
        if self.now_ns < self._time_of(point):
            return False
        self.seen_by(HOST).join(point.seen)
        self.host_acts()
        return True

    def elapsed_ns(self, start: Point, end: Point) -> int:
        """Return the time between two points."""
        return self._time_of(end) - self._time_of(start)

    # ------------------------------------------------------------------ the books
    def reset_clock(self) -> None:
        """Start again at zero; everything issued so far counts as done. Keeps the order."""
        self._run += 1
        for actor in self._actors:
            actor.time_ns = 0
        for engine in self._engines.values():
            engine.clear()

    def timeline(self) -> list[TimelineRow]:
        """Return what happened since `clear_timeline`, in the order of issue."""
        return list(self._rows)

    def clear_timeline(self) -> None:
        """Forget the rows so far."""
        self._rows.clear()

    def _follow_host(self, stream: ActorId) -> None:
        self.seen_by(stream).join(self.seen_by(HOST))

    def _stretched_ns(self, work: Work) -> int:
        """Return how long work takes whose last launch the host has yet to issue."""
        if work.launches <= 1:
            return work.duration_ns
        issuing_ns = (work.launches - 1) * self._profile.host_issue_ns
        return max(work.duration_ns, issuing_ns + work.duration_ns // work.launches)

    def _time_of(self, point: Point) -> int:
        return point.time_ns if point.run == self._run else 0

    def _host_joins(self, seen: VectorClock, time_ns: int, operation: str) -> None:
        start_ns, host = self.now_ns, self._actors[HOST]
        host.time_ns = max(start_ns, time_ns) + self._profile.sync_ns
        host.seen.join(seen)
        self.host_acts()
        if host.time_ns > start_ns:
            self._rows.append(TimelineRow(host.name, "host", operation, 0, start_ns, host.time_ns))
