"""What orders a step under FSDP2, and that no device-wide synchronisation does (invariant 9)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from parallel import Training, compare
from pool import Rank, RankPool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from swapopt_torch import SwapOptimizerConfig, swap_optimizer, virtual
from swapopt_torch.local_tensor import local_of
from training import assert_same_bits

WIDTH = 64
STEPS = 3
WAYS = {"natively": None, "packed": True, "per_tensor": False}


@pytest.fixture(autouse=True)
def only_where_races_are_found(device_type: str) -> None:
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator finds races")


def make_model(rank: Rank, mesh: DeviceMesh | None = None, **options: Any) -> FSDPModule:
    """Return three blocks, each sharded by itself, over all ranks or a mesh."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(3)
    ]
    model = nn.Sequential(*blocks).to(rank.device)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh or rank.mesh(), **options)
    assert isinstance(model, FSDPModule)
    return model


def make_optimizer(model: FSDPModule, packed: bool | None) -> torch.optim.Optimizer:
    """Return a native optimizer for None."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    if packed is None:
        return optimizer
    return swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=4, packed_swap=packed))


def make_data(rank: Rank, count: int) -> list[torch.Tensor]:
    """Return batches that lie on the device; a copy from the host between steps would order them.

    (It blocks the host until the device has caught up with the caller's stream.)
    """
    generator = torch.Generator().manual_seed(rank.index)
    data = [torch.randn(8, WIDTH, generator=generator).to(rank.device) for _ in range(count)]
    torch.virtual.synchronize(rank.device)
    return data


def train(
    model: FSDPModule, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Train on each batch; return what is left of the parameters here, and of their states."""
    for values in data:
        model(values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [local_of(tensor).detach().cpu() for tensor in (*model.parameters(), *states)]


def assert_same_tensors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(one, other, f"tensor {index}")


# Equal numbers, and no race: the pool looks for those after every case.


def build(rank: Rank, variant: str) -> Training:
    options: dict[str, Any] = {}
    if variant == "parameters stay gathered":
        options["reshard_after_forward"] = False
    if variant == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if variant == "replicated shards":
        options["mesh"] = rank.mesh(2, 2, names=("replicate", "shard"))
    model = make_model(rank, **options)
    micro_batches = 3 if variant == "accumulated gradients" else 1
    data = make_data(rank, STEPS * micro_batches)

    def give_gradients(step: int) -> torch.Tensor:
        for index in range(micro_batches):
            if micro_batches > 1:
                model.set_requires_gradient_sync(index == micro_batches - 1)
                model.set_is_last_backward(index == micro_batches - 1)
            loss = model(data[step * micro_batches + index]).float().square().mean()
            loss.backward()
        if variant == "clipped gradients":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss

    return Training(model, [make_optimizer(model, None)], give_gradients)


def _train_in_all_ways(rank: Rank, variant: str) -> None:
    compare(rank, partial(build, variant=variant), steps=STEPS)


@pytest.mark.parametrize(
    ("ranks", "variant"),
    [
        (2, "parameters stay gathered"),
        (2, "mixed precision"),
        (2, "clipped gradients"),
        (2, "accumulated gradients"),
        (4, "replicated shards"),
    ],
    indirect=["ranks"],
)
def test_streams_of_fsdp_need_no_further_order(ranks: RankPool, variant: str) -> None:
    ranks.run(_train_in_all_ways, variant)


def _never_synchronise(rank: Rank, packed: bool) -> None:
    model = make_model(rank)
    optimizer = make_optimizer(model, packed)
    for values in make_data(rank, STEPS):
        model(values).square().mean().backward()
        with _no_synchronisation():
            optimizer.step()
        optimizer.zero_grad()


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a step synchronised the device")

    owners = (torch.virtual, torch.accelerator)
    originals = [owner.synchronize for owner in owners]
    try:
        for owner in owners:
            owner.synchronize = refuse
        yield
    finally:
        for owner, original in zip(owners, originals, strict=True):
            owner.synchronize = original


def test_a_step_does_not_synchronise_the_device(two_ranks: RankPool, packed: bool) -> None:
    two_ranks.run(_never_synchronise, packed)


# The two edges that FSDP2 itself provides. Without one of them training races natively, too.


@contextmanager
def _backward_does_not_wait_for_its_reductions() -> Iterator[None]:
    original = FSDPParamGroup.finalize_backward

    def finalize(group: FSDPParamGroup) -> None:
        # Each of the two would make the caller's stream wait for the reduce-scatter.
        group.comm_ctx._last_post_reduce_events.clear()
        group.comm_ctx.reduce_scatter_states.clear()
        original(group)

    FSDPParamGroup.finalize_backward = finalize
    try:
        yield
    finally:
        FSDPParamGroup.finalize_backward = original


def _races_without_reductions(rank: Rank, packed: bool | None) -> list[tuple[str, str]]:
    model = make_model(rank)
    optimizer, data = make_optimizer(model, packed), make_data(rank, STEPS)
    with _backward_does_not_wait_for_its_reductions():
        train(model, optimizer, data)
        return _found(rank)


def _races_without_post_step_order(rank: Rank, packed: bool | None) -> list[tuple[str, str]]:
    model = make_model(rank)
    optimizer, data = make_optimizer(model, packed), make_data(rank, STEPS)
    before_the_steps = torch.virtual.current_stream().record_event()
    for values in data:
        model.set_post_optim_event(before_the_steps)
        model(values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _found(rank)


def _found(rank: Rank) -> list[tuple[str, str]]:
    """Return the operations that race, the later one first."""
    torch.virtual.synchronize(rank.device)
    return sorted({(race.operation, race.earlier_operation) for race in virtual.races()})


def test_gradients_race_if_backward_does_not_wait_for_them(two_ranks: RankPool) -> None:
    found = {way: two_ranks.run(_races_without_reductions, packed) for way, packed in WAYS.items()}
    for way, races in found.items():
        for of_rank in races:
            assert ("aten::_fused_adamw_", "reduce_scatter_tensor") in of_rank, way


def test_parameters_race_if_the_next_forward_does_not_wait_for_the_step(
    two_ranks: RankPool,
) -> None:
    for packed in WAYS.values():
        for of_rank in two_ranks.run(_races_without_post_step_order, packed):
            assert of_rank == [("aten::_foreach_copy_", "aten::_fused_adamw_")]


# What orders a step is the caller's current stream, on which it begins and ends.


def _wait_for_the_step_alone(rank: Rank) -> None:
    left = []
    for packed in WAYS.values():
        torch.manual_seed(0)
        model = make_model(rank)
        optimizer = make_optimizer(model, packed)
        optimizer.register_step_post_hook(
            lambda *_, model=model: model.set_post_optim_event(
                torch.virtual.current_stream().record_event()
            )
        )
        left.append(train(model, optimizer, make_data(rank, STEPS)))
    assert_same_tensors(left[1], left[0])
    assert_same_tensors(left[2], left[0])


def test_an_event_after_the_step_orders_the_next_forward(two_ranks: RankPool) -> None:
    two_ranks.run(_wait_for_the_step_alone)


def _step_in_backward(rank: Rank) -> None:
    left = []
    for packed in WAYS.values():
        torch.manual_seed(0)
        model = make_model(rank)
        optimizers = [_optimizer_in_backward(parameter, packed) for parameter in model.parameters()]
        for values in make_data(rank, STEPS):
            model(values).square().mean().backward()
        states = [
            value
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
        ]
        tensors = (*model.parameters(), *states)
        left.append([local_of(tensor).detach().cpu() for tensor in tensors])
    assert_same_tensors(left[1], left[0])
    assert_same_tensors(left[2], left[0])


def _optimizer_in_backward(parameter: nn.Parameter, packed: bool | None) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = torch.optim.AdamW([parameter], 1e-2, fused=True)
    if packed is not None:
        optimizer = swap_optimizer(optimizer, SwapOptimizerConfig(packed_swap=packed, min_numel=0))

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)
    return optimizer


def test_steps_in_backward_run_on_the_stream_that_reduces(two_ranks: RankPool) -> None:
    """FSDP2 calls the hooks with that stream current: a step follows the caller, wherever."""
    two_ranks.run(_step_in_backward)


# A stream of the user's own needs one wait, natively as with us.


def _scale_on_a_side_stream(
    rank: Rank, packed: bool | None, is_ordered: bool
) -> list[tuple[str, str]]:
    model = make_model(rank)
    optimizer, data = make_optimizer(model, packed), make_data(rank, STEPS)
    side = torch.Stream(device=rank.device)
    for values in data:
        model(values).square().mean().backward()
        side.wait_stream(torch.virtual.current_stream())
        with side:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
        if is_ordered:
            torch.virtual.current_stream().wait_stream(side)
        optimizer.step()
        optimizer.zero_grad()
    return _found(rank)


@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "unordered"])
def test_a_side_stream_that_writes_gradients(two_ranks: RankPool, is_ordered: bool) -> None:
    found = {
        way: two_ranks.run(_scale_on_a_side_stream, packed, is_ordered)
        for way, packed in WAYS.items()
    }
    assert found["packed"] == found["per_tensor"] == found["natively"]
    update_and_scaling = ("aten::_fused_adamw_", "aten::mul_.Tensor")
    for of_rank in found["natively"]:
        assert (update_and_scaling in of_rank) is not is_ordered
        assert is_ordered or of_rank
