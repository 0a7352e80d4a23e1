"""Both runtimes do the same things in the same order, for the same parameters and batches."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

# Three batches: weight and bias of 24 x 64 (12,800 bytes of two float32 moments), weight of 64 x 48
# (24,576), and what is left, a bias of 48 and the last layer (6,656). Two go to the device first.
GOLDEN = [
    ("h2d", 12_800 + 24_576),
    *(("update", 0), ("d2h", 12_800), ("h2d", 6_656)),
    *(("update", 0), ("d2h", 24_576)),
    *(("update", 0), ("d2h", 6_656)),
]


def order_of(rows: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the rows with neighbours of one kind added up.

    In how many copies a batch moves is each backend's own business.
    """
    return [
        (kind, sum(nbytes for _, nbytes in run))
        for kind, run in itertools.groupby(rows, key=lambda row: row[0])
    ]


@pytest.mark.parametrize("way", ["packed", "per_tensor"])
def test_a_recorded_step_is_the_same(recordings: dict[str, Path], way: str) -> None:
    for folder in recordings.values():
        rows = json.loads((folder / "order.json").read_text())[way]
        assert order_of(rows) == GOLDEN


def test_packed_moves_each_batch_in_one_copy(recordings: dict[str, Path]) -> None:
    for folder in recordings.values():
        rows = json.loads((folder / "order.json").read_text())["packed"]
        for direction in ("h2d", "d2h"):
            copies = [nbytes for lane, nbytes in rows if lane == direction]
            assert copies == [12_800, 24_576, 6_656]
