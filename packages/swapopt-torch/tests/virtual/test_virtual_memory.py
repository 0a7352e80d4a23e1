"""Device memory: accounting, capacity, release and return, poison."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
import torch

from swapopt_torch import virtual

MIB = 1 << 20


def stat(name: str, device: int = 0) -> int:
    return int(torch.virtual.memory_stats(device)[name])


@pytest.fixture(autouse=True)
def baseline(clean_device: None) -> None:
    gc.collect()
    torch.virtual.synchronize()
    torch.virtual.empty_cache()
    torch.virtual.reset_peak_memory_stats()


def test_allocations_are_rounded_to_512_bytes() -> None:
    before = torch.virtual.memory_allocated()
    one = torch.empty(1, device="virtual")
    more = torch.empty(129, device="virtual")
    assert torch.virtual.memory_allocated() - before == 512 + 1024
    assert stat("requested_bytes.all.current") >= 4 + 516
    del one, more
    assert torch.virtual.memory_allocated() == before


def test_peak_and_count_of_allocations() -> None:
    before, count = torch.virtual.memory_allocated(), stat("allocation.all.allocated")
    first = torch.empty(1000, device="virtual")
    del first
    torch.empty(100, device="virtual")
    assert torch.virtual.max_memory_allocated() - before == 4096
    assert stat("allocation.all.allocated") - count == 2
    torch.virtual.reset_peak_memory_stats()
    assert torch.virtual.max_memory_allocated() == before


def test_reserved_memory_is_kept_until_the_cache_is_emptied() -> None:
    before = torch.virtual.memory_reserved()
    big = torch.empty(12 * MIB, dtype=torch.uint8, device="virtual")
    assert torch.virtual.memory_reserved() - before == 12 * MIB
    del big
    assert torch.virtual.memory_reserved() - before == 12 * MIB
    again = torch.empty(11 * MIB, dtype=torch.uint8, device="virtual")
    assert torch.virtual.memory_reserved() - before == 12 * MIB
    del again
    torch.virtual.empty_cache()
    assert torch.virtual.memory_reserved() == before
    assert torch.virtual.max_memory_reserved() - before == 12 * MIB


def test_results_of_operators_are_accounted() -> None:
    source = torch.ones(1024, device="virtual")
    before = torch.virtual.memory_allocated()
    result = source * 2
    assert torch.virtual.memory_allocated() - before == 4096
    view = result[10:]
    assert torch.virtual.memory_allocated() - before == 4096
    del result
    assert torch.virtual.memory_allocated() - before == 4096
    del view
    assert torch.virtual.memory_allocated() == before


def test_resize_to_zero_frees_and_back_allocates_for_all_views() -> None:
    tensor = torch.arange(1000.0, device="virtual")
    view = tensor.view(10, 100)[3]
    before = torch.virtual.memory_allocated()
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert torch.virtual.memory_allocated() == before - 4096
    assert tensor.shape == (1000,)
    storage.resize_(4000)
    assert torch.virtual.memory_allocated() == before
    tensor.copy_(torch.arange(1000.0))
    assert view.tolist() == [float(i) for i in range(300, 400)]


def test_resize_keeps_the_common_prefix() -> None:
    tensor = torch.arange(8.0, device="virtual")
    tensor.untyped_storage().resize_(64)
    longer = torch.empty(0, device="virtual").set_(tensor.untyped_storage(), 0, (16,))
    assert longer[:8].tolist() == [float(i) for i in range(8)]
    assert longer[8:].isnan().all()


def test_resize_allocates_on_the_device_of_the_storage() -> None:
    tensor = torch.ones(1000, device="virtual:1")
    storage = tensor.untyped_storage()
    storage.resize_(0)
    before = torch.virtual.memory_allocated(1)
    with torch.virtual.device(0):
        storage.resize_(4000)
    assert torch.virtual.memory_allocated(1) - before == 4096


@pytest.mark.parametrize("operation", ["add", "foreach", "copy out", "copy in", "item", "out"])
def test_operator_on_released_storage_says_so(operation: str) -> None:
    tensor = torch.ones(1, device="virtual")
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"shape \[1\].*virtual:0.*released.*resize_"):
        match operation:
            case "add":
                tensor + 1
            case "foreach":
                torch._foreach_add_([tensor], 1.0)
            case "copy out":
                tensor.cpu()
            case "copy in":
                tensor.copy_(torch.ones(1))
            case "item":
                tensor.item()
            case "out":
                torch.add(torch.ones(1, device="virtual"), 1, out=tensor)
    assert tensor.view(1, 1).shape == (1, 1)


def test_recorded_stream_keeps_a_block_active_until_its_work_is_done() -> None:
    copies = torch.virtual.Stream()
    source = torch.empty(10 * MIB, dtype=torch.uint8, device="virtual")
    host = torch.empty(10 * MIB, dtype=torch.uint8, pin_memory=True)
    copies.wait_stream(torch.virtual.current_stream())
    with torch.virtual.stream(copies):
        host.copy_(source, non_blocking=True)
    source.record_stream(copies)
    allocated, active = torch.virtual.memory_allocated(), stat("active_bytes.all.current")
    del source
    assert torch.virtual.memory_allocated() == allocated - 10 * MIB
    assert stat("active_bytes.all.current") == active
    copies.synchronize()
    assert stat("active_bytes.all.current") == active - 10 * MIB


def test_active_peak_counts_what_is_still_in_use() -> None:
    copies = torch.virtual.Stream()
    base = stat("active_bytes.all.current")
    host = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    for _ in range(3):
        source = torch.empty(MIB, dtype=torch.uint8, device="virtual")
        copies.wait_stream(torch.virtual.current_stream())
        with torch.virtual.stream(copies):
            host.copy_(source, non_blocking=True)
        source.record_stream(copies)
        del source
    assert stat("active_bytes.all.peak") - base == 3 * MIB
    assert stat("allocated_bytes.all.peak") - base == MIB


def test_capacity_is_checked_against_active_bytes() -> None:
    keep = torch.empty(1000, device="virtual")
    virtual.set_capacity(stat("active_bytes.all.current") + 1024)
    fits = torch.empty(256, device="virtual")
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"virtual:0 is out of memory.*with torch\.virtual\.set_capacity\(\)",
    ):
        torch.empty(1, device="virtual")
    with pytest.raises(torch.OutOfMemoryError):
        keep + 1
    assert stat("num_ooms") >= 2
    del fits
    torch.empty(256, device="virtual")
    torch.empty(1 << 20, device="virtual:1")


def test_out_of_memory_waits_for_recorded_streams_first() -> None:
    copies = torch.virtual.Stream()
    source = torch.empty(MIB, dtype=torch.uint8, device="virtual")
    host = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    virtual.set_capacity(stat("active_bytes.all.current"))
    copies.wait_stream(torch.virtual.current_stream())
    with torch.virtual.stream(copies):
        host.copy_(source, non_blocking=True)
        done = torch.virtual.Event()
        done.record()
    source.record_stream(copies)
    del source
    before_ns = virtual.now_ns()
    torch.empty(MIB, dtype=torch.uint8, device="virtual")
    assert virtual.now_ns() - before_ns >= 2000 + int(MIB / 53)
    assert stat("num_sync_all_streams") >= 1
    done.synchronize()


def test_out_of_memory_out_of_backward() -> None:
    weight = torch.ones(1000, device="virtual", requires_grad=True)
    loss = (weight * weight).sum()
    virtual.set_capacity(stat("active_bytes.all.current") + 512)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()


def test_memory_info_follows_the_capacity() -> None:
    virtual.set_capacity(100 * MIB, 1)
    free, total = torch.virtual.mem_get_info(1)
    assert total == 100 * MIB
    assert free == total - torch.virtual.memory_reserved(1)
    assert torch.virtual.get_device_properties(1).total_memory == total


def test_uninitialised_memory_is_nan_in_every_floating_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert torch.empty(100, dtype=dtype, device="virtual").isnan().all(), dtype


def test_freed_memory_is_poisoned() -> None:
    tensor = torch.ones(1000, device="virtual")
    address = tensor.data_ptr()
    del tensor
    assert set(ctypes.string_at(address, 4000)) == {0xFF}


def test_writing_to_freed_memory_is_reported() -> None:
    tensor = torch.ones(1000, device="virtual")
    address = tensor.data_ptr()
    del tensor
    ctypes.memset(address, 0, 4)
    for _ in range(3):  # push it out of the quarantine
        torch.empty(30 * MIB, dtype=torch.uint8, device="virtual")
    assert [race.kind for race in virtual.races()] == ["write after free"]


def test_accelerator_functions_agree() -> None:
    tensor = torch.ones(1000, device="virtual")
    assert torch.accelerator.memory_allocated() == torch.virtual.memory_allocated() >= tensor.nbytes
    assert torch.accelerator.max_memory_reserved() == torch.virtual.max_memory_reserved()
    assert torch.accelerator.memory_stats() == torch.virtual.memory_stats()
    torch.accelerator.empty_host_cache()


@pytest.mark.parametrize("nbytes", [-1, -(1 << 30), 1 << 63, "8GB", 8e9, True])
def test_limits_that_are_no_number_of_bytes_are_refused(nbytes: Any) -> None:
    found = f"an int from 0 to .* or None for no limit, found {nbytes!r}"
    for set_limit in (torch.virtual.set_capacity, virtual.set_pinned_limit):
        with pytest.raises(ValueError, match=f"nbytes: expected a number of bytes .*{found}"):
            set_limit(nbytes)
    with pytest.raises(ValueError, match=f"capacity_bytes: expected a number of bytes .*{found}"):
        virtual.enable(capacity_bytes=nbytes)


def test_the_largest_limits_are_taken() -> None:
    torch.virtual.set_capacity((1 << 63) - 1)
    assert torch.virtual.mem_get_info()[1] == (1 << 63) - 1
    torch.virtual.set_capacity(None)
