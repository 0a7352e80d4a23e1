"""What is planned agrees with what is run for real, to the byte and the nanosecond."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rehearsals import CASES, SWAP_TIMES

Figures = list[list[dict[str, Any]]]


def figures_of(script: str, *arguments: str) -> Figures:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Figures = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def planned_and_run() -> tuple[Figures, Figures]:
    return figures_of("rehearsals.py", "dry"), figures_of("rehearsals.py", "wet")


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_dry_and_real_rehearsals_are_equal(
    number: int, planned_and_run: tuple[Figures, Figures]
) -> None:
    planned, run = (figures[number] for figures in planned_and_run)
    assert planned == run
    assert len({rehearsal["step_ns"] for rehearsal in run}) == len(SWAP_TIMES)


def test_memory_is_parameters_gradients_and_states(
    planned_and_run: tuple[Figures, Figures],
) -> None:
    number = CASES.index(next(case for case in CASES if case.shape == "uniform"))
    sizes = CASES[number].shard_sizes()
    blocks_bytes = sum(-(-math.prod(size) * 4 // 512) * 512 for size in sizes)
    steps_bytes = 512 * len(sizes)  # the fused kernel keeps its counts on the device
    native, *swapped = planned_and_run[0][number]
    assert native["device_idle_bytes"] == 4 * blocks_bytes + steps_bytes
    for rehearsal in swapped:
        assert rehearsal["device_idle_bytes"] == 2 * blocks_bytes + steps_bytes
        assert rehearsal["copied_bytes"] == 2 * 4 * sum(map(math.prod, sizes))
        assert rehearsal["host_bytes"] >= rehearsal["copied_bytes"]


def test_a_shard_is_what_fsdp_makes_of_the_model() -> None:
    ((planned, sharded),) = figures_of("sharded.py")
    assert planned == sharded
    assert planned["copied_bytes"] > 0
