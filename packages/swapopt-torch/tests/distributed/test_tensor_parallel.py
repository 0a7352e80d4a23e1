"""Tensor parallelism, alone and with FSDP2: states of split parameters swap like any others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
from parallel import MIN_NUMEL, STEPS, compare
from pool import Rank, RankPool
from tensor_parallel import Setting, split

ON_TWO_AND_FOUR = pytest.mark.parametrize("ranks", [2, 4], indirect=True)
SUM, GATHER, SCATTER = (
    "all_reduce",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)
FSDP_GATHER, FSDP_SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


@dataclass(frozen=True)
class Native:
    """What a case saw of the native training on one rank: calls per step, local sizes."""

    calls: dict[str, float]
    numels: dict[str, int]


def compare_split(rank: Rank, setting: Setting) -> Native:
    # With 16 elements on, the norms' states swap, too, whose gradients may be sums yet to be made.
    min_numel = 16 if setting.sequence else MIN_NUMEL
    native = compare(rank, partial(split, setting=setting), min_numel=min_numel)["native"]
    calls: Counter[str] = Counter()
    for (operation, _), count in native.collectives.items():
        calls[operation] += count
    return Native(
        calls={name: count / (STEPS - 1) for name, count in calls.items()},
        numels={name: value.numel() for name, value in native.parameters.items()},
    )


def are_split(natives: list[Native], parts: int) -> bool:
    """Say whether of a matrix of the blocks every rank has the same part."""
    found = [native.numels["blocks.0.attention.query.weight"] for native in natives]
    return found == [64 * 64 // parts] * len(natives)


@ON_TWO_AND_FOUR
@pytest.mark.parametrize("optimizer", ["Adam amsgrad", "HyperParallel AdamW"])
def test_tensor_parallel(ranks: RankPool, optimizer: str) -> None:
    """Beside parameters that are split evenly, unevenly, and not at all."""
    natives = ranks.run(compare_split, Setting(optimizer))
    assert are_split(natives, ranks.size)
    rows = {2: [34, 33], 4: [17, 17, 17, 16]}[ranks.size]
    assert [native.numels["embed.weight"] for native in natives] == [64 * count for count in rows]
    assert all(native.numels["positions.tables"] == 3 * 1024 for native in natives)
    # Activations are summed in the forward and the backward pass; the logits are gathered.
    assert all(native.calls == {SUM: 8, GATHER: 1} for native in natives)


@pytest.mark.parametrize(
    ("ranks", "optimizer", "reads"), [(2, "AdamW", 3), (4, "AdamW fused", 1)], indirect=["ranks"]
)
def test_sequence_and_loss_parallel(ranks: RankPool, optimizer: str, reads: int) -> None:
    """Gradients of norms are sums yet to be made, those of the positions are sharded.

    Their parameters are neither, so the update communicates: whenever it reads such a gradient, the
    loop three times and the fused kernel once.
    """
    natives = ranks.run(compare_split, Setting(optimizer, sequence=True, max_norm=0.1))
    assert are_split(natives, ranks.size)
    # Of six weights and biases of norms clipping reads the gradients, and then the update; three
    # sums are for the loss, one for the norm of all gradients.
    sums = 6 * (1 + reads) + 3 + 1
    for native in natives:
        assert native.calls[SUM] == sums
        assert native.calls[SCATTER] == 6


@pytest.mark.parametrize(
    ("ranks", "data_ranks", "optimizer"),
    [
        (2, 1, "AdamW"),
        (4, 2, "HyperParallel AdamW"),
    ],
    indirect=["ranks"],
)
def test_fsdp2_across_tensor_parallel(ranks: RankPool, data_ranks: int, optimizer: str) -> None:
    """The block is gathered twice and the rest once in a step; what is gathered is a part still."""
    natives = ranks.run(compare_split, Setting(optimizer, data_ranks=data_ranks))
    assert are_split(natives, ranks.size)
    across = {FSDP_GATHER: 3, FSDP_SCATTER: 2} if data_ranks > 1 else {}
    within = {SUM: 8, GATHER: 1} if data_ranks < ranks.size else {}
    assert all(native.calls == {**across, **within} for native in natives)


def test_fsdp2_across_sequence_parallel(four_ranks: RankPool) -> None:
    setting = Setting("AdamW fused", sequence=True, data_ranks=2, max_norm=0.1)
    natives = four_ranks.run(compare_split, setting)
    assert are_split(natives, four_ranks.size)
    for native in natives:
        assert native.calls[FSDP_GATHER] == 3
        assert native.calls[FSDP_SCATTER] == 2
        assert native.calls[SCATTER] == 6
