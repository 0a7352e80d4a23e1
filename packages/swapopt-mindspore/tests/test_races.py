"""Every wait of the pipeline is needed, and every hand-over to the caller is ordered."""

from __future__ import annotations

import gc

import pytest

from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore import mirrors, pipeline, swap_optimizer
from swapopt_mindspore.emulated import EmulatedDevice
from swapopt_mindspore.streams import Edge, Event, Stream
from swapopt_mindspore.tail import Tail
from swapping import Twins, adam, adamw, make_gradients, make_parameters

SHAPES = [(64, 16)] * 6


@pytest.fixture
def collecting() -> EmulatedDevice:
    return EmulatedDevice(races="collect")


def leave_out(monkeypatch: pytest.MonkeyPatch, edge: Edge) -> set[Edge]:
    """Let no stream wait for this reason; return the set that will name the reasons seen."""
    used: set[Edge] = set()
    original = pipeline.wait

    def all_but_one(stream: Stream, event: Event, why: Edge) -> None:
        used.add(why)
        if why is not edge:
            original(stream, event, why)

    monkeypatch.setattr(pipeline, "wait", all_but_one)
    monkeypatch.setattr(mirrors, "wait", all_but_one)
    return used


@pytest.mark.parametrize("edge", list(Edge), ids=lambda edge: edge.name)
def test_without_any_one_wait_the_detector_objects(
    collecting: EmulatedDevice,
    packed: bool,
    window: int,
    edge: Edge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = leave_out(monkeypatch, edge)
    params = make_parameters(SHAPES)
    config = SwapOptimizerConfig(swap_times=3, packed_swap=packed)
    optimizer = swap_optimizer(adamw(params), config, device=collecting)
    assert optimizer._engine.layout.window == window
    for step in range(3):
        optimizer(make_gradients(params, step))
    collecting.synchronize()
    found = collecting.take_races()
    if edge not in used:
        assert (edge, packed) == (Edge.REUSED, False), f"{edge} is never waited for"
        assert not found
        return
    assert found, f"no race without: {edge.value}"


def test_with_all_waits_there_is_no_race(collecting: EmulatedDevice, packed: bool) -> None:
    params = make_parameters(SHAPES)
    config = SwapOptimizerConfig(swap_times=6, packed_swap=packed)
    optimizer = swap_optimizer(adamw(params), config, device=collecting)
    for step in range(3):
        optimizer(make_gradients(params, step))
    optimizer.unswap()
    collecting.synchronize()
    assert collecting.take_races() == []


def test_late_copies_show_an_update_that_does_not_wait(
    collecting: EmulatedDevice, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(monkeypatch, Edge.PREFETCHED)
    twins = Twins(adamw, SHAPES, collecting, SwapOptimizerConfig(swap_times=6, packed_swap=packed))
    twins.step(2)
    with pytest.raises(AssertionError, match="is not finite"):
        twins.assert_equal()


def test_late_copies_show_a_mirror_read_too_early(collecting: EmulatedDevice) -> None:
    twins = Twins(adam, SHAPES, collecting, SwapOptimizerConfig(swap_times=6))
    twins.step()
    last = twins.base.moment1[-1]
    assert (last.asnumpy() != last.asnumpy()).any(), "read without joining, before its offload"
    assert (twins.swapped.moment1[-1].asnumpy() == twins.native.moment1[-1].asnumpy()).all()


def test_step_does_not_block_the_host(packed: bool) -> None:
    """The host returns from a step before the virtual time at which its last offload ends."""
    for synchronous in (False, True):
        device = EmulatedDevice()
        params = make_parameters([(512, 1024)] * 4)
        config = SwapOptimizerConfig(swap_times=4, packed_swap=packed)
        optimizer = swap_optimizer(adamw(params), config, device=device, synchronous=synchronous)
        device.clear_timeline()
        optimizer(make_gradients(params, 0))
        returned_ns = device.now_ns
        last_copy_ns = max(row.end_ns for row in device.timeline() if row.lane == "d2h")
        assert (returned_ns >= last_copy_ns) is synchronous
        host_waits = [row for row in device.timeline() if row.lane == "host"]
        assert bool(host_waits) is synchronous


def test_what_the_caller_does_next_is_behind_the_last_offload(packed: bool) -> None:
    """The device memory is free for the next forward in stream order (invariants 5 and 7)."""
    device = EmulatedDevice()
    params = make_parameters([(512, 1024)] * 4)
    config = SwapOptimizerConfig(swap_times=4, packed_swap=packed)
    optimizer = swap_optimizer(adamw(params), config, device=device)
    device.clear_timeline()
    optimizer(make_gradients(params, 0))
    device.compute("forward", 1e-3)
    rows = device.timeline()
    assert rows[-1].operation == "forward"
    assert rows[-1].start_ns >= max(row.end_ns for row in rows if row.lane == "d2h")


def drop_after_a_step(device: EmulatedDevice, packed: bool) -> None:
    """Let an optimizer go while the offloads of its last steps are under way."""
    params = make_parameters(SHAPES)
    config = SwapOptimizerConfig(swap_times=6, packed_swap=packed)
    optimizer = swap_optimizer(adamw(params), config, device=device)
    first, second = (frozenset(range(begin, 6, 2)) for begin in (0, 1))
    # The host is some steps ahead, and not each of them writes to all host memory.
    for step, missing in enumerate([first, second, first]):
        optimizer(make_gradients(params, step, missing))
    assert device.memory().pinned_bytes > 0
    del optimizer, params
    gc.collect()


def test_an_optimizer_may_be_dropped_after_a_step(collecting: EmulatedDevice, packed: bool) -> None:
    drop_after_a_step(collecting, packed)
    assert collecting.memory().pinned_bytes == 0
    assert not collecting.take_races()


def test_memory_that_nobody_keeps_for_the_tail_is_a_race(
    collecting: EmulatedDevice, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tail, "abandon", Tail.forget)
    drop_after_a_step(collecting, packed)
    races = collecting.take_races()
    assert {race.kind for race in races} == {"released while in use"}
