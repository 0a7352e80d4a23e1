"""The emulated device: MindSpore's CPU tensors stand for tensors on an accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import get_args

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from swapopt_common import HostMemoryError
from swapopt_mindspore.choice import using
from swapopt_mindspore.device import Arena, Device, DeviceMemory
from swapopt_mindspore.emulated.arena import EmulatedArena
from swapopt_mindspore.emulated.books import Allocation, MemoryBooks
from swapopt_mindspore.emulated.instruments import Instruments
from swapopt_mindspore.emulated.profiles import Profile, resolve_profile
from swapopt_mindspore.emulated.streams import EmulatedEvent, EmulatedStream
from swapopt_mindspore.emulated.tensors import TensorBooks, range_of
from swapopt_mindspore.emulated.world import RaceMode, World
from swapopt_mindspore.host_buffer import HostBuffer, nbytes_of, tensor_over
from swapopt_mindspore.streams import Event, Stream


class EmulatedDevice(Instruments, Device):
    """A device made of CPU memory, with memory limits, virtual time and a race detector.

    All of MindSpore's tensors count as being on the device, but for those over a `HostBuffer`
    and those told to `keep_on_host`. Use it as a context manager, or hand it to
    `swap_optimizer`:

        with EmulatedDevice("ascend-910b", capacity_bytes=2**30) as device:
            optimizer = swap_optimizer(nn.Adam(net.trainable_params()))

    Values are computed by MindSpore's CPU kernels. Only what swapopt moves is emulated: forward
    and backward take no virtual time (`compute` charges some), and their memory does not count
    unless it is adopted.

    Args:
        profile: what the device costs: the name of a built-in profile, or a `Profile`.
        capacity_bytes: device memory; None for no limit.
        pinned_limit_bytes: how much host memory may be pinned; None for no limit.
        races: raise RaceError at the racing operation, collect for `take_races`, or look for
            none ("off").
        late_copies: let copies that do not block happen as late as the order allows, with NaN in
            their destination until then; otherwise they happen when they are issued.
        dry: touch no memory: copies take their time and move nothing, and what swapopt allocates
            is address space. Swapped states then hold undefined values; memory, order and time
            are those of a device that is not dry.

    Raises:
        ValueError: a profile or a way of treating races that does not exist, or a negative limit.
    """

    def __init__(
        self,
        profile: str | Profile = "ascend-910b",
        *,
        capacity_bytes: int | None = None,
        pinned_limit_bytes: int | None = None,
        races: RaceMode = "raise",
        late_copies: bool = True,
        dry: bool = False,
    ) -> None:
        if races not in get_args(RaceMode):
            raise ValueError(f"races must be one of {list(get_args(RaceMode))}, found {races!r}")
        _check_limit("capacity_bytes", capacity_bytes)
        _check_limit("pinned_limit_bytes", pinned_limit_bytes)
        chosen = resolve_profile(profile)
        self.name = f"emulated {chosen.name}"
        self._books = MemoryBooks(capacity_bytes, pinned_limit_bytes)
        world = World(
            chosen,
            self._books,
            race_mode=races,
            late=late_copies,
            dry=dry,
            owner_name="compute stream",
        )
        self._dry = dry
        self._tensors = TensorBooks(world, self._books)
        super().__init__(world, self.name)
        self._compute = EmulatedStream(world, world.owner)
        self.h2d: Stream = EmulatedStream(world, world.scheduler.new_stream("h2d stream"))
        self.d2h: Stream = EmulatedStream(world, world.scheduler.new_stream("d2h stream"))
        self._choices: list[AbstractContextManager[None]] = []

    def __enter__(self) -> EmulatedDevice:
        """Choose this device for the optimizers that are wrapped inside the block."""
        choice = using(self)
        choice.__enter__()
        self._choices.append(choice)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Choose it no more. Optimizers that were wrapped stay on it."""
        self._choices.pop().__exit__(kind, error, traceback)

    # ------------------------------------------------------------------ order
    def compute_stream(self) -> Stream:
        """Return the one stream that callers have here."""
        return self._compute

    def new_event(self, *, timing: bool = False) -> Event:
        """Make an event; all of them know the virtual time."""
        del timing
        return EmulatedEvent(self._world)

    def synchronize(self) -> None:
        """Block the host until every stream is idle; everything that was issued has happened."""
        self._world.host_waits_for_all()

    @contextmanager
    def updating(
        self, operation: str, *, reads: Iterable[Tensor], writes: Iterable[Tensor], launches: int
    ) -> Iterator[None]:
        """Check and charge the update inside the block; its effects are there when it ends.

        Raises:
            RaceError: nothing orders the update and another access.
            RuntimeError: the update uses memory that is on the host or was given back.
        """
        read, written = list(reads), list(writes)
        # An operator's first use of a tensor is what brings it to the device.
        self._tensors.bring_in([*read, *written])
        read_ranges = [self._tensors.usable(operation, tensor, "device") for tensor in read]
        write_ranges = [self._tensors.usable(operation, tensor, "device") for tensor in written]
        self._world.begin_update(operation, read_ranges, write_ranges)
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the first failure is the one to hear of
                _finish(written)
            raise
        finally:
            self._world.end_update(operation, read_ranges, write_ranges, launches)
        _finish(written)

    # ------------------------------------------------------------------ device memory
    def holds(self, tensor: Tensor) -> bool:
        """Say whether the tensor counts as being on the device."""
        return self._tensors.place_of(tensor) == "device"

    def keep_on_host(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors be on the host until an update uses them.

        On Ascend that is how tensors are that no operator has used yet.
        """
        self._tensors.keep_on_host(tensors)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that MindSpore allocated, until they are released or exist no more.

        Raises:
            DeviceMemoryError: they do not fit; those before the first that does not are adopted.
        """
        for tensor in tensors:
            self._tensors.adopt(tensor)

    def empty(self, shape: tuple[int, ...], dtype: mstype.Type) -> Tensor:
        """Allocate a tensor full of NaN."""
        memory = self._tensors.allocate(nbytes_of(shape, dtype), "device")
        return tensor_over(memory, dtype, shape)

    def release(self, tensor: Tensor) -> None:
        """Give the memory back; the tensor holds NaN from now on."""
        allocation = self._tensors.owned_by(tensor)
        if allocation.is_live:
            self._world.give_back(allocation)

    def restore(self, tensor: Tensor) -> None:
        """Give the tensor memory again, full of NaN."""
        allocation = self._tensors.owned_by(tensor)
        if allocation.is_live:
            raise ValueError(f"a tensor of shape {tensor.shape} is restored that has its memory")
        self._world.take(allocation)

    def new_arena(self, nbytes: int) -> Arena:
        """Make an empty arena."""
        allocation = Allocation(np.empty(nbytes, np.uint8), "device")
        return EmulatedArena(self._world, allocation, self._tensors.enter(allocation))

    # ------------------------------------------------------------------ host memory and copies
    def allocate_host(self, numel: int, dtype: mstype.Type) -> HostBuffer:
        """Allocate host memory that counts as pinned."""
        nbytes = nbytes_of((numel,), dtype)
        try:
            memory = self._tensors.allocate(nbytes, "pinned")
        except MemoryError as error:
            raise HostMemoryError(
                f"Pinned host memory ran out: {nbytes:,} bytes were asked for in one buffer; "
                f"{error}. Swap fewer states (state_keys, a larger min_numel)."
            ) from error
        if not self._dry:
            memory.fill(0)
        return HostBuffer(memory, dtype)

    def copy(
        self, stream: Stream, destination: Tensor, source: Tensor, *, blocking: bool = False
    ) -> None:
        """Issue the copy.

        Raises:
            RaceError: nothing orders it and another access.
            ValueError: the tensors differ in shape or dtype.
            RuntimeError: they are on the same side, or use memory that was given back.
        """
        assert isinstance(stream, EmulatedStream)
        if destination.shape != source.shape or destination.dtype != source.dtype:
            raise ValueError(
                f"a copy needs equal shapes and dtypes, found {source.shape} of {source.dtype} "
                f"to {destination.shape} of {destination.dtype}"
            )
        to_device = self.holds(destination)
        self._world.copy(
            stream.actor,
            "h2d" if to_device else "d2h",
            self._tensors.usable("copy", destination, "device" if to_device else "pinned"),
            self._tensors.usable("copy", source, "pinned" if to_device else "device"),
            blocking=blocking,
        )

    def keep_until(self, event: Event, buffers: set[HostBuffer]) -> None:
        """Let the host wait for the event before its next act."""
        assert isinstance(event, EmulatedEvent)
        if event.point is not None:
            self._world.keep_until(event.point, buffers)

    # ------------------------------------------------------------------ figures
    def memory(self) -> DeviceMemory:
        """Return the figures now; device allocations count in blocks of 512 bytes."""
        self._world.bury()
        return DeviceMemory(
            allocated_bytes=self._books.device_nbytes,
            peak_allocated_bytes=self._books.peak_device_nbytes,
            pinned_bytes=self._books.pinned_nbytes,
        )

    def reset_peak(self) -> None:
        """Let the peak start again from what is allocated now."""
        self._world.bury()
        self._books.reset_peak()


def _check_limit(name: str, nbytes: int | None) -> None:
    if nbytes is not None and nbytes < 0:
        raise ValueError(f"{name} must be at least 0, or None for no limit; found {nbytes!r}")


def _finish(tensors: Sequence[Tensor]) -> None:
    """Wait until MindSpore has run what it was told; asking for any address does."""
    for tensor in tensors[:1]:
        range_of(tensor)
