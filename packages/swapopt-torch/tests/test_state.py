"""What a reader of the optimizer's state finds, at any time."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer
from training import assert_same_bits


def make(
    device: torch.device, packed: bool, *, count: int = 5, fused: bool = False
) -> tuple[list[nn.Parameter], TorchSwapOptimizer]:
    parameters = [
        nn.Parameter(torch.linspace(0, 1, 2048 + 100 * index, device=device))
        for index in range(count)
    ]
    base = torch.optim.AdamW(parameters, 1e-2, fused=fused, foreach=False)
    return parameters, swap_optimizer(base, SwapOptimizerConfig(swap_times=3, packed_swap=packed))


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1) + index)
        optimizer.step()


def native_twin(
    parameters: list[nn.Parameter], fused: bool = False
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    return twins, torch.optim.AdamW(twins, 1e-2, fused=fused, foreach=False)


def test_c1_state_right_after_step(device: torch.device, packed: bool) -> None:
    parameters, optimizer = make(device, packed)
    twins, reference = native_twin(parameters)
    for _ in range(3):
        train(parameters, optimizer, 1)
        train(twins, reference, 1)
        for parameter, twin in zip(parameters, twins, strict=True):
            found = optimizer.state[parameter]["exp_avg"].sum()
            assert_same_bits(found, reference.state[twin]["exp_avg"].cpu().sum(), "sum")


def test_mirrors_have_storages_of_their_own(device: torch.device, packed: bool) -> None:
    """Invariant 2: exact size, offset 0; saving or copying one takes nothing else along."""
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 1)
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            mirror = state[key]
            assert mirror.storage_offset() == 0
            assert mirror.untyped_storage().nbytes() == mirror.nbytes
            assert mirror.is_pinned()
            buffer = io.BytesIO()
            torch.save(mirror, buffer)
            assert buffer.tell() < mirror.nbytes + 4096
            assert copy.deepcopy(mirror).untyped_storage().nbytes() == mirror.nbytes


def test_mirrors_outlive_the_optimizer(device: torch.device, packed: bool) -> None:
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 2)
    mirror = optimizer.state[parameters[0]]["exp_avg"]
    expected = mirror.clone()
    del optimizer, parameters
    assert_same_bits(mirror, expected, "mirror")


def test_references_from_before_are_valid_after_synchronize(
    device: torch.device, packed: bool
) -> None:
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 1)
    base = optimizer._base
    held = optimizer.state[parameters[-1]]["exp_avg_sq"]
    before = held.clone()
    train(parameters, optimizer, 1)
    optimizer.synchronize()
    assert held is base.state[parameters[-1]]["exp_avg_sq"]
    assert not torch.equal(held, before)


def test_groups_state_and_defaults_are_the_base_optimizers_own(device: torch.device) -> None:
    parameters = [nn.Parameter(torch.ones(2048, device=device))]
    base = torch.optim.AdamW(parameters, 1e-2)
    groups, state, defaults = base.param_groups, base.state, base.defaults
    optimizer = swap_optimizer(base)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert optimizer.defaults is defaults
    optimizer.param_groups[0]["lr"] = 0.5
    train(parameters, optimizer, 1)
    assert float((1 - parameters[0].detach()).abs().max()) > 0.4
    optimizer.zero_grad()
    assert parameters[0].grad is None


def test_hooks_fire_once_per_step(device: torch.device, packed: bool) -> None:
    parameters, _ = make(device, packed)
    base = torch.optim.AdamW(parameters, 1e-2)
    calls: list[str] = []
    base.register_step_pre_hook(lambda *_: calls.append("before wrapping"))
    optimizer = swap_optimizer(base, SwapOptimizerConfig(swap_times=3, packed_swap=packed))
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(parameters, optimizer, 1)
    handle.remove()
    train(parameters, optimizer, 1)
    assert calls == ["before wrapping", "pre", "post", "before wrapping", "pre"]


@pytest.mark.parametrize("fused", [False, True])
def test_checkpoint_roundtrip(device: torch.device, packed: bool, fused: bool) -> None:
    """Ours into native and back, into a fresh optimizer, and across movements."""
    parameters, optimizer = make(device, packed, fused=fused)
    twins, reference = native_twin(parameters, fused)
    train(parameters, optimizer, 3)
    train(twins, reference, 3)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    values = [value for state in saved["state"].values() for value in state.values()]
    assert all(value.device.type == "cpu" for value in values if value.dim() > 0)
    train(parameters, optimizer, 1)
    for number, state in saved["state"].items():
        for key, value in state.items():
            assert_same_bits(value, kept["state"][number][key], f"snapshot of {key}")

    for target_packed in (True, False):
        fresh, restored = make(device, target_packed, fused=fused)
        with torch.no_grad():
            for one, twin in zip(fresh, twins, strict=True):
                one.copy_(twin)
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        restored.load_state_dict(torch.load(buffer, weights_only=True))
        assert all(
            state["exp_avg"].is_pinned() and state["exp_avg"].device.type == "cpu"
            for state in restored.state.values()
        )
        other_twins, other = native_twin(twins, fused)
        other.load_state_dict(copy.deepcopy(reference.state_dict()))
        train(fresh, restored, 2)
        train(other_twins, other, 2)
        for one, twin in zip(fresh, other_twins, strict=True):
            assert_same_bits(one, twin, "parameter after resuming")

    native_again, native = native_twin(twins, fused)
    native.load_state_dict(copy.deepcopy(saved))
    train(native_again, native, 1)
    train(twins, reference, 1)
    for one, twin in zip(native_again, twins, strict=True):
        assert_same_bits(one, twin, "native parameter after loading ours")


def test_loading_in_place_keeps_the_host_memory(device: torch.device, packed: bool) -> None:
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    addresses = [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
    train(parameters, optimizer, 2)
    optimizer.load_state_dict(saved)
    assert addresses == [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
    for number, state in enumerate(optimizer.state.values()):
        assert_same_bits(state["exp_avg"], saved["state"][number]["exp_avg"], "loaded state")


def test_a_checkpoint_that_does_not_fit_changes_nothing(device: torch.device, packed: bool) -> None:
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 1)
    before = optimizer.state_dict()
    wrong_shape = copy.deepcopy(before)
    wrong_shape["state"][4]["exp_avg"] = torch.zeros(7)
    wrong_groups = copy.deepcopy(before)
    wrong_groups["param_groups"][0]["params"] = [0, 1]
    for saved, match in ((wrong_shape, "shape"), (wrong_groups, "groups of sizes")):
        with pytest.raises(ValueError, match=match):
            optimizer.load_state_dict(saved)
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert_same_bits(value, before["state"][number][key], key)


def test_deepcopy_and_pickle_are_pinned_again(device: torch.device, packed: bool) -> None:
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 2)
    twin = copy.deepcopy(optimizer)
    thawed = pickle.loads(pickle.dumps(optimizer))
    for other in (twin, thawed):
        assert isinstance(other, TorchSwapOptimizer)
        assert other.swap_stats().packed is packed
        assert other.swap_stats().batches == 3
        own = other.param_groups[0]["params"]
        train(own, other, 1)
        assert all(state["exp_avg"].is_pinned() for state in other.state.values())
    train(parameters, optimizer, 1)
    for other in (twin, thawed):
        for one, parameter in zip(other.param_groups[0]["params"], parameters, strict=True):
            assert_same_bits(one, parameter, "parameter of the copy")


def test_copies_keep_the_options(
    device: torch.device, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was passed beside the configuration is passed again."""
    parameters = [nn.Parameter(torch.ones(2048, device=device))]
    optimizer = swap_optimizer(
        torch.optim.AdamW(parameters),
        SwapOptimizerConfig(packed_swap=packed),
        synchronous=True,
        pageable_fallback=True,
    )
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other._options == {"synchronous": True, "pageable_fallback": True}
        assert other._config == optimizer._config
        train(other.param_groups[0]["params"], other, 1)
        assert other.swap_stats().last_times.hidden_share == 0


@pytest.mark.parametrize(("start", "said"), [("cpu", "CPU"), ("meta", "meta device")])
def test_a_model_moved_after_wrapping(
    device: torch.device, packed: bool, start: str, said: str
) -> None:
    model = nn.Linear(64, 64, device=start)
    with pytest.warns(UserWarning, match=rf"4 on the {said}\).* until .* on an accelerator"):
        optimizer = swap_optimizer(
            torch.optim.AdamW(model.parameters(), 1e-2, foreach=False),
            SwapOptimizerConfig(packed_swap=packed),
        )
    previous = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(previous)
    train(list(model.parameters()), optimizer, 2)
    assert optimizer.swap_stats().swapped_states == 2
    assert optimizer.state[model.weight]["exp_avg"].is_pinned()
