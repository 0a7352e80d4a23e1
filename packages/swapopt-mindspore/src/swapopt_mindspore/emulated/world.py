"""One emulated machine: order, time, memory and what is checked of them, over raw addresses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

from swapopt_mindspore.emulated.addresses import ByteRange
from swapopt_mindspore.emulated.books import Allocation, MemoryBooks
from swapopt_mindspore.emulated.clock import Point, Scheduler, Work
from swapopt_mindspore.emulated.late import LateCopies, copy_now, poison
from swapopt_mindspore.emulated.order import HOST, ActorId
from swapopt_mindspore.emulated.profiles import Profile
from swapopt_mindspore.emulated.shadow import Race, RaceError, ShadowMemory
from swapopt_mindspore.host_buffer import HostBuffer

RaceMode = Literal["raise", "collect", "off"]
Direction = Literal["h2d", "d2h"]


class World:
    """The machine.

    Every act begins by burying memory that nothing points to any more: that is noticed at any
    moment, also while the books are being written, so it only queues up.

    Args:
        profile: what things cost.
        books: what there is of memory.
        race_mode: raise RaceError, collect races, or look for none.
        late: put asynchronous copies off.
        dry: touch no memory: nothing is copied, and contents are undefined.
        owner_name: what the caller's stream is called; it owns all device memory.
    """

    def __init__(
        self,
        profile: Profile,
        books: MemoryBooks,
        *,
        race_mode: RaceMode,
        late: bool,
        dry: bool,
        owner_name: str,
    ) -> None:
        self.scheduler = Scheduler(profile)
        self.books = books
        self.owner = self.scheduler.new_stream(owner_name)
        self._profile = profile
        self._race_mode = race_mode
        self._late = late
        self._dry = dry
        self._races: list[Race] = []
        self._unraised: list[Race] = []
        self._shadow = ShadowMemory(self.scheduler, self._found)
        self._pending = LateCopies(self.scheduler)
        self._dead: deque[Allocation] = deque()
        self._kept: deque[tuple[Point, set[HostBuffer]]] = deque()

    # ------------------------------------------------------------------ memory
    def take(self, allocation: Allocation, *, keep_content: bool = False) -> None:
        """Allocate memory that the books know; its content is NaN unless it is to be kept.

        Raises:
            DeviceMemoryError, MemoryError: there is not so much.
            RaceError: somebody still uses what was freed before; nothing is allocated.
        """
        self.bury()
        self.books.take(allocation)
        if allocation.place == "pinned":
            self._shadow.add_pinned(allocation.where)
        else:
            self._shadow.add_device(allocation.where, self.owner)
        if not keep_content:
            self._poison(allocation)
        try:
            self._raise_races()
        except RaceError:
            self._give_back(allocation)
            raise

    def give_back(self, allocation: Allocation) -> None:
        """Free memory; what is read from it later is NaN."""
        self.bury()
        self._give_back(allocation)
        self._raise_races()

    def dies(self, allocation: Allocation) -> None:
        """Nothing points to this memory any more. May be called at any moment."""
        self._dead.append(allocation)

    def keep_until(self, point: Point, buffers: set[HostBuffer]) -> None:
        """Let the host wait for the point, then forget the buffers. May be called at any moment."""
        self._kept.append((point, buffers))

    def bury(self) -> None:
        """Free the memory that nothing points to any more."""
        while self._kept:
            point, buffers = self._kept.popleft()
            self.scheduler.host_waits(point, "keep host memory")
            self._pending.run_before_host()
            buffers.clear()
        while self._dead:
            allocation = self._dead.popleft()
            if allocation.is_live:
                self._give_back(allocation)
            self._pending.forget(allocation.where)
            self.books.strike(allocation)

    def _give_back(self, allocation: Allocation) -> None:
        owner = self.owner if allocation.place == "device" else HOST
        self._pending.release(allocation.where, self._shadow.over_at_release(owner))
        self._shadow.remove(allocation.where, "release")
        self.books.give_back(allocation)
        self._poison(allocation)

    def _poison(self, allocation: Allocation) -> None:
        if not self._dry:
            poison(allocation.where)

    # ------------------------------------------------------------------ acts of streams
    def copy(
        self,
        stream: ActorId,
        direction: Direction,
        destination: ByteRange,
        source: ByteRange,
        *,
        blocking: bool,
    ) -> None:
        """Let the stream copy bytes; if blocking, the host waits for them.

        Raises:
            RaceError: nothing orders this copy and another access; nothing was copied.
        """
        operation = direction.upper()
        self._begin(stream, operation, reads=[source], writes=[destination])
        duration_ns = self._profile.copy_ns(direction, destination.nbytes)
        self.scheduler.book(stream, Work(direction, operation, destination.nbytes, duration_ns))
        if self._dry:
            pass
        elif self._late:
            self._pending.defer(stream, destination, source)
        else:
            copy_now(destination, source)
        if blocking:
            self.host_waits(self.scheduler.point_of(stream), "copy")

    def begin_update(
        self, operation: str, reads: Sequence[ByteRange], writes: Sequence[ByteRange]
    ) -> None:
        """The caller's stream is about to run operators that touch these bytes.

        Raises:
            RaceError: nothing orders them and another access.
        """
        self._begin(self.owner, operation, reads=reads, writes=writes)

    def end_update(
        self,
        operation: str,
        reads: Sequence[ByteRange],
        writes: Sequence[ByteRange],
        launches: int,
    ) -> None:
        """Charge the time of the update that began last."""
        traffic = sum(where.nbytes for where in reads) + 2 * sum(where.nbytes for where in writes)
        duration_ns = self._profile.update_ns(traffic, launches)
        work = Work("compute", operation, traffic, duration_ns, launches)
        self.scheduler.book(self.owner, work)

    def compute(self, operation: str, duration_ns: int) -> None:
        """Let the caller's stream be busy."""
        self.bury()
        self.scheduler.order_next(self.owner)
        self.scheduler.book(self.owner, Work("compute", operation, 0, duration_ns))

    def _begin(
        self,
        stream: ActorId,
        operation: str,
        *,
        reads: Sequence[ByteRange],
        writes: Sequence[ByteRange],
    ) -> None:
        self.bury()
        self.scheduler.order_next(stream)
        self._pending.run_before(stream, [*reads, *writes])
        self._shadow.access(stream, operation, reads=reads, writes=writes)
        self._raise_races()

    # ------------------------------------------------------------------ acts of the host
    def host_waits(self, point: Point, operation: str) -> None:
        """Block the host until the point is reached."""
        self.bury()
        self.scheduler.host_waits(point, operation)
        self._pending.run_before_host()

    def host_waits_for_all(self) -> None:
        """Block the host until every stream is idle."""
        self.bury()
        self.scheduler.host_waits_for_all()
        self._pending.run_before_host()

    def poll(self, point: Point) -> bool:
        """Let the host ask whether the point is reached."""
        self.bury()
        reached = self.scheduler.poll(point)
        if reached:
            self._pending.run_before_host()
        return reached

    def host_access(self, where: ByteRange, *, write: bool) -> None:
        """The host reads or writes pinned memory.

        Raises:
            RaceError: nothing orders that and another access.
        """
        self.bury()
        self.scheduler.host_acts()
        reads, writes = ([], [where]) if write else ([where], [])
        self._shadow.access(HOST, "host access", reads=reads, writes=writes)
        self._raise_races()

    # ------------------------------------------------------------------ races
    def take_races(self) -> list[Race]:
        """Return the races found since the last call, in any mode but "off"; forget them."""
        self.bury()
        races, self._races, self._unraised = self._races, [], []
        return races

    def _found(self, race: Race) -> None:
        if self._race_mode != "off":
            self._races.append(race)
            self._unraised.append(race)

    def _raise_races(self) -> None:
        unraised, self._unraised = self._unraised, []
        if unraised and self._race_mode == "raise":
            raise RaceError("; ".join(str(race) for race in unraised))
