"""Every kind of race with and without the wait that orders it."""

from __future__ import annotations

import ctypes

import pytest
import torch

from swapopt_torch import virtual

NUMEL = 1 << 16


def expect_race(*words: str) -> virtual.Race:
    found = virtual.races()
    assert found, "no race was reported"
    for word in words:
        assert word in str(found[0])
    return found[0]


@pytest.mark.parametrize("ordered", [True, False])
def test_use_of_memory_allocated_on_another_stream(ordered: bool) -> None:
    other = torch.virtual.Stream()
    made_here = torch.empty(NUMEL, device="virtual")
    if ordered:
        other.wait_stream(torch.virtual.current_stream())
    with torch.virtual.stream(other):
        made_here.fill_(1)
    if not ordered:
        race = expect_race("allocation", "virtual:0 default stream", "aten::fill_")
        assert race.earlier_operation == "allocation"
        assert race.range == (0, 4 * NUMEL)


@pytest.mark.parametrize("ordered", [True, False])
def test_event_recorded_before_the_allocation_does_not_order_it(ordered: bool) -> None:
    other = torch.virtual.Stream()
    event = torch.virtual.Event()
    if not ordered:
        event.record()
    made_here = torch.empty(NUMEL, device="virtual")
    if ordered:
        event.record()
    other.wait_event(event)
    with torch.virtual.stream(other):
        made_here.fill_(1)
    if not ordered:
        expect_race("allocation")


@pytest.mark.parametrize("ordered", [True, False])
def test_kernel_reads_what_a_copy_brings(ordered: bool) -> None:
    copies = torch.virtual.Stream()
    source = torch.ones(NUMEL).pin_memory()
    destination = torch.empty(NUMEL, device="virtual")
    copies.wait_stream(torch.virtual.current_stream())
    with torch.virtual.stream(copies):
        destination.copy_(source, non_blocking=True)
    if ordered:
        torch.virtual.current_stream().wait_stream(copies)
    destination.mul(2)
    torch.virtual.synchronize()
    if not ordered:
        expect_race("read after write", "copy host to device")


@pytest.mark.parametrize("ordered", [True, False])
def test_copy_to_host_of_what_a_kernel_writes(ordered: bool) -> None:
    copies = torch.virtual.Stream()
    source = torch.ones(NUMEL, device="virtual")
    host = torch.empty(NUMEL, pin_memory=True)
    if ordered:
        copies.wait_stream(torch.virtual.current_stream())
    with torch.virtual.stream(copies):
        host.copy_(source, non_blocking=True)
    torch.virtual.synchronize()
    if not ordered:
        expect_race("copy device to host", "read after write")


@pytest.mark.parametrize("ordered", [True, False])
def test_device_memory_reused_by_a_copy_in_while_a_copy_out_reads_it(ordered: bool) -> None:
    out, into = torch.virtual.Stream(), torch.virtual.Stream()
    arena = torch.zeros(NUMEL, device="virtual")
    mirror = torch.empty(NUMEL, pin_memory=True)
    fresh = torch.ones(NUMEL).pin_memory()
    torch.virtual.synchronize()
    with torch.virtual.stream(out):
        mirror.copy_(arena, non_blocking=True)
    if ordered:
        into.wait_stream(out)
    with torch.virtual.stream(into):
        arena.copy_(fresh, non_blocking=True)
    torch.virtual.synchronize()
    if not ordered:
        expect_race("write after read")


@pytest.mark.parametrize("ordered", [True, False])
def test_host_memory_read_back_while_a_copy_out_writes_it(ordered: bool) -> None:
    out, into = torch.virtual.Stream(), torch.virtual.Stream()
    state = torch.zeros(NUMEL, device="virtual")
    other = torch.zeros(NUMEL, device="virtual")
    mirror = torch.empty(NUMEL, pin_memory=True)
    torch.virtual.synchronize()
    with torch.virtual.stream(out):
        mirror.copy_(state, non_blocking=True)
    if ordered:
        into.wait_stream(out)
    with torch.virtual.stream(into):
        other.copy_(mirror, non_blocking=True)
    torch.virtual.synchronize()
    if not ordered:
        expect_race("pinned host memory")


@pytest.mark.parametrize("how", ["nothing", "record_stream", "wait", "synchronize"])
def test_memory_freed_while_a_copy_reads_it(how: str) -> None:
    out = torch.virtual.Stream()
    state = torch.zeros(NUMEL, device="virtual")
    mirror = torch.empty(NUMEL, pin_memory=True)
    out.wait_stream(torch.virtual.current_stream())
    with torch.virtual.stream(out):
        mirror.copy_(state, non_blocking=True)
    if how == "record_stream":
        state.record_stream(out)
    elif how == "wait":
        torch.virtual.current_stream().wait_stream(out)
    elif how == "synchronize":
        out.synchronize()
    state.untyped_storage().resize_(0)
    torch.empty(NUMEL, device="virtual")
    torch.virtual.synchronize()
    if how == "nothing":
        expect_race("freed while in use", "copy device to host")


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("write", [True, False])
def test_host_operator_on_pinned_memory_in_flight(ordered: bool, write: bool) -> None:
    device = torch.zeros(NUMEL, device="virtual")
    host = torch.zeros(NUMEL, pin_memory=True)
    if write:
        device.copy_(host, non_blocking=True)
    else:
        host.copy_(device, non_blocking=True)
    if ordered:
        torch.virtual.synchronize()
    if write:
        host.add_(1)
    else:
        host.sum()
    torch.virtual.synchronize()
    if not ordered:
        expect_race("CPU operator", "host")


@pytest.mark.parametrize("ordered", [True, False])
def test_unregister_in_flight(ordered: bool) -> None:
    memory = ctypes.create_string_buffer(4 * NUMEL)
    torch.virtual.host_register(ctypes.addressof(memory), 4 * NUMEL)
    host = torch.frombuffer(memory, dtype=torch.float32)
    assert host.is_pinned()
    device = torch.zeros(NUMEL, device="virtual")
    host.copy_(device, non_blocking=True)
    if ordered:
        torch.virtual.synchronize()
    torch.virtual.host_unregister(ctypes.addressof(memory))
    torch.virtual.synchronize()
    assert not host.is_pinned()
    if not ordered:
        expect_race("host_unregister", "registered host memory")


def test_raise_mode_names_both_operations_and_streams() -> None:
    virtual.set_race_mode("raise")
    other = torch.virtual.Stream()
    data = torch.ones(NUMEL, device="virtual")
    with (
        torch.virtual.stream(other),
        pytest.raises(virtual.RaceError, match=r"aten::mul_.*stream \d+ .*aten::.*default stream"),
    ):
        data.mul_(2)
    assert len(virtual.races()) == 1
    torch.virtual.synchronize()


def race_in_backward() -> torch.Tensor:
    weight = torch.ones(10, device="virtual", requires_grad=True)
    factor = torch.ones(10, device="virtual")
    side = torch.virtual.Stream()
    side.wait_stream(torch.virtual.current_stream())
    loss = (weight * factor).sum()
    virtual.set_race_mode("collect")
    with torch.virtual.stream(side):
        factor.data.mul_(2)
    virtual.races()
    virtual.set_race_mode("raise")
    return loss


def test_raise_mode_raises_out_of_backward() -> None:
    loss = race_in_backward()
    with pytest.raises(virtual.RaceError, match="read after write"):
        loss.backward()
    torch.virtual.set_device(0)
    virtual.set_race_mode("collect")
    torch.virtual.synchronize()
    virtual.races()


def test_raise_mode_raises_a_host_race_at_the_next_device_operation() -> None:
    virtual.set_race_mode("raise")
    host = torch.empty(NUMEL, pin_memory=True)
    host.copy_(torch.ones(NUMEL, device="virtual"), non_blocking=True)
    host.sum()
    with pytest.raises(virtual.RaceError, match="CPU operator"):
        torch.virtual.synchronize()
    torch.virtual.synchronize()
    assert all("CPU operator" in race.operation for race in virtual.races())


def test_off_looks_for_nothing() -> None:
    virtual.set_race_mode("off")
    data = torch.ones(NUMEL, device="virtual")
    with torch.virtual.stream(torch.virtual.Stream()):
        data.mul_(2)
    torch.virtual.synchronize()
    assert virtual.races() == []


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_raw_access_that_the_program_announces(write: bool, ordered: bool) -> None:
    host = torch.ones(NUMEL, pin_memory=True)
    device = torch.empty(NUMEL, device="virtual")
    if write:
        device.copy_(host, non_blocking=True)
    else:
        host.copy_(device, non_blocking=True)
    if ordered:
        torch.virtual.synchronize()
    virtual.host_access(host, write=write)
    torch.virtual.synchronize()
    if not ordered:
        expect_race("host write" if write else "host read")


def test_interleaved_columns_are_different_bytes() -> None:
    matrix = torch.zeros(64, 64, device="virtual")
    side = torch.virtual.Stream()
    side.wait_stream(torch.virtual.current_stream())
    with torch.virtual.stream(side):
        matrix[:, :32].add_(1)
    matrix[:, 32:].add_(1)
    assert not virtual.races()
    matrix[:, 31:33].add_(1)
    torch.virtual.synchronize()
    expect_race("write")


def test_a_race_reads_well() -> None:
    data = torch.ones(NUMEL, device="virtual:1")
    stream = torch.virtual.Stream(1)
    with torch.virtual.stream(stream):
        data.neg_()
    torch.virtual.synchronize(1)
    race = virtual.races()[0]
    assert race.operation.startswith("aten::neg")
    assert race.stream == f"virtual:1 stream {stream.stream_id}"
    assert race.earlier_stream == "virtual:1 default stream"
    assert race.memory == f"{4 * NUMEL} bytes of virtual:1 memory"
    assert str(race) == race.message
    assert "is not ordered after" in race.message


def test_two_devices_are_ordered_by_a_copy_between_them() -> None:
    source = torch.ones(NUMEL, device="virtual:0")
    target = source.to("virtual:1", non_blocking=True)
    source.mul_(2)
    target.mul_(2)
    assert target.sum().item() == 2 * NUMEL


def test_pipeline_with_every_wait_in_place_has_no_race() -> None:
    """Prefetch, update, offload over two arenas, twice round."""
    states = [torch.zeros(NUMEL, pin_memory=True) for _ in range(4)]
    arenas = [torch.empty(NUMEL, device="virtual") for _ in range(2)]
    into, out = torch.virtual.Stream(), torch.virtual.Stream()
    compute = torch.virtual.current_stream()
    into.wait_stream(compute)
    for _ in range(2):
        for index, state in enumerate(states):
            arena = arenas[index % 2]
            into.wait_stream(out)
            with torch.virtual.stream(into):
                arena.copy_(state, non_blocking=True)
            compute.wait_stream(into)
            arena.add_(1)
            out.wait_stream(compute)
            with torch.virtual.stream(out):
                state.copy_(arena, non_blocking=True)
    out.synchronize()
    assert all((state == 2).all() for state in states)
