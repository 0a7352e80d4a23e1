"""Comparing runs: equality to the last bit, and the share of transfer time hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swapopt_torch.demo.observe import StepRow
from swapopt_torch.demo.results import (
    RunKind,
    RunResult,
    StepTime,
    compare,
    find_differences,
    hidden_share,
    take_fingerprints,
)
from swapopt_torch.demo.settings import DemoError

NATIVE = RunResult(
    kind=RunKind.NATIVE,
    losses=[2.0, float("nan"), 0.0],
    fingerprints={"weight": "a", "weight/exp_avg": "b"},
    state_nbytes=800,
    peak_nbytes=2000,
    idle_nbytes=1200,
    pinned_nbytes=0,
    step_times=[StepTime(2.0, 0.0, 10.0), StepTime(4.0, 0.0, 14.0)],
    h2d_nbytes=0,
    d2h_nbytes=0,
    step_rows=[StepRow("compute", "adamw", 100, 0.0, 3.0)],
    memory=[],
    wall_seconds=1.0,
)
PACKED = replace(
    NATIVE,
    kind=RunKind.PACKED,
    step_times=[StepTime(8.0, 1.0, 16.0), StepTime(6.0, 2.0, 16.0)],
    step_rows=[
        StepRow("h2d", "copy", 800, 0.0, 4.0),
        StepRow("compute", "adamw", 100, 4.0, 5.0),
        StepRow("d2h", "copy", 800, 5.0, 9.0),
    ],
)


@pytest.mark.parametrize(
    ("swapped", "native", "transfer", "expected"),
    [
        (5.0, 5.0, 8.0, 1.0),  # the step takes no longer: all hidden
        (4.0, 5.0, 8.0, 1.0),  # a shorter step hides no more than all
        (9.0, 5.0, 8.0, 0.5),
        (13.0, 5.0, 8.0, 0.0),  # longer by the whole transfer: nothing hidden
        (17.0, 5.0, 8.0, -0.5),  # the step adds more than its copies take
        (5.0, 5.0, 0.0, None),  # nothing moved
    ],
)
def test_hidden_share(
    swapped: float, native: float, transfer: float, expected: float | None
) -> None:
    assert hidden_share(swapped, native, transfer) == expected


def test_means_and_transfer_time() -> None:
    assert PACKED.step_seconds == 7.0
    assert PACKED.tail_seconds == 1.5
    assert NATIVE.iteration_seconds == 12.0
    assert PACKED.transfer_seconds == 8.0


def test_compare_puts_runs_beside_the_native_one() -> None:
    native, packed = compare([NATIVE, PACKED])
    assert (native.equal_to_native, native.hidden_share) == (None, None)
    assert packed.equal_to_native is True
    assert packed.hidden_share == 1 - (7.0 - 3.0) / 8.0


def test_nan_equals_itself_and_zeros_of_different_sign_differ() -> None:
    assert find_differences(NATIVE, PACKED) == []
    negative_zero = replace(PACKED, losses=[2.0, float("nan"), -0.0])
    assert find_differences(NATIVE, negative_zero) == ["losses"]


def test_a_state_that_differs_or_is_missing_is_named() -> None:
    other = replace(PACKED, fingerprints={"weight": "x", "bias": "c"})
    assert find_differences(NATIVE, other) == ["bias", "weight", "weight/exp_avg"]
    assert compare([NATIVE, other])[1].equal_to_native is False


def test_fingerprints_see_every_bit_of_parameters_and_states() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with pytest.raises(DemoError, match="no states"):
        take_fingerprints(model, optimizer)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    before = take_fingerprints(model, optimizer)
    keys = ("", "/step", "/exp_avg", "/exp_avg_sq")
    assert set(before) == {f"{name}{key}" for name in ("weight", "bias") for key in keys}
    moment = optimizer.state[model.weight]["exp_avg"]
    moment.view(torch.int32)[0, 0] ^= 1
    after = take_fingerprints(model, optimizer)
    assert {name for name in before if before[name] != after[name]} == {"weight/exp_avg"}
