"""The dry device: no memory, no values, and the same time and memory accounts as the wet one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dry_checks import CHECKS
from dry_programs import PROGRAMS

from swapopt_torch import virtual

FOLDER = Path(__file__).parent
Figures = dict[str, Any]


def run_process(arguments: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dry_and_wet() -> tuple[Figures, Figures]:
    script = str(FOLDER / "dry_programs.py")
    dry, wet = (json.loads(run_process([script, mode])) for mode in ("dry", "wet"))
    return dry, wet


@pytest.mark.parametrize("program", PROGRAMS)
def test_dry_takes_the_time_and_memory_of_wet(
    program: str, dry_and_wet: tuple[Figures, Figures]
) -> None:
    dry, wet = (figures[program] for figures in dry_and_wet)
    assert len(wet["rows"]) > 50
    assert wet["steps"][-1]["memory"]["active_bytes.all.peak"] > 0
    assert dry["operators"] == wet["operators"]
    for dry_row, wet_row in zip(dry["rows"], wet["rows"], strict=True):
        assert dry_row == wet_row
    assert dry["steps"] == wet["steps"]


def test_swapped_states_take_host_memory_in_the_books(
    dry_and_wet: tuple[Figures, Figures],
) -> None:
    for figures in dry_and_wet:
        assert figures["packed fused"]["steps"][-1]["host"]["registered_bytes"] > 0
        assert figures["native fused"]["steps"][-1]["host"]["registered_bytes"] == 0


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    found: dict[str, str] = json.loads(run_process([str(FOLDER / "dry_checks.py")]))
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_on_a_dry_device(check: str, failures: dict[str, str]) -> None:
    assert not failures[check], failures[check]


def test_a_wet_device_stays_wet_and_reads_what_was_written() -> None:
    assert not virtual.is_dry()
    with pytest.raises(ValueError, match=r"dry is fixed by the first enable\(\): it is False"):
        virtual.enable("h200", device_count=2, dry=True)
    assert torch.full((2,), 5.0, device="virtual").tolist() == [5.0, 5.0]


def test_late_copies_need_values() -> None:
    with pytest.raises(ValueError, match="late_copies need values"):
        virtual.enable("h200", device_count=2, dry=True, late_copies=True)
