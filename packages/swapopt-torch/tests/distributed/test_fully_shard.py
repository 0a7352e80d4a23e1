"""FSDP2: the states of sharded parameters swap, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from fully_sharded import Setting, sharded
from models import Transformer
from parallel import STEPS, compare
from pool import Rank, RankPool

ON_TWO_AND_FOUR = pytest.mark.parametrize("ranks", [2, 4], indirect=True)
GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


@dataclass(frozen=True)
class Native:
    """What a case saw of the native training on one rank.

    ``calls`` is how often a step communicated, ``nbytes`` how much; ``norms`` are those of the
    gradients before clipping, ``scales`` what the loss was multiplied with.
    """

    calls: dict[str, float]
    nbytes: dict[str, float]
    numels: dict[str, int]
    norms: list[float]
    scales: list[float]


def compare_sharded(rank: Rank, setting: Setting) -> Native:
    native = compare(rank, partial(sharded, setting=setting))["native"]
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for (operation, size), count in native.collectives.items():
        calls[operation] += count
        nbytes[operation] += count * size
    return Native(
        calls={name: count / (STEPS - 1) for name, count in calls.items()},
        nbytes={name: count / (STEPS - 1) for name, count in nbytes.items()},
        numels={name: value.numel() for name, value in native.parameters.items()},
        norms=[norm.item() for norm in native.norms],
        scales=native.scales,
    )


def numels_over(natives: list[Native]) -> int:
    return sum(sum(native.numels.values()) for native in natives)


def numel_of_model() -> int:
    return sum(parameter.numel() for parameter in Transformer().parameters())


@ON_TWO_AND_FOUR
@pytest.mark.parametrize(
    "optimizer", ["Adam amsgrad", "AdamW", "AdamW fused", "HyperParallel AdamW"]
)
def test_nested_groups(ranks: RankPool, optimizer: str) -> None:
    """Two blocks and the rest of the model; shards are uneven, one rank of four has an empty one.

    A block is gathered for the forward and again for the backward, the rest stays gathered.
    """
    natives = ranks.run(compare_sharded, Setting(optimizer))
    assert numels_over(natives) == numel_of_model()
    tables = [native.numels["positions.tables"] for native in natives]
    assert tables == {2: [2048, 1024], 4: [1024, 1024, 1024, 0]}[ranks.size]
    assert all(native.calls == {GATHER: 5, SCATTER: 3} for native in natives)


@ON_TWO_AND_FOUR
def test_one_group(ranks: RankPool) -> None:
    natives = ranks.run(compare_sharded, Setting("AdamW fused", nested=False))
    assert all(native.calls == {GATHER: 1, SCATTER: 1} for native in natives)


@ON_TWO_AND_FOUR
def test_reshard_after_forward(ranks: RankPool) -> None:
    """Every part is gathered twice; with mixed precision (below) each is gathered once."""
    natives = ranks.run(compare_sharded, Setting("AdamW fused", reshard=True))
    assert all(native.calls == {GATHER: 6, SCATTER: 3} for native in natives)


@ON_TWO_AND_FOUR
@pytest.mark.parametrize(
    ("optimizer", "computed"),
    [
        ("AdamW", torch.bfloat16),
        ("AdamW", torch.float16),
        ("HyperParallel AdamW", torch.bfloat16),
    ],
)
def test_fully_shard_adamw_mixed_precision_swap_optimizer_parameter_align(
    ranks: RankPool, optimizer: str, computed: torch.dtype
) -> None:
    """Parameters are gathered in 16 bits; gradients are reduced, states are kept, in fp32."""
    for native in ranks.run(compare_sharded, Setting(optimizer, reshard=False, computed=computed)):
        assert native.calls == {GATHER: 3, SCATTER: 3}
        assert native.nbytes[GATHER] == native.nbytes[SCATTER] / 2


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_parameters_and_states_in_bf16(ranks: RankPool) -> None:
    for native in ranks.run(compare_sharded, Setting(reshard=False, stored=torch.bfloat16)):
        assert native.calls == {GATHER: 3, SCATTER: 3}
        assert native.nbytes[GATHER] == native.nbytes[SCATTER]


@pytest.mark.parametrize(
    ("ranks", "replicas", "optimizer"),
    [
        (2, 1, "AdamW"),
        (2, 2, "HyperParallel AdamW"),
        (4, 2, "AdamW"),
    ],
    indirect=["ranks"],
)
def test_hybrid_sharding(ranks: RankPool, replicas: int, optimizer: str) -> None:
    """Gradients are reduced over the shards, and then over the replicas of each."""
    natives = ranks.run(compare_sharded, Setting(optimizer, replicas=replicas))
    assert numels_over(natives) == replicas * numel_of_model()
    over_shards = {GATHER: 5, SCATTER: 3} if replicas < ranks.size else {}
    assert all(native.calls == {**over_shards, REDUCE: 3} for native in natives)


@ON_TWO_AND_FOUR
def test_accumulated_gradients(ranks: RankPool) -> None:
    """Three backward passes make a step, and only the last one reduces."""
    natives = ranks.run(compare_sharded, Setting("AdamW fused", backward_passes=3))
    assert all(native.calls == {GATHER: 15, SCATTER: 3} for native in natives)


@ON_TWO_AND_FOUR
def test_d1_clipped_gradients(ranks: RankPool) -> None:
    """The norm over all shards is a DTensor; it is above 0.1 in every step, natively, too."""
    natives = ranks.run(compare_sharded, Setting("AdamW", max_norm=0.1))
    for native in natives:
        assert native.calls[REDUCE] == 1
        assert min(native.norms) > 0.1


@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [(2, "HyperParallel AdamW"), (4, "AdamW fused")],
    indirect=["ranks"],
)
def test_a_grad_scaler(ranks: RankPool, optimizer: str) -> None:
    """The first steps overflow and are left out, on all ranks; the others are not."""
    setting = Setting(optimizer, computed=torch.float16, max_norm=1.0, scale=2.0**21)
    for native in ranks.run(compare_sharded, setting):
        assert native.scales[0] > native.scales[-2] == native.scales[-1]
