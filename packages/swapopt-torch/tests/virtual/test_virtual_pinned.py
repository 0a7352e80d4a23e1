"""Pinned host memory: what counts as pinned, the books, limits, and its release in flight."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch

from swapopt_torch import virtual

NUMEL = 1 << 14


@pytest.fixture
def mapped() -> Iterator[mmap.mmap]:
    memory = mmap.mmap(-1, 4 * NUMEL)
    yield memory


def address_of(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


@pytest.fixture
def registered(mapped: mmap.mmap) -> Iterator[torch.Tensor]:
    tensor = torch.frombuffer(mapped, dtype=torch.float32)
    torch.virtual.host_register(address_of(tensor), tensor.nbytes)
    yield tensor
    torch.virtual.synchronize()
    torch.virtual.host_unregister(address_of(tensor))


def test_slices_and_views_of_pinned_memory_are_pinned() -> None:
    region = torch.empty(1000, pin_memory=True)
    assert region[7:].is_pinned()
    assert region.view(torch.uint8)[3:5].is_pinned()
    assert torch.empty(0).set_(region.untyped_storage(), 10, (5,)).is_pinned()
    assert not torch.empty(1000).is_pinned()


def test_registered_memory_is_pinned_and_copies_from_it_are_asynchronous(
    registered: torch.Tensor,
) -> None:
    assert registered.is_pinned()
    assert registered[100:].is_pinned()
    registered.fill_(3)
    target = torch.empty(NUMEL, device="virtual")
    event = torch.virtual.Event()
    target.copy_(registered, non_blocking=True)
    event.record()
    assert not event.query()
    event.synchronize()
    assert (target == 3).all().item()


def test_pageable_copies_block() -> None:
    target = torch.empty(NUMEL, device="virtual")
    target.copy_(torch.ones(NUMEL), non_blocking=True)
    assert torch.virtual.current_stream().query()


def test_books_round_pinned_to_powers_of_two_and_count_registered_exactly(
    mapped: mmap.mmap,
) -> None:
    before = virtual.host_memory(reset_peaks=True)
    pinned = torch.empty(1000, dtype=torch.uint8, pin_memory=True)
    region = torch.frombuffer(mapped, dtype=torch.uint8)[:1000]
    torch.virtual.host_register(address_of(region), 1000)
    now = virtual.host_memory()
    assert now.pinned_requested_bytes - before.pinned_requested_bytes == 1000
    assert now.pinned_allocated_bytes - before.pinned_allocated_bytes == 1024
    assert now.registered_bytes - before.registered_bytes == 1000
    torch.virtual.host_unregister(address_of(region))
    del pinned
    after = virtual.host_memory()
    assert after.pinned_allocated_bytes == before.pinned_allocated_bytes
    assert after.registered_bytes == before.registered_bytes
    assert after.peak_pinned_allocated_bytes - before.pinned_allocated_bytes == 1024
    assert after.peak_registered_bytes - before.registered_bytes == 1000


def test_limit_of_pinned_memory(mapped: mmap.mmap) -> None:
    held = virtual.host_memory()
    virtual.set_pinned_limit(held.pinned_allocated_bytes + held.registered_bytes + 1024)
    try:
        keep = torch.empty(1000, dtype=torch.uint8, pin_memory=True)
        with pytest.raises(RuntimeError, match=r"swapopt_torch\.virtual\.set_pinned_limit\(\)"):
            torch.empty(1, pin_memory=True)
        region = torch.frombuffer(mapped, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="pinned host memory"):
            torch.virtual.host_register(address_of(region), 1)
        del keep
        torch.empty(1, pin_memory=True)
    finally:
        virtual.set_pinned_limit(None)


def test_regions_may_not_overlap(registered: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="already pinned or registered"):
        torch.virtual.host_register(address_of(registered) + 8, 8)


def test_unregister_wants_the_start_of_a_region(registered: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="start address of a registered region"):
        torch.virtual.host_unregister(address_of(registered) + 8)
    with pytest.raises(RuntimeError, match="positive size"):
        torch.virtual.host_register(address_of(registered), 0)


def test_pinned_tensor_may_be_freed_while_its_copy_is_in_flight() -> None:
    """The pinned allocator waits for copies of its tensors before it reuses their memory."""
    virtual.set_late_copies(True)
    target = torch.full((NUMEL,), 5.0).pin_memory().to("virtual", non_blocking=True)
    assert (target == 5).all().item()


def test_freeing_pinned_memory_that_a_copy_uses_behind_its_back_is_a_race() -> None:
    pinned = torch.ones(NUMEL, pin_memory=True)
    raw = (ctypes.c_char * pinned.nbytes).from_address(pinned.data_ptr())
    alias = torch.frombuffer(raw, dtype=torch.float32)
    target = torch.empty(NUMEL, device="virtual")
    target.copy_(alias, non_blocking=True)
    del pinned
    assert [race.kind for race in virtual.races()] == ["pinned memory released while in use"]


def test_data_loader_pins() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    for batch in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True):
        assert batch[0].is_pinned()
