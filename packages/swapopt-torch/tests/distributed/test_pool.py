"""The pool itself: cases run together, and a rank that fails ends the others at once."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import CASE_SECONDS, Rank, RankFailure, RankPool


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


def test_a_case_runs_on_every_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run(_sum_of_ranks) == [(0, 1.0), (1, 1.0)]


def test_a_rank_that_fails_ends_the_others_with_its_message(two_ranks: RankPool) -> None:
    two_ranks.run(_sum_of_ranks)
    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        two_ranks.run(_fail_on, 0)
    assert time.monotonic() - started < CASE_SECONDS / 4, "it waited for the one that hangs"
    assert "ValueError: rank 0 has had enough" in str(caught.value)
    assert "ranks [1]: ended with the others" in str(caught.value)


def test_a_rank_that_dies_ends_the_others_and_the_next_case_has_new_ones(
    two_ranks: RankPool,
) -> None:
    with pytest.raises(RankFailure, match="rank 1: its process ended without a word"):
        two_ranks.run(_die_on, 1)
    assert two_ranks.run(_sum_of_ranks) == [(0, 1.0), (1, 1.0)]
