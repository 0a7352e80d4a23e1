"""The pool itself: cases run together, and a rank that fails ends the others at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from pool import Rank, RankFailure, RankPool


def _alone(index: int, size: int, port: int) -> None:
    """Join nothing: what is shown here needs no MindSpore, whose start takes long."""


@pytest.fixture
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2, join=_alone)
    yield pool
    pool.close()


def _twice(rank: Rank, number: int) -> int:
    return 2 * number + rank.index


def _fail_on(rank: Rank, failing: int) -> None:
    if rank.index == failing:
        raise ValueError(f"rank {rank.index} has had enough")
    time.sleep(600)  # as a collective that the failing rank never joins


def _die_on(rank: Rank, failing: int) -> None:
    if rank.index == failing:
        os._exit(3)
    time.sleep(600)


def test_a_case_runs_on_every_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run(_twice, 4) == [8, 9]


def test_a_rank_that_fails_ends_the_others_with_its_message(two_ranks: RankPool) -> None:
    two_ranks.run(_twice, 4)
    with pytest.raises(RankFailure) as caught:
        two_ranks.run(_fail_on, 0)
    assert "ValueError: rank 0 has had enough" in str(caught.value)
    assert "ranks [1]: ended with the others" in str(caught.value)


def test_a_rank_that_dies_ends_the_others_and_the_next_case_has_new_ones(
    two_ranks: RankPool,
) -> None:
    with pytest.raises(RankFailure, match="rank 1: its process ended without a word"):
        two_ranks.run(_die_on, 1)
    assert two_ranks.run(_twice, 4) == [8, 9]
