"""Updates that communicate do so in one order on all ranks, whose batches differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from models import OPTIMIZERS
from parallel import copied
from pool import Rank, RankPool
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer
from training import assert_same_bits

STEPS = 4
# With these, two batches of all parameters are cut in different places on the two ranks.
ROW_NUMEL, VECTOR_NUMEL = 1536, 1024
Values = dict[str, torch.Tensor]
Train = Callable[[Rank, str, bool | None], tuple[Values, list[int]]]


def _make(rank: Rank, dtypes: Iterable[torch.dtype]) -> list[nn.Parameter]:
    """Make a table, of two rows on the first rank and one on the second, and replicated vectors.

    The gradients of the vectors will be sums that are yet to be made, as those of norms are under
    sequence parallelism: their updates communicate.
    """
    mesh = rank.mesh()
    table = torch.linspace(-1, 1, 3 * ROW_NUMEL, device=rank.device).view(3, ROW_NUMEL)
    values = torch.linspace(-1, 1, VECTOR_NUMEL, device=rank.device)
    vectors = [values.to(dtype) for dtype in dtypes]
    placed = [(table, Shard(0)), *((vector, Replicate()) for vector in vectors)]
    return [nn.Parameter(distribute_tensor(values, mesh, [kind])) for values, kind in placed]


def _give_gradients(rank: Rank, step: int, parameters: list[nn.Parameter]) -> None:
    for index, parameter in enumerate(parameters):
        if not parameter.requires_grad:
            continue
        kind = Partial() if parameter.placements[0].is_replicate() else parameter.placements[0]
        generator = torch.Generator().manual_seed(100 * step + 10 * index + rank.index)
        values = torch.randn(parameter.to_local().shape, generator=generator)
        parameter.grad = DTensor.from_local(
            values.to(rank.device, parameter.dtype),
            rank.mesh(),
            [kind],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _train(
    rank: Rank,
    kind: str,
    packed: bool | None,
    dtypes: Iterable[torch.dtype],
    frozen_at_first: tuple[int, ...] = (),
) -> tuple[Values, list[int]]:
    """Return what is left of a training, and how many units each batch of this rank has."""
    parameters = _make(rank, dtypes)
    for index in frozen_at_first:
        parameters[index].requires_grad_(False)
    optimizer = OPTIMIZERS[kind](parameters)
    if packed is not None:
        optimizer = swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=2, packed_swap=packed))
    for step in range(STEPS):
        for index in frozen_at_first:
            parameters[index].requires_grad_(step >= STEPS // 2)
        _give_gradients(rank, step, parameters)
        optimizer.step()
        optimizer.zero_grad()
    values = {}
    for index, parameter in enumerate(parameters):
        values[f"{index}"] = copied(parameter)
        for key, state in optimizer.state[parameter].items():
            values[f"{index}.{key}"] = copied(state)
    sizes = []
    if isinstance(optimizer, TorchSwapOptimizer):
        sizes = [len(batch.units) for batch in optimizer._engine.layout.batches]
    return values, sizes


def _train_with_late_parameters(
    rank: Rank, kind: str, packed: bool | None
) -> tuple[Values, list[int]]:
    """Two vectors, around one that trains from the start, begin to train in the middle."""
    return _train(rank, kind, packed, [torch.float32] * 3, frozen_at_first=(1, 3))


def _train_with_two_dtypes(rank: Rank, kind: str, packed: bool | None) -> tuple[Values, list[int]]:
    """torch's fused kernels and HyperParallel's update take one dtype after the other."""
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    return _train(rank, kind, packed, dtypes)


def _compare(rank: Rank, train: Train, kind: str, packed: bool) -> list[int]:
    native, _ = train(rank, kind, None)
    found, sizes = train(rank, kind, packed)
    assert found.keys() == native.keys()
    for name, value in found.items():
        assert_same_bits(value, native[name], name)
    return sizes


@pytest.mark.parametrize("kind", ["AdamW", "AdamW fused", "HyperParallel AdamW"])
@pytest.mark.parametrize("train", [_train_with_late_parameters, _train_with_two_dtypes])
def test_ranks_that_cut_their_batches_differently(
    two_ranks: RankPool, train: Train, kind: str, packed: bool
) -> None:
    """Out of step, a gradient of one rank would be added to another parameter's of the other."""
    sizes = two_ranks.run(_compare, train, kind, packed)
    assert sizes[0] != sizes[1], "the ranks' batches are alike, so this test shows nothing"
