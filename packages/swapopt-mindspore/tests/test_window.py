"""More than two batches in flight, as large states have them; the memory is that of two."""

from __future__ import annotations

import itertools

import pytest

from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore.division import SizedUnit, divide
from swapopt_mindspore.emulated import EmulatedDevice
from swapopt_mindspore.slots import MindSporeUnit
from swapping import Twins, adamw, make_parameters

MIB = 2**20
# Two batches of 6 parameters; with four in flight, four batches of 3.
EVEN = [(64, 16)] * 12
UNEVEN = [(33, 70), (7,), (2, 3, 5), (130, 10), (1,), (129, 17)] * 2


def sized(*nbytes: int) -> list[SizedUnit]:
    params = make_parameters([(1,)] * len(nbytes))
    return [
        SizedUnit(MindSporeUnit(index, param), (), size)
        for index, (param, size) in enumerate(zip(params, nbytes, strict=True))
    ]


def lengths(units: list[SizedUnit], swap_times: int) -> tuple[int, list[int]]:
    batches, window = divide(units, swap_times)
    assert [unit for batch in batches for unit in batch] == units
    return window, [len(batch) for batch in batches]


def test_small_states_take_as_many_batches_as_swap_times_says() -> None:
    assert lengths(sized(*[MIB] * 16), 4) == (2, [4, 4, 4, 4])
    assert lengths([], 4) == (2, [])


def test_large_states_take_smaller_batches_in_the_same_memory() -> None:
    window, batches = lengths(sized(*[2 * MIB] * 256), 16)
    assert (window, batches) == (4, [8] * 32)
    memory = 2 * 512 * MIB // 16
    assert window * 8 * 2 * MIB == memory


def test_a_batch_holds_the_largest_parameter_and_the_window_shrinks_for_it() -> None:
    # The memory of two batches is 64 MiB: with one of 20 MiB, three batches of a third fit.
    units = sized(*[2 * MIB] * 200, 20 * MIB, *[2 * MIB] * 46)
    window, batches = lengths(units, 16)
    assert window == 3
    ends = list(itertools.accumulate(batches))
    sizes = [
        sum(unit.swappable_nbytes for unit in units[end - count : end])
        for end, count in zip(ends, batches, strict=True)
    ]
    coarse = max(-(-512 * MIB // 16), 20 * MIB) + 2 * MIB
    assert window * max(sizes) <= 2 * coarse


def test_one_parameter_of_most_bytes_leaves_two_batches() -> None:
    window, _ = lengths(sized(512 * MIB, *[2 * MIB] * 256), 16)
    assert window == 2


@pytest.mark.parametrize("shapes", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_swapped_equals_native(packed: bool, window: int, shapes: list[tuple[int, ...]]) -> None:
    device = EmulatedDevice()
    twins = Twins(
        adamw, shapes, device, SwapOptimizerConfig(swap_times=2, min_numel=0, packed_swap=packed)
    )
    layout = twins.swapped._engine.layout
    assert layout.window == window
    assert len(layout.batches) >= window
    baseline_bytes = device.memory().allocated_bytes
    for missing in ((), (0, 1, 2), (5,), range(12), (1, 3, 5, 7, 9, 11), ()):
        device.reset_peak()
        twins.step(missing=missing)
        taken_bytes = device.memory().peak_allocated_bytes - baseline_bytes
        assert taken_bytes <= layout.bound_nbytes
    twins.assert_equal()


def test_packed_memory_does_not_grow_with_the_window(window: int) -> None:
    device = EmulatedDevice()
    config = SwapOptimizerConfig(swap_times=2)
    twins = Twins(adamw, EVEN, device, config)
    baseline_bytes = device.memory().allocated_bytes
    device.reset_peak()
    twins.step()
    stats = twins.swapped.swap_stats()
    assert stats.batches == window
    all_bytes = 12 * 2 * 64 * 16 * 4
    assert device.memory().peak_allocated_bytes - baseline_bytes == all_bytes
    assert stats.bound_nbytes == all_bytes == window * stats.arena_nbytes


def test_what_helps_where_the_arenas_do_not_fit(window: int) -> None:
    """Batches of one parameter are the smallest there are, but not of the fewest in flight."""
    twins = Twins(adamw, EVEN[:4], EmulatedDevice(), SwapOptimizerConfig(swap_times=2))
    advice = twins.swapped._engine.layout.explain_arenas()
    assert f"a step takes {window} of " in advice
    assert "A larger swap_times makes them smaller" in advice
