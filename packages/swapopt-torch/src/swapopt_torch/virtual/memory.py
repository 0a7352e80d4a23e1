"""Limits and figures of device memory and pinned host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._native import native

_MOST_BYTES = 2**63 - 1


@dataclass(frozen=True)
class HostMemory:
    """Pinned host memory, in bytes, now and at the highest since the peaks were last reset.

    ``pinned_allocated_bytes`` is what the pinned allocator takes: every request rounded up to a
    power of two, as accelerators' allocators do. Registered regions count exactly.
    """

    pinned_requested_bytes: int
    pinned_allocated_bytes: int
    registered_bytes: int
    peak_pinned_requested_bytes: int
    peak_pinned_allocated_bytes: int
    peak_registered_bytes: int


def host_memory(*, reset_peaks: bool = False) -> HostMemory:
    """The figures now; with ``reset_peaks``, the peaks start again from here."""
    figures = HostMemory(*native().host_memory())
    if reset_peaks:
        native().reset_host_peaks()
    return figures


def set_pinned_limit(nbytes: int | None) -> None:
    """Pinning or registering beyond `nbytes` in all fails with RuntimeError; None: no limit.

    Raises:
        ValueError: not a whole number of bytes, or negative.
    """
    native().set_pinned_limit(checked_limit(nbytes, "nbytes"))


def set_capacity(nbytes: int | None, device: torch.device | str | int | None = None) -> None:
    """Let a device hold at most `nbytes` active bytes; None: no limit.

    Beyond it allocations raise ``torch.OutOfMemoryError``.

    Raises:
        ValueError: not a whole number of bytes, or negative.
    """
    native().set_capacity(device_index(device), checked_limit(nbytes, "nbytes"))


def device_index(device: torch.device | str | int | None = None) -> int:
    """The index that `device` means; the current device for None or a device without index.

    Raises:
        ValueError: a device of another type, or one that does not exist.
    """
    index = device if isinstance(device, int) else _described_index(device)
    if index is None:
        return native().current_device()
    count = native().device_count()
    if not 0 <= index < count:
        raise ValueError(f"expected a device index from 0 to {count - 1}, found {device}")
    return index


def _described_index(device: torch.device | str | None) -> int | None:
    if device is None:
        return None
    described = torch.device(device)
    if described.type != "virtual":
        raise ValueError(f"expected a virtual device, found {str(device)!r}")
    index: int | None = described.index
    return index


def checked_limit(nbytes: int | None, name: str) -> int | None:
    """Return `nbytes` if it can be a limit; `name` is what the caller calls it.

    Raises:
        ValueError: it is not a whole number of bytes, or negative, or beyond 64 bits.
    """
    is_count = isinstance(nbytes, int) and not isinstance(nbytes, bool)
    if nbytes is not None and not (is_count and 0 <= nbytes <= _MOST_BYTES):
        raise ValueError(
            f"{name}: expected a number of bytes (an int from 0 to 2**63 - 1, 8 * 2**30 for "
            f"8 GiB) or None for no limit, found {nbytes!r}"
        )
    return nbytes
