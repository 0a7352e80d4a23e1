"""Copies that happen as late as the order of the program allows, over raw memory.

A copy is put off until something that is ordered after it needs its bytes; its destination holds
NaN until then, so that reading it too early gives wrong numbers. Copies keep no memory alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
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
    seen: VectorClock
    source: ByteRange
    destination: ByteRange
    held: bytes | None = None  # what the source was when its memory was given back

    def is_before(self, seen: VectorClock) -> bool:
        return seen.covers(self.stream, self.tick)

    def touches(self, where: ByteRange) -> bool:
        reads = self.held is None and self.source.overlaps(where)
        return reads or self.destination.overlaps(where)

    def conflicts_with(self, later: _Copy) -> bool:
        writes_what_it_touches = self.destination.overlaps(later.destination) or (
            later.held is None and self.destination.overlaps(later.source)
        )
        reads = self.held is None and self.source.overlaps(later.destination)
        return writes_what_it_touches or reads

    def run(self) -> None:
        origin = self.source.begin if self.held is None else self.held
        ctypes.memmove(self.destination.begin, origin, self.destination.nbytes)


def copy_now(destination: ByteRange, source: ByteRange) -> None:
    """Copy bytes at once."""
    ctypes.memmove(destination.begin, source.begin, destination.nbytes)


class LateCopies:
    """The copies that have been issued and have not happened.

    Args:
        scheduler: knows the order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pending: list[_Copy] = []

    def defer(self, stream: ActorId, destination: ByteRange, source: ByteRange) -> None:
        """Put off the copy that is the stream's present act."""
        poison(destination)
        seen = self._scheduler.seen_by(stream)
        self._pending.append(_Copy(stream, seen.at(stream), seen.copy(), source, destination))

    def run_before(self, actor: ActorId, touched: Iterable[ByteRange]) -> None:
        """The actor is about to read or write these bytes: copies it is ordered after happen."""
        if not self._pending:
            return
        seen, ranges = self._scheduler.seen_by(actor), tuple(touched)
        self._run_where(
            lambda copy: copy.is_before(seen) and any(copy.touches(where) for where in ranges)
        )

    def run_before_host(self) -> None:
        """The host may read pinned memory at any time: what it has waited for happens."""
        seen = self._scheduler.seen_by(HOST)
        self._run_where(lambda copy: copy.is_before(seen))

    def release(self, where: ByteRange, over: VectorClock) -> None:
        """Memory goes away, and ``over`` is over by then.

        A copy that reads it and is over by then goes on with the bytes as they are now. Others
        find what comes after; a copy into it that is over has nobody left to show its bytes to.
        """
        for copy in [copy for copy in self._pending if copy.touches(where)]:
            if copy not in self._pending or not copy.is_before(over):
                continue
            if copy.destination.overlaps(where):
                self._run_in_order(copy)
            else:
                self._run_those_before(copy)
                copy.held = ctypes.string_at(copy.source.begin, copy.source.nbytes)

    def forget(self, where: ByteRange) -> None:
        """Memory no longer exists: what would touch it cannot happen."""
        self._pending = [copy for copy in self._pending if not copy.touches(where)]

    def _run_where(self, needed: Callable[[_Copy], bool]) -> None:
        for copy in [copy for copy in self._pending if needed(copy)]:
            if copy in self._pending:
                self._run_in_order(copy)

    def _run_in_order(self, copy: _Copy) -> None:
        self._pending.remove(copy)
        self._run_those_before(copy)
        copy.run()

    def _run_those_before(self, copy: _Copy) -> None:
        """Run the copies that this one is ordered after and that touch its bytes."""
        before = [
            other
            for other in self._pending
            if other is not copy and other.is_before(copy.seen) and other.conflicts_with(copy)
        ]
        for other in before:
            if other in self._pending:
                self._run_in_order(other)
