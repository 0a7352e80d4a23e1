"""What the streams of the device are really given, in the order of issue."""

from __future__ import annotations

import itertools

from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore import swap_optimizer
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import adam, adamw, make_gradients, make_parameters

GOLDEN = "h2d h2d update0 d2h h2d update1 d2h h2d update2 d2h update3 d2h"


def rows_of(device: EmulatedDevice) -> list[str]:
    return [
        row.operation.replace(" ", "") if row.lane == "compute" else row.lane
        for row in device.timeline()
        if row.lane != "host"
    ]


def test_copies_and_updates_are_issued_in_the_golden_order(packed: bool) -> None:
    device = EmulatedDevice()
    params = make_parameters([(64, 16)] * 8)
    config = SwapOptimizerConfig(swap_times=4, packed_swap=packed)
    # nn.Adam's states have storages of their own.
    optimizer = swap_optimizer((adamw if packed else adam)(params), config, device=device)
    for step in range(3):
        device.clear_timeline()
        optimizer(make_gradients(params, step))
        rows = rows_of(device)
        # Per tensor a batch is four copies: two states of two parameters.
        copies = 1 if packed else 4
        kinds = [
            kind
            for kind, run in itertools.groupby(rows)
            for _ in range(len(list(run)) // (1 if kind.startswith("update") else copies))
        ]
        assert " ".join(kinds) == GOLDEN


def test_batches_without_a_gradient_drop_out_of_the_order() -> None:
    device = EmulatedDevice()
    params = make_parameters([(64, 16)] * 8)
    optimizer = swap_optimizer(adamw(params), SwapOptimizerConfig(swap_times=4), device=device)
    device.clear_timeline()
    optimizer(make_gradients(params, 0, missing={2, 3}))
    assert " ".join(rows_of(device)) == "h2d h2d update0 d2h h2d update1 d2h update2 d2h"


def test_neighbours_move_in_one_copy_and_gaps_part_them() -> None:
    device = EmulatedDevice()
    params = make_parameters([(64, 16)] * 6)
    optimizer = swap_optimizer(adamw(params), SwapOptimizerConfig(swap_times=1), device=device)
    moved = {}
    for missing in (set(), {0}, {2}, {1, 3}):
        optimizer(make_gradients(params, 0, missing=missing))
        moved[tuple(missing)] = optimizer.swap_stats().last_step.h2d_copies
    assert moved == {(): 1, (0,): 1, (2,): 2, (1, 3): 3}


def test_copies_of_the_two_directions_overlap() -> None:
    device = EmulatedDevice()
    # nn.Adam launches one operator for each parameter: copies take longer than its updates.
    params = make_parameters([(512, 1024)] * 6)
    optimizer = swap_optimizer(adam(params), SwapOptimizerConfig(swap_times=6), device=device)
    device.clear_timeline()
    optimizer(make_gradients(params, 0))
    device.synchronize()
    rows = device.timeline()
    first_up_ns = min(row.start_ns for row in rows if row.lane == "d2h")
    last_down_ns = max(row.end_ns for row in rows if row.lane == "h2d")
    both_ns = sum(
        max(0, min(down.end_ns, up.end_ns) - max(down.start_ns, up.start_ns))
        for down in rows
        for up in rows
        if (down.lane, up.lane) == ("h2d", "d2h")
    )
    assert both_ns > 0.5 * (last_down_ns - first_up_ns), "the link is full duplex"
