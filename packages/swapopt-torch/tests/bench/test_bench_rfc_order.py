"""The reference: the same arithmetic, the RFC's order, and the time that order takes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from bench_devices import OpenDevice

from swapopt_torch import virtual
from swapopt_torch.bench.contenders import OPTIMIZERS, Entry, Native, Reference
from swapopt_torch.bench.measure import make_scene, measure
from swapopt_torch.bench.rfc_order import RfcOrder
from swapopt_torch.bench.workloads import find_workload
from training import bits

NUMELS = [4000, 1, 700, 12345, 64, 8192, 333, 5000, 2047]


def make_parameters(device: torch.device) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(numel, generator=generator) for numel in NUMELS]
    return [torch.nn.Parameter(value.to(device)) for value in values]


def give_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.numel(), generator=generator)
        # One has no gradient in one of the steps.
        parameter.grad = None if (index, step) == (3, 2) else gradient.to(parameter.device)


@pytest.mark.parametrize("swap_times", [1, 2, 3, 9])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equals_the_native_optimizer_and_does_not_race(
    device: torch.device, kind: str, swap_times: int
) -> None:
    native, swapped = make_parameters(device), make_parameters(device)
    optimizer = OPTIMIZERS[kind].make(native)
    update = OPTIMIZERS[kind].make_update(swapped)
    order = RfcOrder(swapped, update, swap_times)
    for step in range(5):
        give_gradients(native, step)
        give_gradients(swapped, step)
        optimizer.step()
        order.step()
    for parameter, expected, moments in zip(swapped, native, order.states(), strict=True):
        assert torch.equal(bits(parameter), bits(expected))
        for key, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            assert torch.equal(bits(moment), bits(optimizer.state[expected][key]))


@pytest.mark.parametrize("swap_times", [8, 16])
@pytest.mark.parametrize("profile", ["h200", "ascend-910b", "half-duplex"])
def test_takes_both_transfers_one_after_the_other(
    open_device: OpenDevice, profile: str, swap_times: int
) -> None:
    device = open_device(profile)
    workload = find_workload("uniform-512MiB")
    scene = make_scene(workload, OPTIMIZERS["adamw-fused"], swap_times, device.accelerator.device)
    (row,) = measure(
        [Entry("RFC's order", Reference)],
        scene,
        workload,
        device,
        rounds=1,
        training_seconds=0.0,
        say=str,
    )
    link = device.link
    transfers = workload.state_nbytes * (
        1 / link.h2d_bytes_per_second + 1 / link.d2h_bytes_per_second
    )
    assert transfers <= row.step <= 1.02 * transfers
    # Whole batches, in two arenas; the host waits for the last of them.
    assert row.working_nbytes == 2 * workload.state_nbytes // swap_times
    assert row.counts is not None
    assert (row.counts.h2d_copies, row.counts.d2h_copies) == (swap_times, swap_times)
    assert row.returns == pytest.approx(row.step, abs=1e-5)


def test_the_device_is_idle_before_the_first_copy(open_device: OpenDevice) -> None:
    device = open_device("h200")
    workload = find_workload("uniform-64MiB")
    kind = OPTIMIZERS["adamw-fused"]
    scene = make_scene(workload, kind, 4, device.accelerator.device)
    reference = Reference(scene)
    reference.give_gradients(range(len(workload.shapes)))
    torch.virtual.synchronize()
    virtual.clear_timeline()
    busy = torch.ones(2**22, device=device.accelerator.device).mul_(2.0)
    reference.step()
    rows = virtual.timeline()
    backward = max(row.end_ns for row in rows if "mul_" in row.operation)
    assert min(row.start_ns for row in rows if row.lane == "h2d") >= backward
    assert busy.numel() == 2**22
    # On one stream: the copies of both directions follow one another.
    copies = sorted((row.start_ns, row.end_ns) for row in rows if row.lane in ("h2d", "d2h"))
    assert all(end <= start for (_, end), (start, _) in pairwise(copies))
    assert len(copies) == 8


def test_native_holds_its_states_and_nothing_more(open_device: OpenDevice) -> None:
    device = open_device("h200")
    workload = find_workload("uniform-64MiB")
    scene = make_scene(workload, OPTIMIZERS["hyper-adamw"], 4, device.accelerator.device)
    (row,) = measure(
        [Entry("native", Native)], scene, workload, device, rounds=1, training_seconds=0.0, say=str
    )
    assert row.idle_nbytes == 2 * workload.nbytes + workload.state_nbytes
    assert row.working_nbytes == 512  # the step count that the kernel reads
    assert row.host_nbytes == 0 == row.pinned_nbytes
