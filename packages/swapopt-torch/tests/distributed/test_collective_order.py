"""What orders a collective: the waits of a program, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pool import Rank, RankPool

from swapopt_torch import virtual

pytestmark = pytest.mark.asynchronous

NUMEL = 1 << 12


def race_between(*words: str) -> None:
    """Take the races; the first one names all of these."""
    found = virtual.races()
    assert found, "no race was reported"
    for word in words:
        assert word in str(found[0]), str(found[0])


def filled(rank: Rank, value: float = 1.0) -> torch.Tensor:
    return torch.full((NUMEL,), value, device=rank.device)


def result_used_too_early(rank: Rank) -> None:
    tensor = filled(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    early = tensor * 2
    race_between("read after write", "aten::mul", "default stream", "all_reduce")
    work.wait()
    assert early.isnan().all()
    assert (tensor == rank.size).all()
    assert (tensor * 2 == 2 * rank.size).all()


def result_used_on_another_stream_than_waited(rank: Rank) -> None:
    tensor = filled(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    with torch.virtual.stream(torch.virtual.Stream(rank.device)):
        work.wait()
        tensor.mul(2)
    assert not virtual.races()
    tensor.mul(2)
    race_between("read after write", "aten::mul", "default stream", "all_reduce")
    work.wait()
    tensor.mul(2)


def input_overwritten_too_early(rank: Rank) -> None:
    own, all_of_them = filled(rank, float(rank.index)), filled(rank).repeat(rank.size)
    work = dist.all_gather_into_tensor(all_of_them, own, async_op=True)
    assert work is not None
    own.zero_()
    race_between("write after read", "aten::zero_", "all_gather_into_tensor")
    work.wait()
    assert all_of_them.view(rank.size, NUMEL)[:, 0].tolist() == list(range(rank.size))
    own.zero_()


def input_made_on_another_stream(rank: Rank) -> None:
    side = torch.virtual.Stream(rank.device)
    with torch.virtual.stream(side):
        tensor = filled(rank)
    dist.all_reduce(tensor)
    race_between("all_reduce", "aten::fill_", "write")
    torch.virtual.current_stream().wait_stream(side)
    dist.all_reduce(tensor)


def message_used_too_early(rank: Rank) -> None:
    peer = 1 - rank.index
    received, sent = filled(rank, -1.0), filled(rank, float(rank.index))
    receiving, sending = dist.irecv(received, peer), dist.isend(sent, peer)
    assert receiving is not None
    assert sending is not None
    received.add(1)
    race_between("read after write", "aten::add", "recv")
    sending.wait()  # another stream than the one that receives
    received.add(1)
    race_between("read after write", "aten::add", "recv")
    sent.zero_()
    receiving.wait()
    assert (received == peer).all()


def waited_for_in_every_way(rank: Rank) -> None:
    """A wait, a synchronisation, a future, its callbacks and a poll all order what follows."""
    results = []
    for way in range(5):
        tensor = filled(rank, float(way))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if way == 0:
            work.wait()
        elif way == 1:
            torch.virtual.synchronize()
        elif way == 2:
            work.get_future().wait()
        elif way == 3:
            work.get_future().then(lambda future: future.value()[0].add_(0)).wait()
        else:
            while not work.is_completed():
                pass
            assert work.is_success()
        results.append(tensor * 2)
    assert [result[0].item() for result in results] == [2 * rank.size * way for way in range(5)]


def works_of_a_group_follow_each_other(rank: Rank) -> None:
    """Waiting for the last of three that use the same tensor is waiting for all."""
    tensor = filled(rank)
    for _ in range(2):
        dist.all_reduce(tensor, async_op=True)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert (tensor == rank.size**3).all()


def forgotten_works_keep_their_memory(rank: Rank) -> None:
    """Nobody waits, and the tensors die: their memory is not reused under the collective."""
    before = torch.virtual.memory_allocated()
    dist.all_reduce(filled(rank), async_op=True)
    gc.collect()
    assert torch.virtual.memory_allocated() == before + 4 * NUMEL
    other = filled(rank)
    torch.virtual.synchronize()
    assert torch.virtual.memory_allocated() == before + 4 * NUMEL
    assert (other == 1).all()


def memory_is_free_after_the_wait(rank: Rank) -> None:
    before = torch.virtual.memory_allocated()
    tensor = filled(rank)
    dist.all_reduce(tensor)
    del tensor
    assert torch.virtual.memory_allocated() == before


def copies_around_a_collective(rank: Rank) -> None:
    """Late copies to an input, and from an output's old value, happen before the collective."""
    source = torch.full((NUMEL,), 3.0).pin_memory()
    old, new = (torch.empty(NUMEL, pin_memory=True) for _ in range(2))
    tensor = filled(rank)
    old.copy_(tensor, non_blocking=True)
    tensor.copy_(source, non_blocking=True)
    dist.all_reduce(tensor)
    new.copy_(tensor, non_blocking=True)
    torch.virtual.synchronize()
    assert (old == 1).all()
    assert (new == 3 * rank.size).all()


ORDERED = [
    waited_for_in_every_way,
    works_of_a_group_follow_each_other,
    forgotten_works_keep_their_memory,
    memory_is_free_after_the_wait,
    copies_around_a_collective,
]
RACING = [
    result_used_too_early,
    result_used_on_another_stream_than_waited,
    input_overwritten_too_early,
    input_made_on_another_stream,
    message_used_too_early,
]


@pytest.mark.parametrize("case", RACING)
def test_a_race_is_reported_and_its_wait_is_enough(
    two_ranks: RankPool, case: Callable[[Rank], None]
) -> None:
    two_ranks.run(case)


@pytest.mark.parametrize("case", ORDERED)
def test_correct_programs_have_no_race(two_ranks: RankPool, case: Callable[[Rank], None]) -> None:
    two_ranks.run(case)  # the pool fails a case that leaves races
