"""Which device swaps: Ascend where MindSpore runs on it, or an emulated one that was chosen.

An emulated device is used only where somebody asked for it, by `using` (an `EmulatedDevice` is a
context manager that does the same) or by handing it to `swap_optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mindspore.context import get_context

from swapopt_mindspore.ascend import ascend_device
from swapopt_mindspore.device import Device

_chosen: list[Device] = []


@contextmanager
def using(device: Device) -> Iterator[None]:
    """Let optimizers that are wrapped inside the block use ``device``; blocks may be nested."""
    _chosen.append(device)
    try:
        yield
    finally:
        _chosen.pop()  # not by value: blocks of one device may lie inside one another


def resolve_device() -> Device | None:
    """Return the device that optimizers wrapped now swap on.

    That is the innermost one chosen with `using`, else Ascend where it is MindSpore's target,
    else none: nothing swaps then.
    """
    if _chosen:
        return _chosen[-1]
    return ascend_device() if get_context("device_target") == "Ascend" else None
