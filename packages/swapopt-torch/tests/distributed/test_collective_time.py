"""Virtual time of collectives: when all are ready, by the ring formulas, the same in every run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from pool import Rank, RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard

from swapopt_torch import virtual

pytestmark = pytest.mark.asynchronous

NUMEL = 1 << 20
NBYTES = 4 * NUMEL
LATENCY_NS = 1_000
ISSUE_NS = 100
# One byte per nanosecond; nothing but issue, latency and bytes takes time.
ROUND = replace(
    virtual.PROFILES["h200"],
    name="round",
    interconnect_bytes_per_second=1e9,
    interconnect_latency_seconds=LATENCY_NS * 1e-9,
    host_issue_seconds=ISSUE_NS * 1e-9,
    sync_seconds=0.0,
)


def collectives() -> list[virtual.TimelineRow]:
    return [row for row in virtual.timeline() if row.lane == "collective"]


def at_zero(rank: Rank, run: Callable[[], object]) -> list[tuple[str, int, int, int]]:
    """Run with all clocks at zero and return the operations, bytes, starts and ends."""
    before = virtual.profile()
    virtual.set_profile(ROUND)
    torch.virtual.synchronize()
    dist.barrier()
    virtual.reset_clock()
    virtual.clear_timeline()
    try:
        run()
        torch.virtual.synchronize()
        return [(row.operation, row.nbytes, row.start_ns, row.end_ns) for row in collectives()]
    finally:
        virtual.set_profile(before)


def begins_with_the_last_of_the_group(rank: Rank) -> list[tuple[str, int, int, int]]:
    tensor = torch.zeros(NUMEL, device=rank.device)

    def run() -> None:
        virtual.advance_host(rank.index * 1e-3)
        dist.all_reduce(tensor)
        assert virtual.now_ns() == rank.index * 1_000_000 + ISSUE_NS, "the host waited"

    return at_zero(rank, run)


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_a_collective_begins_when_the_last_member_is_ready(ranks: RankPool) -> None:
    start_ns = (ranks.size - 1) * 1_000_000 + ISSUE_NS
    sent_nbytes = 2 * (NBYTES - NBYTES // ranks.size)
    row = ("all_reduce", sent_nbytes, start_ns, start_ns + LATENCY_NS + sent_nbytes)
    assert ranks.run(begins_with_the_last_of_the_group) == [[row]] * ranks.size


def one_of_each(rank: Rank) -> list[tuple[str, int, int, int]]:
    one, many = (torch.zeros(size, NUMEL, device=rank.device) for size in (1, rank.size))

    def run() -> None:
        dist.broadcast(one, 0)
        dist.reduce(one, 0)
        dist.all_gather_into_tensor(many, one)
        dist.reduce_scatter_tensor(one, many)
        dist.all_to_all_single(torch.empty_like(many), many)
        dist.gather(one, [*many.chunk(rank.size)] if rank.index == 0 else None, dst=0)
        dist.scatter(one, [*many.chunk(rank.size)] if rank.index == 0 else None, src=0)
        dist.barrier(device_ids=[rank.index])

    return at_zero(rank, run)


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_durations_follow_the_bytes_that_the_busiest_member_moves(ranks: RankPool) -> None:
    others = ranks.size - 1
    for index, rows in enumerate(ranks.run(one_of_each)):
        assert [(name, nbytes) for name, nbytes, _, _ in rows] == [
            ("broadcast", NBYTES),
            ("reduce", NBYTES),
            ("all_gather_into_tensor", others * NBYTES),
            ("reduce_scatter_tensor", others * NBYTES),
            ("all_to_all_single", others * NBYTES),
            ("gather", NBYTES if index else others * NBYTES),
            ("scatter", NBYTES if index else others * NBYTES),
            ("barrier", 0),
        ]
        lengths = [end_ns - start_ns - LATENCY_NS for _, _, start_ns, end_ns in rows]
        assert lengths == [NBYTES, NBYTES, *[others * NBYTES] * 5, 0]
        assert all(one[3] == other[2] for one, other in pairwise(rows)), rows


def a_message(rank: Rank, late: int) -> list[tuple[str, int, int, int]]:
    tensor = torch.zeros(NUMEL, device=rank.device)

    def run() -> None:
        virtual.advance_host(1e-3 if rank.index == late else 0)
        if rank.index == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)

    return at_zero(rank, run)


def test_a_message_begins_when_both_are_ready_and_a_sender_does_not_wait(
    two_ranks: RankPool,
) -> None:
    for late in (0, 1):
        [[sent], [received]] = two_ranks.run(a_message, late)
        sender_ns = ISSUE_NS + (1_000_000 if late == 0 else 0)
        both_ns = ISSUE_NS + 1_000_000
        assert sent == ("send", NBYTES, sender_ns, sender_ns + LATENCY_NS + NBYTES)
        assert received == ("recv", NBYTES, both_ns, both_ns + LATENCY_NS + NBYTES)


def a_barrier(rank: Rank) -> int:
    def run() -> None:
        virtual.advance_host(rank.index * 1e-3)
        dist.barrier(device_ids=[rank.index])
        times.append(virtual.now_ns())

    times: list[int] = []
    at_zero(rank, run)
    return times[0]


def test_a_barrier_is_waited_for_by_the_host(two_ranks: RankPool) -> None:
    assert two_ranks.run(a_barrier) == [1_000_000 + ISSUE_NS + LATENCY_NS] * 2


def training(rank: Rank, slow: int) -> tuple[int, list[virtual.TimelineRow], int]:
    """FSDP2 with a message around the ring per step; one rank is slow for real."""
    torch.virtual.synchronize()
    dist.barrier()
    torch.virtual.reset_peak_memory_stats()
    before = torch.virtual.memory_allocated()
    virtual.reset_clock()
    virtual.clear_timeline()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(rank.device)
    for layer in model:
        fully_shard(layer, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for step in range(3):
        if rank.index == slow:
            time.sleep(0.05)
        virtual.advance_host((rank.index + step) * 1e-5)
        loss = model(torch.randn(8, 64, device=rank.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().reshape(1)
        received = torch.empty_like(loss)
        right, left = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, loss, right), dist.P2POp(dist.irecv, received, left)]
        )
        for work in works:
            work.wait()
        assert received.isfinite().all()
    torch.virtual.synchronize()
    rows = [replace(row, stream_id=0) for row in virtual.timeline()]
    return virtual.now_ns(), rows, torch.virtual.max_memory_allocated() - before


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_two_runs_take_the_same_nanoseconds_however_fast_the_ranks_are(ranks: RankPool) -> None:
    first, second = (ranks.run(training, slow) for slow in (0, ranks.size - 1))
    assert first == second
    names = {row.operation for row in first[0][1] if row.lane == "collective"}
    assert len(names) >= 4, names
