"""Both runtimes do the same things in the same order, for the same parameters and batches."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from types import ModuleType

import pytest

from conftest import INTERPRETERS, ROOT

# Three batches: weight and bias of 24 x 64 (12,800 bytes of two float32 moments), weight of 64 x 48
# (24,576), and what is left, a bias of 48 and the last layer (6,656). Two go to the device first.
GOLDEN = [
    ("h2d", 12_800 + 24_576),
    *(("update", 0), ("d2h", 12_800), ("h2d", 6_656)),
    *(("update", 0), ("d2h", 24_576)),
    *(("update", 0), ("d2h", 6_656)),
]


# Six batches, of which three may be on the device at a time.
WINDOW_OF_THREE = {
    "packed": "H2D0 H2D1 UPD0 D2H0 H2D2 UPD1 D2H1 H2D3 UPD2 D2H2 H2D4 UPD3 D2H3 H2D5 UPD4 D2H4 "
    "UPD5 D2H5 REL3 REL4 REL5",
    "per_tensor": "H2D0 H2D1 UPD0 D2H0 H2D2 UPD1 D2H1 REL0 H2D3 UPD2 D2H2 REL1 H2D4 UPD3 D2H3 REL2 "
    "H2D5 UPD4 D2H4 REL3 UPD5 D2H5 REL4 REL5",
}


def schedule_of(framework: str) -> ModuleType:
    """Load a backend's schedule, which is plain data and needs no framework."""
    path = ROOT / f"packages/swapopt-{framework}/src/swapopt_{framework}/schedule.py"
    spec = importlib.util.spec_from_file_location(f"{framework}_schedule", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def actions(module: ModuleType, batch_count: int, window: int, way: str) -> str:
    found = module.schedule(batch_count, window=window, reuses_memory=way == "packed")
    return " ".join(map(str, found))


@pytest.mark.parametrize("way", WINDOW_OF_THREE)
def test_schedules_are_the_same_whatever_is_in_flight(way: str) -> None:
    torch, mindspore = map(schedule_of, INTERPRETERS)
    for batch_count, window in itertools.product(range(12), range(2, 7)):
        expected = actions(torch, batch_count, window, way)
        assert actions(mindspore, batch_count, window, way) == expected, (batch_count, window)
    assert actions(torch, 6, 3, way) == WINDOW_OF_THREE[way]


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
