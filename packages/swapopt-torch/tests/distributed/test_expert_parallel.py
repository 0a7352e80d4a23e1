"""Expert parallel: experts divided over the ranks, some without tokens in some steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from models import OPTIMIZERS, WIDTH, Block, FeedForward, Transformer, loss_of, tokens
from parallel import STEPS, Outcome, Training, compare
from pool import Rank, RankPool
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard

PER_RANK = 2

Rest = Literal["replicated", "sharded"]
Loads = list[list[int]]


class LocalExperts(nn.Module):
    """This rank's experts.

    Attributes:
        loads: how many tokens each of them got, for every forward pass so far.
    """

    def __init__(self, experts: list[nn.Module], skip_idle: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.loads: Loads = []
        self._skip_idle = skip_idle

    def forward(self, arrived: torch.Tensor, counts: list[list[int]]) -> torch.Tensor:
        """Map tokens [tokens, width], ordered by where they are from and then by expert."""
        pieces = list(arrived.split([count for row in counts for count in row]))
        self.loads.append([sum(column) for column in zip(*counts, strict=True)])
        for index, (expert, load) in enumerate(zip(self.experts, self.loads[-1], strict=True)):
            if load or not self._skip_idle:
                own = slice(index, None, len(self.experts))
                mapped = expert(torch.cat(pieces[own]))
                pieces[own] = mapped.split([row[index] for row in counts])
        return torch.cat(pieces)


class MixtureOfExperts(nn.Module):
    """Each token goes to the expert that its router scores highest, on whatever rank.

    Attributes:
        closed: experts that get no token for now.
    """

    def __init__(self, group: dist.ProcessGroup, skip_idle: bool) -> None:
        super().__init__()
        self._group = group
        self.count = PER_RANK * group.size()
        self.closed: list[int] = []
        self.router = nn.Linear(WIDTH, self.count, bias=False)
        # All ranks make all experts, from the same numbers, and keep theirs.
        made = [FeedForward(90) for _ in range(self.count)]
        first = PER_RANK * group.rank()
        self.local = LocalExperts(list(made[first : first + PER_RANK]), skip_idle)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.flatten(0, -2)
        scores = self.router(rows)
        closed = torch.zeros(self.count, dtype=torch.bool)
        closed[self.closed] = True
        scores = scores.masked_fill(closed.to(hidden.device), -torch.inf)
        weight, choice = scores.softmax(-1).max(-1, keepdim=True)
        order = choice.flatten().argsort(stable=True)
        sent = (choice == torch.arange(self.count, device=hidden.device)).sum(0)
        mapped = self._dispatch(rows[order], sent)[order.argsort()]
        return (weight * mapped).view_as(hidden)

    def _dispatch(self, rows: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """Send rows, ordered by expert, to the experts' ranks; return what they make of them."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        counts: list[list[int]] = received.view(-1, PER_RANK).tolist()
        here = [sum(row) for row in counts]
        there: list[int] = sent.view(-1, PER_RANK).sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, here, there, self._group)
        return all_to_all_single_autograd(self.local(arrived, counts), there, here, self._group)


def _closed(step: int, count: int) -> list[int]:
    """Close the experts of one rank after the other, and the last expert from the start."""
    first = PER_RANK * step % count
    return [*range(first, first + PER_RANK), *([count - 1] if step < 2 else [])]


def _build(rank: Rank, rest: Rest, skip_idle: bool, loads: list[Loads]) -> Training:
    """Build a model whose other parameters every rank has, or all share (FSDP2)."""
    mixture = MixtureOfExperts(rank.mesh().get_group(), skip_idle)
    model = Transformer([Block(), Block(feed_forward=mixture)]).to(rank.device)
    loads.append(mixture.local.loads)
    experts = list(mixture.local.parameters())
    others = [p for p in model.parameters() if all(p is not expert for expert in experts)]
    if rest == "sharded":
        fully_shard(model, mesh=rank.mesh(), ignored_params=set(experts))

    def reduce() -> None:
        """Average gradients over all ranks; those of experts are summed already."""
        for parameter in others if rest == "replicated" else ():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        for parameter in experts:
            if parameter.grad is not None:
                parameter.grad /= rank.size

    return _training(rank, model, mixture, reduce)


def _build_sharded_experts(rank: Rank, loads: list[Loads]) -> Training:
    """Build a model on a mesh of two dimensions: experts over one, their shards over the other.

    All other parameters are sharded over all ranks: one optimizer has DTensors of two meshes.
    """
    mesh = rank.mesh(2, 2, names=("shard", "expert"))
    mixture = MixtureOfExperts(mesh["expert"].get_group(), skip_idle=False)
    model = Transformer([Block(), Block(feed_forward=mixture)]).to(rank.device)
    loads.append(mixture.local.loads)
    fully_shard(mixture.local, mesh=mesh["shard"]).set_gradient_divide_factor(rank.size)
    fully_shard(model, mesh=rank.mesh())
    return _training(rank, model, mixture, lambda: None)


def _training(
    rank: Rank, model: nn.Module, mixture: MixtureOfExperts, reduce: Callable[[], None]
) -> Training:
    def give_gradients(index: int) -> torch.Tensor:
        mixture.closed = _closed(index, mixture.count)
        loss = loss_of(model, tokens(index, rank.device, rank.index, rank.size))
        loss.backward()
        reduce()
        return loss

    return Training(model, [OPTIMIZERS["AdamW"](model.parameters())], give_gradients)


def _check(outcome: Outcome, loads: Loads, skip_idle: bool) -> None:
    """Each expert had steps without tokens, and was not updated in them if they were skipped."""
    assert len(loads) == STEPS
    for index, row in enumerate(zip(*loads, strict=True)):
        busy = sum(load > 0 for load in row)
        assert 0 < busy < STEPS, f"expert {index} was busy in {busy} of {STEPS} steps"
        updates = outcome.states[f"blocks.1.feed_forward.local.experts.{index}.up.weight.step"]
        assert updates.item() == (busy if skip_idle else STEPS)
    assert any(operation == "all_to_all_single" for operation, _ in outcome.collectives)


def _train_experts(rank: Rank, rest: Rest, skip_idle: bool) -> None:
    loads: list[Loads] = []
    outcomes = compare(rank, partial(_build, rest=rest, skip_idle=skip_idle, loads=loads))
    for outcome, row in zip(outcomes.values(), loads, strict=True):
        _check(outcome, row, skip_idle)


def _train_sharded_experts(rank: Rank) -> None:
    loads: list[Loads] = []
    outcomes = compare(rank, partial(_build_sharded_experts, loads=loads))
    for outcome, row in zip(outcomes.values(), loads, strict=True):
        _check(outcome, row, skip_idle=False)
    name = "blocks.1.feed_forward.local.experts.0.up.weight"
    assert outcomes["native"].parameters[name].shape == (45, WIDTH)


@pytest.mark.parametrize(("rest", "skip_idle"), [("replicated", False), ("sharded", True)])
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_experts_without_tokens(ranks: RankPool, rest: Rest, skip_idle: bool) -> None:
    ranks.run(_train_experts, rest, skip_idle)


def test_experts_that_are_sharded_over_a_second_mesh(four_ranks: RankPool) -> None:
    four_ranks.run(_train_sharded_experts)
