"""States of DTensors whose gradients are sharded in other ways than their parameters."""

from __future__ import annotations

import pytest
import torch
from models import OPTIMIZERS
from parallel import local
from pool import Rank, RankPool
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from swapopt_torch import SwapOptimizerConfig, swap_optimizer, virtual
from training import assert_same_bits

STEPS = 3


def _train_with_gradients_of(
    rank: Rank, kind: str, placement: Placement, packed: bool | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    mesh = rank.mesh()
    values = torch.linspace(-1, 1, 7 * 700, device=rank.device).view(7, 700)
    parameters = [
        nn.Parameter(distribute_tensor(values + index, mesh, [Shard(0)])) for index in range(4)
    ]
    optimizer = OPTIMIZERS[kind](parameters)
    if packed is not None:
        optimizer = swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=3, packed_swap=packed))
    virtual.clear_timeline()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * rank.size + rank.index)
        for index, parameter in enumerate(parameters):
            if index == 1:
                grad = torch.randn(7, 350 if placement.is_shard() else 700, generator=generator)
                parameter.grad = DTensor.from_local(grad.to(rank.device), mesh, [placement])
            else:
                parameter.grad = distribute_tensor(values * (step + index), mesh, [Shard(0)])
        optimizer.step()
    torch.virtual.synchronize()
    rows = [row.operation for row in virtual.timeline() if row.lane == "collective"]
    kept = {f"{index}": local(p.detach()).cpu() for index, p in enumerate(parameters)}
    for index, parameter in enumerate(parameters):
        for key, value in optimizer.state[parameter].items():
            kept[f"{index}.{key}"] = local(value).cpu()
    return kept, rows


def _compare_gradients_of(rank: Rank, kind: str, placement: Placement) -> None:
    native, communicated = _train_with_gradients_of(rank, kind, placement, None)
    for packed in (True, False):
        found, rows = _train_with_gradients_of(rank, kind, placement, packed)
        assert found.keys() == native.keys()
        for name, value in found.items():
            assert_same_bits(value, native[name], name)
        assert rows == communicated


@pytest.mark.parametrize("placement", [Partial(), Partial("avg"), Replicate(), Shard(1)], ids=str)
@pytest.mark.parametrize("kind", ["AdamW", "AdamW fused", "HyperParallel AdamW"])
def test_gradients_sharded_in_another_way(
    two_ranks: RankPool, kind: str, placement: Placement
) -> None:
    two_ranks.run(_compare_gradients_of, kind, placement)
