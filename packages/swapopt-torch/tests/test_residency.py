"""Which states swap, which stay, and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from training import assert_same_bits


def gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = grad.to(parameter.dtype).to(parameter.device)


def compare(
    device: torch.device,
    values: list[torch.Tensor],
    config: SwapOptimizerConfig,
    amsgrad: bool = False,
) -> dict[str, int]:
    """Train native and swapped on the same values; return why states stayed."""
    native = [nn.Parameter(value.detach().clone()) for value in values]
    swapped = [nn.Parameter(value.detach().clone()) for value in values]
    reference = torch.optim.AdamW(native, 1e-2, amsgrad=amsgrad, foreach=False)
    optimizer = swap_optimizer(
        torch.optim.AdamW(swapped, 1e-2, amsgrad=amsgrad, foreach=False), config
    )
    for step in range(3):
        gradients(native, step)
        gradients(swapped, step)
        reference.step()
        optimizer.step()
    for one, other in zip(swapped, native, strict=True):
        assert_same_bits(one, other, "parameter")
        assert one.stride() == other.stride()
        for key, value in optimizer.state[one].items():
            assert_same_bits(value, reference.state[other][key], key)
            assert list(optimizer.state[one]) == list(reference.state[other])
    stats = optimizer.swap_stats()
    assert stats.swapped_states + sum(stats.resident_states.values()) == (
        (3 if amsgrad else 2) * len(values)
    )
    return dict(stats.resident_states)


def test_min_numel(device: torch.device, packed: bool) -> None:
    values = [torch.ones(numel, device=device) for numel in (1023, 1024, 1025, 1)]
    config = SwapOptimizerConfig(packed_swap=packed)
    assert compare(device, values, config) == {"smaller than min_numel=1024": 4}
    config = SwapOptimizerConfig(packed_swap=packed, min_numel=1025)
    assert compare(device, values, config) == {"smaller than min_numel=1025": 6}
    config = SwapOptimizerConfig(packed_swap=packed, min_numel=0)
    assert compare(device, values, config) == {}


@pytest.mark.parametrize(
    "keys", [("exp_avg",), ("exp_avg_sq",), ("max_exp_avg_sq", "exp_avg")], ids="+".join
)
def test_state_keys(device: torch.device, packed: bool, keys: tuple[str, ...]) -> None:
    values = [torch.ones(2048, device=device) for _ in range(3)]
    config = SwapOptimizerConfig(packed_swap=packed, state_keys=keys)
    stayed = compare(device, values, config, amsgrad=True)
    assert stayed == {"not selected by state_keys": 3 * (3 - len(keys))}


def test_shapes_and_layouts(device: torch.device, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(64, 64, generator=generator)
    values = [
        base.to(device).t(),  # not contiguous: zeros_like keeps its strides
        base.to(device)[:, ::2],  # not dense: zeros_like is contiguous again
        torch.randn(2, 8, 8, 16, generator=generator)
        .to(device)
        .contiguous(memory_format=torch.channels_last),
        base.to(device),
        torch.zeros(0, device=device),
        torch.tensor(2.0, device=device),
    ]
    native = [value.clone(memory_format=torch.preserve_format) for value in values]
    config = SwapOptimizerConfig(packed_swap=packed, min_numel=0)
    stayed = compare(device, native, config)
    assert stayed == {"not contiguous": 4, "empty": 2}


def test_complex_parameters_stay(device: torch.device, packed: bool) -> None:
    values = [torch.ones(2048, dtype=torch.complex64, device=device)]
    native, swapped = nn.Parameter(values[0].clone()), nn.Parameter(values[0].clone())
    reference = torch.optim.Adam([native], foreach=False)
    with pytest.warns(UserWarning, match="2 not floating point"):
        optimizer = swap_optimizer(
            torch.optim.Adam([swapped]), SwapOptimizerConfig(packed_swap=packed)
        )
    for _ in range(2):
        native.grad = torch.full_like(native, 1 + 2j)
        swapped.grad = torch.full_like(swapped, 1 + 2j)
        reference.step()
        optimizer.step()
    assert_same_bits(torch.view_as_real(swapped), torch.view_as_real(native), "parameter")


def test_existing_states_that_share_a_storage_stay(device: torch.device, packed: bool) -> None:
    parameters = [nn.Parameter(torch.ones(2048, device=device)) for _ in range(3)]
    base = torch.optim.AdamW(parameters, foreach=False)
    gradients(parameters, 0)
    base.step()
    both = torch.zeros(2, 2048, device=device)
    base.state[parameters[0]]["exp_avg"] = both[0]
    base.state[parameters[0]]["exp_avg_sq"] = both[1]
    same = torch.zeros(2048, device=device)
    base.state[parameters[1]]["exp_avg"] = same
    base.state[parameters[2]]["exp_avg"] = same
    optimizer = swap_optimizer(base, SwapOptimizerConfig(packed_swap=packed))
    assert dict(optimizer.swap_stats().resident_states) == {"shares its storage": 4}
    assert optimizer.swap_stats().swapped_states == 2
    gradients(parameters, 1)
    optimizer.step()
    assert optimizer.state[parameters[1]]["exp_avg"] is same


def test_mixed_dtypes_in_one_batch_and_in_whole_batches(device: torch.device, packed: bool) -> None:
    dtypes = [torch.float32] * 4 + [torch.bfloat16, torch.float32] * 3 + [torch.bfloat16] * 4
    values = [
        torch.linspace(-1, 1, 1500 + 64 * index, device=device).to(dtype)
        for index, dtype in enumerate(dtypes)
    ]
    for swap_times in (1, 4, len(values)):
        config = SwapOptimizerConfig(packed_swap=packed, swap_times=swap_times)
        assert compare(device, values, config) == {}


def test_one_huge_and_many_tiny_parameters(device: torch.device, packed: bool) -> None:
    values = [torch.full((3,), 0.5, device=device) for _ in range(200)]
    values.insert(77, torch.linspace(0, 1, 100_000, device=device))
    config = SwapOptimizerConfig(packed_swap=packed, min_numel=0)
    assert compare(device, values, config) == {}


def test_states_moved_to_the_host_by_hand_are_taken_over(
    device: torch.device, packed: bool
) -> None:
    parameters = [nn.Parameter(torch.ones(2048, device=device)) for _ in range(2)]
    native = [nn.Parameter(torch.ones(2048, device=device)) for _ in range(2)]
    base, reference = torch.optim.AdamW(parameters), torch.optim.AdamW(native, foreach=False)
    for optimizer, owned in ((base, parameters), (reference, native)):
        optimizer.param_groups[0]["foreach"] = False
        gradients(owned, 0)
        optimizer.step()
    for state in base.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].cpu()
    swapped = swap_optimizer(base, SwapOptimizerConfig(packed_swap=packed))
    assert swapped.swap_stats().swapped_states == 4
    gradients(parameters, 1)
    gradients(native, 1)
    swapped.step()
    reference.step()
    for one, other in zip(parameters, native, strict=True):
        assert_same_bits(one, other, "parameter")
