"""A state_dict is a snapshot that shares memory with the optimizer until a step writes (C2)."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer
from swapopt_torch.optim import AdamW as HyperAdamW
from training import allocated, assert_same_bits

NUMELS = [2048, 3000, 5000, 1500, 4096]


def make(device: torch.device, packed: bool) -> tuple[list[nn.Parameter], TorchSwapOptimizer]:
    parameters = [nn.Parameter(torch.linspace(0, 1, n, device=device)) for n in NUMELS]
    base = torch.optim.AdamW(parameters, 1e-2, foreach=False)
    return parameters, swap_optimizer(base, SwapOptimizerConfig(swap_times=3, packed_swap=packed))


def train(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int, skip: int = -1
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for index, parameter in enumerate(parameters):
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.grad = None if index == skip else grad
    optimizer.step()


def assert_same_checkpoint(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in found["state"].items():
        for key, value in state.items():
            assert_same_bits(value, expected["state"][number][key], f"{key} of {number}")


def pinned_bytes() -> int:
    from swapopt_torch import virtual

    gc.collect()
    memory = virtual.host_memory()
    return memory.registered_bytes + memory.pinned_allocated_bytes


def test_c2_later_steps_change_nothing_in_a_snapshot(device: torch.device, packed: bool) -> None:
    parameters, optimizer = make(device, packed)
    twins, reference = make(device, not packed)
    snapshots: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for step in range(6):
        skip = step % 5  # another parameter goes without a gradient in each step
        train(parameters, optimizer, step, skip)
        train(twins, reference, step, skip)
        if step % 2 == 0:
            snapshot = optimizer.state_dict()
            snapshots.append((snapshot, copy.deepcopy(snapshot)))
    for snapshot, copied in snapshots:
        assert_same_checkpoint(snapshot, copied)
    assert_same_checkpoint(optimizer.state_dict(), reference.state_dict())
    for one, twin in zip(parameters, twins, strict=True):
        assert_same_bits(one, twin, "parameter")


def test_c2_hyperparameters_are_copied(device: torch.device, packed: bool) -> None:
    parameters = [nn.Parameter(torch.ones(2048, device=device))]
    rate = torch.tensor(0.01)
    optimizer = swap_optimizer(
        torch.optim.AdamW(parameters, rate, foreach=False), SwapOptimizerConfig(packed_swap=packed)
    )
    train(parameters, optimizer, 0)
    snapshot = optimizer.state_dict()
    rate.fill_(5.0)
    optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    assert snapshot["param_groups"][0]["lr"].item() == pytest.approx(0.01)
    assert snapshot["param_groups"][0]["betas"] == (0.9, 0.999)


def test_one_tensor_kept_is_enough(device: torch.device, packed: bool) -> None:
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 0)
    kept = optimizer.state_dict()["state"][2]["exp_avg"][10:20]
    before = kept.clone()
    train(parameters, optimizer, 1)
    optimizer.synchronize()
    assert_same_bits(kept, before, "slice of a snapshot")


def test_host_memory_of_snapshots(device: torch.device, device_type: str, packed: bool) -> None:
    """None that is gone before the next step; else one more copy while the snapshot lives."""
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator counts pinned bytes")
    before = pinned_bytes()
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 0)
    once = pinned_bytes() - before
    snapshot = optimizer.state_dict()
    assert pinned_bytes() - before == once
    del snapshot
    train(parameters, optimizer, 1)
    assert pinned_bytes() - before == once
    snapshot = optimizer.state_dict()
    for seed in (2, 3, 4):
        train(parameters, optimizer, seed)
        assert pinned_bytes() - before == 2 * once
    del snapshot
    assert pinned_bytes() - before == once
    train(parameters, optimizer, 5)
    assert pinned_bytes() - before == once


def test_what_a_step_leaves_alone_stays_shared(device: torch.device, packed: bool) -> None:
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 0)
    snapshot = optimizer.state_dict()
    train(parameters, optimizer, 1, skip=2)
    shared = [
        number
        for number, parameter in enumerate(parameters)
        if optimizer.state[parameter]["exp_avg"].data_ptr()
        == snapshot["state"][number]["exp_avg"].data_ptr()
    ]
    assert shared == [2]
    train(parameters, optimizer, 2)
    assert_same_bits(
        snapshot["state"][2]["exp_avg"], copy.deepcopy(snapshot)["state"][2]["exp_avg"], "snapshot"
    )


def test_loading_never_writes_to_a_snapshot(device: torch.device, packed: bool) -> None:
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 0)
    old = copy.deepcopy(optimizer.state_dict())
    train(parameters, optimizer, 1)
    snapshot = optimizer.state_dict()
    copied = copy.deepcopy(snapshot)
    optimizer.load_state_dict(old)
    assert_same_checkpoint(snapshot, copied)
    assert_same_checkpoint(optimizer.state_dict(), old)
    optimizer.load_state_dict(snapshot)
    train(parameters, optimizer, 2)
    assert_same_checkpoint(snapshot, copied)


def test_a_second_snapshot_may_be_written_to(device: torch.device, packed: bool) -> None:
    """It is what a checkpoint is read into while the first one is still being saved."""
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 0)
    first = optimizer.state_dict()
    copied = copy.deepcopy(first)
    second = optimizer.state_dict()
    assert_same_checkpoint(second, copied)
    for state in second["state"].values():
        for value in state.values():
            value.fill_(2.0)
    assert_same_checkpoint(first, copied)
    for number, parameter in enumerate(parameters):
        assert_same_bits(
            optimizer.state[parameter]["exp_avg"], copied["state"][number]["exp_avg"], "state"
        )
    optimizer.load_state_dict(second)
    assert_same_checkpoint(first, copied)
    assert_same_checkpoint(optimizer.state_dict(), second)


def test_a_checkpoint_read_into_a_snapshot_is_not_copied(
    device: torch.device, device_type: str, packed: bool
) -> None:
    """torch.distributed.checkpoint reads into what state_dict() returned, then loads that."""
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 0)
    old = copy.deepcopy(optimizer.state_dict())
    twins, reference = make(device, packed)
    reference.load_state_dict(old)
    train(parameters, optimizer, 1)
    with torch.no_grad():
        for twin, parameter in zip(twins, parameters, strict=True):
            twin.copy_(parameter)
    snapshot = optimizer.state_dict()
    addresses = [optimizer.state[p]["exp_avg"].data_ptr() for p in parameters]
    pinned = pinned_bytes() if device_type == "virtual" else 0
    for number, state in snapshot["state"].items():
        for key, value in state.items():
            value.copy_(old["state"][number][key])
    optimizer.load_state_dict(snapshot)
    assert [optimizer.state[p]["exp_avg"].data_ptr() for p in parameters] == addresses
    if device_type == "virtual":
        assert pinned_bytes() == pinned
    train(parameters, optimizer, 2)
    train(twins, reference, 2)
    assert_same_checkpoint(snapshot, old)
    assert_same_checkpoint(optimizer.state_dict(), reference.state_dict())
    for parameter, twin in zip(parameters, twins, strict=True):
        assert_same_bits(parameter, twin, "parameter")


def test_c4_c6_m7_nothing_moves_to_the_device(device: torch.device, packed: bool) -> None:
    """Device bytes are the same after step, save and load; plain types and tensors only."""
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 0)
    module = torch.get_device_module(device)
    after_step = allocated(device)
    module.reset_peak_memory_stats(device)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    assert allocated(device) == module.max_memory_allocated(device) == after_step
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    assert allocated(device) == module.max_memory_allocated(device) == after_step


def test_a_failing_step_with_a_snapshot_alive(
    device: torch.device, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.optim import adam as torch_adam

    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 0)
    snapshot = optimizer.state_dict()
    copied = copy.deepcopy(snapshot)
    original = torch_adam.adam
    calls = 0

    def fail_second(*arguments: object, **options: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("boom")
        original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch_adam, "adam", fail_second)
        with pytest.raises(RuntimeError, match="boom"):
            train(parameters, optimizer, 1)
    assert_same_checkpoint(snapshot, copied)
    state = optimizer.state
    for parameter in parameters:
        for unit in optimizer._adapter.units:
            if unit.param is parameter:
                assert all(state[parameter][slot.name] is slot.tensor for slot in unit.slots)
    train(parameters, optimizer, 2)
    assert_same_checkpoint(snapshot, copied)


@pytest.mark.parametrize("kind", ["adam", "adamw", "hyper"])
def test_torch_adam_swap_optimizer_checkpoint_host_state(
    device: torch.device, packed: bool, kind: str
) -> None:
    """RFC: saving brings nothing back to the device; loaded states stay on the host until used."""

    def make_one(start: float) -> tuple[list[nn.Parameter], TorchSwapOptimizer]:
        parameters = [nn.Parameter(torch.full((n,), start, device=device)) for n in NUMELS]
        bases = {
            "adam": lambda: torch.optim.Adam(parameters, 1e-2, foreach=False),
            "adamw": lambda: torch.optim.AdamW(parameters, 1e-2, fused=True),
            "hyper": lambda: HyperAdamW(parameters, 1e-2),
        }
        return parameters, swap_optimizer(bases[kind](), SwapOptimizerConfig(packed_swap=packed))

    parameters, optimizer = make_one(1.0)
    for seed in range(3):
        train(parameters, optimizer, seed)
    module = torch.get_device_module(device)
    idle = allocated(device)
    module.reset_peak_memory_stats(device)
    saved = optimizer.state_dict()
    assert module.max_memory_allocated(device) == idle

    restored, fresh = make_one(5.0)
    before = allocated(device)
    module.reset_peak_memory_stats(device)
    fresh.load_state_dict(saved)
    step_counters = 512 * len(NUMELS) if kind == "adamw" else 0
    assert module.max_memory_allocated(device) - before <= step_counters
    stats = fresh.swap_stats()
    assert stats.swapped_states == 2 * len(NUMELS)
    for number, parameter in enumerate(restored):
        for key in ("exp_avg", "exp_avg_sq"):
            mirror = fresh.state[parameter][key]
            assert mirror.device.type == "cpu"
            assert mirror.is_pinned()
            assert_same_bits(mirror, saved["state"][number][key], key)

    with torch.no_grad():
        for parameter, source in zip(restored, parameters, strict=True):
            parameter.copy_(source)
    for seed in range(3, 6):
        train(parameters, optimizer, seed)
        train(restored, fresh, seed)
    assert fresh.swap_stats().last_step.h2d_nbytes >= stats.swapped_nbytes
    for one, other in zip(restored, parameters, strict=True):
        assert_same_bits(one, other, "parameter after resuming")
