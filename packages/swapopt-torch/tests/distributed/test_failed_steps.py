"""A step that fails on one rank: the others finish theirs, and that rank can catch up."""

from __future__ import annotations

import pytest
import torch
from fully_sharded import Setting, sharded
from parallel import STEPS, copied
from pool import Rank, RankPool

from swapopt_torch import SwapOptimizerConfig, SwapStepError, layout, swap_optimizer
from swapopt_torch.pipeline import PipelineSwapRuntime
from training import assert_same_bits, fail_at

FAILING_STEP = 2


def _train(rank: Rank, packed: bool | None) -> dict[str, torch.Tensor]:
    """Return this rank's losses, parameters and states; natively, nothing fails."""
    torch.manual_seed(0)
    training = sharded(rank, Setting("AdamW"))
    (optimizer,) = training.optimizers
    if packed is not None:
        with pytest.MonkeyPatch.context() as patch:
            # Whole parameters: one that is cut may be updated in part, and cannot catch up so.
            patch.setattr(layout, "LEAST_DIVIDED_NBYTES", 2**40)
            config = SwapOptimizerConfig(swap_times=4, packed_swap=packed)
            optimizer = swap_optimizer(optimizer, config)
    values = {}
    for step in range(STEPS):
        values[f"loss of step {step}"] = copied(training.give_gradients(step))
        if packed is not None and step == FAILING_STEP and rank.index == 0:
            _fail_and_catch_up(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad()
    for name, parameter in training.module.named_parameters():
        values[name] = copied(parameter)
        for key, state in optimizer.state[parameter].items():
            values[f"{name}.{key}"] = copied(state)
    return values


def _fail_and_catch_up(optimizer: torch.optim.Optimizer) -> None:
    """Fail with two batches updated, then update the parameters of the others."""
    counts = {parameter: state["step"].item() for parameter, state in optimizer.state.items()}
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, PipelineSwapRuntime, "_offload", 1, RuntimeError("link down"))
        with pytest.raises(SwapStepError, match=r"2 of 4 batches updated.*link down"):
            optimizer.step()
    for parameter, state in optimizer.state.items():
        if state["step"].item() > counts[parameter]:
            parameter.grad = None
    optimizer.step()


def _compare(rank: Rank, packed: bool) -> None:
    native, found = _train(rank, None), _train(rank, packed)
    assert found.keys() == native.keys()
    for name, value in found.items():
        assert_same_bits(value, native[name], name)


def test_the_others_finish_and_the_rank_catches_up(two_ranks: RankPool, packed: bool) -> None:
    two_ranks.run(_compare, packed)
