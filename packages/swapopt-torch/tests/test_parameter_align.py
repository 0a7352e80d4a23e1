"""The RFC's scenarios: native and swapped training are the same, in less device memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import adam as torch_adam

from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from training import MakeOptimizer, Run, assert_same_run, swapped_device_bytes, train_gpt

EPS_FOR_HALF = 1e-4


def config(packed: bool, **options: object) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(**{"swap_times": 5, "packed_swap": packed, **options})


def assert_swapping_pays(
    device: torch.device, make: MakeOptimizer, packed: bool
) -> tuple[Run, Run]:
    native = train_gpt(device, make)
    swapped = train_gpt(device, make, config(packed))
    assert_same_run(swapped, native)
    stats = swapped.swapped.swap_stats()
    assert stats.packed is packed
    assert stats.batches == 5
    native_states = swapped_device_bytes(native.optimizer)
    assert native_states > 0
    # Native holds at least the states; the swapped run holds none of them between steps, and two
    # batches of them at most during one.
    assert native.idle_bytes - swapped.idle_bytes >= stats.swapped_nbytes
    assert native.peak_bytes - swapped.peak_bytes >= stats.swapped_nbytes - stats.bound_nbytes
    return native, swapped


def test_torch_adam_swap_optimizer_parameter_align(device: torch.device, packed: bool) -> None:
    assert_swapping_pays(
        device, lambda m: torch.optim.Adam(m.parameters(), 1e-3, foreach=False), packed
    )


def test_torch_adam_decoupled_weight_decay_parameter_align(
    device: torch.device, packed: bool
) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            model.parameters(), 1e-3, weight_decay=0.1, decoupled_weight_decay=True, foreach=False
        )

    assert_swapping_pays(device, make, packed)


def test_torch_adamw_swap_optimizer_parameter_align(device: torch.device, packed: bool) -> None:
    assert_swapping_pays(
        device, lambda m: torch.optim.AdamW(m.parameters(), 1e-3, foreach=False), packed
    )


def test_torch_fused_adamw_swap_optimizer_parameter_align(
    device: torch.device, packed: bool
) -> None:
    assert_swapping_pays(
        device, lambda m: torch.optim.AdamW(m.parameters(), 1e-3, fused=True), packed
    )


@pytest.mark.parametrize("fused", [False, True])
def test_torch_adamw_maximize_parameter_align(
    device: torch.device, packed: bool, fused: bool
) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            model.parameters(), 1e-4, maximize=True, fused=fused, foreach=False
        )

    assert_swapping_pays(device, make, packed)


def test_torch_adamw_eager_state_swap_optimizer_parameter_align(
    device: torch.device, packed: bool
) -> None:
    """States that exist when the optimizer is wrapped leave the device at once."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    native, _ = assert_swapping_pays(device, make, packed)
    module = torch.get_device_module(device)
    model = nn.Linear(64, 64).to(device)
    optimizer = make(model)
    module.synchronize(device)
    before = module.memory_allocated(device)
    wrapped = swap_optimizer(optimizer, config(packed))
    wrapped.synchronize()
    module.synchronize(device)
    assert before - module.memory_allocated(device) == wrapped.swap_stats().swapped_nbytes
    assert len(native.losses) == 8


@pytest.mark.parametrize("fused", [False, True])
def test_torch_adam_amsgrad_swap_optimizer_parameter_align(
    device: torch.device, packed: bool, fused: bool
) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        if fused:
            return torch.optim.AdamW(model.parameters(), 1e-3, amsgrad=True, fused=True)
        return torch.optim.Adam(model.parameters(), 1e-3, amsgrad=True, foreach=False)

    _, swapped = assert_swapping_pays(device, make, packed)
    assert all("max_exp_avg_sq" in state for state in swapped.states)


def test_torch_adam_swap_optimizer_multi_param_group_align(
    device: torch.device, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of different hyperparameters: one functional call per group in each batch."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        groups = [
            {"params": parameters[:7], "lr": 1e-3, "weight_decay": 0.1},
            {"params": parameters[7:18], "lr": 3e-4, "betas": (0.8, 0.95), "amsgrad": True},
            {"params": parameters[18:], "lr": 1e-2, "eps": 1e-6, "maximize": False},
        ]
        return torch.optim.Adam(groups, foreach=False)

    native, swapped = assert_swapping_pays(device, make, packed)
    assert len(native.parameters) == len(swapped.parameters) == 28

    calls: list[tuple[float, set[int]]] = []
    original = torch_adam.adam

    def record(params: list[torch.Tensor], *arguments: object, **options: object) -> None:
        # By their storages: a parameter that is cut is in two calls.
        calls.append((options["lr"], {param.untyped_storage().data_ptr() for param in params}))
        original(params, *arguments, **options)

    monkeypatch.setattr(torch_adam, "adam", record)
    optimizer = swapped.swapped
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # The partition ignores groups, so the two boundaries fall inside batches.
    assert [rate for rate, _ in calls] == sorted(
        (rate for rate, _ in calls), key=[1e-3, 3e-4, 1e-2].index
    )
    updated: dict[float, set[int]] = {}
    for rate, storages in calls:
        updated[rate] = updated.get(rate, set()) | storages
    assert {rate: len(storages) for rate, storages in updated.items()} == {
        1e-3: 7,
        3e-4: 11,
        1e-2: 10,
    }
    assert 5 <= len(calls) <= 7


def test_torch_adamw_tensor_learning_rate_align(device: torch.device, packed: bool) -> None:
    for fused in (False, True):

        def make(model: nn.Module, fused: bool = fused) -> torch.optim.Optimizer:
            rate = torch.tensor(1e-3)
            return torch.optim.AdamW(model.parameters(), rate, fused=fused, foreach=False)

        assert_swapping_pays(device, make, packed)


def test_packed_is_the_default(device: torch.device) -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        parameter = nn.Parameter(torch.zeros(2048, device=device))
        assert swap_optimizer(kind([parameter])).swap_stats().packed is True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
def test_half_precision_parameters_align(
    device: torch.device, packed: bool, dtype: torch.dtype, fused: bool
) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            model.parameters(), 1e-3, eps=EPS_FOR_HALF, fused=fused, foreach=False
        )

    native = train_gpt(device, make, dtype=dtype)
    assert_same_run(train_gpt(device, make, config(packed), dtype=dtype), native)


def test_r5_synchronous_mode_aligns(device: torch.device, packed: bool) -> None:
    """Every copy blocks, and everything else is the same."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    native = train_gpt(device, make)
    assert_same_run(train_gpt(device, make, config(packed), synchronous=True), native)
