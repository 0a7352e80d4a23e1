"""FullyShardedDataParallel (FSDP1), which people still train with."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import OPTIMIZERS, Block, Transformer, loss_of, tokens
from parallel import Training, compare, copied
from pool import Rank, RankPool
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from training import assert_same_bits


def sharded(rank: Rank, optimizer: str, use_orig_params: bool) -> Training:
    """Build a model whose blocks, and the rest of it, are each one flat parameter."""
    model = FullyShardedDataParallel(
        Transformer().to(rank.device),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=rank.device,
    )

    def give_gradients(step: int) -> torch.Tensor:
        loss = loss_of(model, tokens(step, rank.device, rank.index, rank.size))
        loss.backward()
        return loss

    return Training(model, [OPTIMIZERS[optimizer](model.parameters())], give_gradients)


def compare_sharded(
    rank: Rank, optimizer: str, use_orig_params: bool
) -> tuple[set[str], dict[str, int]]:
    build = partial(sharded, optimizer=optimizer, use_orig_params=use_orig_params)
    native = compare(rank, build)["native"]
    operations = {operation for operation, _ in native.collectives}
    return operations, {name: value.numel() for name, value in native.parameters.items()}


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_fsdp1(ranks: RankPool, use_orig_params: bool) -> None:
    """Parts of parameters as views of a flat one, some of them empty; or the flat ones alone."""
    found = ranks.run(compare_sharded, "AdamW fused", use_orig_params)
    for operations, numels in found:
        assert operations == {"all_gather_into_tensor", "reduce_scatter_tensor"}
        assert (0 in numels.values()) is use_orig_params
        assert len(numels) == (len(list(Transformer().parameters())) if use_orig_params else 3)


def save_and_resume(
    rank: Rank, use_orig_params: bool, kind: StateDictType, packed: bool | None
) -> dict[str, torch.Tensor]:
    """Train, save, load what was saved into a fresh model, and train on.

    Natively, where ``packed`` is None. Returns this rank's part of what was saved, and the
    parameters in the end.
    """
    (training, optimizer), (fresh, fresh_optimizer) = (
        _built(rank, use_orig_params, packed, seed) for seed in (0, 1)
    )
    for step in range(2):
        _train(training, optimizer, step)
    with FullyShardedDataParallel.state_dict_type(training.module, kind):
        model = training.module.state_dict()
        states = FullyShardedDataParallel.optim_state_dict(training.module, optimizer)
    values = {
        f"{name}.{key}": _part(value)
        for name, state in states["state"].items()
        for key, value in state.items()
    }
    with FullyShardedDataParallel.state_dict_type(fresh.module, kind):
        fresh.module.load_state_dict(model)
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(
            fresh.module, fresh_optimizer, states
        )
    fresh_optimizer.load_state_dict(loaded)
    _train(fresh, fresh_optimizer, 2)
    return values | {name: copied(value) for name, value in fresh.module.named_parameters()}


def _built(
    rank: Rank, use_orig_params: bool, packed: bool | None, seed: int
) -> tuple[Training, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    training = sharded(rank, "AdamW", use_orig_params)
    (optimizer,) = training.optimizers
    if packed is not None:
        optimizer = swap_optimizer(optimizer, SwapOptimizerConfig(packed_swap=packed))
    return training, optimizer


def _train(training: Training, optimizer: torch.optim.Optimizer, step: int) -> None:
    training.give_gradients(step)
    optimizer.step()
    optimizer.zero_grad()


def _part(value: torch.Tensor | ShardedTensor) -> torch.Tensor:
    """Return the values that this rank holds of a saved state."""
    if not isinstance(value, ShardedTensor):
        return copied(value)
    shards = [copied(shard.tensor).flatten() for shard in value.local_shards()]
    return torch.cat(shards) if shards else torch.empty(0)


def compare_resumed(rank: Rank, use_orig_params: bool, kind: StateDictType) -> None:
    native = save_and_resume(rank, use_orig_params, kind, packed=None)
    assert any(name.endswith(".exp_avg") for name in native)
    for packed in (True, False):
        found = save_and_resume(rank, use_orig_params, kind, packed)
        assert set(found) == set(native)
        for name, value in found.items():
            assert_same_bits(value, native[name], name)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize(
    "kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT], ids=["full", "parts"]
)
def test_fsdp1_saves_and_loads(ranks: RankPool, use_orig_params: bool, kind: StateDictType) -> None:
    """FSDP1's own state dicts are what they are natively, and training goes on as natively."""
    ranks.run(compare_resumed, use_orig_params, kind)
