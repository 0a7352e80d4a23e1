"""Comparing runs: equality to the last bit, changes against native, and reported figures."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
from mindspore import Parameter, Tensor, nn
from rich.console import Console

from swapopt_mindspore.demo.optimizers import choose_optimizer, kinds_of, take_fingerprints
from swapopt_mindspore.demo.results import (
    RunKind,
    RunResult,
    StepTime,
    Transfers,
    compare,
    find_differences,
)
from swapopt_mindspore.demo.sentences import verdict
from swapopt_mindspore.demo.table import result_table

NATIVE = RunResult(
    kind=RunKind.NATIVE,
    losses=[2.0, float("nan"), 0.0],
    fingerprints={"weight": "a", "exp_avg.weight": "b"},
    state_nbytes=800,
    peak_nbytes=2000,
    idle_nbytes=1200,
    pinned_nbytes=0,
    step_times=[StepTime(2.0, 10.0), StepTime(4.0, 14.0)],
    transfers=None,
    step_rows=[],
    memory=[],
    wall_seconds=1.0,
)
PER_TENSOR = replace(
    NATIVE,
    kind=RunKind.PER_TENSOR,
    peak_nbytes=1500,
    step_times=[StepTime(4.5, 13.5)],
    transfers=Transfers(2**20, 2**20, 0.002, 0.0005, 0.75),
)
PACKED = replace(PER_TENSOR, kind=RunKind.PACKED)


def test_compare_puts_runs_beside_the_native_one() -> None:
    native, swapped = compare([NATIVE, PER_TENSOR])
    assert (native.equal_to_native, native.ratios) == (None, None)
    assert swapped.equal_to_native is True
    assert swapped.ratios is not None
    assert swapped.ratios.step_seconds == 4.5 / 3 - 1
    assert swapped.ratios.iteration_seconds == 13.5 / 12 - 1
    assert swapped.ratios.peak_nbytes == -0.25


def test_nan_equals_itself_and_zeros_of_different_sign_differ() -> None:
    assert find_differences(NATIVE, PER_TENSOR) == []
    negative_zero = replace(PER_TENSOR, losses=[2.0, float("nan"), -0.0])
    assert find_differences(NATIVE, negative_zero) == ["losses"]


def test_what_differs_or_is_missing_is_named() -> None:
    other = replace(PER_TENSOR, fingerprints={"weight": "x", "bias": "c"})
    assert find_differences(NATIVE, other) == ["bias", "exp_avg.weight", "weight"]
    rows = compare([NATIVE, other])
    assert rows[1].equal_to_native is False
    assert str(verdict(rows)) == (
        "The per-tensor run differs from the native one in bias, exp_avg.weight, weight."
    )


def test_the_table_has_our_changes_and_the_reported_ones() -> None:
    output = io.StringIO()
    Console(file=output, width=100).print(result_table(compare([NATIVE, PER_TENSOR, PACKED])))
    lines = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in output.getvalue().splitlines()
        if line.startswith("│")
    ]
    found: dict[str, list[str]] = {}
    for label, *cells in lines:
        found.setdefault(label, []).append(" | ".join(cells))
    assert found["against native"] == [
        "- | -25.00 % | -25.00 %",
        "- | +50.00 % | +50.00 %",
        "- | +12.50 % | +12.50 %",
    ]
    # As the specification writes them.
    assert found["optimizer step"] == ["366 ms | +20.49 % | +7.10 %"]
    assert found["whole iteration"] == ["3,528 ms | +1.59 % | +0.17 %"]
    assert found["device memory, peak"] == ["20.26 G | -4.24 % | -4.24 %"]
    assert found["of it updates waited for"] == ["- | 0.500 ms | 0.500 ms"]
    assert found["share hidden"] == ["- | 75 % | 75 %"]


def test_fingerprints_see_every_bit_of_parameters_states_and_counters() -> None:
    param = Parameter(Tensor(np.ones((3, 2), np.float32)), name="weight")
    adam = nn.Adam([param])
    before = take_fingerprints("adam", adam)
    states = {"moment1.weight", "moment2.weight"}
    assert set(before) == {"weight", *states, "global_step", "beta1_power", "beta2_power"}
    values = adam.moment2[0].asnumpy().copy()
    values.view(np.int32)[2, 1] ^= 1
    adam.moment2[0].copy_(Tensor(values))
    after = take_fingerprints("adam", adam)
    assert {name for name in before if before[name] != after[name]} == {"moment2.weight"}


def test_packed_is_compared_where_it_is_served() -> None:
    both = (RunKind.NATIVE, RunKind.PER_TENSOR)
    assert kinds_of("adam") == kinds_of("adam-weight-decay") == both
    assert kinds_of("mindformers-adamw") == (*both, RunKind.PACKED)
    assert choose_optimizer("adam-weight-decay") == "adam-weight-decay"
