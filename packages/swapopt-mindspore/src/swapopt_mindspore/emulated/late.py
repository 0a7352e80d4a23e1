"""Copies that happen as late as the order of the program allows, over raw memory.

A copy is put off until something that is ordered after it needs its bytes; its destination holds
NaN until then, so that reading it too early gives wrong numbers. Copies keep no memory alive.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swapopt_mindspore.emulated.addresses import ByteRange
from swapopt_mindspore.emulated.clock import Scheduler
from swapopt_mindspore.emulated.order import HOST, ActorId, VectorClock

_POISON = 0xFF
"""Bytes of ones are NaN in every floating-point type, and -1 in every signed integer."""


def poison(where: ByteRange) -> None:
    """Fill memory with NaN."""
    ctypes.memset(where.begin, _POISON, where.nbytes)


def copy_now(destination: ByteRange, source: ByteRange) -> None:
    """Copy bytes at once."""
    ctypes.memmove(destination.begin, source.begin, destination.nbytes)


# eq=False: copies are identities; two may have the same ranges.
@dataclass(eq=False)
class _Copy:
    number: int
    stream: ActorId
    tick: int
    source: ByteRange
    destination: ByteRange
    held: bytes | None = None  # what the source was when its memory was given back

    def is_before(self, seen: VectorClock) -> bool:
        return seen.covers(self.stream, self.tick)

    def run(self) -> None:
        origin = self.source.begin if self.held is None else self.held
        ctypes.memmove(self.destination.begin, origin, self.destination.nbytes)


class _Index:
    """Copies by a range of bytes that each has to do with; the ranges may overlap."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, ByteRange, _Copy]] = []
        self._longest_nbytes = 0

    def add(self, where: ByteRange, copy: _Copy) -> None:
        insort(self._entries, (where.begin, copy.number, where, copy))
        self._longest_nbytes = max(self._longest_nbytes, where.nbytes)

    def discard(self, where: ByteRange, copy: _Copy) -> None:
        index = bisect_left(self._entries, (where.begin, copy.number))
        if index < len(self._entries) and self._entries[index][3] is copy:
            del self._entries[index]

    def overlapping(self, where: ByteRange) -> list[_Copy]:
        first = bisect_left(self._entries, (where.begin - self._longest_nbytes,))
        last = bisect_left(self._entries, (where.end,))
        return [entry[3] for entry in self._entries[first:last] if entry[2].end > where.begin]


class LateCopies:
    """The copies that have been issued and have not happened.

    None of them is ordered after another that shares bytes with it: whoever issues an act calls
    `run_before` first, for a copy as for an update. Those that are due happen as they were issued.

    Args:
        scheduler: knows the order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._issued = 0
        self._pending: dict[int, _Copy] = {}
        self._sources = _Index()
        self._destinations = _Index()

    def defer(self, stream: ActorId, destination: ByteRange, source: ByteRange) -> None:
        """Put off the copy that is the stream's present act."""
        poison(destination)
        self._issued += 1
        tick = self._scheduler.seen_by(stream).at(stream)
        copy = _Copy(self._issued, stream, tick, source, destination)
        self._pending[copy.number] = copy
        self._sources.add(source, copy)
        self._destinations.add(destination, copy)

    def run_before(self, actor: ActorId, touched: Sequence[ByteRange]) -> None:
        """The actor is about to read or write these bytes: copies it is ordered after happen."""
        if self._pending:
            found = {copy for where in touched for copy in self._touching(where)}
            self._run(found, self._scheduler.seen_by(actor))

    def run_before_host(self) -> None:
        """The host may read pinned memory at any time: what it has waited for happens."""
        self._run(list(self._pending.values()), self._scheduler.seen_by(HOST))

    def release(self, where: ByteRange, over: VectorClock) -> None:
        """Memory is given back, and ``over`` is over by then.

        A copy from it that is over by then goes on with the bytes as they are now, and one into
        it has nobody left to show its bytes to. Those that are not over find what comes after.
        """
        for copy in self._sources.overlapping(where):
            if copy.is_before(over):
                copy.held = ctypes.string_at(copy.source.begin, copy.source.nbytes)
                self._sources.discard(copy.source, copy)
        for copy in self._destinations.overlapping(where):
            if copy.is_before(over):
                self._drop(copy)

    def forget(self, where: ByteRange) -> None:
        """Memory no longer exists: what would touch it cannot happen."""
        for copy in self._touching(where):
            self._drop(copy)

    def _touching(self, where: ByteRange) -> list[_Copy]:
        return self._sources.overlapping(where) + self._destinations.overlapping(where)

    def _run(self, copies: Collection[_Copy], seen: VectorClock) -> None:
        due = [copy for copy in copies if copy.is_before(seen)]
        for copy in sorted(due, key=lambda copy: copy.number):
            self._drop(copy)
            copy.run()

    def _drop(self, copy: _Copy) -> None:
        self._pending.pop(copy.number, None)
        self._sources.discard(copy.source, copy)
        self._destinations.discard(copy.destination, copy)
