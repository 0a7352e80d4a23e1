"""N3: a state on the wrong device is found before an update, and the parameter is named."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from training import assert_same_bits
from twins import NUMELS, Twin, both, make_twin

SMALL = NUMELS.index(16)  # stays on the device


def named(parameters: Sequence[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"layer {index}", parameter) for index, parameter in enumerate(parameters)]


def values(twin: Twin) -> list[torch.Tensor]:
    """Return copies of all parameters and states."""
    states = [value for state in twin.optimizer.state.values() for value in state.values()]
    return [tensor.detach().cpu().clone() for tensor in (*twin.parameters, *states)]


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_n3_a_resident_state_forced_to_the_host(
    device: torch.device, packed: bool, fused: bool, key: str
) -> None:
    """Refused before anything changes, by its name; once it is back, training goes on."""
    for twin in both(
        device, packed, lambda p: torch.optim.AdamW(named(p), 1e-2, fused=fused, foreach=False)
    ):
        twin.train(2)
        if twin.base is not twin.optimizer:
            state = twin.optimizer.state[twin.parameters[SMALL]]
            home = state[key]
            state[key] = home.cpu()
            twin.give_gradients(2)
            before = values(twin)
            with pytest.raises(ValueError, match=rf"{key} of layer {SMALL} is on cpu"):
                twin.optimizer.step()
            for found, expected in zip(values(twin), before, strict=True):
                assert_same_bits(found, expected, "after a refused step")
            state[key] = home
        twin.train(range(2, 5))


def test_n3_found_when_wrapping(device: torch.device) -> None:
    twin = make_twin(device, lambda p: torch.optim.AdamW(named(p), 1e-2))
    twin.train(1)
    state = twin.base.state[twin.parameters[SMALL]]
    home, state["exp_avg"] = state["exp_avg"], state["exp_avg"].cpu()
    with pytest.raises(ValueError, match=f"exp_avg of layer {SMALL} is on cpu"):
        swap_optimizer(twin.base)
    state["exp_avg"] = home
    twin.train(range(1, 3))


def test_n3_a_state_that_swaps_may_be_anywhere(device: torch.device, packed: bool) -> None:
    """Trainers put states on the host or the device before a step; ours takes them in."""
    for twin in both(device, packed, lambda p: torch.optim.AdamW(p, 1e-2, fused=True)):
        for step, place in enumerate([torch.device("cpu"), device, torch.device("cpu")]):
            twin.train(range(step, step + 1))
            if twin.base is not twin.optimizer:
                for parameter in (twin.parameters[0], twin.parameters[3]):
                    state = twin.optimizer.state[parameter]
                    state["exp_avg"] = state["exp_avg"].to(place, copy=True)
        twin.train(range(3, 5))


def test_n3_fused_chosen_after_steps_on_the_host(device: torch.device, packed: bool) -> None:
    """The loop keeps step on the host, where a fused kernel must not look for it."""
    for twin in both(device, packed, lambda p: torch.optim.AdamW(named(p), 1e-2, foreach=False)):
        twin.train(2)
        twin.optimizer.param_groups[0]["fused"] = True
        if twin.base is not twin.optimizer:
            twin.give_gradients(2)
            before = values(twin)
            with pytest.raises(ValueError, match="step of layer 0 is on cpu"):
                twin.optimizer.step()
            for found, expected in zip(values(twin), before, strict=True):
                assert_same_bits(found, expected, "after a refused step")
        twin.optimizer.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))
        for parameter in twin.parameters:
            assert twin.optimizer.state[parameter]["step"].device == device
        twin.train(range(2, 4))
        twin.optimizer.param_groups[0]["fused"] = False  # the loop reads it anywhere
        twin.train(range(4, 6))


def test_n3_wrapping_an_optimizer_made_fused_by_hand(device: torch.device) -> None:
    twin = make_twin(device, lambda p: torch.optim.AdamW(p, 1e-2, foreach=False))
    twin.train(1)
    twin.base.param_groups[0]["fused"] = True
    with pytest.raises(ValueError, match=r"step of param_groups\[0\]\['params'\]\[0\] is on cpu"):
        swap_optimizer(twin.base, SwapOptimizerConfig())
    twin.base.param_groups[0]["fused"] = False
    twin.train(range(1, 2))
