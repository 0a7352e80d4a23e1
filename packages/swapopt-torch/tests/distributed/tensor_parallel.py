"""Models under tensor parallelism, alone and with FSDP2 across it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from models import OPTIMIZERS, Block, FeedForward, Transformer, loss_of, tokens
from parallel import Training, local
from pool import Rank
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

Plan = dict[str, ParallelStyle]


@dataclass(frozen=True)
class Setting:
    """How a model is split and trained.

    Attributes:
        optimizer: a key of `OPTIMIZERS`.
        sequence: whether activations between the split layers are sharded along the sequence, and
            the loss along the vocabulary; otherwise both are there in full on every rank.
        data_ranks: over how many ranks FSDP2 shards the parts; 0 is without it.
        max_norm: what the norm of the gradients is clipped to, if at all.
    """

    optimizer: str = "AdamW"
    sequence: bool = False
    data_ranks: int = 0
    max_norm: float | None = None


def split(rank: Rank, setting: Setting) -> Training:
    """Build a split model and its optimizer; ranks that share the data see the same of it."""
    # Every rank has whole heads and an equal part of the inner width; the vocabulary is uneven. One
    # block does: a second one is split like it, and nothing here costs as much as split layers.
    model = Transformer([Block(feed_forward=FeedForward(192))]).to(rank.device)
    parts, part = max(setting.data_ranks, 1), 0
    if setting.data_ranks:
        mesh = rank.mesh(parts, rank.size // parts, names=("data", "tensor"))
        part = mesh.get_local_rank("data")
        _split(model, mesh["tensor"], setting.sequence)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    else:
        _split(model, rank.mesh(), setting.sequence)

    def give_gradients(step: int) -> torch.Tensor:
        with loss_parallel() if setting.sequence else nullcontext():
            loss = loss_of(model, tokens(step, rank.device, part, parts))
            loss.backward()
        return local(loss)

    optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
    return Training(model, [optimizer], give_gradients, setting.max_norm)


def _split(model: Transformer, mesh: DeviceMesh, sequence: bool) -> None:
    if not sequence:
        parallelize_module(model, mesh, _plan(Replicate()))
        return
    for block in model.blocks:
        parallelize_module(block, mesh, _norms("norm1", "norm2"))
        parallelize_module(block, mesh, _gathered("attention", "feed_forward"))
    parallelize_module(model, mesh, _norms("norm"))
    _share_positions(model.positions, mesh)
    parallelize_module(model, mesh, _plan(Shard(1)))


def _plan(between: Replicate | Shard) -> Plan:
    """Return how layers are split, given how the activations between them are laid out."""
    logits = Shard(-1) if between.is_shard() else Replicate()
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=between),
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=logits, use_local_output=between.is_replicate()
        ),
    }


def _norms(*names: str) -> Plan:
    return {name: SequenceParallel(use_local_output=True) for name in names}


def _gathered(*names: str) -> Plan:
    return {
        name: PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        for name in names
    }


def _share_positions(positions: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank the tables in full; each adds the positions of its part of the sequence.

    So their gradient is sharded and they are not: the update has to gather it.
    """

    def enter(_: nn.Module, inputs: tuple[torch.Tensor], mesh: DeviceMesh) -> tuple[DTensor]:
        return (DTensor.from_local(inputs[0], mesh, [Shard(1)], run_check=False),)

    def leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.redistribute(placements=[Shard(1)]).to_local()

    distribute_module(positions, mesh, input_fn=enter, output_fn=leave)
