"""Each race with and without the wait that prevents it.

A small packed pipeline on one arena has every edge of `swapopt_mindspore.streams.Edge`; each is
taken away in turn, and the detector says which accesses are left unordered.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from mindspore import Tensor
from mindspore import dtype as mstype
from steps import adopted, bits, follow, host_tensor, random, recorded

from swapopt_mindspore.emulated import EmulatedDevice, RaceError
from swapopt_mindspore.streams import Edge, Stream, wait

SHAPE = (16,)


@pytest.fixture
def collecting() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice("half-duplex", races="collect")
    yield device
    device.synchronize()


class Steps:
    """Two batches through one arena, then memory for somebody else; without some edges."""

    def __init__(self, device: EmulatedDevice, left_out: Edge | None) -> None:
        self.device = device
        self.left_out = left_out
        self.mirrors = [host_tensor(device, random(SHAPE, seed)) for seed in range(2)]
        self.arena = device.new_arena(64)

    def order(self, later: Stream, earlier: Stream, edge: Edge) -> None:
        if edge is not self.left_out:
            wait(later, recorded(self.device, earlier), edge)

    def run(self) -> None:
        device, compute = self.device, self.device.compute_stream()
        self.arena.allocate()
        view = self.arena.view(mstype.float32, 0, SHAPE)
        self.order(device.h2d, compute, Edge.ALLOCATED)
        for batch, mirror in enumerate(self.mirrors):
            if batch > 0:
                self.order(device.h2d, device.d2h, Edge.REUSED)
            device.copy(device.h2d, view, mirror)
            self.order(compute, device.h2d, Edge.PREFETCHED)
            with device.updating("Adam", reads=[], writes=[view], launches=1):
                pass
            self.order(device.d2h, compute, Edge.UPDATED)
            device.copy(device.d2h, mirror, view)
        self.order(compute, device.d2h, Edge.OFFLOADED)
        self.arena.free()
        self.arena.allocate()


def test_the_whole_pipeline_has_no_race(collecting: EmulatedDevice) -> None:
    steps = Steps(collecting, None)
    steps.run()
    collecting.synchronize()
    assert collecting.take_races() == []
    for seed, mirror in enumerate(steps.mirrors):
        assert bits(mirror) == random(SHAPE, seed).tobytes()


@pytest.mark.parametrize(
    ("edge", "kind", "operation", "earlier"),
    [
        (Edge.ALLOCATED, "write after write", "H2D", "allocation"),
        (Edge.PREFETCHED, "write after write", "Adam", "H2D"),
        (Edge.UPDATED, "read after write", "D2H", "Adam"),
        (Edge.REUSED, "write after write", "H2D", "Adam"),
        (Edge.OFFLOADED, "reuse of memory freed in use", "allocation", "D2H"),
    ],
)
def test_a_missing_edge_is_found(
    collecting: EmulatedDevice, edge: Edge, kind: str, operation: str, earlier: str
) -> None:
    Steps(collecting, edge).run()
    race = collecting.take_races()[0]
    assert (race.kind, race.operation, race.earlier_operation) == (kind, operation, earlier)
    assert race.memory == "64 bytes of device memory"
    assert race.range == (0, 64)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_copy_at_wrapping_follows_the_work_that_made_the_states(
    collecting: EmulatedDevice, ordered: bool
) -> None:
    device, compute = collecting, collecting.compute_stream()
    state, mirror = adopted(device, random(SHAPE)), host_tensor(device, random(SHAPE, 1))
    with device.updating("Adam", reads=[], writes=[state], launches=1):
        pass
    if ordered:
        wait(device.d2h, recorded(device, compute), Edge.SETTLED)
    device.copy(device.d2h, mirror, state)
    kinds = [race.kind for race in device.take_races()]
    assert kinds == ([] if ordered else ["read after write"])


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("how", ["event", "query", "stream", "device", "blocking"])
def test_the_host_reads_a_mirror_after_its_offload(
    collecting: EmulatedDevice, how: str, ordered: bool
) -> None:
    device = collecting
    state, mirror = adopted(device, random(SHAPE)), host_tensor(device, random(SHAPE, 1))
    device.copy(device.d2h, mirror, state, blocking=how == "blocking" and ordered)
    event = recorded(device, device.d2h)
    if ordered and how == "event":
        event.synchronize()
    elif ordered and how == "query":
        while not event.query():
            pass
    elif ordered and how == "stream":
        device.d2h.synchronize()
    elif ordered and how == "device":
        device.synchronize()
    device.host_access(mirror, write=False)
    races = device.take_races()
    assert [str(race) for race in races] == (
        []
        if ordered
        else [
            "read after write: host access (host) is not ordered after D2H (d2h stream); "
            "bytes 0 to 64 of 64 bytes of pinned host memory"
        ]
    )


@pytest.mark.parametrize("ordered", [True, False])
def test_the_host_writes_a_mirror_after_its_prefetch(
    collecting: EmulatedDevice, ordered: bool
) -> None:
    device = collecting
    mirror, state = host_tensor(device, random(SHAPE)), adopted(device, random(SHAPE))
    device.copy(device.h2d, state, mirror)
    if ordered:
        device.h2d.synchronize()
    device.host_access(mirror, write=True)
    kinds = [race.kind for race in device.take_races()]
    assert kinds == ([] if ordered else ["write after read"])


def test_what_the_host_wrote_before_a_copy_is_ordered_before_it(device: EmulatedDevice) -> None:
    mirror, state = host_tensor(device, random(SHAPE)), adopted(device, random(SHAPE))
    device.host_access(mirror, write=True)
    device.copy(device.h2d, state, mirror, blocking=True)
    assert device.take_races() == []


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("noticed_by", ["event", "stream", "device"])
def test_host_memory_is_dropped_after_its_last_copy(
    collecting: EmulatedDevice, ordered: bool, noticed_by: str
) -> None:
    device = collecting
    state, mirror = adopted(device, random(SHAPE)), host_tensor(device, random(SHAPE, 1))
    device.copy(device.d2h, mirror, state)
    event = recorded(device, device.d2h)
    if ordered:
        device.d2h.synchronize()
    del mirror
    gc.collect()
    {"event": event, "stream": device.d2h, "device": device}[noticed_by].synchronize()
    kinds = [race.kind for race in device.take_races()]
    assert kinds == ([] if ordered else ["released while in use"])


def test_memory_may_be_freed_when_the_host_has_waited(device: EmulatedDevice) -> None:
    state, mirror = adopted(device, random(SHAPE)), host_tensor(device, random(SHAPE, 1))
    device.copy(device.d2h, mirror, state)
    device.d2h.synchronize()
    device.release(state)
    device.empty(SHAPE, mstype.float32)
    assert device.take_races() == []


def test_only_the_bytes_that_are_shared_race(collecting: EmulatedDevice) -> None:
    device = collecting
    buffer = device.allocate_host(64, mstype.float32)
    state = adopted(device, random((16,)))
    device.copy(device.d2h, buffer.tensor(0, (16,)), state)
    device.host_access(buffer.tensor(16, (48,)), write=True)
    assert device.take_races() == []
    device.host_access(buffer.tensor(12, (8,)), write=True)
    (race,) = device.take_races()
    assert race.range == (48, 64)


def test_a_race_is_raised_where_it_happens_and_only_there() -> None:
    device = EmulatedDevice("half-duplex")
    state, mirror = device.empty(SHAPE, mstype.float32), host_tensor(device, random(SHAPE))
    with pytest.raises(RaceError, match=r"H2D \(h2d stream\) is not ordered after allocation"):
        device.copy(device.h2d, state, mirror)
    follow(device, device.h2d, device.compute_stream())
    device.copy(device.h2d, state, mirror)
    device.h2d.synchronize()
    assert bits(state) == bits(mirror)
    assert [race.kind for race in device.take_races()] == ["write after write"]


def test_an_allocation_that_races_leaves_nothing_allocated() -> None:
    device = EmulatedDevice("half-duplex")
    state, mirror = adopted(device, random(SHAPE)), host_tensor(device, random(SHAPE))
    device.copy(device.d2h, mirror, state)
    device.release(state)
    with pytest.raises(RaceError, match="reuse of memory freed in use"):
        device.empty(SHAPE, mstype.float32)
    assert device.memory().allocated_bytes == 0


def test_no_race_is_looked_for_when_off() -> None:
    device = EmulatedDevice(races="off")
    device.copy(device.h2d, device.empty(SHAPE, mstype.float32), host_tensor(device, random(SHAPE)))
    device.synchronize()
    assert device.take_races() == []


def test_tensors_that_the_device_does_not_know_are_left_out(device: EmulatedDevice) -> None:
    gradient = Tensor(random(SHAPE))
    for _ in range(2):
        with device.updating("Adam", reads=[gradient], writes=[], launches=1):
            pass
    assert device.take_races() == []
