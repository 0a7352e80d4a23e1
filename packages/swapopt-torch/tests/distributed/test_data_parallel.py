"""DDP: gradients that are views of its buckets, accumulation, parameters without a part."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from models import OPTIMIZERS, Transformer, loss_of, tokens
from parallel import STEPS, Outcome, Training, compare, train
from pool import Rank, RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from training import assert_same_bits

BUCKET_MIB = 0.1


class Skipping(Transformer):
    """Leaves its second block out when told to."""

    skips = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](self.positions(self.embed(batch)))
        return self.head(self.norm(hidden if self.skips else self.blocks[1](hidden)))


def _build(rank: Rank, as_view: bool, passes: int) -> Training:
    """Build a model whose gradients are reduced in the last of some backward passes."""
    model = DistributedDataParallel(
        Transformer().to(rank.device),
        device_ids=[rank.device],
        bucket_cap_mb=BUCKET_MIB,
        gradient_as_bucket_view=as_view,
    )

    def give_gradients(index: int) -> torch.Tensor:
        for each in range(passes):
            with nullcontext() if each == passes - 1 else model.no_sync():
                batch = tokens(passes * index + each, rank.device, rank.index, rank.size)
                loss = loss_of(model, batch) / passes
                loss.backward()
        assert _are_views(model) == as_view
        return loss

    return Training(model, [OPTIMIZERS["AdamW fused"](model.parameters())], give_gradients)


def _are_views(model: nn.Module) -> bool:
    """Say whether several gradients share a storage, and so all of them."""
    storages = Counter(p.grad.untyped_storage().data_ptr() for p in model.parameters())
    shared = [count > 1 for count in storages.values()]
    assert all(shared) or not any(shared)
    return all(shared)


def _build_skipping(rank: Rank, as_view: bool) -> Training:
    """Build a model that leaves a block out on every rank, or on the first one only."""
    inner = Skipping().to(rank.device)
    model = DistributedDataParallel(
        inner,
        device_ids=[rank.device],
        bucket_cap_mb=BUCKET_MIB,
        gradient_as_bucket_view=as_view,
        find_unused_parameters=True,
    )
    skipped = inner.blocks[1].feed_forward.up.weight

    def give_gradients(index: int) -> torch.Tensor:
        inner.skips = index == 2 or (index == 3 and rank.index == 0)
        loss = loss_of(model, tokens(index, rank.device, rank.index, rank.size))
        loss.backward()
        assert (skipped.grad is None) == (index == 2)
        return loss

    return Training(model, [OPTIMIZERS["AdamW"](model.parameters())], give_gradients)


def _reduced(outcome: Outcome) -> tuple[int, int]:
    """Return the number and the bytes of all_reduce operations."""
    rows = [(n, c) for (name, n), c in outcome.collectives.items() if name == "all_reduce"]
    return sum(count for _, count in rows), sum(nbytes * count for nbytes, count in rows)


def _train(rank: Rank, as_view: bool) -> None:
    outcome = train(rank, partial(_build, as_view=as_view, passes=1), None)
    accumulated = compare(rank, partial(_build, as_view=as_view, passes=2))["native"]
    count, nbytes = _reduced(outcome)
    assert count > 2 * (STEPS - 1), "there are several buckets"
    sent_nbytes = 2 * (rank.size - 1) * sum(p.nbytes for p in outcome.parameters.values())
    assert nbytes * rank.size == pytest.approx(sent_nbytes * (STEPS - 1), rel=1e-3)
    assert _reduced(accumulated) == (count, nbytes)
    assert accumulated.losses[0] != outcome.losses[0]


def _train_skipping(rank: Rank, as_view: bool) -> None:
    outcome = compare(rank, partial(_build_skipping, as_view=as_view))["native"]
    assert outcome.states["module.blocks.1.feed_forward.up.weight.step"] == STEPS - 1


def _refuse_a_divided_optimizer(rank: Rank) -> None:
    """ZeroRedundancyOptimizer is refused by name, and steps on as before."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def build(rank: Rank, wrap: bool) -> Training:
        model = DistributedDataParallel(Transformer().to(rank.device), device_ids=[rank.device])
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-2, fused=True
        )
        if wrap:
            with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer.*torch\.optim\.AdamW"):
                swap_optimizer(optimizer, SwapOptimizerConfig())

        def give_gradients(index: int) -> torch.Tensor:
            loss = loss_of(model, tokens(index, rank.device, rank.index, rank.size))
            loss.backward()
            return loss

        return Training(model, [optimizer], give_gradients)

    refused, native = (train(rank, partial(build, wrap=wrap), None) for wrap in (True, False))
    for name, parameter in refused.parameters.items():
        assert_same_bits(parameter, native.parameters[name], name)


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_buckets_with_and_without_accumulation(ranks: RankPool, as_view: bool) -> None:
    ranks.run(_train, as_view)


@pytest.mark.parametrize(("ranks", "as_view"), [(2, True), (4, False)], indirect=["ranks"])
def test_parameters_that_have_no_part_in_some_steps(ranks: RankPool, as_view: bool) -> None:
    ranks.run(_train_skipping, as_view)


def test_a_zero_redundancy_optimizer_is_refused(two_ranks: RankPool) -> None:
    two_ranks.run(_refuse_a_divided_optimizer)
