"""The pool itself: cases run together, and a rank that fails ends the others at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pool import CASE_SECONDS, Rank, RankFailure, RankPool


def _join_on_the_cpu(index: int, size: int, device_type: str, store: str) -> Rank:
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=index, world_size=size)
    return Rank(index, size, torch.device(device_type))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of these tests' own: they end its ranks, and new ones on the CPU start sooner."""
    pool = RankPool(2, "cpu", _join_on_the_cpu)
    yield pool
    pool.close()


def _sum_of_ranks(rank: Rank) -> tuple[int, float]:
    total = torch.tensor(float(rank.index))
    dist.all_reduce(total)
    return rank.index, total.item()


def _fail_on(rank: Rank, failing: int) -> None:
    if rank.index == failing:
        raise ValueError(f"rank {rank.index} has had enough")
    dist.barrier()


def _die_on(rank: Rank, failing: int) -> None:
    if rank.index == failing:
        os._exit(3)
    dist.barrier()


def test_a_case_runs_on_every_rank(pool: RankPool) -> None:
    assert pool.run(_sum_of_ranks) == [(0, 1.0), (1, 1.0)]


def test_a_rank_that_fails_ends_the_others_with_its_message(pool: RankPool) -> None:
    pool.run(_sum_of_ranks)
    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        pool.run(_fail_on, 0)
    assert time.monotonic() - started < CASE_SECONDS / 4, "it waited for the one that hangs"
    assert "ValueError: rank 0 has had enough" in str(caught.value)
    assert "ranks [1]: ended with the others" in str(caught.value)


def test_a_rank_that_dies_ends_the_others_and_the_next_case_has_new_ones(
    pool: RankPool,
) -> None:
    with pytest.raises(RankFailure, match="rank 1: its process ended without a word"):
        pool.run(_die_on, 1)
    assert pool.run(_sum_of_ranks) == [(0, 1.0), (1, 1.0)]
