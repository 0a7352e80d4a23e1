"""Whole states: gathered on one rank or on all, and given out again."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from checkpointing import (
    STEPS,
    SWAPPED,
    Job,
    Moves,
    assert_same_job,
    assert_same_tensors,
    make_heir,
    make_job,
    moves_on,
    place,
)
from parallel import local
from pool import Rank, RankPool
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map_only

from swapopt_torch import TorchSwapOptimizer
from swapopt_torch.layout import round_up
from training import assert_same_bits


def _trained(rank: Rank, optimizer: str) -> dict[str, Job]:
    where = place(rank, "sharded")
    assert where is not None
    jobs = {variant: make_job(where, optimizer, variant) for variant in ("native", *SWAPPED)}
    for job in jobs.values():
        job.train(range(STEPS))
    return jobs


def _assert_same(found: object, expected: object, what: str = "state_dict") -> None:
    """Nested dictionaries and lists hold the same, tensors bit for bit, on whatever device."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), what
        assert_same_bits(found, expected, what)
    elif isinstance(expected, Mapping):
        assert isinstance(found, Mapping), what
        assert list(found) == list(expected), what
        for key, value in expected.items():
            _assert_same(found[key], value, f"{what}.{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list), what
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            _assert_same(one, other, f"{what}[{index}]")
    else:
        assert type(found) is type(expected), what
        assert found == expected, what


def _gather(rank: Rank, optimizer: str) -> None:
    jobs = _trained(rank, optimizer)
    for options in (
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(ignore_frozen_params=True),
    ):
        dicts = {
            variant: get_optimizer_state_dict(job.model, job.optimizer, options=options)
            for variant, job in jobs.items()
        }
        only_on_one = options.full_state_dict and options.cpu_offload
        assert bool(dicts["native"]) == (rank.index == 0 or not only_on_one)
        for variant in SWAPPED:
            _assert_same(dicts[variant], dicts["native"], variant)


@pytest.mark.parametrize("optimizer", ["loop", "fused", "hyper"])
def test_every_option_gives_what_it_gives_natively(two_ranks: RankPool, optimizer: str) -> None:
    two_ranks.run(_gather, optimizer)


def _watch_gather(rank: Rank) -> None:
    jobs = _trained(rank, "loop")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    moves = {}
    for variant in ("native", "packed"):
        job = jobs[variant]
        with moves_on(rank.device) as moves[variant]:
            found = get_optimizer_state_dict(job.model, job.optimizer, options=options)
        assert bool(found) == (rank.index == 0)
    swapped = jobs["packed"].optimizer
    assert isinstance(swapped, TorchSwapOptimizer)
    moments = [
        value for state in swapped.state.values() for key, value in state.items() if key != "step"
    ]
    parts = [local(moment).nbytes for moment in moments]
    assert moves["packed"].peak_nbytes <= moves["native"].peak_nbytes + round_up(max(parts))
    assert moves["packed"].peak_nbytes < sum(moment.numel() * moment.itemsize for moment in moments)
    if rank.device.type == "virtual":
        assert moves["packed"].h2d_nbytes == sum(parts) == swapped.swap_stats().swapped_nbytes


def test_m3_gathering_moves_one_state_at_a_time(four_ranks: RankPool) -> None:
    """torch gathers over the mesh's device: each part goes there, the whole comes back."""
    four_ranks.run(_watch_gather)


def _give_out(rank: Rank, optimizer: str) -> None:
    native = _trained(rank, optimizer)["native"]
    everywhere = get_optimizer_state_dict(
        native.model, native.optimizer, options=StateDictOptions(full_state_dict=True)
    )
    everywhere = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), everywhere)
    for broadcast in (True, False):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        given = everywhere if rank.index == 0 or not broadcast else {}
        heirs = {name: make_heir(native, optimizer, name) for name in ("native", *SWAPPED)}
        for heir in heirs.values():
            for _ in range(2):  # the first time it has not stepped, the second time it has states
                whole = copy.deepcopy(given)
                set_optimizer_state_dict(heir.model, heir.optimizer, whole, options=options)
                assert_same_tensors(heir, native)
        for heir in heirs.values():
            assert_same_job(heir, heirs["native"])
        for heir in heirs.values():
            heir.train(range(STEPS, 2 * STEPS))
            assert_same_job(heir, heirs["native"])


@pytest.mark.parametrize("optimizer", ["loop", "fused", "hyper"])
def test_whole_states_are_given_out(two_ranks: RankPool, optimizer: str) -> None:
    two_ranks.run(_give_out, optimizer)


def _watch_giving_out(rank: Rank) -> None:
    jobs = _trained(rank, "loop")
    native, job = jobs["native"], jobs["packed"]
    whole = get_optimizer_state_dict(
        native.model, native.optimizer, options=StateDictOptions(full_state_dict=True)
    )
    whole = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), whole)
    moves = {}
    for broadcast in (True, False):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        given = whole if rank.index == 0 or not broadcast else {}
        with moves_on(rank.device) as moves[broadcast]:
            set_optimizer_state_dict(job.model, job.optimizer, given, options=options)
        assert_same_tensors(job, native)
    with moves_on(rank.device) as natively:
        set_optimizer_state_dict(native.model, native.optimizer, whole, options=options)
    assert moves[True] == Moves()
    assert moves[False].peak_nbytes <= natively.peak_nbytes


def test_m3_broadcasting_moves_nothing(four_ranks: RankPool) -> None:
    """The states of a swapped optimizer are on the CPU, and so is torch's broadcast of them.

    Without the broadcast torch shards every state on the device before it loads the first.
    """
    four_ranks.run(_watch_giving_out)


def _load_without(rank: Rank, missing: str) -> None:
    jobs = _trained(rank, "loop")
    state = get_optimizer_state_dict(jobs["native"].model, jobs["native"].optimizer)
    state = copy.deepcopy(state)
    assert isinstance(state["state"], dict)
    del state["state"][missing]
    for variant in SWAPPED:
        job = make_heir(jobs["native"], "loop", variant)
        with pytest.raises(RuntimeError, match=f"Missing optimizer state for parameter '{missing}"):
            set_optimizer_state_dict(job.model, job.optimizer, copy.deepcopy(state))
    heirs = {name: make_heir(jobs["native"], "loop", name) for name in ("native", *SWAPPED)}
    for heir in heirs.values():
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(heir.model, heir.optimizer, copy.deepcopy(state), options=options)
        heir.train(range(STEPS, 2 * STEPS))
        assert_same_job(heir, heirs["native"])


def test_a_missing_state_is_refused_or_starts_anew(two_ranks: RankPool) -> None:
    two_ranks.run(_load_without, "eight")
