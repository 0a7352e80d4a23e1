"""Pinned memory and its end: the device is drained, and gets it back once, from who took it."""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable
from typing import ClassVar, TypeAlias

import torch

from swapopt_torch.device_traits import HostRegistrar, pinned_block_nbytes

logger = logging.getLogger("swapopt_torch")

_CHUNK_NBYTES = 2**30
"""Memory is made in chunks of this size, so that the log can say how far it is."""
# MADV_POPULATE_WRITE of Linux 5.14: makes pages as a write to each would, and writes nothing.
_POPULATE = 23

# What torch.frombuffer takes; a host mirror keeps it, and so the memory, alive.
Buffer: TypeAlias = "mmap.mmap | ctypes.Array[ctypes.c_char]"


class Lease:
    """Pinned memory that a device will have to take back.

    It ends with the last mirror over the memory. A copy may still be under way then, and giving
    memory back under it would be undefined, so the device is drained first. It ends before the
    device shuts down at exit, too. It never ends in a forked process, which cannot use the device.

    Args:
        device: which device.
        nbytes: bytes it pins.
    """

    total_nbytes: ClassVar[int] = 0

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._process = os.getpid()
        self._give_back: Callable[[], object] | None = None

    def begin(self, give_back: Callable[[], object]) -> None:
        """Note that the memory is pinned, and how it is given back."""
        self._give_back = give_back
        Lease.total_nbytes += self._nbytes
        _leases.add(self)
        _end_leases_at_exit()

    def end(self) -> None:
        """Give the memory back; a second time does nothing."""
        if self._give_back is None or os.getpid() != self._process:
            return
        torch.get_device_module(self._device).synchronize(self._device)
        self._give_back()
        self._give_back = None
        Lease.total_nbytes -= self._nbytes

    def __del__(self) -> None:
        self.end()


_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


@functools.cache
def _end_leases_at_exit() -> None:
    # Hooks run in the reverse order: this one, registered with the first pinned memory, before
    # that of the device, registered when it was loaded.
    atexit.register(_end_leases)


def _end_leases() -> None:
    for lease in tuple(_leases):
        lease.end()


class _RegisteredMapping(mmap.mmap):
    """An anonymous mapping that a device has registered; the lease ends before it is unmapped."""

    lease: Lease | None = None


def registered_buffer(nbytes: int, registrar: HostRegistrar, device: torch.device) -> Buffer:
    """Map at least so many bytes, whole pages of zeros, and register them.

    The kernel writes each page once, when it makes it, and nobody does so again. That takes a
    while for many GiB, and the log says how far it is.

    Raises:
        RuntimeError: the device refuses.
        OSError: the host has no memory.
    """
    pages = -(-nbytes // mmap.PAGESIZE)
    mapping = _RegisteredMapping(-1, pages * mmap.PAGESIZE, flags=registrar.mapping_flags)
    started = time.monotonic()
    if len(mapping) > _CHUNK_NBYTES and registrar.has_pages:
        _make_pages(mapping)
    pin(mapping, registrar, device)
    if len(mapping) > _CHUNK_NBYTES:
        seconds = time.monotonic() - started
        logger.info("swapopt: %s of host memory pinned in %.1f s", _gib(len(mapping)), seconds)
    return mapping


def _make_pages(mapping: mmap.mmap) -> None:
    """Let the kernel make a mapping's pages, chunk by chunk, and tell how far it is."""
    whole = _gib(len(mapping))
    logger.info("swapopt: making %s of host memory, to be pinned", whole)
    for start in range(0, len(mapping), _CHUNK_NBYTES):
        stop = min(start + _CHUNK_NBYTES, len(mapping))
        try:
            mapping.madvise(_POPULATE, start, stop - start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # An older kernel makes them when they are registered, without a word.
        logger.info("swapopt: %s of %s made", _gib(stop), whole)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def pin(mapping: _RegisteredMapping, registrar: HostRegistrar, device: torch.device) -> None:
    """Register a mapping for as long as it exists; raises whatever the registrar raises."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    lease = mapping.lease = Lease(device, len(mapping))
    registrar.register(address, len(mapping))
    # Nothing may come between these: memory that goes away while it is registered is a trap.
    lease.begin(lambda: registrar.unregister(address))


def allocated_buffer(nbytes: int, device: torch.device, *, zeroed: bool) -> Buffer:
    """Take memory from torch's pinned allocator: zeros, or whatever it holds.

    Raises:
        RuntimeError: the allocator has none left.
    """
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if zeroed:
        memory.zero_()
    buffer = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
    # The allocator knows its blocks by the tensor that copies, and mirrors are not its own: it has
    # not seen their copies, and would lend the block out again under one of them. The lease holds
    # the block until the device is drained, the buffer as long as anybody can read it.
    lease = Lease(device, pinned_block_nbytes(nbytes))
    lease.begin(lambda: memory)
    buffer.kept = memory, lease  # type: ignore[attr-defined]
    return buffer


def pinned_nbytes(buffer: Buffer) -> int:
    """Return the bytes pinned for a buffer: its pages, the allocator's block, or none."""
    if isinstance(buffer, _RegisteredMapping):
        return len(buffer)
    return 0 if isinstance(buffer, mmap.mmap) else pinned_block_nbytes(len(buffer))
