"""Order, engines, address maps and the detector's books by themselves: no tensor in sight."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapopt_mindspore.emulated.addresses import AddressMap, ByteRange
from swapopt_mindspore.emulated.clock import Scheduler, Work
from swapopt_mindspore.emulated.engine import Engine
from swapopt_mindspore.emulated.order import HOST, ActorId, VectorClock
from swapopt_mindspore.emulated.profiles import PROFILES, Profile, resolve_profile
from swapopt_mindspore.emulated.shadow import Race, ShadowMemory

FIRST, SECOND, THIRD = 1, 2, 3


# ---------------------------------------------------------------------- vector clocks
def test_a_clock_knows_what_it_joined_and_no_more() -> None:
    mine, theirs = VectorClock(), VectorClock()
    theirs.tick(SECOND)
    before = theirs.copy()
    theirs.tick(SECOND)
    mine.join(before)
    mine.tick(FIRST)
    assert mine.covers(SECOND, 1)
    assert not mine.covers(SECOND, 2)
    assert not theirs.covers(FIRST, 1)
    assert (mine.at(FIRST), mine.at(SECOND), mine.at(THIRD)) == (1, 1, 0)


# ---------------------------------------------------------------------- engines
bookings = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30)


@given(bookings)
def test_an_engine_does_one_thing_at_a_time(wishes: list[tuple[int, int]]) -> None:
    engine = Engine()
    taken = []
    for ready_ns, duration_ns in wishes:
        start_ns = engine.book(ready_ns, duration_ns, horizon_ns=0)
        assert start_ns >= ready_ns
        if duration_ns > 0:
            taken.append((start_ns, start_ns + duration_ns))
    for earlier, later in pairwise(sorted(taken)):
        assert earlier[1] <= later[0]


@given(bookings)
def test_an_engine_takes_the_first_gap(wishes: list[tuple[int, int]]) -> None:
    engine = Engine()
    busy: set[int] = set()
    for ready_ns, duration_ns in ((ready, duration + 1) for ready, duration in wishes):
        first = ready_ns
        while busy & set(range(first, first + duration_ns)):
            first += 1
        assert engine.book(ready_ns, duration_ns, horizon_ns=0) == first
        busy |= set(range(first, first + duration_ns))


def test_an_engine_forgets_what_is_over() -> None:
    engine = Engine()
    assert engine.book(0, 10, horizon_ns=0) == 0
    assert engine.book(5, 10, horizon_ns=5) == 10
    assert engine.book(20, 10, horizon_ns=20) == 20
    engine.clear()
    assert engine.book(0, 10, horizon_ns=0) == 0


# ---------------------------------------------------------------------- addresses
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 10)), max_size=20),
    st.integers(-5, 80),
)
def test_a_map_finds_by_any_address_inside(pieces: list[tuple[int, int]], address: int) -> None:
    ranges: list[ByteRange] = []
    found: AddressMap[ByteRange] = AddressMap()
    for begin, nbytes in pieces:
        where = ByteRange(begin, begin + nbytes)
        overlapped = [other for other in ranges if other.overlaps(where)]
        assert (found.overlapping(where) is not None) == bool(overlapped)
        if not overlapped:
            ranges.append(where)
            found.add(where, where)
    expected = [where for where in ranges if where.begin <= address < where.end]
    hit = found.find(address)
    assert [hit] == [(where, where) for where in expected] if expected else hit is None
    for where in ranges[::2]:
        assert found.remove(where) == where
    assert [where for where in ranges if found.find(where.begin) is not None] == ranges[1::2]


# ---------------------------------------------------------------------- the detector
class PlainDetector:
    """The rules of the shadow memory, byte by byte, with nothing merged or cut."""

    def __init__(self, nbytes: int) -> None:
        self.writes: list[tuple[ActorId, int] | None] = [None] * nbytes
        self.reads: list[dict[ActorId, int]] = [{} for _ in range(nbytes)]

    def access(
        self, actor: ActorId, seen: VectorClock, begin: int, end: int, *, write: bool
    ) -> bool:
        """Enter the access and say whether it races."""
        earlier = [self.writes[at] for at in range(begin, end)]
        if write:
            earlier += [read for at in range(begin, end) for read in self.reads[at].items()]
        for at in range(begin, end):
            if write:
                self.writes[at], self.reads[at] = (actor, seen.at(actor)), {}
            else:
                self.reads[at][actor] = seen.at(actor)
        return any(access is not None and not seen.covers(*access) for access in earlier)


acts = st.lists(
    st.one_of(
        st.tuples(
            st.just("access"),
            st.sampled_from([FIRST, SECOND, THIRD]),
            st.integers(0, 15),
            st.integers(1, 8),
            st.booleans(),
        ),
        st.tuples(
            st.just("wait"), st.sampled_from([FIRST, SECOND, THIRD]), st.integers(FIRST, THIRD)
        ),
    ),
    max_size=40,
)


@given(acts)
def test_the_detector_agrees_with_one_that_looks_at_every_byte(
    program: list[tuple[str, ActorId, int] | tuple[str, ActorId, int, int, bool]],
) -> None:
    scheduler = Scheduler(PROFILES["half-duplex"])
    for name in ("first", "second", "third"):
        scheduler.new_stream(name)
    races: list[Race] = []
    shadow = ShadowMemory(scheduler, races.append)
    shadow.add_pinned(ByteRange(1000, 1024))
    plain = PlainDetector(24)
    for verb, actor, *rest in program:
        if verb == "wait":
            scheduler.stream_waits(actor, scheduler.point_of(rest[0]))
            continue
        begin, nbytes, write = rest
        scheduler.order_next(actor)
        where = [ByteRange(1000 + begin, 1000 + begin + nbytes)]
        shadow.access(actor, "act", reads=[] if write else where, writes=where if write else [])
        seen = scheduler.seen_by(actor)
        expected = plain.access(actor, seen, begin, begin + nbytes, write=bool(write))
        assert bool(races) == expected
        assert len(races) <= 1
        races.clear()


# ---------------------------------------------------------------------- the scheduler
PROFILE = Profile(
    name="round figures",
    h2d_bytes_per_second=1e9,
    d2h_bytes_per_second=2e9,
    full_duplex=True,
    memory_bytes_per_second=10e9,
    host_issue_seconds=1e-7,
    copy_overhead_seconds=5e-7,
    kernel_overhead_seconds=1e-7,
    sync_seconds=1e-8,
    poll_seconds=1e-8,
)


def test_what_things_cost() -> None:
    assert PROFILE.copy_ns("h2d", 1000) == 500 + 1000
    assert PROFILE.copy_ns("d2h", 1000) == 500 + 500
    assert PROFILE.update_ns(1000, launches=3) == 3 * 100 + 100
    assert (PROFILE.host_issue_ns, PROFILE.sync_ns, PROFILE.poll_ns) == (100, 10, 10)


def test_work_begins_after_its_issue_and_what_its_stream_waits_for() -> None:
    scheduler = Scheduler(PROFILE)
    first, second = scheduler.new_stream("first"), scheduler.new_stream("second")
    issue(scheduler, first, Work("h2d", "a", 0, 1000))
    scheduler.stream_waits(second, scheduler.point_of(first))
    issue(scheduler, second, Work("d2h", "b", 0, 50))
    issue(scheduler, first, Work("h2d", "c", 0, 10))
    assert [(row.operation, row.start_ns, row.end_ns) for row in scheduler.timeline()] == [
        ("a", 100, 1100),
        ("b", 1100, 1150),
        ("c", 1100, 1110),
    ]
    assert scheduler.now_ns == 300


def issue(scheduler: Scheduler, stream: ActorId, work: Work) -> None:
    scheduler.order_next(stream)
    scheduler.book(stream, work)


def test_many_launches_end_when_the_host_has_issued_the_last() -> None:
    scheduler = Scheduler(PROFILE)
    stream = scheduler.new_stream("compute")
    issue(scheduler, stream, Work("compute", "update", 0, 40, launches=4))
    (row,) = scheduler.timeline()
    assert (row.start_ns, row.end_ns) == (100, 100 + 3 * 100 + 10)
    assert scheduler.now_ns == 400


def test_the_host_waits_for_a_point_and_knows_what_came_before() -> None:
    scheduler = Scheduler(PROFILE)
    stream = scheduler.new_stream("copies")
    issue(scheduler, stream, Work("h2d", "a", 0, 1000))
    point = scheduler.point_of(stream)
    issue(scheduler, stream, Work("h2d", "b", 0, 1000))
    scheduler.host_waits(point, "synchronize event")
    assert scheduler.now_ns == 1100 + 10
    assert scheduler.seen_by(HOST).covers(stream, 1)
    assert not scheduler.seen_by(HOST).covers(stream, 2)
    scheduler.host_waits_for_all()
    assert scheduler.now_ns == 2100 + 10
    assert scheduler.seen_by(HOST).covers(stream, 2)
    assert [row.operation for row in scheduler.timeline() if row.lane == "host"] == [
        "synchronize event",
        "synchronize device",
    ]


def test_a_reset_clock_keeps_the_order_and_ends_what_was_issued() -> None:
    scheduler = Scheduler(PROFILE)
    stream = scheduler.new_stream("copies")
    issue(scheduler, stream, Work("h2d", "a", 0, 1000))
    point = scheduler.point_of(stream)
    scheduler.reset_clock()
    assert scheduler.now_ns == 0
    assert scheduler.poll(point)
    assert scheduler.seen_by(HOST).covers(stream, 1)
    issue(scheduler, stream, Work("h2d", "b", 0, 1000))
    assert scheduler.timeline()[-1].start_ns == 10 + 100


# ---------------------------------------------------------------------- profiles
def test_a_profile_is_found_by_name_or_is_one() -> None:
    assert resolve_profile("h200").name == "h200"
    assert resolve_profile(PROFILE) is PROFILE
    with pytest.raises(ValueError, match="unknown profile 'h100': choose one of"):
        resolve_profile("h100")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("h2d_bytes_per_second", 0.0),
        ("d2h_bytes_per_second", -1.0),
        ("memory_bytes_per_second", float("nan")),
        ("host_issue_seconds", -1.0),
        ("poll_seconds", 0.0),
        ("sources", {"colour": "red"}),
    ],
)
def test_a_profile_that_cannot_be_is_refused(field: str, value: object) -> None:
    figures = {name: getattr(PROFILE, name) for name in PROFILE.__dataclass_fields__}
    with pytest.raises(ValueError, match=f"{field}|sources must name fields"):
        Profile(**{**figures, field: value})


def test_every_figure_of_a_built_in_profile_has_a_source() -> None:
    for profile in PROFILES.values():
        figures = set(profile.__dataclass_fields__) - {"name", "sources"}
        assert set(profile.sources) == figures
