"""Which states swap, and that the others train on where they are."""

from __future__ import annotations

from collections.abc import Mapping

import mindspore as ms
import pytest

from cases import NATIVE
from swapopt_common import SwapConfigError, SwapOptimizerConfig
from swapopt_mindspore import swap_optimizer
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import Twins, adam, adamw, make_parameters

SHAPES = [(32, 16), (32,), (8, 32), (8,), (32,), (32,)]
HALF_AND_FULL = (ms.float16, ms.float32, ms.bfloat16)
MOMENTS = {"exp_avg": 6, "exp_avg_sq": 6}

SELECTIONS: dict[str, tuple[SwapOptimizerConfig, Mapping[str, int]]] = {
    "all": (SwapOptimizerConfig(min_numel=0), MOMENTS),
    "min_numel": (SwapOptimizerConfig(min_numel=33), {"exp_avg": 2, "exp_avg_sq": 2}),
    "exactly min_numel": (SwapOptimizerConfig(min_numel=32), {"exp_avg": 5, "exp_avg_sq": 5}),
    "one key": (SwapOptimizerConfig(min_numel=0, state_keys=["exp_avg_sq"]), {"exp_avg_sq": 6}),
    "masters": (
        SwapOptimizerConfig(min_numel=0, include_master_params=True),
        {**MOMENTS, "master_param": 4},
    ),
    "masters alone": (
        SwapOptimizerConfig(min_numel=0, include_master_params=True, state_keys=["master_param"]),
        {"master_param": 4},
    ),
    "masters unnamed": (
        SwapOptimizerConfig(min_numel=0, include_master_params=True, state_keys=["exp_avg"]),
        {"exp_avg": 6},
    ),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selected_states_swap_and_all_train_as_native(name: str) -> None:
    config, expected = SELECTIONS[name]
    twins = Twins(adamw, SHAPES, EmulatedDevice(), config, HALF_AND_FULL)
    twins.step(3)
    twins.assert_equal()
    swapped: dict[str, int] = {}
    for slot in twins.swapped._engine.layout.slots():
        swapped[slot.name] = swapped.get(slot.name, 0) + 1
    assert swapped == dict(expected)
    stats = twins.swapped.swap_stats()
    assert stats.swapped_states == sum(expected.values())
    assert len(stats.resident) == 16 - stats.swapped_states


def test_amsgrad_has_a_third_state_to_select() -> None:
    config = SwapOptimizerConfig(min_numel=0, state_keys=["max_exp_avg_sq"])
    twins = Twins(NATIVE["adam_amsgrad"].make, SHAPES, EmulatedDevice(), config)
    twins.step(3)
    twins.assert_equal()
    assert {slot.name for slot in twins.swapped._engine.layout.slots()} == {"max_exp_avg_sq"}


def test_resident_states_stay_on_the_device_and_are_listed() -> None:
    device = EmulatedDevice()
    params = make_parameters([(16, 64), (8,)])
    config = SwapOptimizerConfig(state_keys=["exp_avg"], min_numel=9)
    optimizer = swap_optimizer(adam(params), config, device=device)
    parameters_bytes, resident_bytes = 4096 + 512, 4096 + 2 * 512
    assert device.memory().allocated_bytes == parameters_bytes + resident_bytes
    assert [(s.parameter, s.key, s.nbytes, s.reason) for s in optimizer.swap_stats().resident] == [
        ("p0", "exp_avg_sq", 4096, "not selected by state_keys"),
        ("p1", "exp_avg", 32, "smaller than min_numel=9"),
        ("p1", "exp_avg_sq", 32, "not selected by state_keys"),
    ]


def test_no_more_batches_than_parameters_and_none_of_them_empty() -> None:
    optimizer = swap_optimizer(
        adam(make_parameters([(8,)] * 3)), SwapOptimizerConfig(min_numel=0), device=EmulatedDevice()
    )
    assert optimizer.swap_stats().batches == 3


def test_defaults_move_mindformers_packed_and_the_native_two_per_tensor() -> None:
    for make, packed in ((adam, False), (adamw, True)):
        optimizer = swap_optimizer(make(make_parameters([(32, 64)])), device=EmulatedDevice())
        assert optimizer.swap_stats().packed is packed


def test_a_key_that_the_optimizer_lacks_is_refused() -> None:
    config = SwapOptimizerConfig(state_keys=["max_exp_avg_sq"])
    with pytest.raises(SwapConfigError, match="max_exp_avg_sq"):
        swap_optimizer(adam(make_parameters([(8,)])), config, device=EmulatedDevice())


def test_batches_whose_states_all_stay_join_the_one_before() -> None:
    """Large and small parameters in turn, each in a batch of its own: the small ones stay."""
    device = EmulatedDevice()
    shapes = [(64, 64), (4,), (64, 64), (4,), (64, 64)]
    twins = Twins(adamw, shapes, device, SwapOptimizerConfig(swap_times=5))
    device.clear_timeline()
    twins.step(3)
    twins.assert_equal()
    updates = [row for row in device.timeline() if row.lane == "compute"]
    assert len(updates) == 3 * 3


def test_only_small_parameters_have_gradients() -> None:
    device = EmulatedDevice()
    twins = Twins(
        adamw, [(4,), (64, 64), (4,)], device, SwapOptimizerConfig(swap_times=3), (ms.float32,)
    )
    twins.step(missing={1})
    twins.step(2)
    twins.step(missing={1})
    twins.assert_equal()
