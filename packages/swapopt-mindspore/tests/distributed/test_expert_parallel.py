"""Experts on several ranks, of which some get no tokens in a step."""

from __future__ import annotations

import pytest
from experts import ExpertParallel
from parallel import STEPS, compare
from pool import Rank, RankPool

import mindformers_adamw
from swapping import adam, adamw


def _compare(rank: Rank, packed: bool) -> tuple[list[float], list[int]]:
    built: list[ExpertParallel] = []

    def build(rank: Rank) -> ExpertParallel:
        built.append(ExpertParallel(rank))
        return built[-1]

    native = compare(rank, build, adamw if packed else adam, [packed])
    assert built[0].idle_steps == built[1].idle_steps
    return native.losses(), built[0].idle_steps


@pytest.mark.parametrize("packed", [False, True], ids=["adam_per_tensor", "mindformers_packed"])
def test_experts_without_tokens(ranks: RankPool, packed: bool) -> None:
    """Every rank has an expert whose gradient is None in one step, and one where it is zero."""
    if packed:
        mindformers_adamw.home()  # skips where it is not installed
    losses, idle_steps = zip(*ranks.run(_compare, packed), strict=True)
    assert losses[1:] == losses[:-1]
    assert sorted(step for steps in idle_steps for step in steps) == list(range(STEPS))
    assert all({step % 2 for step in steps} == {0, 1} for steps in idle_steps)
