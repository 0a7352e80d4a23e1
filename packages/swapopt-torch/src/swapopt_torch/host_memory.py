"""Pinned host memory of exact size, and the host mirrors that live in it.

torch's pinned allocators round every request up to a power of two. Where the device lets us
register memory of our own (CUDA, the virtual accelerator) a region is an anonymous mapping, a
whole number of pages, registered with the device: the kernel hands it out as zeros, so states
are born there without being written. Elsewhere a region is one pinned allocation.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from swapopt_common import HostMemoryError

SLOT_ALIGNMENT_BYTES = 64


class _Registrar(NamedTuple):
    """How one kind of device pins and unpins memory that is already mapped (address, bytes)."""

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]
    synchronize: Callable[[], None]


# What torch.frombuffer takes; a host mirror keeps it, and so the memory, alive.
_Buffer: TypeAlias = "mmap.mmap | ctypes.Array[ctypes.c_char]"


class _HeldBytes:
    """Bytes pinned for swapped states in this process, for messages."""

    total = 0


class _RegisteredMapping(mmap.mmap):
    """An anonymous mapping registered with a device until the last mirror over it is gone."""

    _registrar: _Registrar | None = None
    _address = 0

    def pin(self, registrar: _Registrar) -> None:
        """Register the mapping; raises whatever the device's own call raises."""
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        registrar.register(self._address, len(self))
        # Nothing may come between these: memory that goes away while it is registered is a trap.
        self._registrar = registrar
        _HeldBytes.total += len(self)

    def __del__(self) -> None:
        # Runs before the mapping goes away. A copy may still be under way; unpinning under it
        # would be undefined, so the device is drained first.
        if self._registrar is not None:
            self._registrar.synchronize()
            self._registrar.unregister(self._address)
            _HeldBytes.total -= len(self)


def _cuda_registrar(device: torch.device) -> _Registrar:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    portable = 1  # cudaHostRegisterPortable: pinned for every context of the process

    def check(code: int) -> None:
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister/Unregister failed with error {int(code)}")

    return _Registrar(
        lambda address, nbytes: check(runtime.cudaHostRegister(address, nbytes, portable)),
        lambda address: check(runtime.cudaHostUnregister(address)),
        lambda: torch.cuda.synchronize(device),
    )


def _registrar(device: torch.device) -> _Registrar | None:
    """Return how ``device`` registers memory, or None where it cannot."""
    if device.type == "cuda":
        return _cuda_registrar(device)
    module = torch.get_device_module(device)
    if hasattr(module, "host_register") and hasattr(module, "host_unregister"):
        return _Registrar(
            module.host_register, module.host_unregister, lambda: module.synchronize(device)
        )
    return None


def _registered_buffer(nbytes: int, registrar: _Registrar) -> _Buffer:
    pages = -(-nbytes // mmap.PAGESIZE)
    mapping = _RegisteredMapping(-1, pages * mmap.PAGESIZE)
    mapping.pin(registrar)
    return mapping


def _allocated_buffer(nbytes: int) -> _Buffer:
    memory = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    buffer = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
    buffer._owner = memory  # type: ignore[attr-defined]  # keeps the pinned block alive
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
        """Bytes of pinned memory the region takes: a whole number of pages where registered."""
        return len(self._buffer)

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


def allocate_region(dtype: torch.dtype, numel: int, device: torch.device) -> HostRegion:
    """Allocate and pin a region of ``numel`` elements for copies to and from ``device``.

    Raises:
        HostMemoryError: the host could not provide or pin the memory.
    """
    nbytes = numel * dtype.itemsize
    registrar = _registrar(device)
    try:
        buffer = (
            _allocated_buffer(nbytes)
            if registrar is None
            else _registered_buffer(nbytes, registrar)
        )
    except (RuntimeError, OSError, MemoryError) as error:
        raise HostMemoryError(
            f"Pinned host memory ran out: {nbytes:,} bytes were asked for in one region of "
            f"{dtype}, {_HeldBytes.total:,} bytes are held by swapped states already. Swap fewer "
            "states (state_keys, a larger min_numel), raise the host's limit on locked memory "
            "(ulimit -l), or give each rank more host memory."
        ) from error
    return HostRegion(buffer, dtype, numel)


def aligned_numel(numel: int, dtype: torch.dtype) -> int:
    """Round ``numel`` up so that the next slot starts on a 64-byte boundary."""
    step = SLOT_ALIGNMENT_BYTES // dtype.itemsize
    return -(-numel // step) * step
