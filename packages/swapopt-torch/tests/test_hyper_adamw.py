"""HyperParallel's AdamW, swapped: as native, in less device memory, with one count per group."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from hyper import Pair, config, counts
from swapopt_common import SlotState
from swapopt_torch import SwapOptimizerConfig, SwapStepError, optim, swap_optimizer
from swapopt_torch.packed import PackedMovement
from swapopt_torch.per_tensor import PerTensorMovement
from training import (
    MakeOptimizer,
    Run,
    allocated,
    assert_same_run,
    fail_at,
    swapped_device_bytes,
    train_gpt,
)

OPTIM_MODULE = sys.modules["swapopt_torch.optim.adamw"]
STEPS = 8


def assert_swapping_pays(
    device: torch.device, make: MakeOptimizer, packed: bool | None
) -> tuple[Run, Run]:
    """Equal for 8 steps; native holds all states on the device, we hold two batches at most."""
    native = train_gpt(device, make, steps=STEPS)
    swapped = train_gpt(device, make, config(packed, 5), steps=STEPS)
    assert_same_run(swapped, native)
    assert native.optimizer is not None
    stats = swapped.swapped.swap_stats()
    assert stats.packed is (packed is not False)
    assert stats.batches == 5
    assert counts(swapped.swapped) == counts(native.optimizer) == [STEPS]
    host = [value for state in swapped.swapped.state.values() for value in state.values()]
    assert sum(v.nbytes for v in host if v.device.type == "cpu") == stats.swapped_nbytes > 0
    assert all(v.is_pinned() for v in host if v.device.type == "cpu")
    on_device = swapped_device_bytes(native.optimizer) - swapped_device_bytes(swapped.swapped)
    assert on_device == stats.swapped_nbytes
    assert native.idle_bytes - swapped.idle_bytes >= stats.swapped_nbytes
    assert native.peak_bytes - swapped.peak_bytes >= stats.swapped_nbytes - stats.bound_nbytes
    return native, swapped


@pytest.mark.parametrize("choice", [None, True, False], ids=["default", "packed", "per_tensor"])
def test_hyper_adamw_swap_optimizer_parameter_align(
    device: torch.device, choice: bool | None
) -> None:
    _, swapped = assert_swapping_pays(
        device, lambda m: optim.AdamW(m.parameters(), 1e-3, weight_decay=0.1), choice
    )
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in swapped.states)
    torchs = train_gpt(
        device,
        lambda m: torch.optim.AdamW(m.parameters(), 1e-3, weight_decay=0.1, fused=True),
        steps=STEPS,
    )
    for state in torchs.states:
        assert state.pop("step").item() == STEPS
    assert_same_run(swapped, torchs)


@pytest.mark.parametrize("choice", [None, True, False], ids=["default", "packed", "per_tensor"])
def test_hyper_adamw_amsgrad_swap_optimizer_parameter_align(
    device: torch.device, choice: bool | None
) -> None:
    _, swapped = assert_swapping_pays(
        device, lambda m: optim.AdamW(m.parameters(), 1e-3, amsgrad=True), choice
    )
    keys = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert all(set(state) == keys for state in swapped.states)


def test_maximize_and_groups_of_their_own(device: torch.device, packed: bool) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        groups = [
            {"params": parameters[:7], "lr": torch.tensor(1e-4), "weight_decay": 0.1},
            {"params": parameters[7:18], "betas": (0.8, 0.95), "amsgrad": True},
            {"params": parameters[18:], "eps": 1e-6, "maximize": False},
        ]
        return optim.AdamW(groups, 1e-4, maximize=True)

    native = train_gpt(device, make)
    swapped = train_gpt(device, make, config(packed, 5))
    assert_same_run(swapped, native)
    assert counts(swapped.swapped) == [8, 8, 8]


def test_half_precision_parameters_align(device: torch.device, packed: bool) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return optim.AdamW(model.parameters(), 1e-3, eps=1e-4)

    native = train_gpt(device, make, dtype=torch.bfloat16)
    assert_same_run(train_gpt(device, make, config(packed), dtype=torch.bfloat16), native)


def test_gradients_that_come_and_go(device: torch.device, packed: bool) -> None:
    """The count is the group's: a parameter that joins late is corrected for all its steps."""
    pair = Pair(device, packed)
    patterns: list[set[int]] = [{0, 1}, {0, 3, 4}, set(), {4, 5, 6, 7}, set(range(8)), {2}]
    expected = [[1, 0], [2, 1], [2, 1], [2, 2], [3, 3], [4, 3]]
    for seed, (active, count) in enumerate(zip(patterns, expected, strict=True)):
        pair.step(seed, active)
        assert counts(pair.optimizer) == count
        pair.assert_equal()


def test_a_group_added_after_steps_counts_for_itself(device: torch.device, packed: bool) -> None:
    pair = Pair(device, packed)
    pair.step(0)
    for parameters, optimizer in ((pair.swapped, pair.optimizer), (pair.native, pair.reference)):
        parameters.append(nn.Parameter(torch.linspace(0, 9, 4096, device=device)))
        optimizer.add_param_group({"params": parameters[-1:], "amsgrad": True})
    pair.step(1)
    assert counts(pair.optimizer) == [2, 2, 1]
    pair.assert_equal()


def test_every_batch_of_a_step_has_the_same_count(
    device: torch.device, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(device, packed)
    pair.step(0)
    calls: list[tuple[int, int]] = []

    def record(params: list[torch.Tensor], *tensors: Any, **options: Any) -> None:
        calls.append((len(params), tensors[-1]))
        optim.adamw(params, *tensors, **options)

    monkeypatch.setattr(OPTIM_MODULE, "adamw", record)
    pair.give_gradients(1)
    pair.optimizer.step()
    assert calls == [(2, 2), (1, 2), (1, 2), (2, 2), (2, 2)]
    assert counts(pair.optimizer) == [2, 2]


def assert_consistent(pair: Pair, expected_bytes: int) -> None:
    assert allocated(pair.device) == expected_bytes
    slots = [slot for unit in pair.optimizer._adapter.units for slot in unit.slots]
    assert {slot.state for slot in slots} == {SlotState.HOST}


# The parameters that each functional call of a step updates.
CALLS = [{0, 1}, {2}, {3}, {4, 5}, {6, 7}]


@pytest.mark.parametrize("failing", range(5))
@pytest.mark.parametrize(
    "error", [ValueError("boom"), KeyboardInterrupt()], ids=["error", "ctrl-c"]
)
def test_an_update_fails(
    device: torch.device,
    packed: bool,
    failing: int,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group counts the step if some of its parameters were updated, and not otherwise."""
    pair = Pair(device, packed)
    pair.step(0)
    pair.give_gradients(1)
    expected_bytes = allocated(device)
    with monkeypatch.context() as patch:
        fail_at(patch, OPTIM_MODULE, "adamw", failing, error)
        expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else SwapStepError
        with pytest.raises(expected):
            pair.optimizer.step()
    assert_consistent(pair, expected_bytes)
    pair.native_updates_only(set().union(*CALLS[:failing]))
    assert counts(pair.optimizer) == [[1, 1], [2, 1], [2, 1], [2, 2], [2, 2]][failing]
    pair.assert_equal()
    pair.step(2)
    pair.assert_equal()


@pytest.mark.parametrize("failing", range(4))
def test_memory_runs_out(
    device: torch.device, packed: bool, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefetch that fails before any update leaves the counts alone."""
    pair = Pair(device, packed)
    pair.step(0)
    pair.give_gradients(1)
    expected_bytes = allocated(device)
    movement = PackedMovement if packed else PerTensorMovement
    with monkeypatch.context() as patch:
        fail_at(patch, movement, "acquire", failing, torch.OutOfMemoryError("none left"))
        with pytest.raises(RuntimeError):
            pair.optimizer.step()
    assert_consistent(pair, expected_bytes)
    # Two batches are prefetched before the first is updated.
    updated = max(0, failing - 1)
    pair.native_updates_only(set(range(2 * updated)))
    assert counts(pair.optimizer) == [[1, 1], [1, 1], [2, 1], [2, 2]][failing]
    pair.assert_equal()
    pair.step(2)
    pair.assert_equal()


class OwnStep(optim.AdamW):
    def step(self, closure: None = None) -> None:
        super().step(closure)


class OwnDefaults(optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, 1e-2, amsgrad=True)


def test_subclasses(device: torch.device, packed: bool) -> None:
    parameter = nn.Parameter(torch.ones(4096, device=device))
    OwnStep([parameter])
    with pytest.raises(ValueError, match=r"OwnStep.*swapopt_torch\.optim\.AdamW"):
        swap_optimizer(OwnStep([parameter]))
    pair = Pair(device, packed, OwnDefaults)
    pair.step(0)
    pair.step(1)
    pair.assert_equal()
    assert "max_exp_avg_sq" in pair.optimizer.state[pair.swapped[0]]


def test_refusals(device: torch.device) -> None:
    dense = nn.Parameter(torch.ones(4096, device=device))
    sparse = nn.Embedding(8, 4, sparse=True)
    optimizer = swap_optimizer(optim.AdamW([dense, sparse.weight]))
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 0.0)
    dense.grad = torch.ones_like(dense)
    sparse(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"optim\.AdamW .* dense gradients only"):
        optimizer.step()
    assert counts(optimizer) == [0]
    assert not optimizer.state
    with pytest.raises(ValueError, match=r"max_exp_avg_sq needs amsgrad=True"):
        swap_optimizer(optim.AdamW([dense]), SwapOptimizerConfig(state_keys=("max_exp_avg_sq",)))
