"""HyperParallel's AdamW, swapped: checkpoints, copies and mixed precision carry the counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hyper import Pair, counts, saved
from training import assert_same_bits


@pytest.mark.parametrize("into_packed", [True, False], ids=["into_packed", "into_per_tensor"])
def test_checkpoint_round_trip(device: torch.device, packed: bool, into_packed: bool) -> None:
    """Wrapped into unwrapped and back, with counts that differ between the groups."""
    pair = Pair(device, packed)
    pair.step(0)
    pair.step(1, {3, 4, 7})
    ours, natives = saved(pair.optimizer), saved(pair.reference)
    assert [group["step"] for group in ours["param_groups"]] == [1, 2]
    assert all(value.device.type == "cpu" for s in ours["state"].values() for value in s.values())
    fresh = Pair(device, into_packed)
    fresh.step(5)
    with torch.no_grad():
        for parameters in (fresh.swapped, fresh.native):
            for parameter, value in zip(parameters, pair.native, strict=True):
                parameter.copy_(value)
    fresh.optimizer.load_state_dict(natives)
    fresh.reference.load_state_dict(ours)
    assert counts(fresh.optimizer) == counts(fresh.reference) == [1, 2]
    assert fresh.optimizer.state[fresh.swapped[0]]["exp_avg"].is_pinned()
    pair.step(2)
    fresh.step(2)
    fresh.assert_equal()
    for parameter, twin in zip(fresh.swapped, pair.native, strict=True):
        assert_same_bits(parameter, twin, "parameter after resuming")


def test_a_checkpoint_of_torchs_adamw(device: torch.device, packed: bool) -> None:
    def fused(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, fused=True)

    torchs, pair = Pair(device, packed, fused), Pair(device, packed)
    torchs.step(0)
    checkpoint = saved(torchs.reference)
    pair.optimizer.load_state_dict(checkpoint)
    assert counts(pair.optimizer) == [1, 1]
    torchs.step(1, {3})
    before = saved(pair.optimizer)
    with pytest.raises(ValueError, match=r"counts 1 to 2 steps .* group 1"):
        pair.optimizer.load_state_dict(saved(torchs.reference))
    assert counts(pair.optimizer) == [1, 1]
    for number, state in saved(pair.optimizer)["state"].items():
        assert set(state) == {"exp_avg", "exp_avg_sq"}
        for key, value in state.items():
            assert_same_bits(value, before["state"][number][key], key)
            assert_same_bits(value, checkpoint["state"][number][key].cpu(), key)


def test_copies_and_unswap(device: torch.device, packed: bool) -> None:
    pair = Pair(device, packed)
    pair.step(0)
    twin = copy.deepcopy(pair.optimizer)
    assert counts(twin) == [1, 1]
    base = pair.optimizer.unswap()
    pair.give_gradients(1)
    base.step()
    pair.reference.step()
    own = [parameter for group in twin.param_groups for parameter in group["params"]]
    for copied, parameter in zip(own, pair.native, strict=True):
        copied.grad = parameter.grad
    twin.step()
    assert counts(base) == counts(twin) == [2, 2]
    for one, copied, other in zip(pair.swapped, own, pair.native, strict=True):
        assert_same_bits(one, other, "parameter after unswap")
        assert_same_bits(copied, other, "parameter of the copy")


def test_gradscaler_takes_the_path_that_checks_on_the_host(
    device: torch.device, packed: bool
) -> None:
    pair = Pair(device, packed)
    scalers = [torch.amp.GradScaler(device.type, init_scale=8.0) for _ in range(2)]
    for seed, factor in enumerate((8.0, float("inf"), 4.0)):
        pair.give_gradients(seed)
        for optimizer, parameters, scaler in (
            (pair.optimizer, pair.swapped, scalers[0]),
            (pair.reference, pair.native, scalers[1]),
        ):
            scaler.scale(torch.zeros((), device=device))
            for parameter in parameters:
                parameter.grad.mul_(factor)  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
    assert counts(pair.optimizer) == [2, 2]
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
    pair.assert_equal()
    assert not pair.optimizer._step_supports_amp_scaling
