"""Every block of device and pinned memory, and who last wrote and read each range of it.

Two accesses to the same byte, one of them a write, must be ordered by an event, a wait or a
synchronisation (docs/design.md invariant 4); where they are not, that is a race, found by order
and not by luck. An allocation counts as a write by the stream that allocates.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from swapopt_mindspore.emulated.addresses import AddressMap, ByteRange
from swapopt_mindspore.emulated.clock import Scheduler
from swapopt_mindspore.emulated.order import HOST, ActorId, VectorClock

Place = Literal["device memory", "pinned host memory"]


class RaceError(RuntimeError):
    """Two accesses to the same bytes that nothing orders."""


@dataclass(frozen=True)
class Race:
    """One conflict.

    Attributes:
        kind: such as "read after write".
        operation, stream: what raced, and where it was issued.
        earlier_operation, earlier_stream: the access that nothing orders before it.
        memory: which memory.
        range: the bytes, counted from the start of that memory.
    """

    kind: str
    operation: str
    stream: str
    earlier_operation: str
    earlier_stream: str
    memory: str
    range: tuple[int, int]

    def __str__(self) -> str:
        begin, end = self.range
        return (
            f"{self.kind}: {self.operation} ({self.stream}) is not ordered after "
            f"{self.earlier_operation} ({self.earlier_stream}); bytes {begin} to {end} of "
            f"{self.memory}"
        )


class _Access(NamedTuple):
    actor: ActorId
    tick: int
    operation: str

    def is_before(self, seen: VectorClock) -> bool:
        return seen.covers(self.actor, self.tick)


@dataclass
class _Span:
    """A range inside a block that was always accessed as a whole."""

    where: ByteRange
    write: _Access | None
    reads: list[_Access] = field(default_factory=list)

    def uses(self) -> list[_Access]:
        return [*([self.write] if self.write is not None else []), *self.reads]

    def cut_at(self, *addresses: int) -> list[_Span]:
        begin, end = self.where
        edges = [begin, *(address for address in addresses if begin < address < end), end]
        return [_Span(ByteRange(*edge), self.write, list(self.reads)) for edge in pairwise(edges)]


@dataclass
class _Block:
    where: ByteRange
    place: Place
    owner: ActorId
    spans: list[_Span]  # disjoint, by rising address; bytes that nobody accessed are in none

    def tile(self, where: ByteRange) -> slice:
        """Cut and fill the spans so that some of them tile ``where`` exactly; return which."""
        first = bisect_right(self.spans, where.begin, key=lambda span: span.where.end)
        last = bisect_left(self.spans, where.end, key=lambda span: span.where.begin)
        tiles, at = [], where.begin
        for span in self.spans[first:last]:
            if at < span.where.begin:
                tiles.append(_Span(ByteRange(at, span.where.begin), None))
            tiles += span.cut_at(where.begin, where.end)
            at = span.where.end
        if at < where.end:
            tiles.append(_Span(ByteRange(at, where.end), None))
        self.spans[first:last] = tiles
        first += tiles[0].where.begin < where.begin
        last = bisect_left(self.spans, where.end, key=lambda span: span.where.begin)
        return slice(first, last)

    def __str__(self) -> str:
        return f"{self.where.nbytes} bytes of {self.place}"


class _FreedInUse(NamedTuple):
    uses: list[_Access]
    block: _Block


class ShadowMemory:
    """The detector.

    Args:
        scheduler: knows the order.
        report: called with every race, when it is found.
    """

    def __init__(self, scheduler: Scheduler, report: Callable[[Race], None]) -> None:
        self._scheduler = scheduler
        self._report = report
        self._blocks: AddressMap[_Block] = AddressMap()
        self._freed_in_use: list[_FreedInUse] = []

    def add_device(self, where: ByteRange, owner: ActorId) -> None:
        """Device memory is allocated by the stream ``owner``.

        A caching allocator may hand out memory that was just freed on that stream, so this is
        where freed memory that somebody still uses becomes a race.
        """
        self._check_reuse(owner)
        tick = self._scheduler.mark_allocation(owner)
        span = _Span(where, _Access(owner, tick, "allocation"))
        self._blocks.add(where, _Block(where, "device memory", owner, [span]))

    def add_pinned(self, where: ByteRange) -> None:
        """Host memory is allocated; it is the host's."""
        self._blocks.add(where, _Block(where, "pinned host memory", HOST, []))

    def remove(self, where: ByteRange, operation: str) -> None:
        """Memory is given back."""
        block = self._blocks.remove(where)
        over = self.over_at_release(block.owner)
        uses = [use for span in block.spans for use in span.uses() if not use.is_before(over)]
        if not uses:
            return
        if block.place == "device memory":
            self._freed_in_use.append(_FreedInUse(uses, block))
        else:
            me = _Access(HOST, 0, operation)
            self._found("released while in use", me, uses[0], block, block.where)

    def over_at_release(self, owner: ActorId) -> VectorClock:
        """Return what is certain to be over before freed memory is used for something else."""
        over = self._scheduler.seen_by(owner).copy()
        over.join(self._scheduler.seen_by(HOST))
        return over

    def access(
        self,
        actor: ActorId,
        operation: str,
        *,
        reads: Sequence[ByteRange] = (),
        writes: Sequence[ByteRange] = (),
    ) -> None:
        """The actor's present act reads and writes these bytes; unknown memory is left out."""
        seen = self._scheduler.seen_by(actor)
        me = _Access(actor, seen.at(actor), operation)
        for where in reads:
            self._read(where, me, seen)
        for where in writes:
            self._write(where, me, seen)

    def _check_reuse(self, owner: ActorId) -> None:
        over = self.over_at_release(owner)
        freed_in_use, self._freed_in_use = self._freed_in_use, []
        for uses, block in freed_in_use:
            for use in uses:
                if not use.is_before(over):
                    me = _Access(owner, 0, "allocation")
                    self._found("reuse of memory freed in use", me, use, block, block.where)
                    break

    def _read(self, where: ByteRange, me: _Access, seen: VectorClock) -> None:
        block = self._block_of(where)
        if block is None:
            return
        racing = None
        for span in block.spans[block.tile(where)]:
            if span.write is not None and not span.write.is_before(seen):
                racing = racing or (span.write, span.where)
            span.reads = [read for read in span.reads if read.actor != me.actor] + [me]
        if racing is not None:
            self._found("read after write", me, racing[0], block, racing[1])

    def _write(self, where: ByteRange, me: _Access, seen: VectorClock) -> None:
        block = self._block_of(where)
        if block is None:
            return
        racing = None
        tiles = block.tile(where)
        for span in block.spans[tiles]:
            for use in span.uses():
                if not use.is_before(seen):
                    kind = "write after write" if use is span.write else "write after read"
                    racing = racing or (kind, use, span.where)
        block.spans[tiles] = [_Span(where, me)]
        if racing is not None:
            self._found(racing[0], me, racing[1], block, racing[2])

    def _block_of(self, where: ByteRange) -> _Block | None:
        found = self._blocks.find(where.begin)
        if found is None:
            return None
        assert found[0].contains(where), "an access lies inside one block"
        return found[1]

    def _found(
        self, kind: str, me: _Access, earlier: _Access, block: _Block, where: ByteRange
    ) -> None:
        name_of = self._scheduler.name_of
        begin = block.where.begin
        self._report(
            Race(
                kind,
                me.operation,
                name_of(me.actor),
                earlier.operation,
                name_of(earlier.actor),
                str(block),
                (where.begin - begin, where.end - begin),
            )
        )
