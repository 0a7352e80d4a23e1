"""Memory as formulas: on the device, and pinned on the host."""

from __future__ import annotations

import gc
import logging
import mmap

import pytest
import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer
from training import allocated, capped

BLOCK = 512


def make_parameters(
    device: torch.device, numels: list[int], dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(numel, dtype=dtype, device=device)) for numel in numels]


def make_swapped(
    parameters: list[nn.Parameter], packed: bool, swap_times: int, *, fused: bool = True
) -> TorchSwapOptimizer:
    return swap_optimizer(
        torch.optim.AdamW(parameters, fused=fused, foreach=False),
        SwapOptimizerConfig(swap_times=swap_times, packed_swap=packed, min_numel=0),
    )


def give_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1)


def step_peak(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Return the active bytes at the peak of a step over those before it."""
    module = torch.get_device_module(device)
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_stats(device)["active_bytes.all.current"]
    optimizer.step()
    module.synchronize(device)
    peak: int = module.memory_stats(device)["active_bytes.all.peak"] - before
    return peak


def round_up(nbytes: int, unit: int = BLOCK) -> int:
    return -(-nbytes // unit) * unit


NUMELS = [4000, 1, 700, 12345, 64, 8192, 333, 5000, 2047]


@pytest.mark.parametrize("swap_times", [1, 2, 3, 9])
def test_packed_step_holds_exactly_the_arenas(device: torch.device, swap_times: int) -> None:
    parameters = make_parameters(device, NUMELS)
    optimizer = make_swapped(parameters, True, swap_times)
    give_gradients(parameters)
    optimizer.step()
    stats = optimizer.swap_stats()
    assert stats.batches == swap_times
    assert stats.bound_nbytes == min(2, swap_times) * stats.arena_nbytes
    assert step_peak(optimizer, device) == stats.bound_nbytes
    # The arena is the largest batch: two states of each parameter, 64-byte slots, 512 in all.
    slot_bytes = [2 * round_up(4 * numel, 64) for numel in NUMELS]
    if swap_times == 1:
        assert stats.arena_nbytes == round_up(sum(slot_bytes))
    if swap_times == len(NUMELS):
        assert stats.arena_nbytes == round_up(max(slot_bytes))


@pytest.mark.parametrize("swap_times", [1, 2, 3, 9])
def test_per_tensor_step_holds_at_most_the_bound(device: torch.device, swap_times: int) -> None:
    parameters = make_parameters(device, NUMELS)
    optimizer = make_swapped(parameters, False, swap_times)
    give_gradients(parameters)
    optimizer.step()
    bound = optimizer.swap_stats().bound_nbytes
    blocks = [2 * round_up(4 * numel) for numel in NUMELS]
    if swap_times == 1:
        assert bound == sum(blocks)
    if swap_times == len(NUMELS):
        assert bound == sum(sorted(blocks)[-2:])
    peak = step_peak(optimizer, device)
    assert max(blocks) <= peak <= bound


def test_loop_update_adds_only_what_native_makes_too(device: torch.device) -> None:
    peaks = {}
    for kind in ("native", "packed", "per_tensor"):
        parameters = make_parameters(device, NUMELS)
        give_gradients(parameters)
        if kind == "native":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, foreach=False)
            bound = 0
        else:
            optimizer = make_swapped(parameters, kind == "packed", 3, fused=False)
        optimizer.step()
        if isinstance(optimizer, TorchSwapOptimizer):
            bound = optimizer.swap_stats().bound_nbytes
        peaks[kind] = step_peak(optimizer, device) - bound
    assert peaks["packed"] <= peaks["native"]
    assert peaks["per_tensor"] <= peaks["native"]
    assert peaks["native"] <= 3 * round_up(4 * max(NUMELS))


@pytest.mark.parametrize("fused", [False, True])
def test_no_byte_of_swapped_state_between_steps(
    device: torch.device, packed: bool, fused: bool
) -> None:
    parameters = make_parameters(device, NUMELS)
    give_gradients(parameters)
    before = allocated(device)
    optimizer = make_swapped(parameters, packed, 4, fused=fused)
    for _ in range(3):
        optimizer.step()
    optimizer.synchronize()
    steps_on_device = BLOCK * len(parameters) if fused else 0
    assert allocated(device) - before == steps_on_device
    for state in optimizer.state.values():
        assert state["exp_avg"].device.type == state["exp_avg_sq"].device.type == "cpu"


def test_m1_pinned_bytes(device: torch.device, device_type: str, packed: bool) -> None:
    """At most 1.02 times the states, a page per region and 64 bytes per slot."""
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator counts pinned bytes")
    from swapopt_torch import virtual

    gc.collect()
    before = virtual.host_memory()
    parameters = make_parameters(device, [1025, 40_000, 513, 260_000, 77_777])
    parameters += make_parameters(device, [33_333, 1111], torch.bfloat16)
    give_gradients(parameters)
    optimizer = make_swapped(parameters, packed, 4, fused=False)
    optimizer.step()
    now = virtual.host_memory()
    pinned = (now.pinned_allocated_bytes + now.registered_bytes) - (
        before.pinned_allocated_bytes + before.registered_bytes
    )
    stats = optimizer.swap_stats()
    regions = 2
    assert stats.swapped_nbytes <= pinned
    assert pinned <= (
        1.02 * stats.swapped_nbytes + regions * mmap.PAGESIZE + 64 * stats.swapped_states
    )
    del optimizer, parameters
    gc.collect()
    after = virtual.host_memory()
    assert after.registered_bytes == before.registered_bytes


def test_m2_first_step_where_the_states_do_not_fit(
    device: torch.device, device_type: str, packed: bool
) -> None:
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator takes a capacity")
    parameters = make_parameters(device, [100_000] * 16)
    give_gradients(parameters)
    optimizer = make_swapped(parameters, packed, 16)
    bound = optimizer.swap_stats().bound_nbytes
    assert bound < 2 * 4 * 100_000 * 16 / 7
    step_counters = 16 * BLOCK
    capacity = allocated(device) + bound + step_counters
    with capped(device, capacity):
        optimizer.step()
        native = torch.optim.AdamW(parameters, fused=True)
        with pytest.raises(torch.OutOfMemoryError):
            native.step()


def test_m4_the_bound_holds_for_two_optimizers_in_turn(device: torch.device, packed: bool) -> None:
    """Even when one step follows another at once, with the first one's tail under way."""
    module = torch.get_device_module(device)
    groups = [make_parameters(device, [30_000, 20_000, 50_000, 10_000, 5000]) for _ in range(2)]
    optimizers = [make_swapped(parameters, packed, 5) for parameters in groups]
    for parameters, optimizer in zip(groups, optimizers, strict=True):
        give_gradients(parameters)
        optimizer.step()
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_stats(device)["active_bytes.all.current"]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    peak = module.memory_stats(device)["active_bytes.all.peak"] - before
    assert 0 < peak <= max(optimizer.swap_stats().bound_nbytes for optimizer in optimizers)


def test_m4_the_bound_is_logged_once_at_wrap(
    device: torch.device, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "swapopt_torch"):
        parameters = make_parameters(device, NUMELS)
        optimizer = make_swapped(parameters, packed, 3)
        give_gradients(parameters)
        for _ in range(3):
            optimizer.step()
        (record,) = caplog.records
        assert f"{optimizer.swap_stats().bound_nbytes:,} bytes" in record.getMessage()
        # Said again when the layout changes, and only then.
        optimizer.add_param_group({"params": make_parameters(device, [100_000])})
        for _ in range(3):
            optimizer.step()
    assert len(caplog.records) == 2
    assert f"{optimizer.swap_stats().bound_nbytes:,} bytes" in caplog.records[1].getMessage()


def test_m5_reserved_memory_is_flat(device: torch.device, packed: bool) -> None:
    module = torch.get_device_module(device)
    parameters = make_parameters(device, [3000, 20_000, 1500, 9000])
    optimizer = make_swapped(parameters, packed, 3)
    reserved = []
    for _ in range(200):
        give_gradients(parameters)
        optimizer.step()
        optimizer.zero_grad()
        reserved.append(module.memory_reserved(device))
    assert len(set(reserved[2:])) == 1
