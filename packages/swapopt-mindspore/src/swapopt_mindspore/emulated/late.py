"""Copies that happen as late as the order of the program allows, over raw memory.

A copy is put off until something that is ordered after it needs its bytes; its destination holds
NaN until then, so that reading it too early gives wrong numbers. Copies keep no memory alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swapopt_mindspore.emulated.addresses import ByteRange
from swapopt_mindspore.emulated.clock import Scheduler
from swapopt_mindspore.emulated.order import HOST, ActorId, VectorClock

_POISON = 0xFF
"""Bytes of ones are NaN in every floating-point type, and -1 in every signed integer."""


def poison(where: ByteRange) -> None:
    """Fill memory with NaN."""
    ctypes.memset(where.begin, _POISON, where.nbytes)


# eq=False: copies are identities; two may have the same ranges.
@dataclass(eq=False)
class _Copy:
    stream: ActorId
    tick: int
    source: ByteRange
    destination: ByteRange
    held: bytes | None = None  # what the source was when its memory was given back

    def is_before(self, seen: VectorClock) -> bool:
        return seen.covers(self.stream, self.tick)

    def reads(self, where: ByteRange) -> bool:
        return self.held is None and self.source.overlaps(where)

    def writes(self, where: ByteRange) -> bool:
        return self.destination.overlaps(where)

    def touches(self, where: ByteRange) -> bool:
        return self.reads(where) or self.writes(where)

    def run(self) -> None:
        origin = self.source.begin if self.held is None else self.held
        ctypes.memmove(self.destination.begin, origin, self.destination.nbytes)


def copy_now(destination: ByteRange, source: ByteRange) -> None:
    """Copy bytes at once."""
    ctypes.memmove(destination.begin, source.begin, destination.nbytes)


class LateCopies:
    """The copies that have been issued and have not happened, in the order of issue.

    None of them is ordered after another that shares bytes with it: whoever issues an act calls
    `run_before` first, for a copy as for an update.

    Args:
        scheduler: knows the order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pending: list[_Copy] = []

    def defer(self, stream: ActorId, destination: ByteRange, source: ByteRange) -> None:
        """Put off the copy that is the stream's present act."""
        poison(destination)
        tick = self._scheduler.seen_by(stream).at(stream)
        self._pending.append(_Copy(stream, tick, source, destination))

    def run_before(self, actor: ActorId, touched: Sequence[ByteRange]) -> None:
        """The actor is about to read or write these bytes: copies it is ordered after happen."""
        seen = self._scheduler.seen_by(actor)
        self._run_where(
            lambda copy: copy.is_before(seen) and any(copy.touches(where) for where in touched)
        )

    def run_before_host(self) -> None:
        """The host may read pinned memory at any time: what it has waited for happens."""
        seen = self._scheduler.seen_by(HOST)
        self._run_where(lambda copy: copy.is_before(seen))

    def release(self, where: ByteRange, over: VectorClock) -> None:
        """Memory is given back, and ``over`` is over by then.

        A copy from it that is over by then goes on with the bytes as they are now, and one into
        it has nobody left to show its bytes to. Those that are not over find what comes after.
        """
        for copy in self._pending:
            if copy.reads(where) and copy.is_before(over):
                copy.held = ctypes.string_at(copy.source.begin, copy.source.nbytes)
        self._pending = [
            copy for copy in self._pending if not (copy.writes(where) and copy.is_before(over))
        ]

    def forget(self, where: ByteRange) -> None:
        """Memory no longer exists: what would touch it cannot happen."""
        self._pending = [copy for copy in self._pending if not copy.touches(where)]

    def _run_where(self, needed: Callable[[_Copy], bool]) -> None:
        waiting = []
        for copy in self._pending:
            if needed(copy):
                copy.run()
            else:
                waiting.append(copy)
        self._pending = waiting
