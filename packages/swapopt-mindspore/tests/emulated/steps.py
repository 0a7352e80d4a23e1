"""Small pieces that tests of the emulated device are put together from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from mindspore import Tensor
from mindspore import dtype as mstype

from swapopt_mindspore.emulated import EmulatedDevice
from swapopt_mindspore.streams import Event, Stream


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.asnumpy().tobytes())


def random(shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def is_all_nan(tensor: Tensor) -> bool:
    return bool(np.isnan(tensor.asnumpy().astype(np.float32)).all())


def recorded(device: EmulatedDevice, stream: Stream) -> Event:
    event = device.new_event()
    event.record(stream)
    return event


def follow(device: EmulatedDevice, later: Stream, earlier: Stream) -> None:
    """Order what ``later`` does from now on behind what ``earlier`` has been given."""
    later.wait_event(recorded(device, earlier))


def host_tensor(device: EmulatedDevice, values: npt.NDArray[np.float32]) -> Tensor:
    """A tensor over pinned memory with these values."""
    tensor = device.allocate_host(values.size, mstype.float32).tensor(0, values.shape)
    tensor.asnumpy()[...] = values
    return tensor


def adopted(device: EmulatedDevice, values: npt.NDArray[np.float32]) -> Tensor:
    """A tensor on the device with these values, known to every stream."""
    tensor = Tensor(values)
    device.adopt([tensor])
    device.synchronize()
    return tensor
