"""The arithmetic of a step: the floor, equal pieces, the best number of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swapopt_torch import virtual
from swapopt_torch.bench.floor import (
    Demand,
    Link,
    find_optimum,
    most_pieces,
    step_seconds,
)
from swapopt_torch.bench.link import link_of_profile

GIB = 2**30


def make_link(
    h2d: float = 50e9,
    d2h: float = 50e9,
    *,
    full_duplex: bool = True,
    overhead: float = 0.0,
    issue: float = 0.0,
) -> Link:
    return Link("test", h2d, d2h, full_duplex, overhead, issue, host_budget_share=0.02)


RATES = st.floats(1e9, 1e11)
LINKS = st.builds(
    make_link,
    RATES,
    RATES,
    full_duplex=st.booleans(),
    overhead=st.floats(0, 1e-5),
    issue=st.floats(0, 1e-4),
)
DEMANDS = st.builds(Demand, st.floats(1e6, 1e11), st.floats(0, 1.0), st.floats(0, 1.0))


def test_the_floor_is_the_slowest_lane() -> None:
    demand = Demand(nbytes=GIB, update_seconds=0.005, issue_seconds=0.0)
    assert demand.floor_seconds(make_link(50e9, 25e9)) == GIB / 25e9
    both = demand.floor_seconds(make_link(50e9, 25e9, full_duplex=False))
    assert both == GIB / 50e9 + GIB / 25e9
    slow = Demand(nbytes=GIB, update_seconds=0.5, issue_seconds=0.0)
    assert slow.floor_seconds(make_link()) == 0.5


@given(LINKS, DEMANDS, st.integers(1, 60), st.integers(1, 8))
def test_no_step_is_below_the_floor_and_memory_never_harms(
    link: Link, demand: Demand, pieces: int, in_flight: int
) -> None:
    seconds = step_seconds(link, demand, pieces, in_flight)
    assert seconds >= demand.floor_seconds(link) * (1 - 1e-9)
    if link.full_duplex and link.host_issue_seconds == 0 == demand.issue_seconds:
        more = step_seconds(link, demand, pieces, in_flight + 1)
        assert more <= seconds * (1 + 1e-9)


@given(RATES, RATES, DEMANDS, st.integers(1, 60))
def test_with_memory_to_spare_the_slowest_lane_is_always_busy(
    h2d: float, d2h: float, demand: Demand, pieces: int
) -> None:
    demand = Demand(demand.nbytes, demand.update_seconds, issue_seconds=0.0)
    link = make_link(h2d, d2h, overhead=1e-6)
    lanes = (
        demand.nbytes / pieces / h2d + 1e-6,
        demand.update_seconds / pieces,
        demand.nbytes / pieces / d2h + 1e-6,
    )
    expected = sum(lanes) + (pieces - 1) * max(lanes)
    assert step_seconds(link, demand, pieces, pieces) == pytest.approx(expected)


def test_one_engine_is_always_busy_where_updates_take_nothing() -> None:
    link = make_link(50e9, 25e9, full_duplex=False, overhead=1e-6)
    demand = Demand(GIB, 0.0, 0.0)
    expected = GIB / 50e9 + GIB / 25e9 + 2 * 16 * 1e-6
    assert step_seconds(link, demand, pieces=16, in_flight=2) == pytest.approx(expected)


def test_one_piece_in_flight_hides_nothing() -> None:
    demand = Demand(GIB, 0.01, 0.0)
    expected = 2 * GIB / 50e9 + 0.01
    assert step_seconds(make_link(), demand, pieces=8, in_flight=1) == pytest.approx(expected)


@given(LINKS, DEMANDS, st.integers(1, 20))
def test_the_optimum_is_the_best_within_memory_and_budget(
    link: Link, demand: Demand, swap_times: int
) -> None:
    if most_pieces(link, demand) > 200:
        return  # slow to try them all, and nothing new
    found = find_optimum(link, demand, swap_times)
    most = max(swap_times, most_pieces(link, demand))
    assert swap_times <= found.pieces <= most
    for pieces in range(swap_times, most + 1):
        in_flight = 2 * pieces // swap_times
        # As many pieces of this size as two arenas hold.
        assert in_flight * demand.nbytes / pieces <= 2 * demand.nbytes / swap_times * (1 + 1e-9)
        assert found.seconds <= step_seconds(link, demand, pieces, in_flight)
    assert found.ratio == found.seconds / demand.floor_seconds(link)


@pytest.mark.parametrize(("profile", "share"), [("h200", 0.02), ("ascend-910b", 0.20)])
@pytest.mark.parametrize("issue_share", [0.0, 0.3, 0.6])
def test_the_host_issues_within_its_budget(profile: str, share: float, issue_share: float) -> None:
    link = link_of_profile(virtual.PROFILES[profile])
    budget_seconds = share * link.transfer_seconds(GIB)
    demand = Demand(GIB, 0.001, issue_share * budget_seconds)

    def host_seconds(pieces: int) -> float:
        updates_seconds = max(pieces * link.host_issue_seconds, demand.issue_seconds)
        return 2 * pieces * link.host_issue_seconds + updates_seconds

    most = most_pieces(link, demand)
    assert host_seconds(most) <= budget_seconds < host_seconds(most + 1)
    assert find_optimum(link, demand, 16).pieces <= most


@pytest.mark.parametrize("profile", sorted(virtual.PROFILES))
@pytest.mark.parametrize(("pieces", "in_flight"), [(1, 1), (5, 2), (12, 3), (16, 4)])
def test_the_model_is_what_the_virtual_accelerator_does(
    device: torch.device, profile: str, pieces: int, in_flight: int
) -> None:
    """Equal pieces on three streams, by hand, take what the arithmetic says."""
    virtual.enable(profile, races="collect", late_copies=False)
    numel = 2**20
    arenas = [torch.empty(numel, device=device) for _ in range(in_flight)]
    host = [torch.zeros(numel, pin_memory=True) for _ in range(pieces)]
    torch.virtual.synchronize(device)
    virtual.reset_clock()
    seconds = run_by_hand(arenas, host)
    kernel_seconds = 2 * numel * 4 / virtual.profile().memory_bytes_per_second
    demand = Demand(pieces * numel * 4, pieces * kernel_seconds, 0.0)
    link = link_of_profile(virtual.profile())
    expected = step_seconds(link, demand, pieces, in_flight)
    # Every time is rounded to a nanosecond; the last synchronisation costs a microsecond.
    expected += virtual.profile().sync_seconds
    assert seconds == pytest.approx(expected, abs=4 * pieces * 1e-9)


def run_by_hand(arenas: list[torch.Tensor], host: list[torch.Tensor]) -> float:
    device = arenas[0].device
    h2d, d2h = (torch.Stream(device=device) for _ in range(2))
    compute = torch.virtual.current_stream(device)
    ready, updated, home = ([torch.Event(device) for _ in host] for _ in range(3))
    allocated = torch.Event(device)
    allocated.record(compute)
    h2d.wait_event(allocated)
    began = torch.virtual.now()

    def move_in(piece: int) -> None:
        if piece >= len(arenas):
            h2d.wait_event(home[piece - len(arenas)])
        with h2d:
            arenas[piece % len(arenas)].copy_(host[piece], non_blocking=True)
            ready[piece].record(h2d)

    for piece in range(min(len(arenas), len(host))):
        move_in(piece)
    for piece, memory in enumerate(host):
        arena = arenas[piece % len(arenas)]
        compute.wait_event(ready[piece])
        arena.mul_(2.0)  # written in place: its bytes travel twice
        updated[piece].record(compute)
        d2h.wait_event(updated[piece])
        with d2h:
            memory.copy_(arena, non_blocking=True)
            home[piece].record(d2h)
        if piece + len(arenas) < len(host):
            move_in(piece + len(arenas))
    torch.virtual.synchronize(device)
    return float(torch.virtual.now()) - began
