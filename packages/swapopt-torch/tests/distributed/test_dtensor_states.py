"""States of DTensors beside gradients or parameters that are sharded unlike them."""

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


def _train_a_parameter_that_changes(rank: Rank, packed: bool | None) -> list[torch.Tensor]:
    """Shard a matrix, take two steps, give every rank all of it, and take two more."""
    mesh = rank.mesh()
    values = torch.linspace(-1, 1, 64 * 64, device=rank.device).view(64, 64)
    parameter = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    optimizer = OPTIMIZERS["AdamW"]([parameter])
    if packed is not None:
        optimizer = swap_optimizer(optimizer, SwapOptimizerConfig(packed_swap=packed))
    for step in range(4):
        if step == 2:
            whole = parameter.detach().redistribute(placements=[Replicate()])
            torch.utils.swap_tensors(parameter, nn.Parameter(whole))
        parameter.grad = distribute_tensor(values * (step + 1), mesh, parameter.placements)
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[parameter]
    assert state["exp_avg"].placements == (Shard(0),)
    tensors = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
    return [local(tensor).cpu() for tensor in tensors]


def _compare_a_parameter_that_changes(rank: Rank, packed: bool) -> None:
    native = _train_a_parameter_that_changes(rank, None)
    found = _train_a_parameter_that_changes(rank, packed)
    for index, (one, other) in enumerate(zip(found, native, strict=True)):
        assert_same_bits(one, other, f"tensor {index}")


def test_a_parameter_that_others_lay_out_anew(two_ranks: RankPool, packed: bool) -> None:
    """Its states stay as they were laid out, natively, too: updates communicate from then on."""
    two_ranks.run(_compare_a_parameter_that_changes, packed)
