"""The figures of a swapped optimizer, against ones computed by hand."""

from __future__ import annotations

import re

import pytest

from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore import swap_optimizer
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import adam, adamw, make_gradients, make_parameters


def test_stats_count_what_moves(packed: bool) -> None:
    params = make_parameters([(64, 64)] * 4 + [(8,)])
    config = SwapOptimizerConfig(swap_times=5, packed_swap=packed)
    make = adamw if packed else adam
    optimizer = swap_optimizer(make(params), config, device=EmulatedDevice())
    state_bytes = 64 * 64 * 4
    stats = optimizer.swap_stats()
    assert stats.packed is packed
    assert (stats.batches, stats.swapped_states) == (5, 8)
    assert stats.swapped_nbytes == stats.pinned_nbytes == 8 * state_bytes
    assert stats.arena_nbytes == (2 * state_bytes if packed else 0)
    assert stats.bound_nbytes == 4 * state_bytes
    assert stats.resident_states == {"smaller than min_numel=1024": 2}
    assert stats.last_times is None
    assert stats.last_step.h2d_copies == 0

    optimizer(make_gradients(params, 0, missing={2}))
    moved = optimizer.swap_stats().last_step
    assert moved.h2d_copies == moved.d2h_copies == (3 if packed else 6)
    assert moved.h2d_nbytes == moved.d2h_nbytes == 6 * state_bytes


@pytest.mark.parametrize("synchronous", [True, False])
def test_times_are_those_of_the_timeline(synchronous: bool) -> None:
    device = EmulatedDevice()
    params = make_parameters([(256, 256)] * 8)
    optimizer = swap_optimizer(
        adamw(params), SwapOptimizerConfig(swap_times=8), device=device, synchronous=synchronous
    )
    device.clear_timeline()
    optimizer(make_gradients(params, 0))
    times = optimizer.swap_stats().last_times
    assert times is not None
    rows = device.timeline()
    for lane, seconds in (("h2d", times.h2d_seconds), ("d2h", times.d2h_seconds)):
        busy_ns = sum(row.end_ns - row.start_ns for row in rows if row.lane == lane)
        assert seconds >= busy_ns * 1e-9
    # The first prefetch has nothing to hide under, and the last offload not either.
    assert times.exposed_seconds > 0
    assert (times.hidden_share == 0) is synchronous


def test_printed_stats_are_a_table() -> None:
    params = make_parameters([(512, 1024), (8,)])
    optimizer = swap_optimizer(adamw(params), device=EmulatedDevice())
    optimizer(make_gradients(params, 0))
    rows = [re.split(" {2,}", line.strip()) for line in str(optimizer.swap_stats()).splitlines()]
    assert rows[:6] == [
        ["movement", "packed, arenas of 4.0 MiB, 2 batches (swap_times=16)"],
        ["on the device in a step", "at most 4.0 MiB"],
        ["swapped", "2 states, 4.0 MiB"],
        ["pinned host memory", "4.0 MiB"],
        ["resident", "2 states, 64 bytes"],
        ["smaller than min_numel=1024", "2 states"],
    ]
    assert [name for name, _ in rows[6:]] == [
        "last step, to the device",
        "last step, to the host",
        "waited for",
    ]
    assert rows[6][1].startswith("4.0 MiB in 1 copy, ")


def test_one_of_a_kind_is_printed_in_the_singular() -> None:
    params = make_parameters([(64, 64)])
    config = SwapOptimizerConfig(state_keys=["exp_avg"])
    printed = str(swap_optimizer(adamw(params), config, device=EmulatedDevice()).swap_stats())
    assert "packed, arenas of 16.0 KiB, 1 batch (swap_times=16)\n" in printed
    assert re.search("swapped +1 state, ", printed)
    assert re.search("not selected by state_keys +1 state$", printed)


def test_nothing_moved_is_not_called_hidden() -> None:
    params = make_parameters([(512, 1024), (8,)])
    optimizer = swap_optimizer(adamw(params), device=EmulatedDevice())
    optimizer(make_gradients(params, 0, missing={0}))
    stats = optimizer.swap_stats()
    assert stats.swapped_states == 2
    assert stats.last_step.h2d_copies == stats.last_step.d2h_copies == 0
    assert "hidden" not in str(stats)
