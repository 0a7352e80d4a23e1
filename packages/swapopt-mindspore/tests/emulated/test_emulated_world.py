"""Detector and late copies against each other, over programs made at random.

A program in which the detector finds no race must leave the same bytes whether copies happen at
once or as late as they may.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from hypothesis import assume, event, given
from hypothesis import strategies as st

from swapopt_mindspore.emulated.addresses import ByteRange
from swapopt_mindspore.emulated.books import Allocation, MemoryBooks
from swapopt_mindspore.emulated.profiles import PROFILES
from swapopt_mindspore.emulated.world import World

NBYTES = 24


class Act(NamedTuple):
    """One act on some of the bytes; ``follows`` are the streams it waits for first."""

    verb: Literal["h2d", "d2h", "update", "host write"]
    begin: int
    end: int
    follows: frozenset[str]


streams = st.sampled_from(["compute", "h2d", "d2h"])
acts = st.builds(
    lambda verb, begin, nbytes, follows: Act(verb, begin, min(begin + nbytes, NBYTES), follows),
    st.sampled_from(["h2d", "d2h", "update", "host write"]),
    st.integers(0, NBYTES - 1),
    st.integers(1, NBYTES),
    # Mostly all three, or hardly any program would be free of races.
    st.one_of(st.just(frozenset({"compute", "h2d", "d2h"})), st.frozensets(streams)),
)


class Machine:
    def __init__(self, *, late: bool) -> None:
        books = MemoryBooks(None, None)
        profile = PROFILES["half-duplex"]
        self.world = World(
            profile, books, race_mode="collect", late=late, dry=False, owner_name="compute stream"
        )
        self.actors = {
            "compute": self.world.owner,
            "h2d": self.world.scheduler.new_stream("h2d stream"),
            "d2h": self.world.scheduler.new_stream("d2h stream"),
        }
        start = np.arange(NBYTES, dtype=np.uint8)
        self.device = Allocation(start.copy(), "device")
        self.pinned = Allocation(start + 100, "pinned")
        for allocation in (self.device, self.pinned):
            self.world.take(allocation, keep_content=True)
            books.enter(allocation)
        self.world.host_waits_for_all()

    def run(self, act: Act, number: int) -> None:
        scheduler = self.world.scheduler
        points = [scheduler.point_of(self.actors[name]) for name in sorted(act.follows)]
        on_device = _part(self.device, act)
        on_host = _part(self.pinned, act)
        if act.verb == "host write":
            for point in points:
                self.world.host_waits(point, "synchronize event")
            self.world.host_access(on_host, write=True)
            self.pinned.memory[act.begin : act.end] = number
            return
        actor = self.actors["compute" if act.verb == "update" else act.verb]
        for point in points:
            scheduler.stream_waits(actor, point)
        if act.verb == "update":
            self.world.begin_update("update", [], [on_device])
            self.device.memory[act.begin : act.end] *= 2
            self.device.memory[act.begin : act.end] += number
            self.world.end_update("update", [], [on_device], launches=1)
        elif act.verb == "h2d":
            self.world.copy(actor, "h2d", on_device, on_host, blocking=False)
        else:
            self.world.copy(actor, "d2h", on_host, on_device, blocking=False)

    def finish(self) -> tuple[bytes, bytes]:
        self.world.host_waits_for_all()
        return self.device.memory.tobytes(), self.pinned.memory.tobytes()


def _part(allocation: Allocation, act: Act) -> ByteRange:
    begin = allocation.where.begin
    return ByteRange(begin + act.begin, begin + act.end)


@given(st.lists(acts, min_size=4, max_size=12))
def test_without_races_late_copies_change_nothing(program: list[Act]) -> None:
    at_once, late = Machine(late=False), Machine(late=True)
    for number, act in enumerate(program):
        at_once.run(act, number)
        late.run(act, number)
    races = late.world.take_races()
    assert races == at_once.world.take_races()
    event("races" if races else "no races")
    assume(not races)
    assert late.finish() == at_once.finish()
    assert late.world.scheduler.timeline() == at_once.world.scheduler.timeline()
