"""The figures of a swapped optimizer."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from swapopt_torch import ResidentState, SwapOptimizerConfig, swap_optimizer


@pytest.mark.asynchronous
def test_figures_add_up(device: torch.device, device_type: str, packed: bool) -> None:
    parameters = [nn.Parameter(torch.ones(1 << 18, device=device)) for _ in range(8)]
    parameters += [nn.Parameter(torch.ones(10, device=device)) for _ in range(2)]
    base = torch.optim.AdamW(parameters, fused=True)
    optimizer = swap_optimizer(base, SwapOptimizerConfig(swap_times=4, packed_swap=packed))
    before = optimizer.swap_stats()
    assert before.swapped_states == before.swapped_nbytes == before.pinned_nbytes == 0
    assert before.last_times is None
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stats = optimizer.swap_stats()
    states = 2 * 8 * 4 * (1 << 18)
    assert stats.swapped_nbytes == states
    assert states <= stats.pinned_nbytes <= states + 4096
    assert stats.resident[0] == ResidentState(
        "param_groups[0]['params'][8]", "exp_avg", 40, "smaller than min_numel=1024"
    )
    assert len(stats.resident) == 4
    assert stats.last_step.h2d_nbytes == stats.last_step.d2h_nbytes == states
    times = stats.last_times
    assert times is not None
    assert times.h2d_seconds > 0
    assert times.d2h_seconds > 0
    assert 0 < times.exposed_seconds < times.h2d_seconds + times.d2h_seconds
    assert 0 < times.hidden_share < 1
    if device_type == "virtual":
        from swapopt_torch import virtual

        # 53 GB/s and 2 us of engine time per copy, from the profile.
        ideal = states / virtual.PROFILES["h200"].h2d_bytes_per_second
        assert ideal <= times.h2d_seconds <= ideal + stats.last_step.h2d_copies * 10e-6


def test_it_prints_a_table(device: torch.device, packed: bool) -> None:
    parameters = [nn.Parameter(torch.ones(1 << 18, device=device)) for _ in range(4)]
    parameters.append(nn.Parameter(torch.ones(10, device=device)))
    optimizer = swap_optimizer(
        torch.optim.AdamW(parameters), SwapOptimizerConfig(swap_times=2, packed_swap=packed)
    )
    assert "last step" not in str(optimizer.swap_stats())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    text = str(optimizer.swap_stats())
    lines = dict(line.split("  ", 1) for line in text.splitlines() if not line.startswith(" "))
    assert lines["swapped"].strip() == "8 states, 8.0 MiB"
    assert lines["resident"].strip() == "2 states, 80 bytes"
    assert ("packed, 2 arenas of" in text) is packed
    assert "8.0 MiB in" in lines["last step, to the device"]
    assert "GB/s" in lines["last step, to the host"]
    assert "% hidden" in text


def test_where_nothing_swaps_the_table_names_no_batches(device: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(10, device=device))
    with pytest.warns(UserWarning, match="no optimizer state can be swapped"):
        optimizer = swap_optimizer(torch.optim.AdamW([parameter]))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    rows = [line.split("  ", 1) for line in str(optimizer.swap_stats()).splitlines()]
    lines = {name: value.strip() for name, value in rows if name}
    assert lines["movement"] == "none"
    assert lines["swapped"] == "0 states, 0 bytes"
    assert lines["resident"] == "2 states, 80 bytes"


def test_one_state_is_not_called_states(device: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(2048, device=device))
    config = SwapOptimizerConfig(state_keys=["exp_avg_sq"])
    optimizer = swap_optimizer(torch.optim.AdamW([parameter]), config)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    text = str(optimizer.swap_stats())
    assert ", 1 batch (swap_times=16)" in text
    assert "1 state, 8.0 KiB" in text


def test_a_dropped_optimizer_frees_its_memory_at_once(
    device: torch.device, device_type: str, packed: bool
) -> None:
    """No cycle of references waits for the garbage collector with gigabytes pinned."""
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator counts pinned bytes")
    from swapopt_torch import virtual

    gc.collect()
    before = virtual.host_memory().registered_bytes
    parameters = [nn.Parameter(torch.ones(4096, device=device)) for _ in range(4)]
    optimizer = swap_optimizer(
        torch.optim.AdamW(parameters), SwapOptimizerConfig(swap_times=2, packed_swap=packed)
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert virtual.host_memory().registered_bytes > before
    gc.disable()
    try:
        del optimizer
        assert virtual.host_memory().registered_bytes == before
    finally:
        gc.enable()
