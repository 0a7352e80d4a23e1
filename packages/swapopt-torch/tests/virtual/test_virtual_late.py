"""Late mode: a copy happens only when something ordered after it needs it."""

from __future__ import annotations

import io

import pytest
import torch

from swapopt_torch import virtual

NUMEL = 4096


@pytest.fixture(autouse=True)
def late(clean_device: None) -> None:
    virtual.set_late_copies(True)


def copy_in(value: float) -> tuple[torch.Tensor, torch.virtual.Stream]:
    source = torch.full((NUMEL,), value).pin_memory()
    target = torch.empty(NUMEL, device="virtual")
    copies = torch.virtual.Stream()
    copies.wait_stream(torch.virtual.current_stream())
    with torch.virtual.stream(copies):
        target.copy_(source, non_blocking=True)
    return target, copies


@pytest.mark.parametrize("ordered", [True, False])
def test_kernel_sees_the_copy_only_if_it_waits(ordered: bool) -> None:
    target, copies = copy_in(2.0)
    if ordered:
        torch.virtual.current_stream().wait_stream(copies)
    result = (target * 2).sum().item()
    assert (result == 4 * NUMEL) is ordered
    torch.virtual.synchronize()
    assert bool(virtual.races()) is not ordered


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("how", ["numpy", "tolist", "save"])
def test_raw_read_by_the_host_sees_the_copy_only_if_it_waits(ordered: bool, how: str) -> None:
    """The detector cannot see these reads; the numbers can."""
    host = torch.zeros(NUMEL, pin_memory=True)
    host.copy_(torch.ones(NUMEL, device="virtual"), non_blocking=True)
    if ordered:
        torch.virtual.current_stream().synchronize()
    if how == "numpy":
        found = float(host.numpy().sum())
    elif how == "tolist":
        found = sum(host.tolist())
    else:
        found = sum_after_saving(host)
    assert (found == NUMEL) is ordered
    torch.virtual.synchronize()
    assert host.sum() == NUMEL


def sum_after_saving(host: torch.Tensor) -> float:
    file = io.BytesIO()
    torch.save(host, file)
    file.seek(0)
    return float(torch.load(file).sum())


def test_waiting_stream_does_not_deliver_to_a_stream_that_did_not_wait() -> None:
    target, copies = copy_in(1.0)
    torch.virtual.current_stream().wait_stream(copies)
    bystander = torch.virtual.Stream()
    with torch.virtual.stream(bystander):
        early = target + 1
    torch.virtual.synchronize()
    assert virtual.races()
    assert early.isnan().all().item()
    assert (target == 1).all().item()


def test_source_overwritten_too_early_spoils_the_copy() -> None:
    source = torch.ones(NUMEL, pin_memory=True)
    target = torch.empty(NUMEL, device="virtual")
    target.copy_(source, non_blocking=True)
    source.fill_(7)
    assert virtual.races()
    assert (target == 7).all().item()


@pytest.mark.parametrize("safe", [True, False])
def test_device_source_freed_before_its_copy(safe: bool) -> None:
    source = torch.ones(NUMEL, device="virtual")
    host = torch.zeros(NUMEL, pin_memory=True)
    copies = torch.virtual.Stream()
    copies.wait_stream(torch.virtual.current_stream())
    with torch.virtual.stream(copies):
        host.copy_(source, non_blocking=True)
    if safe:
        source.record_stream(copies)
    source.untyped_storage().resize_(0)
    torch.virtual.synchronize()
    if safe:
        assert (host == 1).all()
    else:
        assert host.isnan().all()


def test_pending_copy_keeps_no_device_memory() -> None:
    before = torch.virtual.memory_allocated()
    source = torch.ones(NUMEL, device="virtual")
    host = torch.zeros(NUMEL, pin_memory=True)
    host.copy_(source, non_blocking=True)
    del source
    assert torch.virtual.memory_allocated() == before
    torch.virtual.synchronize()
    assert (host == 1).all()


def test_chain_of_copies_runs_in_order() -> None:
    first = torch.full((NUMEL,), 3.0).pin_memory()
    middle = torch.empty(NUMEL, device="virtual")
    last = torch.zeros(NUMEL, pin_memory=True)
    into, out = torch.virtual.Stream(), torch.virtual.Stream()
    into.wait_stream(torch.virtual.current_stream())
    with torch.virtual.stream(into):
        middle.copy_(first, non_blocking=True)
    out.wait_stream(into)
    with torch.virtual.stream(out):
        last.copy_(middle, non_blocking=True)
    out.synchronize()
    assert (last == 3).all()
    torch.virtual.synchronize()


def test_query_delivers_once_it_is_true() -> None:
    host = torch.zeros(NUMEL, pin_memory=True)
    host.copy_(torch.ones(NUMEL, device="virtual"), non_blocking=True)
    event = torch.virtual.Event()
    event.record()
    while not event.query():
        assert host.numpy()[0] != 1
    assert (host == 1).all()


def test_strided_and_integer_destinations() -> None:
    host = torch.zeros(64, 64, dtype=torch.int32, pin_memory=True)
    host[:, ::2].copy_(torch.ones(64, 32, dtype=torch.int32, device="virtual"), non_blocking=True)
    assert host.numpy()[0, 0] == -1
    assert host.numpy()[0, 1] == 0
    torch.virtual.synchronize()
    assert int(host.sum()) == 64 * 32


def test_switching_off_completes_what_is_pending() -> None:
    host = torch.zeros(NUMEL, pin_memory=True)
    host.copy_(torch.ones(NUMEL, device="virtual"), non_blocking=True)
    virtual.set_late_copies(False)
    assert host.numpy().sum() == NUMEL
    torch.virtual.synchronize()


def test_blocking_copies_are_never_late() -> None:
    host = torch.zeros(NUMEL, pin_memory=True)
    host.copy_(torch.ones(NUMEL, device="virtual"))
    assert host.numpy().sum() == NUMEL
