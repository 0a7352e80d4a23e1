"""Host mirrors between steps: what they are filled from, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from swapopt_common import SwapConfigError
from swapopt_mindspore.device import Device
from swapopt_mindspore.slots import MindSporeSlot
from swapopt_mindspore.streams import Edge, Event, Stream, wait

Value = tuple[MindSporeSlot, Tensor]
"""A swapped state, and the tensor that holds what is to be in its mirror."""

LoadedValue = tuple[MindSporeSlot, npt.NDArray[np.generic]]
"""A swapped state, and an array of its shape and dtype."""


class MirrorCopies:
    """Copies between mirrors and the device outside of steps; blocks the host until they are done.

    Args:
        device: where the device tensors are.
        synchronous: make every single copy block.
    """

    def __init__(self, device: Device, *, synchronous: bool) -> None:
        self._device = device
        self._synchronous = synchronous

    def fetch(self, values: Sequence[Value]) -> None:
        """Copy device tensors into mirrors; blocks the host until that is done."""
        device, event = self._device, self._device.new_event()
        event.record(device.compute_stream())
        wait(device.d2h, event, Edge.SETTLED)
        self._copy_all(device.d2h, event, [(slot.mirror(), tensor) for slot, tensor in values])

    def restore(self, slots: Sequence[MindSporeSlot]) -> None:
        """Let the optimizer's own tensors be device tensors with the mirrors' values.

        Raises:
            DeviceMemoryError: they do not fit; nothing has changed.
        """
        device, event = self._device, self._device.new_event()
        restored = [(slot, device.empty(slot.shape, slot.dtype)) for slot in slots]
        event.record(device.compute_stream())
        wait(device.h2d, event, Edge.ALLOCATED)
        self._copy_all(device.h2d, event, [(tensor, slot.mirror()) for slot, tensor in restored])
        for slot, tensor in restored:
            slot.home.data = tensor

    def _copy_all(
        self, stream: Stream, event: Event, copies: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Make copies, as destination and source; blocks the host until they are done."""
        try:
            for destination, source in copies:
                self._device.copy(stream, destination, source, blocking=self._synchronous)
            event.record(stream)
            event.synchronize()
        except BaseException:
            # No copy may be under way whose memory a failure sets free.
            self._device.synchronize()
            raise


def expose_mirrors(slots: Sequence[MindSporeSlot], device: Device | None = None) -> None:
    """Let the optimizer's own tensors be the mirrors; with a device, free what they were."""
    for slot in slots:
        home = slot.home
        former = home.data  # a tensor of its own that keeps the memory for a moment
        home.data = slot.mirror()
        if device is not None:
            device.release(former)


def check_fits(slot: MindSporeSlot, value: Tensor) -> None:
    """Raise SwapConfigError unless a tensor can be the state's value."""
    if tuple(value.shape) != slot.shape or value.dtype != slot.dtype:
        raise SwapConfigError(
            f"{slot.parameter.name} was replaced by a tensor of shape {tuple(value.shape)} and "
            f"dtype {value.dtype}; the optimizer's state is of shape {slot.shape} and dtype "
            f"{slot.dtype}. Load states that fit, or wrap a new optimizer."
        )
