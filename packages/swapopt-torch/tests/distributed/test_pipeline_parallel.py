"""Pipeline parallel: a rank's stages, each with a swapped optimizer of its own."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from models import OPTIMIZERS, VOCABULARY, WIDTH, Block, tokens
from parallel import STEPS, Outcome, Training, compare
from pool import Rank, RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule

MICROBATCHES = 4

ScheduleName = Literal["1F1B", "GPipe", "interleaved"]


class Part(nn.Module):
    """What one stage of a pipeline holds: a block, and the embedding or the head at its ends."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else nn.Identity()
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY) if index == count - 1 else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(hidden)))


def _make_stages(rank: Rank, group: dist.ProcessGroup, per_rank: int) -> list[PipelineStage]:
    """Return this rank's stages; successive stages are on successive ranks of the group."""
    count = per_rank * group.size()
    parts = [Part(index, count) for index in range(count)]
    return [
        PipelineStage(parts[index].to(rank.device), index, count, rank.device, group=group)
        for index in range(group.rank(), count, group.size())
    ]


def _make_schedule(name: ScheduleName, stages: list[PipelineStage]) -> _PipelineSchedule:
    if name == "interleaved":
        return ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=_loss)
    (stage,) = stages
    kind = Schedule1F1B if name == "1F1B" else ScheduleGPipe
    return kind(stage, MICROBATCHES, loss_fn=_loss)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _build(rank: Rank, name: ScheduleName) -> Training:
    stages = _make_stages(rank, rank.mesh().get_group(), 2 if name == "interleaved" else 1)
    return _training(rank, name, stages)


def _build_sharded(rank: Rank) -> Training:
    """Build two stages, each sharded (FSDP2) over two ranks that see different data."""
    mesh = rank.mesh(2, 2, names=("pipeline", "shard"))
    stages = _make_stages(rank, mesh["pipeline"].get_group(), per_rank=1)
    for stage in stages:
        fully_shard(stage.submod, mesh=mesh["shard"], reshard_after_forward=False)
    return _training(rank, "1F1B", stages, part=mesh["shard"].get_local_rank(), parts=2)


def _training(
    rank: Rank, name: ScheduleName, stages: list[PipelineStage], part: int = 0, parts: int = 1
) -> Training:
    schedule = _make_schedule(name, stages)
    modules = nn.ModuleList(stage.submod for stage in stages)

    def give_gradients(index: int) -> torch.Tensor:
        batch = tokens(index, rank.device, part, parts)
        losses: list[torch.Tensor] = []
        schedule.step(
            *([batch[:, :-1]] if any(stage.is_first for stage in stages) else []),
            target=batch[:, 1:] if any(stage.is_last for stage in stages) else None,
            losses=losses,
        )
        return torch.stack(losses).mean() if losses else torch.zeros((), device=rank.device)

    optimizers = [OPTIMIZERS["AdamW fused"](each.parameters()) for each in modules]
    return Training(modules, optimizers, give_gradients)


def _messages(outcome: Outcome) -> Counter[str]:
    """Return how often this rank communicated from the second step on, by name."""
    messages: Counter[str] = Counter()
    for (operation, _), count in outcome.collectives.items():
        messages[operation] += count
    return messages


def _train_in_a_pipeline(rank: Rank, name: ScheduleName) -> Counter[str]:
    return _messages(compare(rank, partial(_build, name=name))["native"])


def _train_in_a_sharded_pipeline(rank: Rank) -> Counter[str]:
    return _messages(compare(rank, _build_sharded)["native"])


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(2, "1F1B"), (2, "GPipe"), (2, "interleaved"), (4, "1F1B"), (4, "interleaved")],
    indirect=["ranks"],
)
def test_stages_with_their_own_optimizers(ranks: RankPool, name: ScheduleName) -> None:
    found = ranks.run(_train_in_a_pipeline, name)
    per_rank = 2 if name == "interleaved" else 1
    for index, messages in enumerate(found):
        # Activations go on from every stage but the last, gradients go back from all but the first.
        ends = (index == 0) + (index == ranks.size - 1)
        each = (2 * per_rank - ends) * MICROBATCHES * (STEPS - 1)
        assert messages == {"send": each, "recv": each}


def test_stages_that_are_sharded(four_ranks: RankPool) -> None:
    """Gradients are summed over the microbatches and reduced once a step."""
    for messages in four_ranks.run(_train_in_a_sharded_pipeline):
        assert messages["send"] == messages["recv"] == MICROBATCHES * (STEPS - 1)
        assert messages["reduce_scatter_tensor"] == STEPS - 1
