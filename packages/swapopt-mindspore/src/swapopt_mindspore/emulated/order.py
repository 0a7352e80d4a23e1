"""What happens before what: a vector clock per actor (the host, or a stream).

Every actor counts its own acts. Its clock says how many acts of each other actor are certain to
be over before its next one; two acts of which neither clock covers the other are unordered.
"""

from __future__ import annotations

ActorId = int
HOST: ActorId = 0


class VectorClock:
    """How many acts of each actor are known to be over."""

    def __init__(self, ticks: dict[ActorId, int] | None = None) -> None:
        self._ticks = dict(ticks) if ticks is not None else {}

    def at(self, actor: ActorId) -> int:
        """Return how many acts of ``actor`` are over."""
        return self._ticks.get(actor, 0)

    def tick(self, actor: ActorId) -> None:
        """Count one more act of ``actor``."""
        self._ticks[actor] = self.at(actor) + 1

    def join(self, other: VectorClock) -> None:
        """Know also what ``other`` knows."""
        for actor, tick in other._ticks.items():
            self._ticks[actor] = max(self.at(actor), tick)

    def covers(self, actor: ActorId, tick: int) -> bool:
        """Say whether act number ``tick`` of ``actor`` is over."""
        return self.at(actor) >= tick

    def copy(self) -> VectorClock:
        """Return what is known now."""
        return VectorClock(self._ticks)
