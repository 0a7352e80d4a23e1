"""Context parallel: every rank has a part of the sequence, and attends over all of it.

torch's own ``context_parallel`` shards the flash, memory-efficient and cuDNN kernels of attention.
It refuses the CPU's, which the virtual accelerator computes with; so the models here do it by
themselves.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import LENGTH, OPTIMIZERS, WIDTH, Attention, Block, Positions, Transformer, tokens
from parallel import STEPS, Training, compare
from pool import Rank, RankPool
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_single_autograd,
    all_to_all_single_autograd,
)
from torch.distributed.fsdp import fully_shard


class GatheringAttention(Attention):
    """Gathers keys and values of the whole sequence for the queries of this rank's part."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank
        self._group = rank.mesh().get_group()

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys = all_gather_single_autograd(key.contiguous(), 2, self._group)
        values = all_gather_single_autograd(value.contiguous(), 2, self._group)
        length = query.shape[2]
        seen = torch.ones(length, keys.shape[2], dtype=torch.bool, device=query.device)
        return nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen.tril(self._rank.index * length)
        )


class ExchangingAttention(Attention):
    """Exchanges parts of the sequence for heads before it attends, and back (Ulysses)."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._size = rank.size
        self._group = rank.mesh().get_group()

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads = [
            self._exchanged(each.unflatten(1, (self._size, -1)).movedim(1, 0)).movedim(0, 2)
            for each in (query, key, value)
        ]
        mixed = super().attend(*(each.flatten(2, 3) for each in heads))
        parts = mixed.unflatten(2, (self._size, -1)).movedim(2, 0)
        return self._exchanged(parts).movedim(0, 1).flatten(1, 2)

    def _exchanged(self, parts: torch.Tensor) -> torch.Tensor:
        """Send the n-th part to rank n, and return what all ranks sent here."""
        return all_to_all_single_autograd(parts.contiguous(), None, None, self._group)


class LaterPositions(Positions):
    """The positions of a part of the sequence."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        end = self._start + hidden.shape[1]
        return hidden + self.tables.sum(0).view(LENGTH, WIDTH)[self._start : end]


ATTENTIONS = {"all gather": GatheringAttention, "all to all": ExchangingAttention}


def _mean_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _build(rank: Rank, kind: str) -> Training:
    """Build a model that is sharded (FSDP2) over the ranks that share the sequence."""
    length = LENGTH // rank.size
    own = slice(rank.index * length, (rank.index + 1) * length)
    model = Transformer([Block(ATTENTIONS[kind](rank)) for _ in range(2)])
    positions = LaterPositions(own.start)
    positions.load_state_dict(model.positions.state_dict())
    model.positions = positions
    model.to(rank.device)
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())

    def give_gradients(index: int) -> torch.Tensor:
        batch = tokens(index, rank.device)
        loss = _mean_loss(model, batch[:, :-1][:, own], batch[:, 1:][:, own])
        loss.backward()
        return loss

    return Training(model, [OPTIMIZERS["AdamW fused"](model.parameters())], give_gradients)


def _train_in_parts(rank: Rank, kind: str) -> tuple[list[float], set[str]]:
    """Return the losses of this rank's part of the sequence, and what was communicated."""
    native = compare(rank, partial(_build, kind=kind))["native"]
    return [loss.item() for loss in native.losses], {name for name, _ in native.collectives}


def _train_whole() -> list[float]:
    """Return the losses of the same training on one CPU."""
    torch.manual_seed(0)
    model = Transformer([Block(), Block()])
    optimizer = OPTIMIZERS["AdamW fused"](model.parameters())
    losses = []
    for index in range(STEPS):
        batch = tokens(index, torch.device("cpu"))
        loss = _mean_loss(model, batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", list(ATTENTIONS))
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_a_shared_sequence(ranks: RankPool, kind: str) -> None:
    losses, collectives = zip(*ranks.run(_train_in_parts, kind), strict=True)
    communicated = {
        "all gather": {"all_gather_into_tensor", "reduce_scatter_tensor"},
        "all to all": {"all_to_all_single"},
    }
    for names in collectives:
        assert communicated[kind] <= names
    # Sums over ranks are made in another order, so the losses are close to those of one device.
    together = [sum(row) / ranks.size for row in zip(*losses, strict=True)]
    assert together == pytest.approx(_train_whole(), rel=1e-4)
