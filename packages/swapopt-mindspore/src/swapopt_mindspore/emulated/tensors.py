"""From MindSpore's tensors to the memory they stand for, and back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from mindspore import Tensor

from swapopt_mindspore.emulated.addresses import ByteRange
from swapopt_mindspore.emulated.books import Allocation, MemoryBooks, Place
from swapopt_mindspore.emulated.world import World
from swapopt_mindspore.host_buffer import Bytes, nbytes_of


def range_of(tensor: Tensor) -> ByteRange:
    """Return the bytes of a contiguous tensor, when MindSpore is done with what it was told.

    MindSpore runs operators in the background; asking for an address waits for them.
    """
    begin = tensor.data_ptr()
    return ByteRange(begin, begin + nbytes_of(tensor.shape, tensor.dtype))


class TensorBooks:
    """Which tensors are where.

    Args:
        world: the machine.
        books: its memory.
    """

    def __init__(self, world: World, books: MemoryBooks) -> None:
        self._world = world
        self._books = books
        self._adopted: dict[int, _Adoption] = {}
        self._on_host = _KnownTensors()

    def allocate(self, nbytes: int, place: Place) -> Bytes:
        """Allocate memory that is freed when no tensor over it is left."""
        allocation = Allocation(np.empty(nbytes, np.uint8), place)
        self._world.take(allocation)
        return self.enter(allocation)

    def enter(self, allocation: Allocation) -> Bytes:
        """Know an allocation; return its bytes, which lead back to it as long as they exist."""
        self._books.enter(allocation)
        loan = _Loan(allocation.memory)
        # Not at exit: then nobody is left to ask about memory.
        weakref.finalize(loan, self._world.dies, allocation).atexit = False
        return np.asarray(loan)

    def keep_on_host(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors be on the host until `bring_in`."""
        for tensor in tensors:
            self._on_host.add(tensor)

    def bring_in(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors that were kept on the host be on the device from now on."""
        for tensor in tensors:
            if tensor in self._on_host:
                self._on_host.discard(tensor)
                self.adopt(tensor)

    def adopt(self, tensor: Tensor) -> None:
        """Count a tensor that MindSpore allocated, unless it is on the host or counted already.

        Tensors that are not contiguous are left out.

        Raises:
            DeviceMemoryError: it does not fit.
            ValueError: only a part of its memory is known.
        """
        where = range_of(tensor)
        if tensor in self._on_host or where.nbytes == 0 or not tensor.is_contiguous():
            return
        self._forget_moved(tensor, where)
        if self._books.find(where) is not None:
            return
        if self._books.overlaps(where):
            raise ValueError(
                f"a tensor of shape {tensor.shape} is adopted after a view of it was: adopt the "
                "whole tensor first"
            )
        # The array keeps the memory where it is, should MindSpore let go of it.
        memory = tensor.asnumpy().reshape(-1).view(np.uint8)
        allocation = Allocation(memory, "device")
        self._world.take(allocation, keep_content=True)
        self._books.enter(allocation)
        farewell = weakref.finalize(tensor, self._part_with, id(tensor))
        farewell.atexit = False
        self._adopted[id(tensor)] = _Adoption(allocation, farewell)

    def place_of(self, tensor: Tensor) -> Place:
        """Return where a tensor is; unknown ones are on the device."""
        return self._place(tensor, self._books.find(range_of(tensor)))

    def owned_by(self, tensor: Tensor) -> Allocation:
        """Return the device allocation that is this tensor's alone.

        Raises:
            ValueError: it has none.
        """
        where = range_of(tensor)
        allocation = self._books.find(where)
        if allocation is None or allocation.place != "device" or allocation.where != where:
            raise ValueError(
                f"a tensor of shape {tensor.shape} is released or restored that owns no device "
                "memory: it was not adopted, or is a view"
            )
        return allocation

    def usable(self, operation: str, tensor: Tensor, place: Place) -> ByteRange:
        """Return the bytes of a tensor that is used where it is.

        Raises:
            RuntimeError: it is elsewhere, or its memory was given back.
        """
        where = range_of(tensor)
        allocation = self._books.find(where)
        if self._place(tensor, allocation) != place:
            raise RuntimeError(
                f"{operation}: a tensor of shape {tensor.shape} is needed in {place} memory and "
                "is not there"
            )
        if allocation is not None and not allocation.is_live:
            raise RuntimeError(
                f"{operation}: a tensor of shape {tensor.shape} is used whose memory was released"
            )
        return where

    def _place(self, tensor: Tensor, allocation: Allocation | None) -> Place:
        if tensor in self._on_host:
            return "pinned"
        return "device" if allocation is None else allocation.place

    def _forget_moved(self, tensor: Tensor, where: ByteRange) -> None:
        """MindSpore may have given an adopted tensor other memory since (``set_data``)."""
        adoption = self._adopted.get(id(tensor))
        if adoption is not None and adoption.allocation.where != where:
            adoption.farewell.detach()
            self._part_with(id(tensor))

    def _part_with(self, identity: int) -> None:
        self._world.dies(self._adopted.pop(identity).allocation)


class _Adoption(NamedTuple):
    allocation: Allocation
    farewell: weakref.finalize[[int], Tensor]


class _Loan:
    """Lends memory to arrays; its end is the end of the last of them."""

    def __init__(self, memory: Bytes) -> None:
        self.__array_interface__ = memory.__array_interface__


class _KnownTensors:
    """Tensors by identity: their own equality compares elements. They are not kept alive."""

    def __init__(self) -> None:
        self._tensors: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return self._tensors.get(id(tensor)) is tensor

    def add(self, tensor: Tensor) -> None:
        self._tensors[id(tensor)] = tensor

    def discard(self, tensor: Tensor) -> None:
        del self._tensors[id(tensor)]
