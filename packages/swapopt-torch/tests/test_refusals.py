"""F2: a user's mistake is found when wrapping, and the wrapped optimizer is as it was."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from training import assert_same_bits, bits


def parameters(device: torch.device, count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(0, 1, 2048, device=device)) for _ in range(count)]


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def assert_refused(
    optimizer: torch.optim.Optimizer, match: str, config: SwapOptimizerConfig | None = None
) -> None:
    """Wrapping raises ValueError, and the optimizer still steps by itself as before."""
    states = {
        parameter: {key: (value, bits(value)) for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }
    groups = [dict(group) for group in optimizer.param_groups]
    step = optimizer.step
    with pytest.raises(ValueError, match=match):
        swap_optimizer(optimizer, config)
    assert optimizer.step == step
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert set(optimizer.state) == set(states)
    for parameter, state in states.items():
        for key, (value, before) in state.items():
            assert optimizer.state[parameter][key] is value
            assert torch.equal(bits(value), before)


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable", "differentiable"])
def test_f2_adam_flags(device: torch.device, flag: str) -> None:
    optimizer = torch.optim.Adam(parameters(device))
    stepped(optimizer)
    optimizer.param_groups[0][flag] = True
    assert_refused(optimizer, f"{flag}=True")


@pytest.mark.parametrize("flag", ["foreach", "capturable", "differentiable"])
def test_f2_adamw_flags_in_any_group(device: torch.device, flag: str) -> None:
    first, second = parameters(device)
    groups = [{"params": [first]}, {"params": [second], flag: True}]
    assert_refused(torch.optim.AdamW(groups), f"param group 1 .*{flag}=True")


@pytest.mark.parametrize("flag", ["foreach", "fused"])
@pytest.mark.parametrize("value", [None, False])
def test_flags_that_are_none_or_false_are_served(
    device: torch.device, flag: str, value: bool | None
) -> None:
    optimizer = torch.optim.Adam(parameters(device), **{flag: value})
    stepped(swap_optimizer(optimizer))


def test_other_optimizers_are_refused_by_name(device: torch.device) -> None:
    kinds: list[Callable[..., torch.optim.Optimizer]] = [
        torch.optim.SGD,
        torch.optim.RAdam,
        torch.optim.NAdam,
        torch.optim.Adamax,
    ]
    for kind in kinds:
        optimizer = kind(parameters(device), lr=0.1)
        assert_refused(stepped(optimizer), r"torch\.optim\.Adam.*torch\.optim\.AdamW")
    with pytest.raises(ValueError, match="supports"):
        swap_optimizer("AdamW")  # type: ignore[arg-type]


class _OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure


class _OwnInit(torch.optim.AdamW):
    def _init_group(self, *arguments: Any) -> bool:
        return bool(super()._init_group(*arguments))


class _Decorated(torch.optim.Adam):
    @functools.wraps(torch.optim.Adam.step)
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure


class _OnlyAnotherName(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, fused=True)


@pytest.mark.parametrize("kind", [_OwnStep, _OwnInit, _Decorated])
@pytest.mark.parametrize("built_before", [False, True])
def test_subclasses_that_update_differently(
    device: torch.device, kind: type[torch.optim.Adam], built_before: bool
) -> None:
    if built_before:  # torch wraps step when the first instance of a class is made
        torch.optim.Adam(parameters(device))
        kind(parameters(device))
    assert_refused(kind(parameters(device)), "override neither step nor _init_group")


def test_a_subclass_that_leaves_the_update_alone_is_served(device: torch.device) -> None:
    stepped(swap_optimizer(_OnlyAnotherName(parameters(device))))


def test_a_patch_on_the_instance_is_no_override(device: torch.device) -> None:
    optimizer = torch.optim.AdamW(parameters(device))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    stepped(swap_optimizer(optimizer))


@pytest.mark.parametrize("config", [SwapOptimizerConfig, 16, {"swap_times": 16}, "packed"])
def test_what_is_no_config(device: torch.device, config: object) -> None:
    optimizer = torch.optim.AdamW(parameters(device))
    with pytest.raises(ValueError, match=r"must be a SwapOptimizerConfig or None, found .*16"):
        swap_optimizer(optimizer, config)  # type: ignore[arg-type]
    stepped(optimizer)


@pytest.mark.parametrize("saved", [{"model": {}, "optimizer": {}}, "step-100.pt", None, {}])
def test_what_is_no_checkpoint(device: torch.device, saved: object) -> None:
    optimizer = swap_optimizer(torch.optim.AdamW(parameters(device)))
    with pytest.raises(ValueError, match=r"'state' and 'param_groups'; found"):
        optimizer.load_state_dict(saved)  # type: ignore[arg-type]
    stepped(optimizer)


def test_a_checkpoint_of_another_optimizer(device: torch.device) -> None:
    momentum = stepped(torch.optim.SGD(parameters(device), 0.1, momentum=0.9))
    optimizer = swap_optimizer(torch.optim.AdamW(parameters(device)))
    with pytest.raises(ValueError, match="momentum_buffer: those of another optimizer"):
        optimizer.load_state_dict(momentum.state_dict())
    stepped(optimizer)


def test_fused_adam_says_what_to_take_instead(device: torch.device) -> None:
    with pytest.raises(ValueError, match="AdamW may be fused"):
        swap_optimizer(torch.optim.Adam(parameters(device), fused=True))


def test_a_swapped_optimizer_is_refused(device: torch.device) -> None:
    base = torch.optim.AdamW(parameters(device))
    wrapped = swap_optimizer(base)
    for optimizer in (base, wrapped):
        with pytest.raises(ValueError, match="swapped already"):
            swap_optimizer(optimizer)
    stepped(wrapped)


@pytest.mark.parametrize("key", ["max_exp_avg_sq", "master_param"])
def test_absent_state_keys(device: torch.device, key: str) -> None:
    optimizer = stepped(torch.optim.AdamW(parameters(device)))
    config = SwapOptimizerConfig(state_keys=("exp_avg", key))
    assert_refused(optimizer, key, config)


def test_a_key_that_some_group_has_is_served(device: torch.device) -> None:
    first, second = parameters(device)
    groups = [{"params": [first]}, {"params": [second], "amsgrad": True}]
    optimizer = swap_optimizer(
        torch.optim.AdamW(groups), SwapOptimizerConfig(state_keys=("max_exp_avg_sq",))
    )
    stepped(optimizer)
    assert optimizer.swap_stats().swapped_states == 1


def test_base_step_says_what_to_call(device: torch.device) -> None:
    base = torch.optim.AdamW(parameters(device))
    swap_optimizer(base)
    with pytest.raises(RuntimeError, match="swap_optimizer returned"):
        base.step()


def test_closures(device: torch.device) -> None:
    optimizer = swap_optimizer(torch.optim.AdamW(parameters(device)))
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(closure=lambda: 0.0)
    assert optimizer.step(closure=None) is None
    assert not optimizer.state


def test_groups_added_edited_or_loaded_later(device: torch.device) -> None:
    first, second = parameters(device)
    optimizer = swap_optimizer(torch.optim.Adam([first]))
    stepped(optimizer)
    before = {key: value.clone() for key, value in optimizer.state[first].items()}

    with pytest.raises(ValueError, match=r"added param group.*fused=True"):
        optimizer.add_param_group({"params": [second], "fused": True})
    assert len(optimizer.param_groups) == 1

    checkpoint = optimizer.state_dict()
    checkpoint["param_groups"][0]["foreach"] = True
    with pytest.raises(ValueError, match="foreach=True"):
        optimizer.load_state_dict(checkpoint)

    optimizer.param_groups[0]["capturable"] = True
    first.grad = torch.ones_like(first)
    with pytest.raises(ValueError, match="capturable=True"):
        optimizer.step()
    optimizer.param_groups[0]["capturable"] = False
    for key, value in optimizer.state[first].items():
        assert_same_bits(value, before[key], key)
    stepped(optimizer)


def test_sparse_gradients(device: torch.device) -> None:
    """Found before anything moves; the embedding is on the CPU, the other parameter is not."""
    (dense,) = parameters(device, 1)
    embedding = nn.Embedding(8, 4, sparse=True)
    optimizer = swap_optimizer(torch.optim.AdamW([dense, embedding.weight]))
    dense.grad = torch.ones_like(dense)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo"):
        optimizer.step()
    assert not optimizer.state


def test_include_master_params_has_no_effect_and_says_so(device: torch.device) -> None:
    with pytest.warns(UserWarning, match="include_master_params"):
        optimizer = swap_optimizer(
            torch.optim.AdamW(parameters(device)), SwapOptimizerConfig(include_master_params=True)
        )
    stepped(optimizer)


def test_cpu_parameters_train_as_without_us() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(64, 64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    native = torch.optim.AdamW(models[0].parameters(), foreach=False)
    with pytest.warns(UserWarning, match="no optimizer state can be swapped.*on the CPU") as caught:
        swapped = swap_optimizer(torch.optim.AdamW(models[1].parameters(), foreach=False))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            stepped(native)
            stepped(swapped)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_same_bits(other, one, "parameter")


def test_several_devices(device_type: str, packed: bool) -> None:
    if torch.get_device_module(device_type).device_count() < 2:
        pytest.skip("one device of this type")
    devices = [torch.device(device_type, index) for index in (0, 1)]
    spread = [nn.Parameter(torch.linspace(0, 1, 4096, device=d)) for d in devices]
    native = [nn.Parameter(p.detach().clone()) for p in spread]
    if packed:
        assert_refused(
            torch.optim.AdamW(spread), "packed_swap=True", SwapOptimizerConfig(packed_swap=True)
        )
        with pytest.warns(UserWarning, match="several devices"):
            optimizer = swap_optimizer(torch.optim.AdamW(spread))
    else:
        optimizer = swap_optimizer(
            torch.optim.AdamW(spread), SwapOptimizerConfig(packed_swap=False)
        )
    assert optimizer.swap_stats().packed is False
    reference = torch.optim.AdamW(native, foreach=False)
    for _ in range(3):
        stepped(optimizer)
        stepped(reference)
    for one, other in zip(native, spread, strict=True):
        assert_same_bits(other, one, "parameter")
    assert optimizer.swap_stats().swapped_states == 4


def test_a_group_on_another_device_is_refused_when_packed(device_type: str) -> None:
    if torch.get_device_module(device_type).device_count() < 2:
        pytest.skip("one device of this type")
    here, there = (nn.Parameter(torch.ones(4096, device=f"{device_type}:{i}")) for i in (0, 1))
    optimizer = swap_optimizer(torch.optim.AdamW([here]), SwapOptimizerConfig(packed_swap=True))
    stepped(optimizer)
    with pytest.raises(ValueError, match="packed_swap=True"):
        optimizer.add_param_group({"params": [there]})
    assert len(optimizer.param_groups) == 1
    stepped(optimizer)
