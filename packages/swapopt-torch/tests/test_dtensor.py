"""States of DTensor parameters are swapped by their local tensors and seen as DTensors."""

from __future__ import annotations

import copy
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from sharding import ShardedTwin, make_sharded_twin, mesh_of, shard
from swapopt_torch import SwapOptimizerConfig, SwapStepError, pipeline, swap_optimizer
from swapopt_torch.local_tensor import frame_of, local_of
from swapopt_torch.optim import AdamW as HyperAdamW
from training import assert_same_bits, fail_at, swapped_device_bytes
from twins import assert_alike

SWAPPED_KEYS = ("exp_avg", "exp_avg_sq")
SMALL_STATES_NBYTES = 3 * 4  # three moments of one element, the sixth parameter's
MAKERS = {
    "adam": lambda params: torch.optim.Adam(params, 1e-2, weight_decay=0.1, foreach=False),
    "amsgrad": lambda params: torch.optim.AdamW(params, 1e-2, amsgrad=True, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, 1e-2, fused=True),
    "maximize": lambda params: torch.optim.AdamW(params, 1e-2, maximize=True, foreach=False),
    "hyper": lambda params: HyperAdamW(params, 1e-2, amsgrad=True),
}

pytestmark = pytest.mark.usefixtures("lone_group")


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Any:
    return MAKERS[request.param]


def both(
    device: torch.device, mesh: DeviceMesh, packed: bool, make: Any = MAKERS["amsgrad"]
) -> Iterator[ShardedTwin]:
    """Yield the swapped one, then the native one; compare them when both have been used."""
    swapped = make_sharded_twin(device, mesh, make)
    swapped.wrap(packed)
    yield swapped
    native = make_sharded_twin(device, mesh, make)
    yield native
    assert_alike(swapped, native)


def assert_framed_alike(found: ShardedTwin, expected: ShardedTwin) -> None:
    """Every state is of the same type, mesh, placements, global shape and stride as natively."""
    for one, other in zip(found.parameters, expected.parameters, strict=True):
        for key, value in found.optimizer.state[one].items():
            reference = expected.optimizer.state[other][key]
            assert type(value) is type(reference)
            assert value.shape == reference.shape
            assert value.stride() == reference.stride()
            if isinstance(value, DTensor):
                # Equal, not the same: torch makes states that stay out of layouts which it cached.
                assert value.device_mesh == other.device_mesh
                assert value.placements == reference.placements
                assert value._spec == reference._spec
                assert value.requires_grad is False
                assert value.device == value.to_local().device


def test_training_equals_native(
    device: torch.device, mesh: DeviceMesh, packed: bool, make: Any
) -> None:
    twins = []
    for twin in both(device, mesh, packed, make):
        twin.train(4)
        twins.append(twin)
    assert_framed_alike(*twins)


def test_states_are_dtensors_over_their_mirrors(
    device: torch.device, mesh: DeviceMesh, packed: bool
) -> None:
    (twin,) = itertools.islice(both(device, mesh, packed, MAKERS["fused"]), 1)
    twin.train(1)
    stats = twin.swapped.swap_stats()
    assert stats.resident_states == {"empty": 2, "smaller than min_numel=1024": 2}
    assert stats.swapped_states == 10
    before = {(p, k): v for p, s in twin.optimizer.state.items() for k, v in s.items()}
    swapped = [(p, k) for p, k in before if k in SWAPPED_KEYS and local_of(p).numel() >= 1024]
    for parameter, key in swapped:
        state = before[parameter, key]
        assert type(state) is type(parameter.data)
        assert state.device.type == local_of(state).device.type == "cpu"
        assert local_of(state).untyped_storage().nbytes() == local_of(state).nbytes
    twin.train(range(1, 4))
    assert all(twin.optimizer.state[p][key] is before[p, key] for p, key in before)


def test_no_dtensor_is_made_in_a_step(
    device: torch.device, mesh: DeviceMesh, packed: bool, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (twin,) = itertools.islice(both(device, mesh, packed, make), 1)
    twin.train(2)
    made = 0
    original = DTensor.__new__

    def counting(*arguments: Any, **options: Any) -> DTensor:
        nonlocal made
        made += 1
        return original(*arguments, **options)

    twin.give_gradients(2)
    monkeypatch.setattr(DTensor, "__new__", staticmethod(counting))
    twin.optimizer.step()
    assert made == 0
    shard(torch.ones(8, 8), mesh, [Shard(0)], device)
    assert made > 0, "the count counts"


def test_states_that_exist_are_taken_over(
    device: torch.device, mesh: DeviceMesh, packed: bool, make: Any
) -> None:
    swapped = make_sharded_twin(device, mesh, make)
    native = make_sharded_twin(device, mesh, make)
    swapped.train(2)
    swapped.wrap(packed)
    assert swapped_device_bytes(swapped.optimizer) <= SMALL_STATES_NBYTES
    swapped.train(range(2, 4))
    native.train(4)
    assert_alike(swapped, native)
    assert_framed_alike(swapped, native)


def test_unswap_gives_dtensors_back_to_the_device(
    device: torch.device, mesh: DeviceMesh, packed: bool, make: Any
) -> None:
    twins = []
    for twin in both(device, mesh, packed, make):
        twin.train(2)
        if not twins:
            twin.optimizer = twin.swapped.unswap()
        twin.train(range(2, 4))
        twins.append(twin)
    assert_framed_alike(*twins)
    for parameter, state in twins[0].optimizer.state.items():
        for key in SWAPPED_KEYS:
            assert state[key].device == local_of(state[key]).device == local_of(parameter).device


def test_late_gradients_and_an_added_group(
    device: torch.device, mesh: DeviceMesh, packed: bool, make: Any
) -> None:
    for twin in both(device, mesh, packed, make):
        for step, absent in enumerate([{0, 3}, {3}, {1, 4}, set()]):
            twin.give_gradients(step)
            for index in absent:
                twin.parameters[index].grad = None
            twin.optimizer.step()
        added = nn.Parameter(shard(torch.ones(9, 500), mesh, [Shard(0)], device))
        twin.optimizer.add_param_group({"params": [added], "lr": 0.5})
        twin.parameters.append(added)
        twin.train(range(4, 6))


@pytest.mark.parametrize("copied", ["deepcopy", "saved"])
def test_copies_and_pickles(
    device: torch.device, mesh: DeviceMesh, packed: bool, copied: str
) -> None:
    twins = []
    for twin in both(device, mesh, packed):
        twin.train(2)
        whole = twin.parameters, twin.optimizer
        if copied == "deepcopy":
            twin.parameters, twin.optimizer = copy.deepcopy(whole)
        else:
            buffer = io.BytesIO()
            torch.save(whole, buffer)
            buffer.seek(0)
            twin.parameters, twin.optimizer = torch.load(buffer, weights_only=False)
        twin.train(range(2, 4))
        twins.append(twin)
    assert twins[0].swapped.swap_stats().swapped_states > 0


def test_snapshots_stay_as_they_are(device: torch.device, mesh: DeviceMesh, packed: bool) -> None:
    snapshots = []
    for twin in both(device, mesh, packed):
        twin.train(2)
        snapshot = twin.optimizer.state_dict()
        expected = copy.deepcopy(snapshot)
        twin.train(range(2, 4))
        if not snapshots:
            for number, state in snapshot["state"].items():
                for key, value in state.items():
                    assert value.device.type == local_of(value).device.type == "cpu"
                    assert_same_bits(value, expected["state"][number][key], f"{key} of {number}")
        snapshots.append(expected)
    swapped, native = snapshots
    assert swapped["param_groups"] == native["param_groups"]
    for number, state in native["state"].items():
        for key, value in state.items():
            assert_same_bits(swapped["state"][number][key], value, f"{key} of {number}")
            assert swapped["state"][number][key].stride() == value.stride()


@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "trained"])
@pytest.mark.parametrize("saved_natively", [True, False], ids=["from_native", "from_swapped"])
def test_checkpoints_load(
    device: torch.device,
    mesh: DeviceMesh,
    packed: bool,
    make: Any,
    saved_natively: bool,
    is_fresh: bool,
) -> None:
    twins = []
    for twin in both(device, mesh, packed, make):
        source = make_sharded_twin(device, mesh, make)
        if not saved_natively:
            source.wrap(packed)
        source.train(range(5, 8))
        if not is_fresh:
            twin.train(1)
        twin.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
        if not twins:
            assert swapped_device_bytes(twin.optimizer) <= SMALL_STATES_NBYTES
        twin.train(range(2))
        twins.append(twin)
    assert_framed_alike(*twins)


def test_a_checkpoint_of_full_tensors_is_refused(
    device: torch.device, mesh: DeviceMesh, packed: bool
) -> None:
    for twin in both(device, mesh, packed):
        twin.train(1)
        if twin.optimizer is twin.base:
            continue
        saved = copy.deepcopy(twin.optimizer.state_dict())
        saved["state"][3]["exp_avg"] = torch.zeros(40, 50)
        with pytest.raises(ValueError, match=r"exp_avg of .* is no DTensor in the checkpoint"):
            twin.optimizer.load_state_dict(saved)


@pytest.mark.parametrize("ranks", [[0, 2, 3], [[1, 2, 3]]], ids=str)
def test_a_checkpoint_of_another_mesh_is_refused(
    device: torch.device, mesh: DeviceMesh, packed: bool, ranks: list[Any]
) -> None:
    """torch takes it, and then no step works any more; here nothing has changed."""
    other = mesh_of(device, ranks)
    replicated = [Replicate()] * other.ndim
    for twin in both(device, mesh, packed):
        twin.train(1)
        saved = copy.deepcopy(twin.optimizer.state_dict())
        saved["state"][3]["exp_avg"] = shard(torch.zeros(40, 50), other, replicated, device)
        if twin.optimizer is twin.base:
            spoilt = make_sharded_twin(device, mesh, MAKERS["amsgrad"])
            spoilt.optimizer.load_state_dict(saved)
            with pytest.raises(RuntimeError, match="different meshes"):
                spoilt.train(1)
        else:
            expected = re.escape(f"a {device.type} mesh of ranks {ranks} in the checkpoint")
            with pytest.raises(ValueError, match=f"exp_avg of .* is on {expected}"):
                twin.optimizer.load_state_dict(saved)
        twin.train(2)


def test_a_failure_leaves_consistent_states(
    device: torch.device, mesh: DeviceMesh, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 6: what was updated stays so; repeating the others' step gives native's values."""
    make = MAKERS["amsgrad"]
    for twin in both(device, mesh, packed, make):
        twin.train(2)
        twin.give_gradients(2)
        if twin.optimizer is twin.base:
            twin.optimizer.step()
            continue
        counts = [twin.optimizer.state[p]["step"].item() for p in twin.parameters]
        owner = pipeline.PipelineSwapRuntime
        fail_at(monkeypatch, owner, "_offload", 1, RuntimeError("link down"))
        with pytest.raises(SwapStepError, match="link down"):
            twin.optimizer.step()
        for parameter, count in zip(twin.parameters, counts, strict=True):
            if twin.optimizer.state[parameter]["step"].item() > count:
                parameter.grad = None
        assert any(parameter.grad is None for parameter in twin.parameters)
        assert any(parameter.grad is not None for parameter in twin.parameters)
        twin.optimizer.step()


@pytest.mark.parametrize("kind", ["adam", "fused"])
def test_a_gradient_sharded_in_another_way_is_redistributed(
    device: torch.device, mesh: DeviceMesh, packed: bool, kind: str
) -> None:
    """As natively. A replicated one is cut without communication, so the fake group serves."""
    for twin in both(device, mesh, packed, MAKERS[kind]):
        for step in range(3):
            twin.give_gradients(step)
            values = torch.linspace(-1, step + 1, 8 * 512).view(8, 512)
            twin.parameters[0].grad = shard(values, mesh, [Replicate()], device)
            twin.optimizer.step()


def test_sums_stay_and_are_refused_as_natively(
    device: torch.device, mesh: DeviceMesh, packed: bool
) -> None:
    refusals = []
    for is_swapped in (True, False):
        local = torch.ones(2048, device=device)
        parameter = nn.Parameter(DTensor.from_local(local, mesh, [Partial()], run_check=False))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([parameter], foreach=False)
        if is_swapped:
            with pytest.warns(UserWarning, match="sums that are yet to be reduced"):
                optimizer = swap_optimizer(optimizer, SwapOptimizerConfig(packed_swap=packed))
        parameter.grad = DTensor.from_local(local.clone(), mesh, [Replicate()], run_check=False)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]


def test_states_sharded_unlike_their_parameter_stay(
    device: torch.device, mesh: DeviceMesh, packed: bool
) -> None:
    for twin in both(device, mesh, packed, MAKERS["adam"]):
        twin.train(1)
        replicated = shard(torch.full((8, 512), 0.5), mesh, [Replicate()], device)
        state = twin.optimizer.state[twin.parameters[0]]
        state["exp_avg"] = replicated
        # The gradient has to be one that needs no communication.
        for step in range(1, 3):
            twin.give_gradients(step)
            values = torch.linspace(-1, step, 8 * 512).view(8, 512)
            twin.parameters[0].grad = shard(values, mesh, [Replicate()], device)
            twin.optimizer.step()
        assert state["exp_avg"] is replicated
        if twin.optimizer is not twin.base:
            reasons = twin.swapped.swap_stats().resident_states
            assert reasons["sharded unlike its parameter"] == 1


def test_states_that_others_replace(device: torch.device, mesh: DeviceMesh, packed: bool) -> None:
    """Taken up, and written into the host memory that is there."""
    for twin in both(device, mesh, packed):
        twin.train(2)
        parameter = twin.parameters[0]
        replacement = shard(torch.full((8, 512), 0.5), mesh, [Shard(0)], device)
        twin.optimizer.state[parameter]["exp_avg"] = replacement
        twin.train(range(2, 4))
        if twin.optimizer is not twin.base:
            assert twin.optimizer.state[parameter]["exp_avg"] is not replacement
            assert twin.optimizer.state[parameter]["exp_avg"].device.type == "cpu"


def test_parameters_that_moved(device: torch.device, mesh: DeviceMesh, packed: bool) -> None:
    """As ``Module.to`` moves them if it swaps tensors; natively, states are moved by hand."""
    if torch.get_device_module(device).device_count() == 1:
        pytest.skip("needs two devices")
    other = torch.device(device.type, 0)
    for twin in both(device, mesh, packed, MAKERS["adam"]):
        twin.train(2)
        for parameter in twin.parameters:
            _move(parameter, other)
            if twin.optimizer is twin.base or local_of(parameter).numel() < 1024:
                for key in SWAPPED_KEYS:
                    _move(twin.optimizer.state[parameter][key], other)
        twin.device = other
        twin.train(range(2, 4))


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    frame = frame_of(tensor)
    moved = local_of(tensor.detach()).to(device)
    moved = moved if frame is None else frame.around(moved)
    is_parameter = isinstance(tensor, nn.Parameter)
    torch.utils.swap_tensors(tensor, nn.Parameter(moved) if is_parameter else moved)
    assert tensor.device == device


def test_strided_shards(device: torch.device, packed: bool) -> None:
    """What FSDP2 makes of a parameter that tensor parallelism has sharded."""
    mesh = mesh_of(device, [[0, 1], [2, 3]])
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    states: list[dict[str, torch.Tensor]] = []
    for is_swapped in (True, False):
        local = torch.linspace(-1, 1, 3000, device=device).view(2, 1500)
        framed = DTensor.from_local(local, mesh, placements, run_check=False)
        parameter = nn.Parameter(framed)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([parameter], fused=True)
        if is_swapped:
            optimizer = swap_optimizer(optimizer, SwapOptimizerConfig(packed_swap=packed))
        for step in range(3):
            grad = torch.full_like(local, 0.5 + step)
            parameter.grad = DTensor.from_local(grad, mesh, placements, run_check=False)
            optimizer.step()
        states.append({**optimizer.state[parameter], "parameter": parameter.detach()})
    for key, value in states[0].items():
        assert_same_bits(value, states[1][key], key)
        assert value.stride() == states[1][key].stride()
    assert states[0]["exp_avg"].placements == tuple(placements)
    assert states[0]["exp_avg"].device.type == "cpu"


def test_autograd_notices_a_parameter_changed_under_it(
    device: torch.device, mesh: DeviceMesh, packed: bool
) -> None:
    for twin in both(device, mesh, packed, MAKERS["adam"]):
        parameter = twin.parameters[0]
        twin.give_gradients(0)
        loss = (parameter * parameter).to_local().sum()
        twin.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_dtensors_of_several_meshes_in_one_group(device: torch.device, packed: bool) -> None:
    """Experts have a mesh of their own; torch's own kernel over a list would take only one."""
    flat, square = mesh_of(device, [0, 1, 2, 3]), mesh_of(device, [[0, 1], [2, 3]])
    parameters: Sequence[nn.Parameter] = [
        nn.Parameter(shard(torch.ones(8, 1024), flat, [Shard(0)], device)),
        nn.Parameter(shard(torch.ones(8, 1024), square, [Shard(0), Shard(1)], device)),
    ]
    optimizer = swap_optimizer(HyperAdamW(parameters), SwapOptimizerConfig(packed_swap=packed))
    natives = [nn.Parameter(local_of(p).detach().clone()) for p in parameters]
    reference = HyperAdamW(natives)
    for step in range(3):
        for parameter, native in zip(parameters, natives, strict=True):
            values = torch.full((8, 1024), 0.5 + step)
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = shard(values, mesh, placements, device)
            native.grad = local_of(parameter.grad).clone()
        optimizer.step()
        reference.step()
    for parameter, native in zip(parameters, natives, strict=True):
        assert_same_bits(local_of(parameter), native, "parameter")
        for key in SWAPPED_KEYS:
            found = local_of(optimizer.state[parameter][key])
            assert_same_bits(found, reference.state[native][key], key)


def test_hyper_adamw_equals_torchs_fused_one_natively(
    device: torch.device, mesh: DeviceMesh
) -> None:
    ours = make_sharded_twin(device, mesh, lambda params: HyperAdamW(params, 1e-2))
    theirs = make_sharded_twin(
        device, mesh, lambda params: torch.optim.AdamW(params, 1e-2, fused=True)
    )
    for twin in (ours, theirs):
        twin.train(3)
    for one, other in zip(ours.parameters, theirs.parameters, strict=True):
        assert_same_bits(one, other, "parameter")
        for key in SWAPPED_KEYS:
            value = ours.optimizer.state[one][key]
            assert_same_bits(value, theirs.optimizer.state[other][key], key)


@pytest.mark.parametrize(
    "room",
    [{"resident_fraction": 0.5}, {"device_memory_budget": 73_000}],
    ids=["fraction", "budget"],
)
def test_states_that_stay_are_dtensors(
    device: torch.device, mesh: DeviceMesh, packed: bool, make: Any, room: dict[str, Any]
) -> None:
    """Local bytes are counted; what stays is what it is natively."""
    swapped = make_sharded_twin(device, mesh, make)
    config = SwapOptimizerConfig(packed_swap=packed)
    swapped.optimizer = swap_optimizer(swapped.base, config, **room)
    native = make_sharded_twin(device, mesh, make)
    for twin in (swapped, native):
        twin.train(2)
    saved = swapped.optimizer.state_dict()
    swapped.optimizer.load_state_dict(saved)
    for twin in (swapped, native):
        twin.train(range(2, 4))
    assert_alike(swapped, native)
    assert_framed_alike(swapped, native)
    kept = [s for s in swapped.swapped.swap_stats().resident if s.reason.startswith("kept by")]
    assert kept or "device_memory_budget" in room
    assert swapped.swapped.swap_stats().swapped_states > 0
    assert sum(state.nbytes for state in kept) <= sum(
        local_of(value).nbytes
        for state in swapped.optimizer.state.values()
        for value in state.values()
        if local_of(value).device == device
    )
