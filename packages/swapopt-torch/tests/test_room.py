"""A budget for the device memory of states, and states that stay because there is room."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

from swapopt_torch import SwapConfigError, SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer
from test_memory import give_gradients, make_parameters, round_up, step_peak
from training import allocated
from twins import KINDS, Twin, assert_alike, make_twin

NUMELS = (2048, 3000, 16, 5000, 1500, *[2048] * 12)
NBYTES = [8 * numel if numel >= 1024 else 0 for numel in NUMELS]  # 16 is too small to swap
ROOMS: dict[str, dict[str, Any]] = {
    "bytes": {"resident_bytes": 30_000},
    "fraction": {"resident_fraction": 0.5},
    "budget": {"device_memory_budget": 150_000},
    "small budget": {"device_memory_budget": 82_000},
    "all": {"resident_fraction": 1.0},
}


def wrapped(base: torch.optim.Optimizer, packed: bool | None, **room: Any) -> TorchSwapOptimizer:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no optimizer state can be swapped")
        return swap_optimizer(base, SwapOptimizerConfig(packed_swap=packed), **room)


def resident(optimizer: TorchSwapOptimizer) -> dict[str, int]:
    """Return the bytes that stay for each parameter, small ones left out."""
    kept: dict[str, int] = {}
    for state in optimizer.swap_stats().resident:
        if state.reason.startswith("kept by "):
            kept[state.parameter] = kept.get(state.parameter, 0) + state.nbytes
    return kept


def states_on_device_nbytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        round_up(value.nbytes)
        for state in optimizer.state.values()
        for value in state.values()
        if value.numel() >= 1024 and not value.is_cpu
    )


@pytest.mark.parametrize("room", list(ROOMS))
@pytest.mark.parametrize("kind", [*KINDS, "amsgrad"])
def test_numbers_are_the_same(device: torch.device, packed: bool, kind: str, room: str) -> None:
    options = KINDS.get(kind, {"amsgrad": True, "foreach": False})
    native, swapped = (
        make_twin(device, lambda p: torch.optim.AdamW(p, 1e-2, **options), NUMELS) for _ in range(2)
    )
    if kind == "amsgrad" and room == "small budget":
        with pytest.raises(SwapConfigError, match="device_memory_budget=82,000 bytes is too small"):
            wrapped(swapped.base, packed, **ROOMS[room])
        return
    swapped.train(1)  # some states exist when it is wrapped
    native.train(1)
    swapped.optimizer = wrapped(swapped.base, packed, **ROOMS[room])
    for twin in (native, swapped):
        twin.train(range(1, 4))
    assert_alike(swapped, native)
    assert (swapped.swapped.swap_stats().swapped_nbytes > 0) == (room != "all")
    # Per tensor, a batch of whole parameters need not be as large as the largest staging arena.
    assert bool(resident(swapped.swapped)) == (room != "small budget" or not packed)


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        ({"resident_bytes": 0}, []),
        ({"resident_bytes": 16_383}, [4]),  # 12,000 bytes, in blocks of 512
        ({"resident_bytes": 16_384}, [0]),
        ({"resident_bytes": 30_000}, [0, 4]),
        ({"resident_bytes": 10**9}, [i for i in range(17) if i != 2]),
        ({"resident_fraction": 0.3}, [0, 1, 3]),
        ({"resident_fraction": 1}, [i for i in range(17) if i != 2]),
    ],
)
@pytest.mark.parametrize("exist", [True, False], ids=["states exist", "states to come"])
def test_what_stays_is_taken_in_order(
    device: torch.device, exist: bool, room: dict[str, Any], kept: list[int]
) -> None:
    twin = make_twin(device, lambda p: torch.optim.AdamW(p, 1e-2, foreach=False), NUMELS)
    if exist:
        twin.train(1)
    before = [dict(twin.base.state[p]) for p in twin.parameters] if exist else None
    twin.optimizer = wrapped(twin.base, None, **room)
    twin.train(range(1, 3))
    names = [f"param_groups[0]['params'][{index}]" for index in kept]
    assert resident(twin.swapped) == {
        name: NBYTES[index] for name, index in zip(names, kept, strict=True)
    }
    for index, parameter in enumerate(twin.parameters):
        state = twin.optimizer.state[parameter]
        stays = index in kept or index == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].device == (device if stays else torch.device("cpu"))
            if before is not None and stays:
                assert state[key] is before[index][key], "a state that stays is not copied"


@pytest.mark.parametrize("swap_times", [2, 16])
def test_the_rest_swaps_with_the_config(device: torch.device, swap_times: int) -> None:
    parameters = make_parameters(device, [40_000] * 8)
    optimizer = swap_optimizer(
        torch.optim.AdamW(parameters, fused=True),
        SwapOptimizerConfig(swap_times=swap_times),
        resident_fraction=0.25,
    )
    give_gradients(parameters)
    optimizer.step()
    stats = optimizer.swap_stats()
    assert stats.swap_times == swap_times
    assert stats.swapped_nbytes == 6 * 320_000
    assert states_on_device_nbytes(optimizer) == 4 * round_up(160_000)
    assert stats.bound_nbytes <= 2 * (-(-6 * 320_000 // swap_times) + 8 * 512) + 1024
    assert step_peak(optimizer, device) == stats.bound_nbytes


SHARES = [0.05, 0.1, 0.13, 0.2, 0.5, 0.9, 0.99, 1.0, 3.0]


@pytest.mark.parametrize("share", SHARES)
def test_a_budget_is_kept_and_used(device: torch.device, packed: bool, share: float) -> None:
    """Of uneven parameters; what the device holds of states at any time is within the budget."""
    parameters = make_parameters(device, [60_000, 3_000, 250_000, 17_000, *[20_000] * 12])
    total_nbytes = sum(2 * round_up(4 * parameter.numel()) for parameter in parameters)
    budget_nbytes = int(share * total_nbytes)
    module = torch.get_device_module(device)
    optimizer = wrapped(
        torch.optim.AdamW(parameters, fused=True), packed, device_memory_budget=budget_nbytes
    )
    give_gradients(parameters)
    before_nbytes = allocated(device)
    module.reset_peak_memory_stats(device)
    optimizer.step()
    optimizer.step()
    module.synchronize(device)
    counters_nbytes = 512 * len(parameters)  # fused steps count on the device
    peak_nbytes = module.max_memory_allocated(device) - before_nbytes - counters_nbytes
    stats = optimizer.swap_stats()
    kept_nbytes = states_on_device_nbytes(optimizer)
    assert kept_nbytes + stats.bound_nbytes <= budget_nbytes
    assert peak_nbytes <= kept_nbytes + stats.bound_nbytes
    if share >= 1:
        assert kept_nbytes == total_nbytes
    elif share >= 0.5:
        # What is left over is less than the largest parameter that was passed over.
        assert kept_nbytes + stats.bound_nbytes > budget_nbytes - 2 * round_up(4 * 250_000)
    elif share < 0.1:
        assert kept_nbytes == 0
        assert stats.swap_times > 16
        assert stats.bound_nbytes > budget_nbytes / 2


def test_a_budget_with_several_groups_that_come_later(device: torch.device) -> None:
    """States that stayed go to the host where others come to share the room."""
    first, second = make_parameters(device, [20_000] * 4), make_parameters(device, [20_000] * 4)
    native_first, native_second = copy.deepcopy((first, second))
    budget_nbytes = 4 * 2 * round_up(80_000) + 20_000
    optimizer = wrapped(
        torch.optim.AdamW(first, fused=True), True, device_memory_budget=budget_nbytes
    )
    native = torch.optim.AdamW(native_first, fused=True)
    assert len(resident(optimizer)) == 4
    for parameters in (first, native_first):
        give_gradients(parameters)
    optimizer.step()
    native.step()
    optimizer.add_param_group({"params": second, "lr": 0.5})
    native.add_param_group({"params": native_second, "lr": 0.5})
    for parameters in (second, native_second):
        give_gradients(parameters)
    for _ in range(2):
        optimizer.step()
        native.step()
        kept_nbytes = states_on_device_nbytes(optimizer)
        assert kept_nbytes + optimizer.swap_stats().bound_nbytes <= budget_nbytes
    ours = Twin([*first, *second], optimizer, optimizer)
    assert_alike(ours, Twin([*native_first, *native_second], native, native))


def test_a_budget_when_frozen_parameters_begin_to_train(device: torch.device) -> None:
    parameters = make_parameters(device, [20_000] * 8)
    for parameter in parameters[2:]:
        parameter.requires_grad_(False)
    budget_nbytes = 2 * 2 * round_up(80_000)
    optimizer = wrapped(
        torch.optim.AdamW(parameters, fused=True), True, device_memory_budget=budget_nbytes
    )
    give_gradients(parameters[:2])
    optimizer.step()
    assert len(resident(optimizer)) == 2
    for parameter in parameters[2:]:
        parameter.requires_grad_(True)
    give_gradients(parameters)
    optimizer.step()
    kept_nbytes = states_on_device_nbytes(optimizer)
    assert optimizer.swap_stats().swapped_nbytes > 0
    assert kept_nbytes + optimizer.swap_stats().bound_nbytes <= budget_nbytes


@pytest.mark.parametrize("room", ["fraction", "budget"])
def test_checkpoints_and_copies(device: torch.device, packed: bool, room: str) -> None:
    """A checkpoint does not know what stayed; copies and pickles keep the room."""
    native, swapped, loaded = (
        make_twin(device, lambda p: torch.optim.AdamW(p, 1e-2, foreach=False), NUMELS)
        for _ in range(3)
    )
    swapped.optimizer = wrapped(swapped.base, packed, **ROOMS[room])
    for twin in (native, swapped):
        twin.train(2)
    loaded.train(2)
    saved = swapped.optimizer.state_dict()
    assert all(not t.is_cuda for s in saved["state"].values() for t in s.values())
    kept = resident(swapped.swapped)
    assert kept
    for parameter, other in zip(loaded.parameters, swapped.parameters, strict=True):
        parameter.data.copy_(other)
    loaded.optimizer = wrapped(
        torch.optim.AdamW(loaded.parameters, 1e-2, foreach=False), packed, **ROOMS[room]
    )
    loaded.optimizer.load_state_dict(saved)
    assert resident(loaded.swapped) == kept
    copied = pickle.loads(pickle.dumps(swapped.optimizer))
    assert isinstance(copied, TorchSwapOptimizer)
    assert resident(copied) == kept
    for twin in (native, swapped, loaded):
        twin.train(range(2, 4))
    assert_alike(swapped, native)
    assert_alike(loaded, native)
    base = swapped.swapped.unswap()
    assert all(t.device == device for s in base.state.values() for t in s.values() if t.dim())


def test_states_on_the_host_are_not_brought_back(device: torch.device) -> None:
    """Whoever wraps with states on the host has no room for them yet."""
    twin = make_twin(device, lambda p: torch.optim.AdamW(p, 1e-2, foreach=False), NUMELS)
    twin.train(1)
    state = twin.base.state[twin.parameters[0]]
    state["exp_avg"] = state["exp_avg"].cpu()
    twin.optimizer = wrapped(twin.base, None, resident_fraction=1.0)
    twin.train(range(1, 3))
    assert len(resident(twin.swapped)) == 15
    assert twin.swapped.swap_stats().swapped_nbytes == 2 * 2048 * 4


def test_everything_stays_and_a_warning_says_so(device: torch.device) -> None:
    optimizer = torch.optim.AdamW(make_parameters(device, [2048] * 2))
    with pytest.warns(UserWarning, match=r"no optimizer state can be swapped \(4 kept by device_m"):
        swapped = swap_optimizer(optimizer, device_memory_budget=2**30)
    assert swapped.swap_stats().bound_nbytes == 0


@pytest.mark.parametrize(
    ("room", "config", "message"),
    [
        ({"device_memory_budget": 4096}, {}, "4,096 bytes is too small: with 1,600,512 bytes of"),
        ({"device_memory_budget": 1e6}, {}, "device_memory_budget must be None, or a number of"),
        ({"device_memory_budget": 2**20}, {"swap_times": 8}, "picks swap_times by itself, but"),
        ({"resident_bytes": -1}, {}, "resident_bytes must be a number of bytes"),
        ({"resident_fraction": 2}, {}, "from 0 to 1; found 2"),
        ({"resident_bytes": 1, "resident_fraction": 0.1}, {}, "contradict each other"),
    ],
)
def test_refused_before_anything_changes(
    device: torch.device, room: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    parameters = make_parameters(device, [200_000])
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    give_gradients(parameters)
    optimizer.step()
    before = dict(optimizer.state[parameters[0]])
    with pytest.raises(SwapConfigError, match=message):
        swap_optimizer(optimizer, SwapOptimizerConfig(**config), **room)
    after = optimizer.state[parameters[0]]
    assert all(after[key] is value for key, value in before.items())
    optimizer.step()


def test_a_group_that_does_not_fit_is_refused(device: torch.device) -> None:
    parameters = make_parameters(device, [2048] * 2)
    optimizer = wrapped(
        torch.optim.AdamW(parameters, fused=True), True, device_memory_budget=33_000
    )
    assert len(resident(optimizer)) == 2
    with pytest.raises(SwapConfigError, match="device_memory_budget=33,000 bytes is too small"):
        optimizer.add_param_group({"params": make_parameters(device, [20_000])})
    assert len(optimizer.param_groups) == 1
    assert len(resident(optimizer)) == 2
    give_gradients(parameters)
    optimizer.step()
