"""Device and host memory as formulas, in bytes."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import pairwise

import mindspore as ms
import pytest
from mindspore import Parameter, nn

from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore import MindSporeSwapOptimizer, swap_optimizer
from swapopt_mindspore.device import DeviceMemoryError
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import Shape, adamw, make_gradients, make_parameters
from training import assert_same_run, snapshot

UNEVEN = [(33, 70), (7,), (2, 3, 5), (300, 40), (1,), (129, 17)] * 2


def wrap(
    device: EmulatedDevice,
    shapes: Sequence[Shape],
    *,
    packed: bool,
    swap_times: int = 4,
    min_numel: int = 0,
    dtypes: Sequence[ms.Type] = (ms.float32,),
) -> tuple[list[Parameter], MindSporeSwapOptimizer]:
    params = make_parameters(shapes, dtypes)
    config = SwapOptimizerConfig(
        swap_times=swap_times,
        min_numel=min_numel,
        packed_swap=packed,
        include_master_params=dtypes != (ms.float32,),
    )
    return params, swap_optimizer(adamw(params), config, device=device)


def in_blocks(nbytes: int) -> int:
    """Return what the device takes for an allocation."""
    return -(-nbytes // 512) * 512


def state_nbytes(params: Sequence[Parameter]) -> int:
    """Return the bytes of two fp32 moments, and of an fp32 master where the parameter is none."""
    return sum(param.size * 4 * (2 if param.dtype == ms.float32 else 3) for param in params)


def test_between_steps_the_device_holds_no_byte_of_a_swapped_state(packed: bool) -> None:
    device = EmulatedDevice()
    params, optimizer = wrap(device, UNEVEN, packed=packed)
    parameters_bytes = sum(in_blocks(param.nbytes) for param in params)
    assert device.memory().allocated_bytes == parameters_bytes
    for step in range(3):
        optimizer(make_gradients(params, step))
        # Given back in the order of the caller's stream, and so without waiting.
        assert device.memory().allocated_bytes == parameters_bytes


@pytest.mark.parametrize("dtypes", [(ms.float32,), (ms.bfloat16, ms.float32)], ids=["fp32", "both"])
def test_a_step_takes_its_bound_and_no_more(packed: bool, dtypes: Sequence[ms.Type]) -> None:
    device = EmulatedDevice()
    params, optimizer = wrap(device, UNEVEN, packed=packed, dtypes=dtypes)
    bound_bytes = optimizer.swap_stats().bound_nbytes
    baseline_bytes = device.memory().allocated_bytes
    for step in range(2):
        device.reset_peak()
        optimizer(make_gradients(params, step))
        taken_bytes = device.memory().peak_allocated_bytes - baseline_bytes
        assert taken_bytes <= bound_bytes
        assert taken_bytes == (bound_bytes if packed else largest_neighbours(optimizer)), (
            "packed: two arenas; per tensor: two batches that follow each other"
        )


def largest_neighbours(optimizer: MindSporeSwapOptimizer) -> int:
    sizes = [batch.separate_nbytes for batch in optimizer._engine.layout.batches]
    return max(sum(pair) for pair in pairwise(sizes))


def test_even_batches_take_two_of_them(packed: bool) -> None:
    device = EmulatedDevice()
    params, optimizer = wrap(device, [(64, 64)] * 8, packed=packed, swap_times=8)
    baseline_bytes = device.memory().allocated_bytes
    device.reset_peak()
    optimizer(make_gradients(params, 0))
    two_batches_bytes = 2 * 2 * 64 * 64 * 4
    assert device.memory().peak_allocated_bytes - baseline_bytes == two_batches_bytes
    assert optimizer.swap_stats().bound_nbytes == two_batches_bytes


def test_one_batch_takes_one_arena() -> None:
    device = EmulatedDevice()
    params, optimizer = wrap(device, [(64, 64)] * 3, packed=True, swap_times=1)
    baseline_bytes = device.memory().allocated_bytes
    device.reset_peak()
    optimizer(make_gradients(params, 0))
    stats = optimizer.swap_stats()
    assert stats.bound_nbytes == stats.arena_nbytes == 3 * 2 * 64 * 64 * 4
    assert device.memory().peak_allocated_bytes - baseline_bytes == stats.bound_nbytes


def test_pinned_memory_is_what_the_states_take(packed: bool) -> None:
    device = EmulatedDevice()
    params, optimizer = wrap(device, UNEVEN, packed=packed, dtypes=(ms.float16, ms.float32))
    stats = optimizer.swap_stats()
    assert stats.swapped_nbytes == state_nbytes(params)
    # Every state begins on a boundary of 64 bytes.
    most_bytes = 1.02 * stats.swapped_nbytes + 64 * stats.swapped_states
    assert stats.swapped_nbytes <= stats.pinned_nbytes <= most_bytes
    assert device.memory().pinned_bytes == stats.pinned_nbytes


def test_large_states_pin_no_more_than_two_percent(packed: bool) -> None:
    device = EmulatedDevice()
    params, _ = wrap(device, [(250, 130), (77, 31), (1000, 9)], packed=packed)
    assert device.memory().pinned_bytes <= 1.02 * state_nbytes(params)


def test_one_buffer_per_batch_and_dtype_each_from_its_start() -> None:
    device = EmulatedDevice()
    params = make_parameters([(64, 16)] * 8, (ms.float16, ms.float32))
    optimizer = swap_optimizer(
        nn.Adam(params, eps=1e-3), SwapOptimizerConfig(swap_times=4, min_numel=0), device=device
    )
    batches = optimizer._engine.layout.batches
    assert len(batches) == 4
    for batch in batches:
        assert [region.buffer.dtype for region in batch.regions] == [ms.float16, ms.float32]
        for region in batch.regions:
            assert region.slots[0].host_offset == 0
            assert region.arena_offset_bytes % 512 == 0


def test_memory_is_flat_over_two_hundred_steps(packed: bool) -> None:
    device = EmulatedDevice()
    params, optimizer = wrap(device, [(16, 16)] * 2, packed=packed, swap_times=2)
    figures = []
    for step in range(200):
        optimizer(make_gradients(params, step, missing={step % 2} if step % 3 else ()))
        if step % 50 == 1:
            optimizer.synchronize()
            gc.collect()
            memory = device.memory()
            device.clear_timeline()
            figures.append((memory.allocated_bytes, memory.pinned_bytes, len(gc.get_objects())))
    assert len({figure[:2] for figure in figures}) == 1
    objects = [figure[2] for figure in figures[1:]]
    assert max(objects) - min(objects) < 20, objects


def test_two_optimizers_in_turn_take_the_memory_of_one(packed: bool) -> None:
    device = EmulatedDevice()
    pairs = [wrap(device, [(64, 64)] * 4, packed=packed) for _ in range(2)]
    alone = EmulatedDevice()
    twins = [wrap(alone, [(64, 64)] * 4, packed=packed) for _ in range(2)]
    baseline_bytes = device.memory().allocated_bytes
    device.reset_peak()
    for step in range(4):
        for params, optimizer in pairs:
            optimizer(make_gradients(params, step))
    bound_bytes = pairs[0][1].swap_stats().bound_nbytes
    assert device.memory().peak_allocated_bytes - baseline_bytes == bound_bytes
    for params, optimizer in twins:
        for step in range(4):
            optimizer(make_gradients(params, step))
    for (_, optimizer), (_, twin) in zip(pairs, twins, strict=True):
        optimizer.synchronize()
        twin.synchronize()
        assert_same_run(snapshot(optimizer), snapshot(twin))


def test_a_device_of_just_the_bound_will_do(packed: bool) -> None:
    device = EmulatedDevice()
    params, optimizer = wrap(device, [(64, 64)] * 8, packed=packed, swap_times=8)
    parameters_bytes = device.memory().allocated_bytes
    bound_bytes = optimizer.swap_stats().bound_nbytes
    native_bytes = parameters_bytes + state_nbytes(params)
    for missing_bytes in (0, 512):
        small = EmulatedDevice(capacity_bytes=native_bytes)
        params, optimizer = wrap(small, [(64, 64)] * 8, packed=packed, swap_times=8)
        ballast = small.empty(
            ((native_bytes - parameters_bytes - bound_bytes + missing_bytes) // 4,), ms.float32
        )
        if missing_bytes == 0:
            optimizer(make_gradients(params, 0))
        else:
            held_bytes = small.memory().allocated_bytes
            with pytest.raises(DeviceMemoryError, match="swap_times"):
                optimizer(make_gradients(params, 0))
            assert small.memory().allocated_bytes == held_bytes
            small.release(ballast)
            optimizer(make_gradients(params, 0))
