"""The bars that a swapped step has to pass, on the virtual clock, with its memory beside it.

One process of its own runs all benchmarks on a dry accelerator, so that sizes are real. The fused
optimizer is the one of the device: torch's on h200; on ascend-910b, where a list of tensors takes
a launch for each, HyperParallel's AdamW, which the RFC measures and which counts steps once.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from bars_program import Case

from swapopt_torch import SwapOptimizerConfig, swap_optimizer, virtual
from swapopt_torch.bench.report import mib, milliseconds, percent

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "benchmarks.md"
BLOCK = 512
RFC_NATIVE_SECONDS = 42.75e-3
FUSED = {"h200": "adamw-fused", "ascend-910b": "hyper-adamw"}
SIZES = {"uniform-512MiB": 1.06, "uniform-1GiB": 1.05, "uniform-8GiB": 1.05}
HOST_SHARES = {"h200": 0.02, "ascend-910b": 0.20}

UNIFORM_CASES = [Case(device, size, fused) for device, fused in FUSED.items() for size in SIZES]
RFC_CASES = [Case("ascend-910b", "rfc", "hyper-adamw", swap_times) for swap_times in (8, 16)]
ALL_CASES = [*UNIFORM_CASES, *RFC_CASES]

# What bench.json holds: figures of any kind under their names.
Content: TypeAlias = dict[str, Any]


def name_of(value: object) -> str:
    if isinstance(value, Case):
        return f"{value.profile}-{value.workload}-{value.swap_times}"
    return str(value)


uniform = pytest.mark.parametrize("case", UNIFORM_CASES, ids=name_of)


@pytest.fixture(scope="module")
def results() -> dict[Case, Content]:
    program = Path(__file__).with_name("bars_program.py")
    cases = json.dumps([asdict(case) for case in ALL_CASES])
    done = subprocess.run(
        [sys.executable, program, cases], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(ALL_CASES, json.loads(done.stdout), strict=True))


def row_of(result: Content, name: str) -> Content:
    (row,) = (row for row in result["contenders"] if row["name"] == name)
    return dict(row)


def assert_in_two_arenas(result: Content, row: Content) -> None:
    """Assert that a step takes the memory of two arenas, whatever the sizes of the tensors.

    An arena is a share of all swapped bytes, and alignment. What a native step allocates besides
    (a block for a scalar) is not swapping's.
    """
    swapped: int = result["workload"]["state_nbytes"]
    arena = -(-math.ceil(swapped / result["swap_times"]) // BLOCK) * BLOCK
    taken = row["working_nbytes"] - row_of(result, "native")["working_nbytes"]
    assert arena < taken <= 2 * arena


@uniform
def test_a_packed_step_is_close_to_the_floor(results: dict[Case, Content], case: Case) -> None:
    packed = row_of(results[case], "packed")
    assert 1 < packed["floor_ratio"] <= SIZES[case.workload]
    assert_in_two_arenas(results[case], packed)


@uniform
def test_a_packed_step_is_close_to_the_best_of_equal_pieces(
    results: dict[Case, Content], case: Case
) -> None:
    packed = row_of(results[case], "packed")
    assert packed["step"] <= 1.01 * results[case]["optimum"]["seconds"]
    assert_in_two_arenas(results[case], packed)


@uniform
def test_a_per_tensor_step_is_close_to_the_floor(results: dict[Case, Content], case: Case) -> None:
    row = row_of(results[case], "per-tensor")
    assert 1 < row["floor_ratio"] <= 1.10
    assert_in_two_arenas(results[case], row)


@uniform
def test_a_packed_step_is_much_faster_than_the_rfcs_order(
    results: dict[Case, Content], case: Case
) -> None:
    reference, packed = (row_of(results[case], name) for name in ("RFC's order", "packed"))
    assert reference["floor_ratio"] == pytest.approx(2.0, rel=0.02)
    assert reference["step"] >= 1.8 * packed["step"]
    assert_in_two_arenas(results[case], reference)
    assert_in_two_arenas(results[case], packed)


@uniform
def test_a_packed_step_issues_three_things_per_piece(
    results: dict[Case, Content], case: Case
) -> None:
    packed = row_of(results[case], "packed")
    counts = packed["counts"]
    issued = counts["h2d_copies"] + counts["d2h_copies"] + counts["launches"]
    assert counts["d2h_copies"] == counts["h2d_copies"] >= case.swap_times
    # One more launch counts the step, for all parameters.
    assert issued <= 3 * counts["h2d_copies"] + 1
    assert_in_two_arenas(results[case], packed)


@pytest.mark.parametrize(
    "case", [case for case in UNIFORM_CASES if case.workload == "uniform-1GiB"], ids=name_of
)
def test_a_packed_step_returns_early(results: dict[Case, Content], case: Case) -> None:
    packed = row_of(results[case], "packed")
    assert 0 < packed["returns"] <= HOST_SHARES[case.profile] * results[case]["floor_seconds"]
    assert_in_two_arenas(results[case], packed)


@uniform
def test_the_last_offload_is_hidden_by_what_follows(
    results: dict[Case, Content], case: Case
) -> None:
    result = results[case]
    packed = row_of(result, "packed")
    piece_nbytes = result["demand"]["nbytes"] / packed["counts"]["d2h_copies"]
    last_seconds = piece_nbytes / result["link"]["d2h_bytes_per_second"]
    beside_training = packed["training"] - result["training_seconds"]
    # A launch, a copy's overhead and a synchronisation are not hidden.
    assert beside_training <= packed["step"] - last_seconds + 100e-6
    assert_in_two_arenas(result, packed)


def test_the_arenas_are_in_use_until_the_last_offload_ends(device: torch.device) -> None:
    virtual.set_late_copies(False)
    parameters = [torch.nn.Parameter(torch.ones(2**20, device=device)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer = swap_optimizer(
        torch.optim.AdamW(parameters, fused=True), SwapOptimizerConfig(swap_times=2)
    )
    activations = torch.ones(2**20, device=device)
    optimizer.step()
    torch.virtual.synchronize(device)
    idle_nbytes = torch.virtual.memory_stats(device)["active_bytes.all.current"]
    virtual.clear_timeline()
    optimizer.step()
    taken_nbytes = torch.virtual.memory_stats(device)["active_bytes.all.current"] - idle_nbytes
    for _ in range(400):
        activations.mul_(1.5)  # a forward, which is longer than the offloads
    rows = virtual.timeline()
    forward = [row for row in rows if "mul" in row.operation]
    last_offload_ns = max(row.end_ns for row in rows if row.lane == "d2h")
    assert len(forward) == 400
    assert forward[0].start_ns < last_offload_ns < forward[-1].end_ns
    # Two arenas of half of the states each: two moments of all parameters.
    assert taken_nbytes == 2 * 4 * 2**20 * 4
    torch.virtual.synchronize(device)
    assert torch.virtual.memory_stats(device)["active_bytes.all.current"] == idle_nbytes


@pytest.mark.parametrize("case", RFC_CASES, ids=name_of)
def test_the_rfcs_workload_takes_hardly_longer_than_its_updates(
    results: dict[Case, Content], case: Case
) -> None:
    result = results[case]
    native, packed, per_tensor = (
        row_of(result, name) for name in ("native", "packed", "per-tensor")
    )
    assert native["step"] == pytest.approx(RFC_NATIVE_SECONDS, rel=0.005)
    assert packed["step"] <= 1.10 * native["step"]
    assert per_tensor["step"] <= 1.5 * native["step"]
    assert_in_two_arenas(result, packed)
    assert_in_two_arenas(result, per_tensor)


@pytest.mark.parametrize("case", ALL_CASES, ids=name_of)
def test_the_guide_shows_these_figures(results: dict[Case, Content], case: Case) -> None:
    result = results[case]
    packed = row_of(result, "packed")
    compared = [
        row_of(result, "native")["floor_ratio"],
        result["optimum"]["ratio"],
        *(row_of(result, name)["floor_ratio"] for name in ("packed", "per-tensor", "RFC's order")),
    ]
    expected = [
        case.profile,
        case.workload,
        str(case.swap_times),
        mib(result["workload"]["state_nbytes"]),
        mib(packed["working_nbytes"]),
        milliseconds(result["floor_seconds"]),
        *(f"{ratio:.3f}" for ratio in compared),
    ]
    lines = GUIDE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    (row,) = (row for row in rows if row[:3] == expected[:3])
    assert row[: len(expected)] == expected
    assert row[-1] == percent(packed["returns"] / result["floor_seconds"])
