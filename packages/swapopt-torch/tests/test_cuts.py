"""Parameters that do not fit into a batch are cut; nothing else tells that they were."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from swapopt_common import SwapStepError, grain
from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, layout, optim, swap_optimizer
from swapopt_torch.division import CUT_NUMEL, Cut, Size, divide, grain_nbytes
from training import assert_same_bits
from twins import Twin, assert_alike, make_twin

NUMELS = (30_000, 1_000, 12_345, 700, 20_480, 5_000)
WINDOWS = {"two_in_flight": 2**30, "many_in_flight": 16_384}

MAKERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, eps=1e-4, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4, foreach=False),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4, amsgrad=True, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4, fused=True),
    "fused amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4, amsgrad=True, fused=True),
    "hyper": lambda p: optim.AdamW(p, 1e-2, eps=1e-4),
}


@pytest.fixture(autouse=True, params=list(WINDOWS))
def small_grain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small states be cut, and be as many in flight as large ones are."""
    monkeypatch.setattr(layout, "LEAST_DIVIDED_NBYTES", 1)
    monkeypatch.setattr(grain, "LEAST_BATCH_BYTES", WINDOWS[request.param])


def swapped_twin(
    device: torch.device,
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    packed: bool,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Twin:
    twin = make_twin(device, make, NUMELS, dtype)
    config = SwapOptimizerConfig(swap_times=8, packed_swap=packed, **settings)
    twin.optimizer = swap_optimizer(twin.base, config)
    return twin


def cut_units(optimizer: TorchSwapOptimizer) -> int:
    return sum(unit.is_cut for unit in optimizer._adapter.units)


def test_the_log_counts_each_state_once(
    device: torch.device, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "swapopt_torch"):
        twin = swapped_twin(device, MAKERS["adamw"], packed, min_numel=1000)
    twin.train(1)
    assert cut_units(twin.swapped) > 0
    nbytes = 8 * (sum(NUMELS) - 700)
    (said,) = [r.getMessage() for r in caplog.records if "live in pinned" in r.getMessage()]
    assert said.startswith(f"swapopt: 10 states ({nbytes:,} bytes) live in pinned host memory")
    assert said.endswith("resident: 2 smaller than min_numel=1000")
    assert twin.swapped.swap_stats().swapped_nbytes == nbytes


@pytest.mark.parametrize("kind", list(MAKERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_to_the_uncut_update(
    device: torch.device, packed: bool, kind: str, dtype: torch.dtype
) -> None:
    native = make_twin(device, MAKERS[kind], NUMELS, dtype)
    swapped = swapped_twin(device, MAKERS[kind], packed, dtype)
    for twin in (native, swapped):
        twin.train(4)
    assert cut_units(swapped.swapped) >= 3
    assert_alike(swapped, native)


@pytest.mark.parametrize("keys", [("exp_avg",), ("exp_avg_sq",)])
def test_states_that_stay_are_updated_in_ranges_too(
    device: torch.device, packed: bool, keys: tuple[str, ...]
) -> None:
    for kind in ("adamw", "fused"):
        native = make_twin(device, MAKERS[kind], NUMELS)
        swapped = swapped_twin(device, MAKERS[kind], packed, state_keys=keys)
        for twin in (native, swapped):
            twin.train(3)
        assert cut_units(swapped.swapped)
        assert_alike(swapped, native)


def test_a_gradient_now_and_then(device: torch.device, packed: bool) -> None:
    """Parameters that are left out, states that are born late, and parts of batches."""
    native = make_twin(device, MAKERS["fused"], NUMELS)
    swapped = swapped_twin(device, MAKERS["fused"], packed)
    for step, absent in enumerate([(0, 3), (1, 2), (), (0, 4, 5), (2,)]):
        for twin in (native, swapped):
            twin.give_gradients(step)
            for index in absent:
                twin.parameters[index].grad = None
            twin.optimizer.step()
    assert cut_units(swapped.swapped)
    assert_alike(swapped, native)


@pytest.mark.parametrize("overflow_at", [1, None])
def test_each_range_is_unscaled_once(
    device: torch.device, packed: bool, overflow_at: int | None
) -> None:
    """As a GradScaler hands its factor and its finding to the fused kernel."""
    native = make_twin(device, MAKERS["fused"], NUMELS)
    swapped = swapped_twin(device, MAKERS["fused"], packed)
    for step in range(3):
        for twin in (native, swapped):
            twin.give_gradients(step)
            for name, value in (("grad_scale", 8.0), ("found_inf", float(step == overflow_at))):
                setattr(twin.optimizer, name, torch.full((), value, device=device))
            twin.optimizer.step()
            twin.seen.extend(p.grad.sum().item() for p in twin.parameters if p.grad is not None)
    assert cut_units(swapped.swapped)
    assert_alike(swapped, native)


def test_a_snapshot_alive_in_the_next_step_does_not_change(
    device: torch.device, packed: bool
) -> None:
    native = make_twin(device, MAKERS["adamw"], NUMELS)
    swapped = swapped_twin(device, MAKERS["adamw"], packed)
    for twin in (native, swapped):
        twin.train(1)
    snapshot = swapped.optimizer.state_dict()
    expected = {
        (number, key): value.clone()
        for number, state in snapshot["state"].items()
        for key, value in state.items()
    }
    for twin in (native, swapped):
        twin.train(range(1, 3))
    for (number, key), value in expected.items():
        assert_same_bits(snapshot["state"][number][key], value, f"{key} of {number}")
    assert_alike(swapped, native)
    fresh = swapped_twin(device, MAKERS["adamw"], packed)
    fresh.optimizer.load_state_dict(snapshot)
    for (number, key), value in expected.items():
        state = fresh.optimizer.state[fresh.parameters[number]]
        assert_same_bits(state[key], value, f"{key} of {number}")


@pytest.mark.parametrize("with_snapshot", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 3, 6])
def test_a_failure_between_two_ranges(
    device: torch.device,
    packed: bool,
    failing: int,
    with_snapshot: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every element is old or new, its states with it; the error names the ranges."""
    make = MAKERS["fused"]
    native, later = make_twin(device, make, NUMELS), make_twin(device, make, NUMELS)
    swapped = swapped_twin(device, make, packed)
    for twin in (native, later, swapped):
        twin.train(1)
    later.train(range(1, 2))
    snapshot = swapped.optimizer.state_dict() if with_snapshot else None
    kernel, calls = torch._fused_adamw_, 0

    def fail_at_one(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing + 1:
            raise ValueError("boom")
        kernel(*arguments, **options)

    swapped.give_gradients(1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", fail_at_one)
        with pytest.raises(SwapStepError, match=r"\[0:|:\d+\]") as caught:
            swapped.optimizer.step()
    assert caught.value.updated_batches == tuple(range(failing))
    layout_found = swapped.swapped._engine.layout
    for position, batch in enumerate(layout_found.batches):
        expected = later if position < failing else native
        for share in batch.shares:
            index = [p is share.unit.param for p in swapped.parameters].index(True)
            rows = [(swapped.parameters[index], expected.parameters[index])]
            state = swapped.optimizer.state[swapped.parameters[index]]
            reference = expected.optimizer.state[expected.parameters[index]]
            rows += [(state[key], reference[key]) for key in ("exp_avg", "exp_avg_sq")]
            for one, other in rows:
                assert_same_bits(
                    one.view(-1)[share.start : share.stop],
                    other.view(-1)[share.start : share.stop],
                    f"elements {share.start} to {share.stop} of parameter {index}",
                )
    del snapshot
    swapped.train(range(2, 3))


@pytest.mark.parametrize("kind", ["adamw", "fused"])
def test_a_gradient_that_lies_otherwise(device: torch.device, packed: bool, kind: str) -> None:
    """A parameter whose gradient is strided otherwise is not cut any more, and stays equal."""

    def build() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(torch.linspace(-1, 1, 96 * 128, device=device).view(96, 128))
        return parameter, MAKERS[kind]([parameter])

    def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, number: int) -> None:
        values = torch.linspace(-1, 2, 96 * 128).view(128, 96) * (number + 1)
        transposed = values.to(device).t()
        parameter.grad = transposed if number == 1 else transposed.contiguous()
        optimizer.step()

    parameter, native = build()
    other, base = build()
    swapped = swap_optimizer(base, SwapOptimizerConfig(swap_times=8, packed_swap=packed))
    for number in range(3):
        step(parameter, native, number)
        step(other, swapped, number)
        assert cut_units(swapped) == (number == 0)
        assert_same_bits(other, parameter, f"after step {number}")
    for key in ("exp_avg", "exp_avg_sq"):
        assert_same_bits(swapped.state[other][key], native.state[parameter][key], key)


def test_the_arena_follows_from_swap_times(device: torch.device) -> None:
    """One parameter of more than half of all elements does not set the memory of a step."""
    parameters = [nn.Parameter(torch.ones(n, device=device)) for n in (1_000_000, 300_000, 5_000)]
    config = SwapOptimizerConfig(swap_times=16, packed_swap=True)
    optimizer = swap_optimizer(torch.optim.AdamW(parameters, fused=True), config)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stats = optimizer.swap_stats()
    step_nbytes = 2 * -(-stats.swapped_nbytes // 16)
    element_nbytes = 8
    arenas = stats.bound_nbytes // stats.arena_nbytes
    assert stats.bound_nbytes <= step_nbytes + arenas * (512 + CUT_NUMEL * element_nbytes)


def test_the_division_by_hand() -> None:
    sizes = [Size(8 * 2048, 2048, 8), Size(8 * 100, 100, 0), Size(8 * 3000, 3000, 8)]
    assert divide(sizes, 8 * 1024) == [
        [Cut(0, 0, 1024)],
        [Cut(0, 1024, 2048)],
        [Cut(1, 0, 100), Cut(2, 0, 512)],
        [Cut(2, 512, 1536)],
        [Cut(2, 1536, 2560)],
        [Cut(2, 2560, 3000)],
    ]
    assert grain_nbytes(sizes) == 8 * CUT_NUMEL
