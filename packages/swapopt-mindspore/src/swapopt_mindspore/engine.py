"""The swapped states of one optimizer: their layout, their movement, their pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mindspore import Tensor

from swapopt_common import HostMemoryError, SlotState, SwapOptimizerConfig, move_slots
from swapopt_mindspore import announce
from swapopt_mindspore.device import Device
from swapopt_mindspore.host_buffer import HostBuffer
from swapopt_mindspore.layout import Batch, SwapLayout
from swapopt_mindspore.local_tensor import local_part
from swapopt_mindspore.mirrors import (
    LoadedValue,
    MirrorCopies,
    Value,
    check_fits,
    expose_mirrors,
)
from swapopt_mindspore.movement import BatchEvents, StepBatch
from swapopt_mindspore.packed import PackedMovement
from swapopt_mindspore.per_tensor import PerTensorMovement
from swapopt_mindspore.pipeline import PipelineSwapRuntime, Updater
from swapopt_mindspore.slots import MindSporeSlot, MindSporeUnit

NO_HOST_MEMORY = "no pinned host memory was left for it"


class SwapEngine:
    """Decides once how states move, and keeps what was built for that.

    Args:
        device: where updates run.
        config: the user's configuration.
        packed_by_default: what ``packed_swap=None`` means for this optimizer.
        takes_views: whether its updates may be given views of a block that states share.
        synchronous: make every copy block the host.

    Attributes:
        layout: which state is where.
        runtime: what executes steps.
    """

    def __init__(
        self,
        device: Device,
        config: SwapOptimizerConfig,
        *,
        packed_by_default: bool,
        takes_views: bool,
        synchronous: bool,
    ) -> None:
        packed = packed_by_default if config.packed_swap is None else config.packed_swap
        self._device = device
        self._synchronous = synchronous
        self._copies = MirrorCopies(device, synchronous=synchronous)
        self._events: dict[Batch, BatchEvents] = {}
        self.layout = SwapLayout(device, packed=packed, takes_views=takes_views)
        self.runtime = self._new_runtime()

    def _new_runtime(self) -> PipelineSwapRuntime:
        movement = (
            PackedMovement(self._device, self.layout)
            if self.layout.packed
            else PerTensorMovement(self._device)
        )
        return PipelineSwapRuntime(
            self._device, movement, window=self.layout.window, synchronous=self._synchronous
        )

    def attach(self, units: Sequence[MindSporeUnit], swap_times: int) -> None:
        """Lay out all units, and move the states that swap to the host.

        Blocks the host until they are there: the memory they leave is free afterwards.

        Raises:
            HostMemoryError: no state has moved.
        """
        self._device.adopt([local_part(unit.param) for unit in units])
        self._device.adopt([slot.operand() for unit in units for slot in unit.slots])
        self.layout.plan(units, swap_times)
        self._move_in(self.layout.materialise())
        announce.log_layout(self._device, self.layout, units)

    def welcome(self, late: Sequence[MindSporeSlot], units: Sequence[MindSporeUnit]) -> None:
        """Take in states whose device storage has appeared since; see `attach`.

        They join the batch of their parameter. If nothing has been swapped yet, all ``units`` are
        laid out anew instead.

        Raises:
            HostMemoryError: they stay on the device, for good.
        """
        self.settle()
        try:
            if not self.layout.has_mirrors:
                self.layout.plan(units, self.layout.swap_times)
            self._move_in(self.layout.materialise())
        finally:
            for slot in late:
                if slot.buffer is None:
                    slot.swappable, slot.resident_reason = False, NO_HOST_MEMORY
        announce.log_layout(self._device, self.layout, units)

    def run(self, units: Sequence[MindSporeUnit], updater: Updater) -> None:
        """Update ``units`` batch by batch; see `PipelineSwapRuntime.run_pipeline`."""
        if units:
            self._spare_snapshots(slot for unit in units for slot in unit.swapped())
            self.runtime.run_pipeline(self._step_batches(units), updater)

    def lend(self, slot: MindSporeSlot) -> Tensor:
        """Return a tensor over a swapped state's host memory that nothing we do changes.

        As long as anything shares its memory, steps and loads go to fresh memory (invariant 8).
        """
        assert slot.buffer is not None, "a swapped state has host memory"
        return slot.buffer.lend(slot.host_offset, slot.shape)

    def _spare_snapshots(self, written: Iterable[MindSporeSlot]) -> None:
        """Give fresh host memory to states about to be written that a live snapshot lies in.

        A buffer at a time, values included: of a buffer's states some may not be written now.

        Raises:
            HostMemoryError: there is not enough for both; nothing has changed.
        """
        lent = self.layout.lent_regions()
        if not lent:
            return
        self.settle()
        buffers = {slot.buffer for slot in written}
        fresh = [
            (region, self._allocate_beside_snapshot(region.buffer))
            for region in lent
            if region.buffer in buffers
        ]
        self.runtime.forget_mirrors()
        for region, buffer in fresh:
            # What somebody has put in place of a mirror stays to be taken over.
            in_place = [slot for slot in region.slots if not slot.is_home_moved]
            region.move_to(buffer)
            expose_mirrors(in_place)

    def _allocate_beside_snapshot(self, lent: HostBuffer) -> HostBuffer:
        try:
            return self._device.allocate_host(lent.numel, lent.dtype)
        except HostMemoryError as error:
            raise HostMemoryError(
                "What state_dict() returned is still alive, so the states it shares memory with "
                "need host memory of their own before they change. Write it to a file and drop it "
                f"before the next step or load. ({error})"
            ) from error

    def settle(self) -> None:
        """Block the host until all offloads are complete: the mirrors can be read."""
        self.runtime.settle()

    def take_in_moved(self) -> None:
        """Take over values that somebody put in place of our mirrors, as loading weights does.

        Raises:
            SwapConfigError: a value has another shape or dtype; nothing has changed.
        """
        moved = [slot for slot in self.layout.slots() if slot.is_home_moved]
        if not moved:
            return
        values = [(slot, slot.home) for slot in moved]
        for slot, value in values:
            check_fits(slot, value)
        self.store(values)
        expose_mirrors(moved)

    def store(self, values: Sequence[Value]) -> None:
        """Let the mirrors of swapped states hold these values; blocks the host.

        Raises:
            HostMemoryError: a snapshot is alive, and there is not enough for both; nothing has
                changed.
        """
        self.settle()
        self._spare_snapshots(slot for slot, _ in values)
        on_device: list[Value] = []
        on_host: list[Value] = []
        for slot, tensor in values:
            (on_device if self._device.holds(tensor) else on_host).append((slot, tensor))
        self._device.adopt([tensor for _, tensor in on_device])
        self._copies.fetch(on_device)
        for slot, tensor in on_host:
            slot.mirror().copy_(tensor)

    def load(self, values: Sequence[LoadedValue]) -> None:
        """Let the mirrors of swapped states hold values that are in host memory; see `store`."""
        self.settle()
        self._spare_snapshots(slot for slot, _ in values)
        for slot, array in values:
            assert slot.buffer is not None, "a swapped state has host memory"
            slot.buffer.write(slot.host_offset, array)

    def restore(self) -> None:
        """Give the states back to the optimizer, on the device; blocks the host.

        Raises:
            DeviceMemoryError: they do not fit; they stay in host memory.
        """
        self.settle()
        self._copies.restore([slot for slot in self.layout.slots() if not slot.is_home_moved])

    def _move_in(self, slots: Sequence[MindSporeSlot]) -> None:
        """Copy states that have just been given host memory there; their device memory is freed."""
        move_slots(slots, SlotState.D2H)
        try:
            self._copies.fetch([(slot, slot.operand()) for slot in slots])
        except BaseException:
            move_slots(slots, SlotState.DEVICE)
            raise
        move_slots(slots, SlotState.HOST)
        for slot in slots:
            slot.tensor = slot.cpu_tensor
        expose_mirrors(slots, self._device)
        self.runtime = self._new_runtime()

    def _step_batches(self, units: Sequence[MindSporeUnit]) -> list[StepBatch]:
        found: dict[Batch, list[MindSporeUnit]] = {}
        for unit in units:
            assert unit.batch_index is not None, "all units are planned when wrapping"
            found.setdefault(self.layout.batches[unit.batch_index], []).append(unit)
        step_batches: list[StepBatch] = []
        for batch, its_units in found.items():
            slots = [slot for unit in its_units for slot in unit.swapped()]
            if slots or not step_batches:
                whole = len(its_units) == len(batch.units)
                events = self._events_of(batch)
                step_batches.append(StepBatch(batch, its_units, slots, events, whole))
            else:
                # Nothing to move here: a turn of its own would only hold the next prefetch up.
                step_batches[-1].units.extend(its_units)
        return step_batches

    def _events_of(self, batch: Batch) -> BatchEvents:
        events = self._events.get(batch)
        if events is None:
            events = self._events[batch] = BatchEvents(self._device)
        return events
