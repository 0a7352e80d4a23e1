"""Pinned host memory of exact size, and the host mirrors that live in it.

torch's pinned allocators round every request up to a power of two. Where the device lets us
register memory of our own (see `device_traits`) a region is an anonymous mapping, a whole number
of pages, registered with the device: the kernel hands it out as zeros, so states are born there
without being written. Elsewhere a region is one pinned allocation, and states are divided among
several regions so that rounding costs little (see `cutting`).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import warnings
import weakref
from pathlib import Path

import torch

from swapopt_common import HostMemoryError
from swapopt_torch.device_traits import traits_of
from swapopt_torch.pinning import (
    Buffer,
    Lease,
    allocated_buffer,
    pinned_nbytes,
    registered_buffer,
)

SLOT_ALIGNMENT_BYTES = 64


class HostRegion:
    """Pinned host memory for states of one dtype, zeros at birth.

    Attributes:
        flat: the whole region as a 1-D tensor of ``numel`` elements; what the pipeline copies
            from and to. Its memory lives as long as the region or any mirror over it.
    """

    def __init__(self, buffer: Buffer, dtype: torch.dtype, numel: int) -> None:
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
        return pinned_nbytes(self._buffer)

    @property
    def is_lent(self) -> bool:
        """Whether a snapshot over this region is alive."""
        return self._lent is not None and self._lent() is not None

    def _tensor_over(
        self, buffer: Buffer, host_offset: int, shape: tuple[int, ...]
    ) -> torch.Tensor:
        dtype = self.flat.dtype
        offset_bytes = host_offset * dtype.itemsize
        numel = math.prod(shape)
        flat = torch.frombuffer(buffer, dtype=dtype, count=numel, offset=offset_bytes)
        return flat.view(shape)


def allocate_region(
    dtype: torch.dtype,
    numel: int,
    device: torch.device,
    *,
    pageable_fallback: bool,
    zeroed: bool = True,
) -> HostRegion:
    """Allocate and pin a region of ``numel`` elements for copies to and from ``device``.

    Args:
        dtype: of its elements.
        numel: how many.
        device: whose copy engine is to reach it.
        pageable_fallback: where it cannot be pinned, warn and go on with ordinary memory, whose
            copies block the host.
        zeroed: whether it must be zeros; False where all of it is written soon, and memory that
            does not come as zeros by itself need not be written twice.

    Raises:
        HostMemoryError: the host could not provide or pin the memory.
    """
    nbytes = numel * dtype.itemsize
    registrar = traits_of(device).find_registrar(device)
    try:
        buffer = (
            allocated_buffer(nbytes, device, zeroed=zeroed)
            if registrar is None
            else registered_buffer(nbytes, registrar, device)
        )
    except (RuntimeError, OSError, MemoryError) as error:
        found = (
            f"Pinned host memory ran out: {nbytes:,} bytes were asked for in one region of "
            f"{dtype}, {Lease.total_nbytes:,} bytes are held by swapped states and by what "
            "state_dict() returned and is still alive"
        )
        if not pageable_fallback:
            raise HostMemoryError(
                f"{found}. Drop old checkpoints, swap fewer states (state_keys, a larger "
                "min_numel), raise the host's limit on locked memory (ulimit -l), give each rank "
                "more host memory, or accept slow copies with swap_optimizer(..., "
                "pageable_fallback=True)."
            ) from error
        warnings.warn(f"swapopt: {found}. They go on in pageable memory: slower.", stacklevel=2)
        buffer = mmap.mmap(-1, max(nbytes, 1))
    return HostRegion(buffer, dtype, numel)


def registers_memory(device: torch.device) -> bool:
    """Say whether a region is pinned at its exact size, rather than taken in rounded blocks."""
    return traits_of(device).find_registrar(device) is not None


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
