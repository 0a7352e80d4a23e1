"""Workloads: what they say they are."""

from __future__ import annotations

import math

import pytest
import torch

from swapopt_torch.bench.workloads import NAMES, find_workload

GIB = 2**30


def test_the_rfcs_numbers_are_met_exactly() -> None:
    rfc = find_workload("rfc")
    assert rfc.numel == 25_239_552
    assert len(rfc.shapes) == 816
    assert {shape[-1] for shape in rfc.shapes} == {1024}
    # As the RFC's table has it: 192.56 MiB of states.
    assert round(rfc.state_nbytes / 2**20, 2) == 192.56


@pytest.mark.parametrize(
    ("name", "state_nbytes"),
    [("uniform-512MiB", GIB // 2), ("uniform-1GiB", GIB), ("uniform-8gib", 8 * GIB)],
)
def test_uniform_states_have_the_size_in_the_name(name: str, state_nbytes: int) -> None:
    workload = find_workload(name)
    assert workload.state_nbytes == state_nbytes
    # No tensor exceeds a sixteenth: per-tensor movement can divide it, too.
    assert max(map(math.prod, workload.shapes)) * 2 * 4 <= state_nbytes // 16


def test_llama_has_the_parameters_of_a_model_of_its_size() -> None:
    assert find_workload("llama-1b").numel == 1_235_814_400


def test_half_of_the_parameters_are_in_the_embedding() -> None:
    workload = find_workload("embedding")
    assert 2 * math.prod(workload.shapes[0]) == workload.numel


def test_experts_take_turns() -> None:
    moe = find_workload("moe")
    assert len(moe.shapes) > 3000
    assert moe.changes
    steps = [list(moe.active(step)) for step in range(4)]
    assert len({tuple(active) for active in steps}) == 4
    assert steps == [list(moe.active(step)) for step in range(4)]
    for active in steps:
        assert active == sorted(set(active))
        # Attention always, and half of the experts, each with its three tensors.
        assert active[:64] == list(range(64))
        assert len(active) == 64 + (len(moe.shapes) - 64) // 2
        routed = active[64:]
        assert all(
            [index, index + 1, index + 2] == routed[place : place + 3]
            for place, index in enumerate(routed)
            if place % 3 == 0
        )


def test_moved_bytes_are_those_of_active_states_of_enough_elements() -> None:
    moe = find_workload("moe")
    everything = find_workload("rfc")
    assert everything.moved_nbytes(0, step=0) == everything.state_nbytes
    # 24 * 17 vectors of 1024 elements stay if states below 1025 do.
    vectors_nbytes = 24 * 17 * 1024 * 2 * 4
    assert everything.moved_nbytes(1025, 0) == everything.state_nbytes - vectors_nbytes
    attention_nbytes = 64 * 128 * 128 * 2 * 4
    assert moe.moved_nbytes(0, 3) == attention_nbytes + (moe.state_nbytes - attention_nbytes) // 2


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_known(name: str) -> None:
    workload = find_workload(name)
    assert workload.name == name
    assert workload.dtype is torch.float32


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet", "choose one of rfc, llama-1b, moe, embedding, uniform-512MiB"),
        ("uniform-1.5GiB", "choose one of"),
        ("uniform-100MiB", "layers of 64 MiB; choose a multiple"),
        ("uniform-0MiB", "choose a multiple"),
    ],
)
def test_an_unknown_name_is_refused(name: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        find_workload(name)


def test_tiny_workloads_have_any_number_of_tensors() -> None:
    workload = find_workload("tiny-300")
    assert workload.shapes == ((1024,),) * 300
    assert workload.moved_nbytes(1024, 0) == workload.state_nbytes == 300 * 1024 * 2 * 4
    with pytest.raises(ValueError, match="tiny-COUNT"):
        find_workload("tiny-0")
