"""Ascend through MindSpore's own runtime: thin, because nothing here can be tried without one.

Known of MindSpore 2.10, from its documentation and sources:
- `copy_(non_blocking=True)` between host and device is asynchronous only if the host tensor is
  contiguous with offset 0; it copies from and to that tensor's memory itself, so tensors over
  pieces of one pinned allocation (see `host_buffer`) will do.
- `untyped_storage().resize_` first waits until everything issued has been dispatched, and says
  nothing when memory runs out.
- There is no `record_stream`: memory is given back when the caller's stream is behind its use.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mindspore import Tensor, mint, runtime
from mindspore import dtype as mstype

from swapopt_common import HostMemoryError
from swapopt_mindspore.device import Arena, Device, DeviceMemory, DeviceMemoryError
from swapopt_mindspore.host_buffer import Bytes, HostBuffer, nbytes_of
from swapopt_mindspore.streams import Event, Stream


class AscendDevice(Device):
    """The Ascend device of this process (MindSpore uses one per process)."""

    name = "Ascend"

    def __init__(self) -> None:
        self.h2d: Stream = runtime.Stream()
        self.d2h: Stream = runtime.Stream()

    def compute_stream(self) -> Stream:
        """Return the caller's current stream."""
        stream: Stream = runtime.current_stream()
        return stream

    def new_event(self, *, timing: bool = False) -> Event:
        """Make an event."""
        return runtime.Event(enable_timing=timing)

    def synchronize(self) -> None:
        """Block the host until the device is idle."""
        runtime.synchronize()

    def updating(
        self, operation: str, *, reads: Iterable[Tensor], writes: Iterable[Tensor], launches: int
    ) -> AbstractContextManager[None]:
        """Change nothing: operators run on the caller's current stream by themselves."""
        del operation, reads, writes, launches
        return nullcontext()

    def holds(self, tensor: Tensor) -> bool:
        """Say whether the tensor is on an Ascend; before its first use it may be on the host."""
        return bool(tensor.device.startswith("Ascend"))

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: MindSpore knows its memory."""

    def empty(self, shape: tuple[int, ...], dtype: mstype.Type) -> Tensor:
        """Allocate a tensor."""
        with _memory_for(nbytes_of(shape, dtype)):
            tensor: Tensor = mint.empty(shape, dtype=dtype, device="Ascend")
            _check(tensor)
        return tensor

    def release(self, tensor: Tensor) -> None:
        """Empty the tensor's storage."""
        tensor.untyped_storage().resize_(0)

    def restore(self, tensor: Tensor) -> None:
        """Fill the tensor's storage with memory again."""
        nbytes = nbytes_of(tensor.shape, tensor.dtype)
        with _memory_for(nbytes):
            tensor.untyped_storage().resize_(nbytes)
            _check(tensor)

    def new_arena(self, nbytes: int) -> Arena:
        """Make an empty arena."""
        return _AscendArena(self, nbytes)

    def allocate_host(self, numel: int, dtype: mstype.Type) -> HostBuffer:
        """Allocate pinned memory."""
        return HostBuffer(_pinned_bytes(nbytes_of((numel,), dtype)), dtype)

    def copy(
        self, stream: Stream, destination: Tensor, source: Tensor, *, blocking: bool = False
    ) -> None:
        """Issue the copy to ``stream``."""
        with runtime.StreamCtx(stream):
            destination.copy_(source, non_blocking=not blocking)

    def keep_until(self, event: Event, buffers: set[HostBuffer]) -> None:
        """Wait for the event: what is left of a step's copies is short."""
        event.synchronize()

    def memory(self) -> DeviceMemory:
        """Return MindSpore's figures and our own of host memory."""
        return DeviceMemory(
            allocated_bytes=runtime.memory_allocated(),
            peak_allocated_bytes=runtime.max_memory_allocated(),
            pinned_bytes=HostBuffer.alive_nbytes,
        )

    def reset_peak(self) -> None:
        """Reset MindSpore's peak."""
        runtime.reset_max_memory_allocated()


class _AscendArena(Arena):
    def __init__(self, device: AscendDevice, nbytes: int) -> None:
        super().__init__(nbytes)
        self._device = device
        self._bytes: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self._bytes is None or self._bytes.untyped_storage().nbytes() == 0

    def allocate(self) -> None:
        assert self.is_empty, "an arena is freed before it is allocated again"
        if self._bytes is None:
            self._bytes = self._device.empty((self.nbytes,), mstype.uint8)
        else:
            self._device.restore(self._bytes)

    def free(self) -> None:
        if self._bytes is not None:
            self._device.release(self._bytes)

    def _view(self, dtype: mstype.Type, offset_bytes: int, shape: tuple[int, ...]) -> Tensor:
        assert self._bytes is not None, "views are made while the arena has memory"
        piece = self._bytes.narrow(0, offset_bytes, nbytes_of(shape, dtype))
        view: Tensor = piece.view(dtype).view(shape)
        return view


def _pinned_bytes(nbytes: int) -> Bytes:
    """Allocate pinned memory, zeros, and return the very memory as an array."""
    try:
        pinned = mint.empty((nbytes,), dtype=mstype.uint8, device="cpu", pin_memory=True)
        memory: Bytes = pinned.asnumpy()
        address = pinned.data_ptr()
    except RuntimeError as error:
        raise HostMemoryError(
            f"Pinned host memory ran out: {nbytes:,} bytes were asked for in one buffer, "
            f"{HostBuffer.alive_nbytes:,} bytes are held by swapped states. Swap fewer states "
            "(state_keys, a larger min_numel), raise the host's limit on locked memory "
            "(ulimit -l), or give each rank more host memory."
        ) from error
    if memory.ctypes.data != address:
        raise HostMemoryError(
            "MindSpore handed out a copy of its pinned memory where the memory itself was "
            "expected (Tensor.asnumpy of a tensor made with pin_memory=True). This version of "
            "MindSpore cannot serve swapopt; 2.10 is the one it was written for."
        )
    memory.fill(0)
    return memory


@contextmanager
def _memory_for(nbytes: int) -> Iterator[None]:
    """Say what was asked for when MindSpore fails to allocate it."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceMemoryError(f"{nbytes:,} bytes of Ascend memory could not be had") from error


def _check(tensor: Tensor) -> None:
    if tensor.data_ptr() == 0:  # waits until the allocation has been dispatched
        raise RuntimeError("MindSpore returned no memory")


@functools.cache
def ascend_device() -> AscendDevice:
    """Return the process's device, made at first use: streams are made once."""
    return AscendDevice()
