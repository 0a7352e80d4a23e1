"""Pinned host memory of exact size, and the tensors over pieces of it."""

from __future__ import annotations

import functools
import math
import weakref
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from mindspore import Tensor
from mindspore import dtype as mstype

Bytes = npt.NDArray[np.uint8]


@functools.cache
def numpy_dtype(dtype: mstype.Type) -> np.dtype[np.generic]:
    """Return numpy's name of a MindSpore dtype, bfloat16 included."""
    found: np.dtype[np.generic] = Tensor([0], dtype).asnumpy().dtype
    return found


def nbytes_of(shape: tuple[int, ...], dtype: mstype.Type) -> int:
    """Return the bytes of a contiguous tensor."""
    return math.prod(shape) * numpy_dtype(dtype).itemsize


def tensor_over(memory: Bytes, dtype: mstype.Type, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that is this memory: a storage of its own, of exactly its size, offset 0.

    The memory lives as long as the tensor.
    """
    tensor: Tensor = Tensor.from_numpy(memory.view(numpy_dtype(dtype)).reshape(shape))
    return tensor


class HostBuffer:
    """Host memory for states of one dtype. Made by `Device.allocate_host`, zeros at birth.

    Its memory lives as long as the buffer or any tensor over it.

    Args:
        memory: the bytes; whoever made them sees to it that they are pinned.
        dtype: of the buffer's elements.

    Attributes:
        dtype: of its elements.
        numel: how many there are.
    """

    alive_nbytes: ClassVar[int] = 0
    """Bytes of the buffers that are alive in this process."""

    def __init__(self, memory: Bytes, dtype: mstype.Type) -> None:
        self._memory = memory
        self._itemsize = numpy_dtype(dtype).itemsize
        self._lent: weakref.ref[Bytes] | None = None
        self.dtype = dtype
        self.numel = memory.nbytes // self._itemsize
        HostBuffer.alive_nbytes += memory.nbytes
        # The array dies with the last tensor over it, which may outlive the buffer.
        weakref.finalize(memory, _forget, memory.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._memory.nbytes

    def tensor(self, host_offset: int, shape: tuple[int, ...]) -> Tensor:
        """Return a contiguous tensor over a piece of the buffer: a host mirror, or a run of them.

        Equal arguments give tensors over the same memory. It is never a view of the buffer:
        MindSpore copies between host and device only where the host tensor has offset 0, and
        saving a view would take the whole buffer along. The host may read or write it while no
        copy from or to it is under way.

        Args:
            host_offset: its first element, counted in elements.
            shape: its shape.

        Raises:
            ValueError: the piece does not lie inside the buffer.
        """
        return tensor_over(self._memory[self._bytes_of(host_offset, shape)], self.dtype, shape)

    @property
    def is_lent(self) -> bool:
        """Whether a snapshot over this memory is alive; nobody may write to it then."""
        return self._lent is not None and self._lent() is not None

    def lend(self, host_offset: int, shape: tuple[int, ...]) -> Tensor:
        """Return another tensor over a piece of the buffer, for a snapshot.

        As long as it, or anything that shares its memory, is alive, `is_lent` is true.

        Args:
            host_offset: its first element, counted in elements.
            shape: its shape.
        """
        lent = self._lent() if self._lent is not None else None
        if lent is None:
            # Over a memoryview: pieces of it keep this array alive, and not only its memory.
            lent = np.frombuffer(self._memory.data, np.uint8)
            self._lent = weakref.ref(lent)
        return tensor_over(lent[self._bytes_of(host_offset, shape)], self.dtype, shape)

    def write(self, host_offset: int, values: npt.NDArray[np.generic]) -> None:
        """Let a piece of the buffer hold these values, of its dtype; no copy may be under way."""
        piece = self._memory[self._bytes_of(host_offset, values.shape)]
        piece.view(numpy_dtype(self.dtype)).reshape(values.shape)[...] = values

    def take_over(self, other: HostBuffer) -> None:
        """Copy what another buffer of the same size and dtype holds; blocks the host."""
        self._memory[...] = other._memory

    def _bytes_of(self, host_offset: int, shape: tuple[int, ...]) -> slice:
        begin = host_offset * self._itemsize
        end = begin + nbytes_of(shape, self.dtype)
        if not 0 <= begin <= end <= self.nbytes:
            raise ValueError(
                f"a host buffer of {self.numel} elements holds no piece of shape {shape} at "
                f"element {host_offset}"
            )
        return slice(begin, end)


def _forget(nbytes: int) -> None:
    HostBuffer.alive_nbytes -= nbytes
