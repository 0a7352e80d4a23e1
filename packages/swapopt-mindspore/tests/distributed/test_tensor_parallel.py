"""Matrices divided by rows and by columns, whose results are added up."""

from __future__ import annotations

import numpy as np
from models import TensorParallel, losses_of_the_whole
from parallel import compare
from pool import Rank, RankPool

from swapping import adam


def _compare(rank: Rank) -> list[float]:
    return compare(rank, TensorParallel, adam, [False]).losses()


def test_divided_matrices(ranks: RankPool) -> None:
    losses, *others = ranks.run(_compare)
    assert others == [losses] * 3
    # Another order of summation; see test_fully_sharded.
    np.testing.assert_allclose(losses, losses_of_the_whole(adam), rtol=1e-4)
