"""States of DTensors on several ranks: gradients sharded in other ways, torch's own state dicts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import OPTIMIZERS
from parallel import local
from pool import Rank, RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer, virtual
from training import assert_same_bits

STEPS = 3
# With this, the first rank alone gets what all states are together.
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def wrap(optimizer: torch.optim.Optimizer, packed: bool | None) -> torch.optim.Optimizer:
    """Return the optimizer itself for None."""
    if packed is None:
        return optimizer
    return swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=3, packed_swap=packed))


# Gradients that are not sharded as their parameters are.


def _train_with_gradients_of(
    rank: Rank, kind: str, placement: Placement, packed: bool | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    mesh = rank.mesh()
    values = torch.linspace(-1, 1, 7 * 700, device=rank.device).view(7, 700)
    parameters = [
        nn.Parameter(distribute_tensor(values + index, mesh, [Shard(0)])) for index in range(4)
    ]
    optimizer = wrap(OPTIMIZERS[kind](parameters), packed)
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


# torch's own functions for state dicts.


def _make(rank: Rank, kind: str, packed: bool | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(67, 80), nn.Linear(80, 3), nn.Linear(3, 900)).to(rank.device)
    for layer in (*model, model):
        fully_shard(layer, mesh=rank.mesh())
    return model, wrap(OPTIMIZERS[kind](model.parameters()), packed)


def _train(rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step * rank.size + rank.index)
        values = torch.randn(8, 67, generator=generator).to(rank.device)
        model(values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_same(found: Any, expected: Any, what: str) -> None:
    assert type(found) is type(expected), f"{what}: {type(found)} instead of {type(expected)}"
    if isinstance(found, dict):
        assert list(found) == list(expected), what
        for key, value in found.items():
            _assert_same(value, expected[key], f"{what}.{key}")
    elif isinstance(found, torch.Tensor):
        assert_same_bits(found, expected, what)
    else:
        assert found == expected, what


def _full_state_dicts(rank: Rank, kind: str, packed: bool) -> None:
    saved = []
    for way in (None, packed):
        model, optimizer = _make(rank, kind, way)
        _train(rank, model, optimizer, range(2))
        saved.append(get_optimizer_state_dict(model, optimizer, options=FULL))
    _assert_same(saved[1], saved[0], "full state dict")
    resumed = []
    for way in (None, packed):
        model, optimizer = _make(rank, kind, way)
        # A copy: natively, step counts are taken over as they are, and count on.
        loaded = copy.deepcopy(saved[0])
        set_optimizer_state_dict(model, optimizer, loaded, options=FROM_RANK_0)
        if isinstance(optimizer, TorchSwapOptimizer):
            assert optimizer.swap_stats().swapped_states > 0
        _train(rank, model, optimizer, range(2, 4))
        resumed.append(get_optimizer_state_dict(model, optimizer))
    _assert_same(resumed[1], resumed[0], "resumed")


@pytest.mark.parametrize("kind", ["AdamW", "AdamW fused", "HyperParallel AdamW"])
def test_full_state_dicts(two_ranks: RankPool, kind: str, packed: bool) -> None:
    two_ranks.run(_full_state_dicts, kind, packed)


def _sharded_checkpoints(rank: Rank, kind: str, packed: bool, folder: Path) -> None:
    resumed = []
    for index, way in enumerate((None, packed)):
        model, optimizer = _make(rank, kind, way)
        _train(rank, model, optimizer, range(2))
        saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(saved, checkpoint_id=str(folder / str(index)))
        model, optimizer = _make(rank, kind, way)
        loaded = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(loaded, checkpoint_id=str(folder / str(0)))
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        _train(rank, model, optimizer, range(2, 4))
        resumed.append(get_optimizer_state_dict(model, optimizer))
    _assert_same(resumed[1], resumed[0], "resumed")


@pytest.mark.parametrize("kind", ["AdamW", "AdamW fused", "HyperParallel AdamW"])
def test_sharded_checkpoints(two_ranks: RankPool, kind: str, packed: bool, tmp_path: Path) -> None:
    two_ranks.run(_sharded_checkpoints, kind, packed, tmp_path)
