"""Pinned host memory of exact size, and the host mirrors that live in it.

torch's pinned allocators round every request up to a power of two. Where the device lets us
register memory of our own (see `device_traits`) a region is an anonymous mapping, a whole number
of pages, registered with the device: the kernel hands it out as zeros, so states are born there
without being written. Elsewhere a region is one pinned allocation.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import warnings
import weakref
from pathlib import Path
from typing import TypeAlias

import torch

from swapopt_common import HostMemoryError
from swapopt_torch.device_traits import HostRegistrar, pinned_block_nbytes, traits_of

SLOT_ALIGNMENT_BYTES = 64


# What torch.frombuffer takes; a host mirror keeps it, and so the memory, alive.
_Buffer: TypeAlias = "mmap.mmap | ctypes.Array[ctypes.c_char]"


class _HeldBytes:
    """Bytes pinned for swapped states in this process, for messages."""

    total = 0


class _RegisteredMapping(mmap.mmap):
    """An anonymous mapping registered with a device until the last mirror over it is gone."""

    _registrar: HostRegistrar | None = None
    _device = torch.device("cpu")
    _address = 0
    _owner_pid = 0

    def pin(self, registrar: HostRegistrar, device: torch.device) -> None:
        """Register the mapping; raises whatever the device's own call raises."""
        self._device = device
        self._owner_pid = os.getpid()
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        registrar.register(self._address, len(self))
        # Nothing may come between these: memory that goes away while it is registered is a trap.
        self._registrar = registrar
        _HeldBytes.total += len(self)

    def __del__(self) -> None:
        # Runs before the mapping goes away. A copy may still be under way; unpinning under it
        # would be undefined, so the device is drained first. A forked child owns no device.
        if self._registrar is not None and self._owner_pid == os.getpid():
            _synchronize(self._device)
            self._registrar.unregister(self._address)
            _HeldBytes.total -= len(self)


class _PinnedBlock:
    """A block of torch's pinned allocator, held until the last mirror over it is gone."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._memory = memory
        self._device = device
        _HeldBytes.total += pinned_block_nbytes(memory.nbytes)

    def __del__(self) -> None:
        # The allocator looks blocks up by the tensor that copies, and mirrors are not its own: it
        # has not seen their copies, and would lend the block out again under one of them.
        _synchronize(self._device)
        _HeldBytes.total -= pinned_block_nbytes(self._memory.nbytes)


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize(device)


def _registered_buffer(nbytes: int, registrar: HostRegistrar, device: torch.device) -> _Buffer:
    pages = -(-nbytes // mmap.PAGESIZE)
    mapping = _RegisteredMapping(-1, pages * mmap.PAGESIZE)
    mapping.pin(registrar, device)
    return mapping


def _allocated_buffer(nbytes: int, device: torch.device) -> _Buffer:
    memory = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    buffer = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
    buffer._owner = _PinnedBlock(memory, device)  # type: ignore[attr-defined]
    return buffer


class HostRegion:
    """Pinned host memory for states of one dtype, zeros at birth.

    Attributes:
        flat: the whole region as a 1-D tensor of ``numel`` elements; what the pipeline copies
            from and to. Its memory lives as long as the region or any mirror over it.
    """

    def __init__(self, buffer: _Buffer, dtype: torch.dtype, numel: int) -> None:
        self._buffer = buffer
        self._lent: weakref.ref[ctypes.Array[ctypes.c_char]] | None = None
        self.flat = torch.frombuffer(buffer, dtype=dtype, count=numel)

    def mirror(self, host_offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a host mirror: a tensor with a storage of its own over a piece of the region.

        Never a view of the region: saving or copying a view would take the whole region along.

        Args:
            host_offset: offset of its first element, in elements.
            shape: its shape; it is contiguous.
        """
        return self._tensor_over(self._buffer, host_offset, shape)

    def lend(self, host_offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return another tensor over a mirror's memory, for a snapshot.

        As long as its storage lives, `is_lent` is true, and nobody may write to the region.
        """
        lent = self._lent() if self._lent is not None else None
        if lent is None:
            nbytes = self.flat.nbytes
            lent = (ctypes.c_char * nbytes).from_buffer(self._buffer)
            self._lent = weakref.ref(lent)
        return self._tensor_over(lent, host_offset, shape)

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of pinned memory the region takes: whole pages, or a block of the allocator."""
        nbytes = len(self._buffer)
        if isinstance(self._buffer, _RegisteredMapping):
            return nbytes
        return 0 if isinstance(self._buffer, mmap.mmap) else pinned_block_nbytes(nbytes)

    @property
    def is_lent(self) -> bool:
        """Whether a snapshot over this region is alive."""
        return self._lent is not None and self._lent() is not None

    def _tensor_over(
        self, buffer: _Buffer, host_offset: int, shape: tuple[int, ...]
    ) -> torch.Tensor:
        dtype = self.flat.dtype
        offset_bytes = host_offset * dtype.itemsize
        numel = math.prod(shape)
        flat = torch.frombuffer(buffer, dtype=dtype, count=numel, offset=offset_bytes)
        return flat.view(shape)


def allocate_region(
    dtype: torch.dtype, numel: int, device: torch.device, *, pageable_fallback: bool
) -> HostRegion:
    """Allocate and pin a region of ``numel`` elements for copies to and from ``device``.

    Args:
        dtype: of its elements.
        numel: how many.
        device: whose copy engine is to reach it.
        pageable_fallback: where it cannot be pinned, warn and go on with ordinary memory, whose
            copies block the host.

    Raises:
        HostMemoryError: the host could not provide or pin the memory.
    """
    nbytes = numel * dtype.itemsize
    registrar = traits_of(device).find_registrar(device)
    try:
        buffer = (
            _allocated_buffer(nbytes, device)
            if registrar is None
            else _registered_buffer(nbytes, registrar, device)
        )
    except (RuntimeError, OSError, MemoryError) as error:
        found = (
            f"Pinned host memory ran out: {nbytes:,} bytes were asked for in one region of "
            f"{dtype}, {_HeldBytes.total:,} bytes are held by swapped states already"
        )
        if not pageable_fallback:
            raise HostMemoryError(
                f"{found}. Swap fewer states (state_keys, a larger min_numel), raise the host's "
                "limit on locked memory (ulimit -l), give each rank more host memory, or accept "
                "slow copies with swap_optimizer(..., pageable_fallback=True)."
            ) from error
        warnings.warn(f"swapopt: {found}. They go on in pageable memory: slower.", stacklevel=2)
        buffer = mmap.mmap(-1, max(nbytes, 1))
    return HostRegion(buffer, dtype, numel)


def available_host_nbytes() -> int | None:
    """Return the bytes of host memory that can be taken without swapping to disk, if known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kibibytes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    available = kibibytes.get("MemAvailable")
    return None if available is None else int(available) * 1024


def aligned_numel(numel: int, dtype: torch.dtype) -> int:
    """Round ``numel`` up so that the next slot starts on a 64-byte boundary."""
    step = SLOT_ALIGNMENT_BYTES // dtype.itemsize
    return -(-numel // step) * step
