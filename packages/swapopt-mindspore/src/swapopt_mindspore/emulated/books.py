"""The books of device and pinned memory: what is allocated, by whom, and how much there may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swapopt_mindspore.device import DeviceMemoryError
from swapopt_mindspore.emulated.addresses import AddressMap, ByteRange
from swapopt_mindspore.host_buffer import Bytes

_BLOCK_BYTES = 512
"""Device allocations are rounded up to this, as MindSpore's own pool does on Ascend."""

Place = Literal["device", "pinned"]


# eq=False: allocations are identities.
@dataclass(eq=False)
class Allocation:
    """Memory of the process that stands for device or pinned memory.

    Attributes:
        memory: the bytes; kept even while they are given back, since tensors still point there.
        place: what it stands for.
        is_live: whether it is allocated now, or given back.
    """

    memory: Bytes
    place: Place
    is_live: bool = False

    @property
    def where(self) -> ByteRange:
        """Its addresses."""
        begin = self.memory.ctypes.data
        return ByteRange(begin, begin + self.memory.nbytes)


class MemoryBooks:
    """What is allocated; addresses lead to allocations.

    Args:
        capacity_nbytes: of the device, or None for no limit.
        pinned_limit_nbytes: of pinned memory, or None for no limit.
    """

    def __init__(self, capacity_nbytes: int | None, pinned_limit_nbytes: int | None) -> None:
        self._capacity_nbytes = capacity_nbytes
        self._pinned_limit_nbytes = pinned_limit_nbytes
        self._allocations: AddressMap[Allocation] = AddressMap()
        self.device_nbytes = 0
        self.peak_device_nbytes = 0
        self.pinned_nbytes = 0

    def enter(self, allocation: Allocation) -> None:
        """Know memory, which is not allocated yet."""
        self._allocations.add(allocation.where, allocation)

    def strike(self, allocation: Allocation) -> None:
        """Forget memory, which has been given back."""
        assert not allocation.is_live
        self._allocations.remove(allocation.where)

    def find(self, where: ByteRange) -> Allocation | None:
        """Return the allocation that these bytes are part of, live or given back."""
        found = self._allocations.find(where.begin)
        return None if found is None else found[1]

    def overlaps(self, where: ByteRange) -> bool:
        """Say whether any of these bytes is known."""
        return self._allocations.overlapping(where) is not None

    def take(self, allocation: Allocation) -> None:
        """Allocate.

        Raises:
            DeviceMemoryError: the device has not so much.
            MemoryError: the limit of pinned memory is reached.
        """
        nbytes = allocation.memory.nbytes
        if allocation.place == "pinned":
            self._check_pinned(nbytes)
            self.pinned_nbytes += nbytes
        else:
            self._check_capacity(_rounded(nbytes))
            self.device_nbytes += _rounded(nbytes)
            self.peak_device_nbytes = max(self.peak_device_nbytes, self.device_nbytes)
        allocation.is_live = True

    def give_back(self, allocation: Allocation) -> None:
        """Free."""
        if allocation.place == "pinned":
            self.pinned_nbytes -= allocation.memory.nbytes
        else:
            self.device_nbytes -= _rounded(allocation.memory.nbytes)
        allocation.is_live = False

    def reset_peak(self) -> None:
        """Let the peak start again from what is allocated now."""
        self.peak_device_nbytes = self.device_nbytes

    def _check_capacity(self, nbytes: int) -> None:
        capacity = self._capacity_nbytes
        if capacity is not None and self.device_nbytes + nbytes > capacity:
            raise DeviceMemoryError(
                f"the emulated device has {capacity:,} bytes, {self.device_nbytes:,} of them are "
                f"allocated, and {nbytes:,} more were asked for"
            )

    def _check_pinned(self, nbytes: int) -> None:
        limit = self._pinned_limit_nbytes
        if limit is not None and self.pinned_nbytes + nbytes > limit:
            raise MemoryError(
                f"{limit:,} bytes may be pinned, {self.pinned_nbytes:,} are, and {nbytes:,} more "
                "were asked for"
            )


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
