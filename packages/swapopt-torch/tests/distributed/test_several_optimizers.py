"""Two swapped optimizers, each over parts of one FSDP2 model."""

from __future__ import annotations

import pytest
import torch
from models import OPTIMIZERS, Transformer, loss_of, tokens
from parallel import Training, compare
from pool import Rank, RankPool
from torch.distributed.fsdp import fully_shard


def _build(rank: Rank) -> Training:
    model = Transformer().to(rank.device)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=rank.mesh())
    inside = list(model.blocks.parameters())
    around = [p for p in model.parameters() if all(p is not other for other in inside)]

    def give_gradients(index: int) -> torch.Tensor:
        loss = loss_of(model, tokens(index, rank.device, rank.index, rank.size))
        loss.backward()
        return loss

    optimizers = [OPTIMIZERS["AdamW fused"](inside), OPTIMIZERS["Adam amsgrad"](around)]
    return Training(model, optimizers, give_gradients)


def _train_with_two(rank: Rank) -> None:
    states = compare(rank, _build)["packed"].states
    with_maximum = {name.split(".")[0] for name in states if name.endswith("max_exp_avg_sq")}
    assert with_maximum == {"embed", "positions", "norm", "head"}
    assert "blocks.0.attention.query.weight.exp_avg" in states


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_blocks_and_what_is_around_them(ranks: RankPool) -> None:
    ranks.run(_train_with_two)
