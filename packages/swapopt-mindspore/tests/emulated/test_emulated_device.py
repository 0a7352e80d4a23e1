"""What the contract in `swapopt_mindspore.device` promises, on the emulated device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

from swapopt_mindspore.emulated import EmulatedDevice
from swapopt_mindspore.streams import Edge, wait

DTYPES = [mstype.float32, mstype.float16, mstype.bfloat16]


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.asnumpy().tobytes())


def random(shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def allocated(device: EmulatedDevice) -> int:
    return device.memory().allocated_bytes


# ---------------------------------------------------------------------- there and back
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_there_and_back_keeps_every_bit(device: EmulatedDevice, dtype: mstype.Type) -> None:
    values = Tensor(random((3, 5))).astype(dtype)
    buffer = device.allocate_host(40, dtype)
    there, back = buffer.tensor(0, (3, 5)), buffer.tensor(20, (3, 5))
    there.asnumpy()[...] = values.asnumpy()
    state = device.empty((3, 5), dtype)
    device.h2d.wait_event(recorded(device, device.compute_stream()))

    device.copy(device.h2d, state, there)
    device.d2h.wait_event(recorded(device, device.h2d))
    device.copy(device.d2h, back, state)
    device.d2h.synchronize()

    assert bits(back) == bits(values)
    assert bits(state) == bits(values)


def recorded(device: EmulatedDevice, stream: object) -> object:
    event = device.new_event()
    event.record(stream)
    return event


def test_a_blocking_copy_is_done_when_it_returns(device: EmulatedDevice) -> None:
    state = Tensor(random((8,)))
    device.adopt([state])
    mirror = device.allocate_host(8, mstype.float32).tensor(0, (8,))

    wait(device.d2h, recorded(device, device.compute_stream()), Edge.SETTLED)
    device.copy(device.d2h, mirror, state, blocking=True)

    assert bits(mirror) == random((8,)).tobytes()


def test_an_adam_step_through_the_device_is_the_step_without_it(device: EmulatedDevice) -> None:
    def adam() -> tuple[nn.Adam, Parameter, Tensor]:
        parameter = Parameter(Tensor(random((64, 16))), name="w")
        return nn.Adam([parameter], 0.01), parameter, Tensor(random((64, 16), 1))

    def update(optimizer: nn.Adam, *tensors: Tensor) -> None:
        power = [Tensor(value, mstype.float32) for value in (0.9, 0.999)]
        rate = [Tensor(value, mstype.float32) for value in (0.01, 0.9, 0.999, 1e-8)]
        optimizer.opt(*tensors[:3], *power, *rate, tensors[3])

    native, native_parameter, gradient = adam()
    swapped, parameter, _ = adam()
    states = [swapped.moment1[0], swapped.moment2[0]]
    device.adopt([parameter, *states])
    mirrors = [device.allocate_host(64 * 16, mstype.float32).tensor(0, (64, 16)) for _ in states]
    for _ in range(3):
        update(native, native_parameter, native.moment1[0], native.moment2[0], gradient)
        with device.updating("Adam", reads=[gradient], writes=[parameter, *states], launches=1):
            update(swapped, parameter, *states, gradient)
        wait(device.d2h, recorded(device, device.compute_stream()), Edge.UPDATED)
        for mirror, state in zip(mirrors, states, strict=True):
            device.copy(device.d2h, mirror, state)
        wait(device.compute_stream(), recorded(device, device.d2h), Edge.OFFLOADED)
        for state in states:
            device.release(state)
            assert np.isnan(state.asnumpy()).all()
            device.restore(state)
        wait(device.h2d, recorded(device, device.compute_stream()), Edge.ALLOCATED)
        for mirror, state in zip(mirrors, states, strict=True):
            device.copy(device.h2d, state, mirror)
        wait(device.compute_stream(), recorded(device, device.h2d), Edge.PREFETCHED)
    device.synchronize()

    assert bits(parameter) == bits(native_parameter)
    assert [bits(state) for state in states] == [bits(native.moment1[0]), bits(native.moment2[0])]
    assert [bits(mirror) for mirror in mirrors] == [bits(state) for state in states]
