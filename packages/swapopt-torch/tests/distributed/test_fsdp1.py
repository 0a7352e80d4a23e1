"""FullyShardedDataParallel (FSDP1), which people still train with."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import OPTIMIZERS, Block, Transformer, loss_of, tokens
from parallel import Training, compare
from pool import Rank, RankPool
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


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
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW fused"])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_fsdp1(ranks: RankPool, optimizer: str, use_orig_params: bool) -> None:
    """Parts of parameters as views of a flat one, some of them empty; or the flat ones alone."""
    found = ranks.run(compare_sharded, optimizer, use_orig_params)
    for operations, numels in found:
        assert operations == {"all_gather_into_tensor", "reduce_scatter_tensor"}
        assert (0 in numels.values()) is use_orig_params
        assert len(numels) == (len(list(Transformer().parameters())) if use_orig_params else 3)
