"""FSDP2 with CPUOffloadPolicy: parameters and states are on the CPU, and there is nothing to do."""

from __future__ import annotations

import re
import warnings
from functools import partial

import pytest
import torch
from models import OPTIMIZERS, Transformer, loss_of, tokens
from parallel import Training, assert_same_training, train
from pool import Rank, RankPool
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from swapopt_torch import SwapOptimizerConfig


def _build(rank: Rank, optimizer: str) -> Training:
    # torch moves shards to the CPU, but not a whole model to a device that it got from outside.
    model = Transformer().to(rank.device)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=rank.mesh(), offload_policy=CPUOffloadPolicy(pin_memory=True))

    def give_gradients(index: int) -> torch.Tensor:
        loss = loss_of(model, tokens(index, rank.device, rank.index, rank.size))
        loss.backward()
        return loss

    return Training(model, [OPTIMIZERS[optimizer](model.parameters())], give_gradients)


def _train_on_the_cpu(rank: Rank, optimizer: str, packed: bool | None) -> list[str]:
    """Return the warnings of a training that was wrapped; it equals the native one."""
    build = partial(_build, optimizer=optimizer)
    native = train(rank, build, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = train(rank, build, SwapOptimizerConfig(packed_swap=packed))
    assert_same_training(wrapped, native)
    assert native.collectives
    assert (wrapped.idle_nbytes, wrapped.peak_nbytes) == (native.idle_nbytes, native.peak_nbytes)
    return [text for each in caught if "swapopt" in (text := str(each.message))]


@pytest.mark.parametrize(("optimizer", "packed"), [("Adam", None), ("AdamW fused", True)])
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_one_warning_and_training_goes_on(
    ranks: RankPool, optimizer: str, packed: bool | None
) -> None:
    for texts in ranks.run(_train_on_the_cpu, optimizer, packed):
        (text,) = texts
        assert re.search(r"no optimizer state can be swapped \(\d+ on the CPU\)", text)
