"""FSDP2 with recomputation and activation swap."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from models import OPTIMIZERS, Block, Transformer, loss_of, tokens
from parallel import Outcome, Training, compare, train
from pool import Rank, RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard

from activation_memory import TECHNIQUES
from training import assert_same_bits


def _build(rank: Rank, name: str | None) -> Training:
    """Build a model of sharded blocks that hold fewer activations, or all without a name."""
    blocks: list[nn.Module] = [Block() for _ in range(2)]
    if name is not None:
        blocks = [TECHNIQUES[name](block) for block in blocks]
    model = Transformer(blocks).to(rank.device)
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())

    def give_gradients(index: int) -> torch.Tensor:
        loss = loss_of(model, tokens(index, rank.device, rank.index, rank.size))
        loss.backward()
        return loss

    return Training(model, [OPTIMIZERS["AdamW fused"](model.parameters())], give_gradients)


@cache
def _train_with_all_activations(rank: Rank) -> Outcome:
    """Train natively, once for all techniques."""
    return train(rank, partial(_build, name=None), None)


def _train_sharded(rank: Rank, name: str) -> None:
    plain = _train_with_all_activations(rank)
    native = compare(rank, partial(_build, name=name))["native"]
    assert native.peak_nbytes < plain.peak_nbytes
    for found, expected in zip(native.losses, plain.losses, strict=True):
        assert_same_bits(found, expected, "loss")


@pytest.mark.parametrize("name", list(TECHNIQUES))
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_sharded_blocks_with_fewer_activations(ranks: RankPool, name: str) -> None:
    ranks.run(_train_sharded, name)
