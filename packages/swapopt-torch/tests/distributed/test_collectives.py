"""The collectives of the virtual accelerator against gloo's on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch
from collective_calls import CALLS, bits
from pool import Rank, RankPool

BOTH_SIZES = pytest.mark.parametrize("ranks", [2, 4], indirect=True)


def same_as_on_the_cpu(rank: Rank) -> list[str]:
    """Run every collective on both; return those that differ."""
    different = []
    for name, call in CALLS.items():
        expected = call(rank, torch.device("cpu"))
        found = call(rank, rank.device)
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            assert one.device == rank.device, name
            if not torch.equal(bits(one), bits(other)):
                different.append(name)
    return different


@BOTH_SIZES
def test_every_collective_gives_the_bits_of_the_cpu(ranks: RankPool) -> None:
    assert ranks.run(same_as_on_the_cpu) == [[]] * ranks.size
