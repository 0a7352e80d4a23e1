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
        begin = host_offset * self._itemsize
        end = begin + nbytes_of(shape, self.dtype)
        if not 0 <= begin <= end <= self.nbytes:
            raise ValueError(
                f"a host buffer of {self.numel} elements holds no piece of shape {shape} at "
                f"element {host_offset}"
            )
        return tensor_over(self._memory[begin:end], self.dtype, shape)


def _forget(nbytes: int) -> None:
    HostBuffer.alive_nbytes -= nbytes
