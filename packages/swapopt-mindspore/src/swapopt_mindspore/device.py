"""What swapopt needs of a device; `ascend` and `emulated` give it.

Memory that the optimizer's updates use is device memory, and the caller's stream owns it:
everything here that allocates or frees does so in the order of that stream (docs/design.md
invariant 5). Copies run on two further streams, one per direction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from mindspore import Tensor
from mindspore import dtype as mstype

from swapopt_mindspore.host_buffer import HostBuffer, nbytes_of, numpy_dtype
from swapopt_mindspore.streams import Event, Stream

ARENA_ALIGNMENT_BYTES = 512
"""Where regions of different dtypes begin inside an arena."""


class DeviceMemoryError(RuntimeError):
    """Device memory ran out; the message says how much was asked for."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory figures in bytes, now and at the highest since `Device.reset_peak`.

    Attributes:
        allocated_bytes, peak_allocated_bytes: device memory.
        pinned_bytes: host memory of the `HostBuffer`s that are alive.
    """

    allocated_bytes: int
    peak_allocated_bytes: int
    pinned_bytes: int


class Arena(ABC):
    """A block of device memory that can be given back and taken again.

    It is empty when it is made. Views share its storage: a view made once is valid whenever the
    arena is not empty, and has nothing to say (and keeps no memory) while it is.

    Args:
        nbytes: what it takes when it is allocated.

    Attributes:
        nbytes: the same.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether it has no memory now."""

    @abstractmethod
    def allocate(self) -> None:
        """Take the memory under the caller's current stream; its content is undefined.

        Raises:
            DeviceMemoryError: there is not so much; the arena stays empty.
        """

    @abstractmethod
    def free(self) -> None:
        """Give the memory back; nothing happens to an empty arena.

        The caller's stream (or the host) must be ordered behind every use of it.
        """

    def view(self, dtype: mstype.Type, offset_bytes: int, shape: tuple[int, ...]) -> Tensor:
        """Return a contiguous view of one element or more; the arena must not be empty.

        Args:
            dtype: of its elements.
            offset_bytes: its first byte, a multiple of the element size.
            shape: its shape.

        Raises:
            ValueError: the piece does not lie inside the arena, or is misaligned.
        """
        nbytes = nbytes_of(shape, dtype)
        if offset_bytes < 0 or nbytes == 0 or offset_bytes + nbytes > self.nbytes:
            raise ValueError(
                f"an arena of {self.nbytes} bytes holds no piece of {nbytes} bytes at byte "
                f"{offset_bytes}"
            )
        if offset_bytes % numpy_dtype(dtype).itemsize:
            raise ValueError(f"byte {offset_bytes} is no place for elements of {dtype}")
        return self._view(dtype, offset_bytes, shape)

    @abstractmethod
    def _view(self, dtype: mstype.Type, offset_bytes: int, shape: tuple[int, ...]) -> Tensor:
        """Make the view, which lies inside the arena."""


class Device(ABC):
    """One device: memory, streams, copies.

    Attributes:
        name: how messages call it.
        h2d, d2h: the streams of copies to and from the device.
    """

    name: str
    h2d: Stream
    d2h: Stream

    # ------------------------------------------------------------------ order
    @abstractmethod
    def compute_stream(self) -> Stream:
        """Return the caller's current stream: updates run there, and it owns all memory."""

    @abstractmethod
    def new_event(self, *, timing: bool = False) -> Event:
        """Make an event, to be recorded; only one with ``timing`` has an elapsed time."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until every stream of the device is idle."""

    @abstractmethod
    def updating(
        self,
        operation: str,
        *,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        launches: int,
    ) -> AbstractContextManager[None]:
        """Surround the update of a batch, which runs on the caller's current stream.

        Changes nothing on a real device. An emulated one cannot see what operators touch, so
        this is where it learns of it: it checks the order of these accesses, charges their time,
        and sees to it that their effects are there at the end of the block.

        Args:
            operation: how timelines and race reports call the update.
            reads: tensors that are only read: gradients, hyperparameters held on the device.
            writes: tensors that are read and written: parameters, states, masters. Tensors that
                the device does not know are left out of account. Like ``reads``, gone through once
                at most, on entry.
            launches: operators that the update issues, for its time.
        """

    # ------------------------------------------------------------------ device memory
    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Say whether the tensor's storage is on this device; a released one is, too.

        On Ascend a tensor that no operator has used yet may be on the host still: ask again
        after its first update.
        """

    @abstractmethod
    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Tell the device of tensors that MindSpore or the user allocated on it.

        States and parameters are adopted when an optimizer is wrapped: from then on they may be
        released, restored, copied and named to `updating`. Adopting a tensor again does nothing.
        Real devices know all of their memory, and do nothing here; an emulated one counts the
        tensor's bytes until it is released or no longer exists.

        Raises:
            DeviceMemoryError: the device is too small for them.
        """

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: mstype.Type) -> Tensor:
        """Allocate a device tensor with a storage of its own under the caller's current stream.

        Its content is undefined. The caller owns it.

        Raises:
            DeviceMemoryError: there is not so much memory.
        """

    @abstractmethod
    def release(self, tensor: Tensor) -> None:
        """Give back the memory of a tensor that owns its storage; it may not be used after.

        The caller's stream (or the host) must be ordered behind every use of it. Shape and dtype
        stay as they are. A released tensor may be released again.
        """

    @abstractmethod
    def restore(self, tensor: Tensor) -> None:
        """Give a released tensor memory again, under the caller's current stream.

        Its content is undefined.

        Raises:
            DeviceMemoryError: there is not so much memory; the tensor stays released.
        """

    @abstractmethod
    def new_arena(self, nbytes: int) -> Arena:
        """Make an empty arena that takes ``nbytes`` when it is allocated."""

    # ------------------------------------------------------------------ host memory and copies
    @abstractmethod
    def allocate_host(self, numel: int, dtype: mstype.Type) -> HostBuffer:
        """Allocate pinned host memory of exactly ``numel`` elements, all zero.

        Raises:
            swapopt_common.HostMemoryError: the host could not provide or pin it.
        """

    @abstractmethod
    def copy(
        self, stream: Stream, destination: Tensor, source: Tensor, *, blocking: bool = False
    ) -> None:
        """Copy between a device tensor and a tensor of a host buffer, on ``stream``.

        Both are contiguous and equal in shape and dtype. The copy is issued, not awaited, and
        the caller keeps both tensors' memory until it is over.

        Args:
            stream: `h2d` or `d2h`, as the direction is.
            destination: written.
            source: read.
            blocking: wait on the host until it is done.
        """

    @abstractmethod
    def keep_until(self, event: Event, buffers: set[HostBuffer]) -> None:
        """Keep host memory until ``event`` is reached, then let it go.

        The garbage collector calls this, at any moment.

        Args:
            event: recorded behind the last copy from or to that memory.
            buffers: the memory; the caller hands the set over.
        """

    # ------------------------------------------------------------------ figures
    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return the figures now."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Let the peak start again from what is allocated now."""
