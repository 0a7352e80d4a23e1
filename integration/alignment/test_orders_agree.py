"""Both runtimes do the same things in the same order, for the same parameters and batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PACKED = [
    *(["h2d", 12_800], ["h2d", 24_576]),
    *(["update", 0], ["d2h", 12_800], ["h2d", 3_552]),
    *(["update", 0], ["d2h", 24_576]),
    *(["update", 0], ["d2h", 3_552]),
]
"""Three batches: weight and bias of 24 x 64, weight of 64 x 48, and what is left, a bias of 48 and
the last layer. Two float32 moments of each."""
PER_TENSOR = [
    [kind, nbytes]
    for kind, sizes in (
        ("h2d", (6_144, 256)),
        ("h2d", (12_288,)),
        ("update", (0,)),
        ("d2h", (6_144, 256)),
        ("h2d", (192, 1_536, 32)),
        ("update", (0,)),
        ("d2h", (12_288,)),
        ("update", (0,)),
        ("d2h", (192, 1_536, 32)),
    )
    for nbytes in sizes
    for _ in range(1 if kind == "update" else 2)
]


@pytest.mark.parametrize(
    ("way", "golden"), [("packed", PACKED), ("per_tensor", PER_TENSOR)], ids=lambda v: str(v)[:10]
)
def test_a_recorded_step_is_the_same(
    recordings: dict[str, Path], way: str, golden: list[list[str | int]]
) -> None:
    recorded = {
        backend: json.loads((folder / "order.json").read_text())[way]
        for backend, folder in recordings.items()
    }
    assert recorded == {"torch": golden, "mindspore": golden}
