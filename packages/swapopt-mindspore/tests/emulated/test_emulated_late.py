"""Copies that happen as late as they may, and memory that is poisoned: wrong order, wrong bytes.

Each of these runs with the detector off: late copies are an oracle of their own.
"""

from __future__ import annotations

import gc

import pytest
from mindspore import dtype as mstype
from steps import adopted, bits, follow, host_tensor, is_all_nan, random

from swapopt_mindspore.emulated import EmulatedDevice

SHAPE = (16,)
NEW, OLD = random(SHAPE, 1), random(SHAPE, 2)


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice("half-duplex", races="off")


def test_a_destination_is_nan_until_somebody_waits(device: EmulatedDevice) -> None:
    state, mirror = adopted(device, NEW), host_tensor(device, OLD)
    device.copy(device.d2h, mirror, state)
    assert is_all_nan(mirror)
    event = device.new_event()
    event.synchronize()
    assert is_all_nan(mirror)
    event.record(device.h2d)
    event.synchronize()
    assert is_all_nan(mirror)
    event.record(device.d2h)
    event.synchronize()
    assert bits(mirror) == NEW.tobytes()


def test_an_event_that_is_not_reached_lets_nothing_happen(device: EmulatedDevice) -> None:
    state, mirror = adopted(device, NEW), host_tensor(device, OLD)
    device.copy(device.d2h, mirror, state)
    event = device.new_event()
    event.record(device.d2h)
    assert not event.query()
    assert is_all_nan(mirror)
    device.advance_host(1.0)
    assert event.query()
    assert bits(mirror) == NEW.tobytes()


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_an_update_sees_what_it_waited_for(
    device: EmulatedDevice, ordered: bool, writes: bool
) -> None:
    state, mirror = adopted(device, OLD), host_tensor(device, NEW)
    device.copy(device.h2d, state, mirror)
    if ordered:
        follow(device, device.compute_stream(), device.h2d)
    touched = ([], [state]) if writes else ([state], [])
    with device.updating("Adam", reads=touched[0], writes=touched[1], launches=1):
        assert is_all_nan(state) is not ordered
        assert (bits(state) == NEW.tobytes()) is ordered


@pytest.mark.parametrize("ordered", [True, False])
def test_a_prefetch_of_what_was_just_offloaded(device: EmulatedDevice, ordered: bool) -> None:
    first, mirror, second = adopted(device, NEW), host_tensor(device, OLD), adopted(device, OLD)
    device.copy(device.d2h, mirror, first)
    if ordered:
        follow(device, device.h2d, device.d2h)
    device.copy(device.h2d, second, mirror)
    device.h2d.synchronize()
    assert (bits(second) == NEW.tobytes()) is ordered
    assert is_all_nan(second) is not ordered


@pytest.mark.parametrize("ordered", [True, False])
def test_a_source_is_overwritten_after_its_copy(device: EmulatedDevice, ordered: bool) -> None:
    state, first, second = adopted(device, NEW), host_tensor(device, OLD), host_tensor(device, OLD)
    device.copy(device.d2h, first, state)
    if ordered:
        follow(device, device.h2d, device.d2h)
    device.copy(device.h2d, state, second)
    device.synchronize()
    assert (bits(first) == NEW.tobytes()) is ordered


@pytest.mark.parametrize("ordered", [True, False])
def test_memory_is_freed_after_its_offload(device: EmulatedDevice, ordered: bool) -> None:
    state, mirror = adopted(device, NEW), host_tensor(device, OLD)
    device.copy(device.d2h, mirror, state)
    if ordered:
        follow(device, device.compute_stream(), device.d2h)
    device.release(state)
    assert is_all_nan(mirror)
    device.d2h.synchronize()
    assert (bits(mirror) == NEW.tobytes()) is ordered
    assert is_all_nan(mirror) is not ordered


def test_a_copy_through_memory_that_is_freed(device: EmulatedDevice) -> None:
    arena = device.new_arena(64)
    arena.allocate()
    view = arena.view(mstype.float32, 0, SHAPE)
    source, target = host_tensor(device, NEW), host_tensor(device, OLD)
    follow(device, device.h2d, device.compute_stream())
    device.copy(device.h2d, view, source)
    follow(device, device.d2h, device.h2d)
    device.copy(device.d2h, target, view)
    follow(device, device.compute_stream(), device.d2h)
    arena.free()
    assert is_all_nan(view)
    assert is_all_nan(target)
    device.synchronize()
    assert bits(target) == NEW.tobytes()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_prefetch_into_memory_that_is_freed(device: EmulatedDevice, ordered: bool) -> None:
    state, mirror = adopted(device, OLD), host_tensor(device, NEW)
    device.copy(device.h2d, state, mirror)
    if ordered:
        follow(device, device.compute_stream(), device.h2d)
    device.release(state)
    device.restore(state)
    assert is_all_nan(state)
    device.synchronize()
    # Without the wait it hits the memory's next owner, as on a real device.
    assert is_all_nan(state) is ordered
    assert (bits(state) == NEW.tobytes()) is not ordered


def test_a_state_that_nobody_has_any_more_is_offloaded_all_the_same(
    device: EmulatedDevice,
) -> None:
    state, mirror = device.empty(SHAPE, mstype.float32), host_tensor(device, OLD)
    state.asnumpy()[...] = NEW
    device.copy(device.d2h, mirror, state)
    follow(device, device.compute_stream(), device.d2h)
    del state
    gc.collect()
    device.synchronize()
    assert bits(mirror) == NEW.tobytes()


def test_copies_into_memory_that_is_gone_do_not_happen(device: EmulatedDevice) -> None:
    state, mirror = adopted(device, NEW), host_tensor(device, OLD)
    device.copy(device.d2h, mirror, state)
    del mirror
    gc.collect()
    device.synchronize()
    assert bits(state) == NEW.tobytes()
    assert device.memory().pinned_bytes == 0


def test_the_last_of_two_offloads_to_one_mirror_stands(device: EmulatedDevice) -> None:
    first, second, mirror = adopted(device, OLD), adopted(device, NEW), host_tensor(device, OLD)
    device.copy(device.d2h, mirror, first)
    device.copy(device.d2h, mirror, second)
    device.synchronize()
    assert bits(mirror) == NEW.tobytes()


def test_of_two_unordered_offloads_to_one_mirror_the_last_stands(device: EmulatedDevice) -> None:
    first, second, mirror = adopted(device, OLD), adopted(device, NEW), host_tensor(device, OLD)
    device.copy(device.d2h, mirror, first)
    device.copy(device.compute_stream(), mirror, second)
    device.synchronize()
    assert bits(mirror) == NEW.tobytes()


def test_only_copies_of_the_bytes_that_are_needed_happen(device: EmulatedDevice) -> None:
    buffer = device.allocate_host(48, mstype.float32)
    mirrors = [buffer.tensor(offset, SHAPE) for offset in (0, 16, 32)]
    states = [adopted(device, NEW) for _ in mirrors]
    other = adopted(device, OLD)
    for mirror, state in zip(mirrors, states, strict=True):
        device.copy(device.d2h, mirror, state)
    follow(device, device.h2d, device.d2h)
    device.copy(device.h2d, other, mirrors[1])
    assert [is_all_nan(mirror) for mirror in mirrors] == [True, False, True]
    device.synchronize()
    assert [bits(mirror) for mirror in mirrors] == [NEW.tobytes()] * 3


def test_copies_happen_at_once_where_late_copies_are_off() -> None:
    device = EmulatedDevice("half-duplex", late_copies=False)
    state, mirror = adopted(device, NEW), host_tensor(device, OLD)
    device.copy(device.d2h, mirror, state)
    assert bits(mirror) == NEW.tobytes()
    device.synchronize()
