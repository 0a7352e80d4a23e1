"""What the contract in `swapopt_mindspore.device` promises, on the emulated device."""

from __future__ import annotations

from contextlib import nullcontext

import mindspore
import pytest
from mindspore import Parameter, Tensor, mint, nn
from mindspore import dtype as mstype
from steps import adopted, bits, follow, host_tensor, is_all_nan, random

from swapopt_mindspore.choice import resolve_device, using
from swapopt_mindspore.device import Device
from swapopt_mindspore.emulated import EmulatedDevice

DTYPES = [mstype.float32, mstype.float16, mstype.bfloat16]


# ---------------------------------------------------------------------- copies
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_there_and_back_keeps_every_bit(device: EmulatedDevice, dtype: mstype.Type) -> None:
    values = Tensor(random((3, 5))).astype(dtype)
    buffer = device.allocate_host(40, dtype)
    there, back = buffer.tensor(0, (3, 5)), buffer.tensor(20, (3, 5))
    there.asnumpy()[...] = values.asnumpy()
    state = device.empty((3, 5), dtype)

    follow(device, device.h2d, device.compute_stream())
    device.copy(device.h2d, state, there)
    follow(device, device.d2h, device.h2d)
    device.copy(device.d2h, back, state)
    device.d2h.synchronize()

    assert bits(back) == bits(state) == bits(values)


def test_a_blocking_copy_is_done_when_it_returns(device: EmulatedDevice) -> None:
    state = adopted(device, random((8,)))
    mirror = device.allocate_host(8, mstype.float32).tensor(0, (8,))
    device.copy(device.d2h, mirror, state, blocking=True)
    assert bits(mirror) == random((8,)).tobytes()


@pytest.mark.parametrize(
    ("shape", "dtype", "found"),
    [((7,), mstype.float32, r"\(8,\).*\(7,\)"), ((8,), mstype.float16, ".*Float32.*Float16")],
)
def test_a_copy_between_unequal_tensors_is_refused(
    device: EmulatedDevice, shape: tuple[int, ...], dtype: mstype.Type, found: str
) -> None:
    mirror = device.allocate_host(8, dtype).tensor(0, shape)
    with pytest.raises(ValueError, match=f"equal shapes and dtypes, found {found}"):
        device.copy(device.d2h, mirror, adopted(device, random((8,))))


def test_a_copy_inside_the_device_is_refused(device: EmulatedDevice) -> None:
    first, second = adopted(device, random((8,))), adopted(device, random((8,)))
    with pytest.raises(RuntimeError, match="is needed in pinned memory and is not there"):
        device.copy(device.h2d, first, second)


# ---------------------------------------------------------------------- updates
def test_an_adam_step_through_the_device_is_the_step_without_it(device: EmulatedDevice) -> None:
    native, native_parameter = adam()
    swapped, parameter = adam()
    gradient = Tensor(random((64, 16), 1))
    native_states = [native.moment1[0], native.moment2[0]]
    states = [swapped.moment1[0], swapped.moment2[0]]
    device.adopt([parameter, *states])
    mirrors = [host_tensor(device, random((64, 16))) for _ in states]
    compute = device.compute_stream()
    for _ in range(3):
        update(native, native_parameter, *native_states, gradient)
        with device.updating("Adam", reads=[gradient], writes=[parameter, *states], launches=1):
            update(swapped, parameter, *states, gradient)
        follow(device, device.d2h, compute)
        for mirror, state in zip(mirrors, states, strict=True):
            device.copy(device.d2h, mirror, state)
        follow(device, compute, device.d2h)
        for state in states:
            device.release(state)
            assert is_all_nan(state)
            device.restore(state)
        follow(device, device.h2d, compute)
        for mirror, state in zip(mirrors, states, strict=True):
            device.copy(device.h2d, state, mirror)
        follow(device, compute, device.h2d)
    device.synchronize()

    assert bits(parameter) == bits(native_parameter)
    assert [bits(state) for state in states] == [bits(state) for state in native_states]
    assert [bits(mirror) for mirror in mirrors] == [bits(state) for state in native_states]


def adam(shape: tuple[int, ...] = (64, 16)) -> tuple[nn.Adam, Parameter]:
    parameter = Parameter(Tensor(random(shape)), name="w")
    return nn.Adam([parameter], 0.01), parameter


def update(optimizer: nn.Adam, p: Tensor, m: Tensor, v: Tensor, gradient: Tensor) -> None:
    scalars = [Tensor(value, mstype.float32) for value in (0.9, 0.999, 0.01, 0.9, 0.999, 1e-8)]
    optimizer.opt(p, m, v, *scalars, gradient)


def test_an_update_sees_a_state_in_an_arena(device: EmulatedDevice) -> None:
    native, native_parameter = adam()
    update(native, native_parameter, native.moment1[0], native.moment2[0], Tensor(random((64, 16))))
    swapped, parameter = adam()
    arena = device.new_arena(10_000)
    arena.allocate()
    states = [arena.view(mstype.float32, offset, (64, 16)) for offset in (512, 512 + 4096)]
    for state in states:
        follow(device, device.h2d, device.compute_stream())
        device.copy(device.h2d, state, host_tensor(device, 0 * random((64, 16))), blocking=True)
    gradient = Tensor(random((64, 16)))
    with device.updating("Adam", reads=[gradient], writes=[parameter, *states], launches=1):
        update(swapped, parameter, *states, gradient)

    assert bits(parameter) == bits(native_parameter)
    assert [bits(state) for state in states] == [bits(native.moment1[0]), bits(native.moment2[0])]


def test_an_update_of_a_released_state_is_refused(device: EmulatedDevice) -> None:
    state = adopted(device, random((4,)))
    device.release(state)
    with (
        pytest.raises(RuntimeError, match=r"Adam: .*shape \(4,\) is used whose memory was rel"),
        device.updating("Adam", reads=[], writes=[state], launches=1),
    ):
        raise AssertionError("the update does not begin")


def test_an_update_of_a_host_mirror_is_refused(device: EmulatedDevice) -> None:
    mirror = host_tensor(device, random((4,)))
    with (
        pytest.raises(RuntimeError, match=r"Adam: .* is needed in device memory and is not there"),
        device.updating("Adam", reads=[], writes=[mirror], launches=1),
    ):
        raise AssertionError("the update does not begin")


LARGE = (2**21,)


@pytest.mark.parametrize("fails", [False, True])
def test_an_update_is_done_when_its_block_ends(device: EmulatedDevice, fails: bool) -> None:
    optimizer, parameter = adam(LARGE)
    memory = parameter.asnumpy()  # reading this waits for nothing
    states = [optimizer.moment1[0], optimizer.moment2[0]]
    gradient = Tensor(random(LARGE, 1))
    with (
        pytest.raises(KeyError) if fails else nullcontext(),
        device.updating("Adam", reads=[gradient], writes=[parameter, *states], launches=1),
    ):
        update(optimizer, parameter, *states, gradient)
        if fails:
            raise KeyError
    after = memory.tobytes()
    assert after == bits(parameter)
    assert after != random(LARGE).tobytes()


def test_what_fails_in_the_background_is_raised_by_the_update(device: EmulatedDevice) -> None:
    state = adopted(device, random((4,)))
    with (
        pytest.raises(RuntimeError, match="FillScalar unregistered"),
        device.updating("Adam", reads=[], writes=[state], launches=1),
    ):
        mint.full((2,), 1.0)  # which has no CPU kernel


def test_what_fails_in_an_update_is_what_is_raised(device: EmulatedDevice) -> None:
    state = adopted(device, random((4,)))
    with (
        pytest.raises(KeyError, match="the update's own"),
        device.updating("Adam", reads=[], writes=[state], launches=1),
    ):
        mint.full((2,), 1.0)
        raise KeyError("the update's own")


# ---------------------------------------------------------------------- which tensors
def test_what_is_on_the_device(device: EmulatedDevice) -> None:
    assert device.holds(Tensor(random((4,))))
    assert device.holds(device.empty((4,), mstype.float32))
    assert not device.holds(host_tensor(device, random((4,))))
    state = adopted(device, random((4,)))
    device.release(state)
    assert device.holds(state)


def test_a_tensor_kept_on_the_host_comes_in_with_its_first_update(device: EmulatedDevice) -> None:
    state = Tensor(random((4,)))
    device.keep_on_host([state])
    device.adopt([state])
    assert not device.holds(state)
    assert device.memory().allocated_bytes == 0

    with device.updating("Adam", reads=[], writes=[state], launches=1):
        pass
    assert device.holds(state)
    assert device.memory().allocated_bytes == 512


# ---------------------------------------------------------------------- choosing a device
def test_on_a_cpu_nothing_swaps_unless_a_device_was_chosen() -> None:
    assert mindspore.get_context("device_target") == "CPU"
    assert resolve_device() is None


def test_the_innermost_chosen_device_counts() -> None:
    with EmulatedDevice() as outer:
        with EmulatedDevice() as inner:
            assert resolve_device() is inner
        assert resolve_device() is outer
        with using(inner), outer:
            assert resolve_device() is outer
        assert resolve_device() is outer
    assert resolve_device() is None


def test_a_device_may_be_chosen_again_inside_its_own_block() -> None:
    with EmulatedDevice() as first:
        with EmulatedDevice() as second:
            with using(first):
                assert resolve_device() is first
            assert resolve_device() is second
        assert resolve_device() is first
    assert resolve_device() is None


def test_a_failure_inside_the_block_ends_the_choice() -> None:
    with pytest.raises(KeyError), EmulatedDevice():
        raise KeyError
    assert resolve_device() is None


def test_an_emulated_device_is_a_device(device: EmulatedDevice) -> None:
    assert isinstance(device, Device)
    assert device.name == "emulated half-duplex"


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("races", "rise", "one of .'raise', 'collect', 'off'., found 'rise'"),
        ("capacity_bytes", -1, "at least 0"),
        ("pinned_limit_bytes", -512, "at least 0"),
    ],
)
def test_a_device_that_cannot_be_is_refused(argument: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be {expected}"):
        EmulatedDevice(**{argument: value})
