"""Which states swap, and why the others stay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

import mindformers_adamw
from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore.adapters import make_adapter
from swapopt_mindspore.emulated import EmulatedDevice
from swapopt_mindspore.residency import Surroundings, find_shared_storages, make_slot
from swapopt_mindspore.slots import MindSporeUnit
from training import Regressor

ALL = SwapOptimizerConfig(min_numel=0)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as device:
        yield device


def reasons(units: list[MindSporeUnit]) -> dict[str, dict[str, str | None]]:
    return {unit.name: {slot.name: slot.resident_reason for slot in unit.slots} for unit in units}


def adam(**options: object) -> nn.Adam:
    return nn.Adam(list(Regressor((mstype.float32,)).trainable_params()), **options)


def masters(**options: object) -> nn.Optimizer:
    model = Regressor((mstype.float32, mstype.bfloat16))
    return mindformers_adamw.home().AdamW(list(model.trainable_params()), **options)


def test_large_states_swap_and_small_ones_stay(device: EmulatedDevice) -> None:
    units = make_adapter(adam(), SwapOptimizerConfig(min_numel=512)).register_units(device)
    found = reasons(units)
    assert found.pop("layer0.weight") == {"exp_avg": None, "exp_avg_sq": None}
    small = "smaller than min_numel=512"
    assert len(found) == 5
    assert all(stay == {"exp_avg": small, "exp_avg_sq": small} for stay in found.values())


def test_slots_describe_the_states(device: EmulatedDevice) -> None:
    optimizer = adam(use_amsgrad=True)
    units = make_adapter(optimizer, ALL).register_units(device)
    assert [unit.adapter_index for unit in units] == list(range(6))
    assert [unit.param for unit in units[:1]] == [optimizer.parameters[0]]
    for index, unit in enumerate(units):
        expected = (optimizer.moment1[index], optimizer.moment2[index], optimizer.vhat[index])
        assert [slot.name for slot in unit.slots] == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        for slot, state in zip(unit.slots, expected, strict=True):
            assert slot.parameter is slot.operand() is state
            assert (slot.shape, slot.dtype) == (tuple(state.shape), mstype.float32)
            assert (slot.numel, slot.storage_nbytes) == (state.size, 4 * state.size)
            assert slot.swappable
            assert slot.device is device
        assert unit.swappable_nbytes == 3 * 4 * unit.param.size


def test_only_the_named_states_swap(device: EmulatedDevice) -> None:
    config = SwapOptimizerConfig(state_keys=["exp_avg_sq"], min_numel=0)
    for stay in reasons(make_adapter(adam(), config).register_units(device)).values():
        assert stay == {"exp_avg": "not selected by state_keys", "exp_avg_sq": None}


def test_nothing_swaps_without_a_device() -> None:
    units = make_adapter(adam(), ALL).register_units(None)
    assert all(set(stay.values()) == {"on the CPU"} for stay in reasons(units).values())
    assert not any(unit.swappable_nbytes for unit in units)


def test_states_swap_once_their_storage_is_on_the_device(device: EmulatedDevice) -> None:
    """MindSpore gives some states device storage with their first update (RFC 5.2.2)."""
    optimizer = adam()
    device.keep_on_host([*optimizer.moment1, *optimizer.moment2])
    adapter = make_adapter(optimizer, SwapOptimizerConfig(min_numel=64))
    units = adapter.register_units(device)
    assert units[0].slots[0].resident_reason == f"not on {device.name}"
    assert adapter.refresh_swappable_slots(units) == []

    with device.updating(
        "update", reads=[], writes=[slot.operand() for slot in units[0].slots], launches=1
    ):
        pass
    assert adapter.refresh_swappable_slots(units) == units[0].slots
    assert all(slot.swappable and slot.resident_reason is None for slot in units[0].slots)
    assert units[1].slots[0].resident_reason == "smaller than min_numel=64"


def test_masters_swap_only_where_asked_for(device: EmulatedDevice) -> None:
    asked = SwapOptimizerConfig(include_master_params=True, min_numel=0)
    expected = {
        ALL: "include_master_params is False",
        asked: None,
        SwapOptimizerConfig(
            include_master_params=True, state_keys=["exp_avg", "master_param"], min_numel=0
        ): None,
        SwapOptimizerConfig(
            include_master_params=True, state_keys=["exp_avg"], min_numel=0
        ): "not selected by state_keys",
    }
    for config, reason in expected.items():
        optimizer = masters()
        units = make_adapter(optimizer, config).register_units(device)
        for index, unit in enumerate(units):
            if index % 2 == 0:  # fp32 parameters are their own masters
                assert unit.master is None
                assert [slot.name for slot in unit.slots] == ["exp_avg", "exp_avg_sq"]
                continue
            assert unit.master is unit.slots[-1]
            assert unit.master.parameter is optimizer.fp32_params[index]
            assert unit.master.resident_reason == reason
            assert unit.master.dtype == mstype.float32
            assert unit.param.dtype == mstype.bfloat16


@pytest.mark.parametrize(("amsgrad", "names"), [(False, 2), (True, 3)])
def test_fused_maxima_have_a_slot_only_where_they_are_a_state(
    amsgrad: bool, names: int, device: EmulatedDevice
) -> None:
    optimizer = masters(use_fused=True, amsgrad=amsgrad)
    assert (optimizer.max_exp_avg_sq is optimizer.exp_avg_sq) is not amsgrad
    for unit in make_adapter(optimizer, ALL).register_units(device):
        moments = [slot for slot in unit.slots if slot is not unit.master]
        assert [slot.name for slot in moments] == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"][
            :names
        ]
        assert all(slot.swappable for slot in moments)


def test_states_that_cannot_move_alone_stay(device: EmulatedDevice) -> None:
    whole = Tensor(np.zeros((8, 8), np.float32))
    left, right = (Parameter(Tensor(np.zeros(4, np.float32)), name=name) for name in "lr")
    right.set_data(left)
    states = {
        "shares its storage": [whole.view(64)[8:], whole.view(64)[:32], left, right],
        "not contiguous": [whole.swapaxes(0, 1)],
        "not floating point": [Tensor(np.zeros(4, np.int32))],
        "empty": [Tensor(np.zeros((0, 3), np.float32))],
        "smaller than min_numel=2": [Tensor(np.zeros(1, np.float32))],
    }
    shared = find_shared_storages([left, right, left, *states["not floating point"]])
    assert len(shared) == 1
    around = Surroundings(device, 2, shared)
    for reason, tensors in states.items():
        for tensor in tensors:
            assert make_slot("exp_avg", tensor, None, around).resident_reason == reason
    assert make_slot("exp_avg", Tensor(np.zeros(4, np.float32)), None, around).swappable


class Sharded(Tensor):
    """As HyperParallel's DTensor: a tensor of a global shape that knows its local part."""

    shard: Tensor

    def to_local(self) -> Tensor:
        return self.shard


def test_of_a_dtensor_the_local_part_swaps(device: EmulatedDevice) -> None:
    state = Sharded(np.zeros((8, 4), np.float32))
    state.shard = Tensor(np.zeros((4, 4), np.float32))
    slot = make_slot("exp_avg", state, None, Surroundings(device, 0, frozenset()))
    assert slot.tensor is state.shard
    assert slot.logical_tensor is slot.parameter is state
    assert (slot.shape, slot.numel, slot.storage_nbytes) == ((4, 4), 16, 64)
    assert slot.swappable
