"""What users of such tools ran into, by the numbers of docs/user-problems.md.

Only what no other test shows; the table there says which test shows what.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops

from cases import NATIVE
from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore import swap_optimizer
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import Twins, adam, adamw, make_gradients, make_parameters
from training import Gradients, assert_same_bytes, copy_of, eager

EVERYTHING = SwapOptimizerConfig(swap_times=3, min_numel=0)
SHAPES = [(16, 8), (24,), (8, 8), (5, 7)]


def decaying(params: list[Parameter]) -> nn.Optimizer:
    optimizer: nn.Optimizer = nn.AdamWeightDecay(params, learning_rate=0.02, weight_decay=0.1)
    return optimizer


@pytest.fixture(params=[adam, decaying, adamw], ids=["adam", "adam_weight_decay", "mindformers"])
def twins(request: pytest.FixtureRequest) -> Twins:
    return Twins(request.param, SHAPES, EmulatedDevice(), EVERYTHING)


def constant(twins: Twins, value: float) -> Gradients:
    return tuple(Tensor(np.full(shape, value, np.float32)) for shape in SHAPES)


def test_n1_the_maximum_is_swapped_and_is_not_the_second_moment() -> None:
    twins = Twins(NATIVE["adam_amsgrad"].make, SHAPES, EmulatedDevice(), EVERYTHING)
    for value in (10.0, 0.1, 0.1):
        gradients = constant(twins, value)
        twins.swapped(gradients)
        twins.step_natively(gradients)
        twins.assert_equal()
    assert twins.swapped.swap_stats().swapped_states == 3 * len(SHAPES)
    for maximum, second in zip(twins.swapped.vhat, twins.swapped.moment2, strict=True):
        assert (maximum.asnumpy() > second.asnumpy()).all()


def test_n4_a_missing_gradient_leaves_a_parameter_alone(twins: Twins) -> None:
    twins.step()
    twins.step(missing={1, 3})
    twins.step()
    twins.assert_equal()


def test_n5_counters_cost_no_copies() -> None:
    device = EmulatedDevice()
    params = make_parameters([(2,)] * 64 + [(16, 16)])
    optimizer = swap_optimizer(nn.Adam(params), SwapOptimizerConfig(min_numel=16), device=device)
    for step in range(2):
        device.clear_timeline()
        optimizer(make_gradients(params, step))
        optimizer.synchronize()
        copies = [row for row in device.timeline() if row.lane in {"h2d", "d2h"}]
        assert len(copies) == 2 * 2, "two moments of one parameter, there and back"


def test_m3_a_loaded_dictionary_is_not_kept(twins: Twins) -> None:
    twins.step(2)
    saved = {
        name: Parameter(Tensor(copy_of(value)), name=name)
        for name, value in twins.native.parameters_dict().items()
    }
    dropped = [weakref.ref(value) for value in saved.values()]
    twins.swapped.load_state_dict(saved)
    del saved
    gc.collect()
    assert [ref() for ref in dropped] == [None] * len(dropped)
    twins.assert_equal()


def test_m2_m3_the_device_never_holds_all_states() -> None:
    """Parameters and two batches fit: wrapping is what frees the states; steps and loads fit."""
    shapes = [(64, 64)] * 8
    parameters_bytes, states_bytes = 8 * 64 * 64 * 4, 2 * 8 * 64 * 64 * 4
    device = EmulatedDevice(capacity_bytes=parameters_bytes + states_bytes)
    config = SwapOptimizerConfig(swap_times=8)
    twins = Twins(adam, shapes, device, config)
    # What forward and backward would take: all but two of the eight batches' states.
    ballast = device.empty((states_bytes * 6 // 8 // 4,), ms.float32)
    twins.step()
    twins.swapped.load_state_dict(twins.native.state_dict())
    twins.step()
    twins.assert_equal()
    assert device.memory().peak_allocated_bytes <= parameters_bytes + states_bytes
    device.release(ballast)


def test_m7_c6_device_memory_is_the_same_after_step_save_and_load(twins: Twins) -> None:
    device = twins.swapped._engine._device
    before_bytes = device.memory().allocated_bytes
    for _ in range(2):
        twins.step()
        assert device.memory().allocated_bytes == before_bytes
        device.reset_peak()
        saved = twins.swapped.state_dict()
        assert device.memory().peak_allocated_bytes == before_bytes
        twins.swapped.load_state_dict(saved)
        assert device.memory().peak_allocated_bytes == before_bytes
        del saved
    twins.assert_equal()


def test_r4_parameters_read_right_after_a_step_are_the_updated_ones(twins: Twins) -> None:
    for _ in range(3):
        twins.step()
        pairs = zip(twins.swapped.parameters, twins.native.parameters, strict=True)
        for ours, native in pairs:
            assert_same_bytes(copy_of(ours), copy_of(native), ours.name)


@pytest.mark.parametrize("make", [adam, adamw], ids=["per_tensor", "packed"])
def test_r5_the_synchronous_mode_overlaps_nothing(make: Callable[..., nn.Optimizer]) -> None:
    device = EmulatedDevice()
    twins = Twins(make, SHAPES, device, EVERYTHING, synchronous=True)
    for missing in (set(), {0}, {1, 2}):
        device.clear_timeline()
        twins.step(missing=missing)
        busy = sorted((row.start_ns, row.end_ns) for row in device.timeline() if row.lane != "host")
        assert len(busy) >= 6, "two batches: there, update, back"
        assert all(end <= start for (_, end), (start, _) in pairwise(busy))
    twins.assert_equal()


def test_d1_gradients_are_clipped_before_a_step(twins: Twins) -> None:
    for _ in range(3):
        gradients = ops.clip_by_global_norm(twins.gradients(), 0.1)
        twins.swapped(gradients)
        twins.step_natively(gradients)
    twins.assert_equal()


def test_a2_steps_with_infinite_gradients_are_left_out_by_a_loss_scaler(twins: Twins) -> None:
    """The scaler is the trainer's here: it unscales, and says whether to step."""
    scales = []
    for optimizer, take in ((twins.swapped, twins.swapped), (twins.native, eager(twins.native))):
        scaler = amp.DynamicLossScaler(1024, 2, 2)
        taken = []
        for step in range(5):
            gradients = make_gradients(list(optimizer.parameters), step)
            scaled = [gradient * 1024.0 for gradient in gradients]
            if step in {1, 3}:
                scaled[2] = scaled[2] / 0.0
            finite = amp.all_finite(scaled)
            if finite:
                take(tuple(gradient / 1024.0 for gradient in scaled))
            scaler.adjust(finite)
            taken.append(bool(finite))
        assert taken == [True, False, True, False, True]
        scales.append(float(scaler.scale_value.asnumpy()))
    assert scales[0] == scales[1]
    twins.assert_equal()


@pytest.mark.parametrize("before", [True, False], ids=["before_wrapping", "after"])
def test_a3_hooks_fire_once_per_step_save_and_load(before: bool) -> None:
    base = adam(make_parameters(SHAPES))
    fired: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda cell, *_: fired.append(f"{name} {type(cell).__name__}")

    def register(optimizer: nn.Optimizer) -> None:
        optimizer.register_forward_pre_hook(note("pre"))
        optimizer.register_forward_hook(note("post"))
        optimizer.register_state_dict_post_hook(note("save"))
        optimizer.register_load_state_dict_post_hook(note("load"))

    if before:
        register(base)
    swapped = swap_optimizer(base, EVERYTHING, device=EmulatedDevice())
    if not before:
        register(swapped)
    for step in range(2):
        swapped(make_gradients(list(swapped.parameters), step))
        swapped.load_state_dict(swapped.state_dict())
    ours = type(swapped).__name__
    assert fired == [f"{name} {ours}" for name in ("pre", "post", "save", "load")] * 2
