"""Every wait of the pipeline is needed, and every hand-over to the caller is ordered."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, pipeline, swap_optimizer
from swapopt_torch.streams import Edge
from training import assert_same_bits


@pytest.fixture(autouse=True)
def only_where_races_are_found(device_type: str) -> None:
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator finds races")


def make(
    device: torch.device, packed: bool, *, count: int = 6
) -> tuple[list[nn.Parameter], TorchSwapOptimizer]:
    parameters = [nn.Parameter(torch.ones(4096, device=device)) for _ in range(count)]
    config = SwapOptimizerConfig(swap_times=6, packed_swap=packed)
    return parameters, swap_optimizer(torch.optim.AdamW(parameters, fused=True), config)


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5 + step)
        optimizer.step()


# Edges that another wait implies, with the proof. The detector stays silent without them.
IMPLIED: dict[tuple[Edge, bool], str] = {}


@pytest.mark.asynchronous
@pytest.mark.parametrize("edge", list(Edge), ids=lambda edge: edge.name)
def test_r2_without_any_one_wait_the_detector_objects(
    device: torch.device, packed: bool, edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swapopt_torch import virtual

    used: set[Edge] = set()
    original = pipeline.wait

    def all_but_one(stream: torch.Stream, event: torch.Event, why: Edge) -> None:
        used.add(why)
        if why is not edge:
            original(stream, event, why)

    monkeypatch.setattr(pipeline, "wait", all_but_one)
    parameters, optimizer = make(device, packed)
    if edge is Edge.SETTLED:
        base = torch.optim.AdamW(parameters, fused=True)
        train(parameters, base, 1)
        optimizer = swap_optimizer(base, SwapOptimizerConfig(swap_times=6, packed_swap=packed))
    train(parameters, optimizer, 3)
    torch.get_device_module(device).synchronize(device)
    found = virtual.races()
    if edge not in used:
        other_movement = {Edge.REUSED: False, Edge.OFFLOADED: True}
        assert other_movement[edge] is packed, f"{edge} is never waited for"
        assert not found
        return
    if (edge, packed) in IMPLIED:
        assert not found
        return
    assert found, f"no race without: {edge.value}"


@pytest.mark.asynchronous
@pytest.mark.parametrize("edge", [Edge.PREFETCHED], ids=lambda edge: edge.name)
def test_late_copies_show_a_destination_read_too_early(
    device: torch.device, packed: bool, edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swapopt_torch import virtual

    original = pipeline.wait

    def all_but_one(stream: torch.Stream, event: torch.Event, why: Edge) -> None:
        if why is not edge:
            original(stream, event, why)

    monkeypatch.setattr(pipeline, "wait", all_but_one)
    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 2)
    torch.get_device_module(device).synchronize(device)
    assert any(parameter.isnan().any() for parameter in parameters)
    virtual.races()


@pytest.mark.asynchronous
def test_late_copies_show_a_host_mirror_read_too_early(device: torch.device, packed: bool) -> None:
    from swapopt_torch import virtual

    parameters, optimizer = make(device, packed)
    train(parameters, optimizer, 1)
    mirror = optimizer._base.state[parameters[-1]]["exp_avg"]
    assert mirror.isnan().any(), "read without synchronize(), before its offload"
    assert virtual.races()
    assert optimizer.state[parameters[-1]]["exp_avg"].isfinite().all()


def test_r4_parameters_read_after_step_are_the_updated_ones(
    device: torch.device, packed: bool
) -> None:
    parameters, optimizer = make(device, packed)
    native = [nn.Parameter(p.detach().clone()) for p in parameters]
    reference = torch.optim.AdamW(native, fused=True)
    side = torch.Stream(device=device)
    side.wait_stream(torch.get_device_module(device).current_stream(device))
    with side:
        train(parameters, optimizer, 3)
        doubled = [parameter * 2 for parameter in parameters]
    torch.get_device_module(device).current_stream(device).wait_stream(side)
    train(native, reference, 3)
    for one, other in zip(doubled, native, strict=True):
        assert_same_bits(one, other * 2, "parameter read right after step")


def test_r1_r3_states_are_those_of_the_last_update(device: torch.device, packed: bool) -> None:
    """The detector and late copies run: a freed source or a missing edge would show here."""
    parameters, optimizer = make(device, packed)
    native = [nn.Parameter(p.detach().clone()) for p in parameters]
    reference = torch.optim.AdamW(native, fused=True)
    for _ in range(3):
        train(parameters, optimizer, 2)
        train(native, reference, 2)
        # Work that would take over memory freed too early.
        scratch = [torch.full((4096,), 7.0, device=device) for _ in range(12)]
        del scratch
        for parameter, other in zip(parameters, native, strict=True):
            for key, value in optimizer.state[parameter].items():
                assert_same_bits(value, reference.state[other][key], key)


@pytest.mark.asynchronous
def test_step_does_not_wait_for_its_own_copies(device: torch.device, packed: bool) -> None:
    """The host returns from step() before the virtual time at which the last offload ends."""
    from swapopt_torch import virtual

    parameters = [nn.Parameter(torch.ones(1 << 20, device=device)) for _ in range(4)]
    config = SwapOptimizerConfig(swap_times=4, packed_swap=packed)
    for synchronous in (False, True):
        optimizer = swap_optimizer(
            torch.optim.AdamW(parameters, fused=True), config, synchronous=synchronous
        )
        train(parameters, optimizer, 1)
        torch.get_device_module(device).synchronize(device)
        virtual.clear_timeline()
        optimizer.step()
        returned_ns = virtual.now_ns()
        last_copy_ns = max(row.end_ns for row in virtual.timeline() if row.lane == "d2h")
        assert (returned_ns >= last_copy_ns) is synchronous
        torch.get_device_module(device).synchronize(device)


def test_r5_synchronous_copies_overlap_with_nothing(device: torch.device, packed: bool) -> None:
    """Copies to the device, to the host and at wrapping: each is over before anything follows."""
    from swapopt_torch import virtual

    parameters = [nn.Parameter(torch.ones(1 << 18, device=device)) for _ in range(4)]
    base = torch.optim.AdamW(parameters, fused=True)
    train(parameters, base, 1)
    torch.get_device_module(device).synchronize(device)
    config = SwapOptimizerConfig(swap_times=4, packed_swap=packed)
    virtual.clear_timeline()
    optimizer = swap_optimizer(base, config, synchronous=True)
    wrapped_ns = virtual.now_ns()
    at_wrap = [row for row in virtual.timeline() if row.lane == "d2h"]
    assert len(at_wrap) == 8
    assert wrapped_ns >= max(row.end_ns for row in at_wrap)
    optimizer.step()
    lanes = ("h2d", "d2h", "compute")
    rows = sorted(
        (row for row in virtual.timeline() if row.lane in lanes), key=lambda row: row.start_ns
    )
    assert {row.lane for row in rows} == set(lanes)
    for row, following in itertools.pairwise(rows):
        if "compute" not in (row.lane, following.lane) or row.lane != following.lane:
            assert following.start_ns >= row.end_ns, f"{row} overlaps with {following}"
    assert optimizer.swap_stats().last_times.hidden_share == 0


def test_two_copy_streams_however_many_optimizers(device: torch.device) -> None:
    """M5: streams are made once."""
    from swapopt_torch import virtual

    virtual.clear_timeline()
    for packed in (True, False, True):
        parameters, optimizer = make(device, packed)
        train(parameters, optimizer, 2)
    torch.get_device_module(device).synchronize(device)
    rows = [row for row in virtual.timeline() if row.device_index == device.index]
    assert len({row.stream_id for row in rows if row.lane == "h2d" and row.nbytes > 4096}) == 1
    assert len({row.stream_id for row in rows if row.lane == "d2h" and row.nbytes > 4096}) == 1
