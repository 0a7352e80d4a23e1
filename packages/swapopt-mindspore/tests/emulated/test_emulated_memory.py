"""Memory of the emulated device: accounting, capacity, arenas, adoption, host buffers."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype
from steps import adopted, bits, host_tensor, is_all_nan, random

from swapopt_common import HostMemoryError
from swapopt_mindspore.device import DeviceMemoryError
from swapopt_mindspore.emulated import EmulatedDevice

MIB = 2**20


def allocated(device: EmulatedDevice) -> int:
    return device.memory().allocated_bytes


# ---------------------------------------------------------------------- tensors
def test_tensors_count_in_blocks_of_512_bytes(device: EmulatedDevice) -> None:
    first = device.empty((128,), mstype.float32)
    assert allocated(device) == 512
    second = device.empty((129,), mstype.float16)
    assert allocated(device) == 1024
    assert is_all_nan(first)
    assert is_all_nan(second)


def test_a_tensor_that_nobody_has_any_more_is_freed(device: EmulatedDevice) -> None:
    tensor = device.empty((MIB,), mstype.float32)
    assert allocated(device) == 4 * MIB
    alias = Tensor.from_numpy(tensor.asnumpy())
    del tensor
    assert allocated(device) == 4 * MIB
    del alias
    assert allocated(device) == 0


def test_released_memory_is_poisoned_and_can_be_taken_again(device: EmulatedDevice) -> None:
    state = adopted(device, random((256,)))
    device.release(state)
    assert allocated(device) == 0
    assert is_all_nan(state)
    device.release(state)
    assert allocated(device) == 0

    state.asnumpy()[...] = 1.0
    device.restore(state)
    assert allocated(device) == 1024
    assert is_all_nan(state)


def test_a_state_that_has_its_memory_is_not_restored(device: EmulatedDevice) -> None:
    state = adopted(device, random((256,)))
    with pytest.raises(ValueError, match=r"\(256,\) is restored that has its memory"):
        device.restore(state)


@pytest.mark.parametrize("what", ["unknown", "host", "view"])
def test_only_memory_of_its_own_is_released(device: EmulatedDevice, what: str) -> None:
    whole = adopted(device, random((256,)))
    tensor = {
        "unknown": Tensor(random((16,))),
        "host": host_tensor(device, random((16,))),
        "view": Tensor.from_numpy(whole.asnumpy()[:16]),
    }[what]
    with pytest.raises(ValueError, match="that owns no device memory"):
        device.release(tensor)


# ---------------------------------------------------------------------- peak and capacity
def test_the_peak_is_the_most_that_was_allocated(device: EmulatedDevice) -> None:
    state = adopted(device, random((256,)))
    more = device.empty((512,), mstype.float32)
    del more
    device.release(state)
    assert device.memory().peak_allocated_bytes == 1024 + 2048
    device.reset_peak()
    assert device.memory().peak_allocated_bytes == 0


def test_a_full_device_says_what_there_is() -> None:
    device = EmulatedDevice(capacity_bytes=4096)
    kept = device.empty((512,), mstype.float32)
    with pytest.raises(DeviceMemoryError, match=r"4,096 bytes, 2,048 of them .* 2,560 more"):
        device.empty((513,), mstype.float32)
    assert allocated(device) == 2048
    fits = device.empty((512,), mstype.float32)
    assert is_all_nan(kept)
    assert is_all_nan(fits)


@pytest.mark.parametrize("how", ["adopt", "restore", "arena"])
def test_whatever_allocates_may_find_the_device_full(how: str) -> None:
    device = EmulatedDevice(capacity_bytes=2048)
    state = adopted(device, random((256,)))
    arena = device.new_arena(2048)
    device.release(state)
    filler = device.empty((512,), mstype.float32)
    act = {
        "adopt": lambda: device.adopt([Tensor(random((16,)))]),
        "restore": lambda: device.restore(state),
        "arena": arena.allocate,
    }[how]
    with pytest.raises(DeviceMemoryError):
        act()
    assert allocated(device) == 2048
    assert arena.is_empty
    del filler
    act()
    assert allocated(device) == {"adopt": 0, "restore": 1024, "arena": 2048}[how]


# ---------------------------------------------------------------------- arenas
def test_an_arena_takes_memory_between_allocate_and_free(device: EmulatedDevice) -> None:
    arena = device.new_arena(5000)
    assert arena.is_empty
    assert allocated(device) == 0
    arena.allocate()
    assert not arena.is_empty
    assert allocated(device) == 5120
    arena.free()
    arena.free()
    assert allocated(device) == 0


def test_a_view_lasts_from_one_allocation_to_the_next(device: EmulatedDevice) -> None:
    arena = device.new_arena(4096)
    arena.allocate()
    view, same = (arena.view(mstype.float16, 512, (2, 8)) for _ in range(2))
    arena.free()
    arena.allocate()
    assert is_all_nan(view)
    view.asnumpy()[...] = 3.0
    assert bits(same) == bits(view)
    neighbour = arena.view(mstype.float32, 512 + 32, (4,))
    assert is_all_nan(neighbour)
    arena.free()
    assert is_all_nan(view)


@pytest.mark.parametrize(
    ("offset_bytes", "shape"), [(-4, (4,)), (4088, (4,)), (0, (1025,)), (0, (0,)), (2, (4,))]
)
def test_a_view_lies_inside_the_arena(
    device: EmulatedDevice, offset_bytes: int, shape: tuple[int, ...]
) -> None:
    arena = device.new_arena(4096)
    arena.allocate()
    with pytest.raises(ValueError, match=r"holds no piece of|is no place for"):
        arena.view(mstype.float32, offset_bytes, shape)


def test_an_arena_that_nobody_has_any_more_is_freed(device: EmulatedDevice) -> None:
    arena = device.new_arena(4096)
    arena.allocate()
    view = arena.view(mstype.float32, 0, (4,))
    del arena
    assert allocated(device) == 4096
    del view
    assert allocated(device) == 0


# ---------------------------------------------------------------------- adoption
def test_adopting_counts_once_and_until_the_tensor_is_gone(device: EmulatedDevice) -> None:
    parameter = Parameter(Tensor(random((1000,))), name="w")
    device.adopt([parameter, parameter])
    device.adopt([parameter])
    assert allocated(device) == 4096
    assert bits(parameter) == random((1000,)).tobytes()
    del parameter
    gc.collect()
    assert allocated(device) == 0


def test_tied_tensors_count_once(device: EmulatedDevice) -> None:
    parameter = Parameter(Tensor(random((1000,))), name="w")
    device.adopt([parameter, Tensor.from_numpy(parameter.asnumpy())])
    assert allocated(device) == 4096


def test_a_tensor_that_moved_is_counted_where_it_is(device: EmulatedDevice) -> None:
    parameter = Parameter(Tensor(random((1000,))), name="w")
    device.adopt([parameter])
    parameter.set_data(Tensor(random((10,))), slice_shape=True)
    device.adopt([parameter])
    assert allocated(device) == 512
    del parameter
    gc.collect()
    assert allocated(device) == 0


def test_a_whole_tensor_is_not_adopted_after_its_view(device: EmulatedDevice) -> None:
    whole = Tensor(random((1000,)))
    view = Tensor.from_numpy(whole.asnumpy()[10:20])
    device.adopt([view])
    with pytest.raises(ValueError, match=r"\(1000,\) is adopted after a view of it"):
        device.adopt([whole])


# ---------------------------------------------------------------------- host buffers
def test_a_host_buffer_is_zeros_of_exact_size(device: EmulatedDevice) -> None:
    buffer = device.allocate_host(1000, mstype.float16)
    assert (buffer.numel, buffer.nbytes, buffer.dtype) == (1000, 2000, mstype.float16)
    assert device.memory().pinned_bytes == 2000
    assert not np.any(buffer.tensor(0, (1000,)).asnumpy())


def test_a_mirror_owns_a_storage_of_its_size(device: EmulatedDevice) -> None:
    buffer = device.allocate_host(1000, mstype.float32)
    mirror, whole = buffer.tensor(100, (2, 5)), buffer.tensor(0, (1000,))
    mirror.asnumpy()[...] = random((2, 5))
    assert mirror.storage_offset() == 0
    assert mirror.untyped_storage().nbytes() == 40
    assert mirror.is_contiguous()
    assert whole.asnumpy()[100:110].tobytes() == random((2, 5)).tobytes()
    assert not np.any(whole.asnumpy()[110:])


@pytest.mark.parametrize(("host_offset", "shape"), [(-1, (2,)), (999, (2,)), (0, (1001,))])
def test_a_mirror_lies_inside_its_buffer(
    device: EmulatedDevice, host_offset: int, shape: tuple[int, ...]
) -> None:
    buffer = device.allocate_host(1000, mstype.float32)
    with pytest.raises(ValueError, match="a host buffer of 1000 elements holds no piece"):
        buffer.tensor(host_offset, shape)


def test_host_memory_lives_as_long_as_a_tensor_over_it(device: EmulatedDevice) -> None:
    mirror = host_tensor(device, random((1000,)))
    gc.collect()
    assert device.memory().pinned_bytes == 4000
    assert bits(mirror) == random((1000,)).tobytes()
    del mirror
    gc.collect()
    assert device.memory().pinned_bytes == 0


def test_a_limit_on_pinned_memory() -> None:
    device = EmulatedDevice(pinned_limit_bytes=1000)
    kept = device.allocate_host(200, mstype.float32)
    with pytest.raises(
        HostMemoryError, match=r"404 bytes were asked for .* 1,000 bytes may be pinned, 800 are"
    ):
        device.allocate_host(101, mstype.float32)
    assert device.allocate_host(50, mstype.float32).nbytes + kept.nbytes == 1000
