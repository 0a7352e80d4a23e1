"""Optimizers over parameters that are divided among ranks, as fully_shard divides them.

Half of the parameters are DTensors, with gradients and states that are.
"""

from __future__ import annotations

from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn
from models import FullySharded, losses_of_the_whole
from parallel import compare
from pool import Rank, RankPool

import mindformers_adamw
from dtensor import DTensor
from swapping import adam, adamw


def _adam(params: list[Parameter]) -> nn.Optimizer:
    optimizer = adam(params)
    divided = [isinstance(state, DTensor) for state in optimizer.moment1]
    assert divided == [True, False, True, False, True]
    return optimizer


def _native_adam(rank: Rank) -> list[float]:
    return compare(rank, FullySharded, _adam, [False]).losses()


def _mindformers_adamw(rank: Rank) -> None:
    build = partial(FullySharded, dtypes=(ms.bfloat16, ms.float32))
    compare(rank, build, adamw, [False, True], masters=True)


def test_native_adam_fully_shard_swap_optimizer_state_align_worker(ranks: RankPool) -> None:
    losses, *others = ranks.run(_native_adam)
    assert others == [losses] * 3
    # What was compared is a model that learns what it should. The tolerance is there because
    # the rows of a gradient are added up in another order.
    np.testing.assert_allclose(losses, losses_of_the_whole(adam), rtol=1e-4)


def test_mindformers_adamw_fully_shard_swap_optimizer_state_align_worker(ranks: RankPool) -> None:
    """Per tensor and packed, with masters of half of the parameters."""
    mindformers_adamw.home()  # skips where it is not installed
    ranks.run(_mindformers_adamw)
