"""Watching a step: memory samples, and events that agree with the device's own timeline."""

from __future__ import annotations

from collections import Counter

import torch

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer
from swapopt_torch.demo.accelerator import VirtualAccelerator
from swapopt_torch.demo.observe import EventRecorder, MemorySampler

BATCHES = 4
STATES_NBYTES = BATCHES * 2 * 512 * 512 * 4
LAUNCH_SECONDS = 4e-6  # of the h200 profile
NANOSECOND = 1e-9


def make_step(device: torch.device) -> TorchSwapOptimizer:
    """Return an optimizer with states and gradients; the device is idle."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(BATCHES)))
    model.to(device)
    optimizer = swap_optimizer(
        torch.optim.AdamW(model.parameters(), fused=True), SwapOptimizerConfig(swap_times=BATCHES)
    )
    model(torch.ones(2, 512, device=device)).sum().backward()
    optimizer.step()
    torch.get_device_module(device).synchronize(device)
    return optimizer


def test_events_show_every_copy_and_update_in_its_lane(device: torch.device) -> None:
    optimizer = make_step(device)
    with EventRecorder(device) as recorder:
        optimizer.step()
    torch.get_device_module(device).synchronize(device)
    rows = recorder.rows()
    moved = {lane: sum(row.nbytes for row in rows if row.lane == lane) for lane in ("h2d", "d2h")}
    assert moved == {"h2d": STATES_NBYTES, "d2h": STATES_NBYTES}
    copies = Counter(row.lane for row in rows if row.lane != "compute")
    assert copies == {"h2d": BATCHES, "d2h": BATCHES}
    updates = [row for row in rows if "_fused_adamw_" in row.operation]
    assert len(updates) == BATCHES
    assert all(row.lane == "compute" for row in updates)
    assert all(0 <= row.start_seconds < row.end_seconds for row in updates)
    assert rows == sorted(rows, key=lambda row: row.start_seconds)


def test_events_agree_with_the_timeline_of_the_device(device: torch.device) -> None:
    from swapopt_torch import virtual

    optimizer = make_step(device)
    accelerator = VirtualAccelerator(device, "virtual", "for a test", "virtual time")
    with accelerator.recorder() as timeline, EventRecorder(device) as events:
        optimizer.step()
    accelerator.synchronize()
    for lane in ("h2d", "d2h"):
        expected = [row.seconds for row in timeline.rows() if row.lane == lane]
        measured = [row.seconds for row in events.rows() if row.lane == lane]
        assert len(measured) == len(expected) == BATCHES
        for seconds, true_seconds in zip(measured, expected, strict=True):
            assert true_seconds <= seconds + NANOSECOND
            assert seconds <= true_seconds + LAUNCH_SECONDS + NANOSECOND
    updates = [row for row in timeline.rows() if "_fused_adamw_" in row.operation]
    assert len(updates) == BATCHES
    assert {row.device_index for row in virtual.timeline()} <= {device.index, -1}


def test_memory_is_sampled_after_every_operator_and_at_every_phase() -> None:
    memory = iter(range(100))
    clock = iter(range(0, 1000, 10))
    sampler = MemorySampler(lambda: next(memory), lambda: float(next(clock)))
    with sampler:
        sampler.enter_phase("forward", 7)
        torch.ones(3).add(1)
        sampler.enter_phase("update", 7)
    torch.ones(3).add(1)  # outside: not sampled
    phases = [(sample.phase, sample.step) for sample in sampler.samples]
    assert phases == [("between steps", 0), *[("forward", 7)] * 4, ("update", 7)]
    assert [sample.nbytes for sample in sampler.samples] == list(range(6))
    assert [sample.seconds for sample in sampler.samples] == [10.0 * i for i in range(6)]
