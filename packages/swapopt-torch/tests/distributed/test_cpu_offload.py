"""FSDP2 with CPUOffloadPolicy: states of parameters on the CPU are there already, and stay."""

from __future__ import annotations

import re
import warnings
from functools import partial

import pytest
import torch
from models import OPTIMIZERS, Transformer, loss_of, tokens
from parallel import Training, assert_same_training, compare, local, train
from pool import Rank, RankPool
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from swapopt_torch import SwapOptimizerConfig


def _build(rank: Rank, optimizer: str, only_a_block: bool = False) -> Training:
    # torch moves shards to the CPU, but not a whole model to a device that it got from outside.
    model = Transformer().to(rank.device)
    for part in (*model.blocks, model):
        offloaded = part is model.blocks[0] or not only_a_block
        policy = CPUOffloadPolicy(pin_memory=True) if offloaded else OffloadPolicy()
        fully_shard(part, mesh=rank.mesh(), offload_policy=policy)
    devices = {local(parameter).device.type for parameter in model.parameters()}
    assert devices == ({"cpu", rank.device.type} if only_a_block else {"cpu"})

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


@pytest.mark.parametrize(
    ("ranks", "optimizer", "packed"),
    [(2, "Adam", None), (4, "AdamW fused", True)],
    indirect=["ranks"],
)
def test_one_warning_and_training_goes_on(
    ranks: RankPool, optimizer: str, packed: bool | None
) -> None:
    for texts in ranks.run(_train_on_the_cpu, optimizer, packed):
        (text,) = texts
        assert re.search(r"no optimizer state can be swapped \(\d+ on the CPU\)", text)


def _train_a_block_on_the_cpu(rank: Rank) -> None:
    compare(rank, partial(_build, optimizer="AdamW", only_a_block=True))


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_a_block_on_the_cpu(ranks: RankPool) -> None:
    ranks.run(_train_a_block_on_the_cpu)
