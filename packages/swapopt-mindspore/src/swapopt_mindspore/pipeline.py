"""The one loop that executes a step's schedule on streams."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from mindspore import Tensor

from swapopt_common import SlotState, move_slots
from swapopt_mindspore.device import Device
from swapopt_mindspore.local_tensor import local_part
from swapopt_mindspore.movement import BatchEvents, Movement, Progress, StepBatch
from swapopt_mindspore.outcome import outcome_of
from swapopt_mindspore.schedule import Verb, schedule
from swapopt_mindspore.slots import MindSporeSlot, MindSporeUnit
from swapopt_mindspore.stats import StepTimes, TransferCounts
from swapopt_mindspore.streams import Edge, Event, wait
from swapopt_mindspore.tail import Tail


class Updater(Protocol):
    """What the pipeline asks of an adapter."""

    def step_batch(self, batch: Sequence[MindSporeUnit]) -> None:
        """Update a batch, whose states are on the device."""

    def is_updated(self, unit: MindSporeUnit) -> bool:
        """Say whether this step has updated a parameter completely."""


class PipelineSwapRuntime:
    """Executes schedules: issues copies, updates and waits; never waits on the host in a step.

    The end of a step is in stream order, too: the caller's stream waits for the last offloads
    before their device memory is given back, because MindSpore's allocator cannot be told of
    other streams that use it. So a later step, of this or another optimizer, is behind them
    without the host having to wait for them (docs/design.md invariant 7).

    Args:
        device: where updates run.
        movement: where states are while they are on the device.
        window: how many batches may be on the device at a time.
        synchronous: make every copy block the host until it is done.
    """

    def __init__(
        self, device: Device, movement: Movement, *, window: int, synchronous: bool
    ) -> None:
        self._device = device
        self._movement = movement
        self._window = window
        self._synchronous = synchronous
        self._batches: Sequence[StepBatch] = ()
        self._updater: Updater | None = None
        self._failed = False
        self._tail = Tail(device)
        # Not at exit: MindSpore ends its copies itself, and may be gone before.
        weakref.finalize(self, self._tail.abandon).atexit = False
        self.counts = TransferCounts()
        self._used: list[BatchEvents] = []
        self._left: list[BatchEvents] = []

    def run_pipeline(self, batches: Sequence[StepBatch], updater: Updater) -> None:
        """Update all batches; returns when everything is issued, not when it is done.

        Updates run on the caller's current stream. Work that the caller issues there afterwards
        sees the updated parameters.

        Raises:
            SwapStepError: something failed when updates had begun; chains the cause. Before that
                the cause itself is raised. Either way all states are in their host mirrors again
                and no device memory is held.
        """
        self.recover()
        self._batches, self._updater = batches, updater
        self.counts = TransferCounts()
        self._used = [batch.events for batch in batches]
        self._left = []
        try:
            for verb, position in schedule(
                len(batches), window=self._window, reuses_memory=self._movement.reuses_memory
            ):
                self._execute(verb, position)
        except BaseException as error:
            _find_torn(batches, updater)
            self._failed = True
            outcome = outcome_of(batches, error)
            self.recover()
            if outcome is not None and isinstance(error, Exception):
                raise outcome from error
            raise
        self._end_step()

    def recover(self) -> None:
        """Bring every state of a failed step home and free the memory (invariant 6).

        Does nothing if no step has failed. May itself be interrupted: the next call goes on.
        """
        if not self._failed:
            return
        self._used = self._left = []
        self._device.synchronize()
        for position, batch in enumerate(self._batches):
            if batch.progress in (Progress.UPDATING, Progress.UPDATED):
                self._bring_home(position, batch)
            _land(batch.slots)
            batch.progress = Progress.RELEASED
        self._movement.release_all(self._batches)
        self._tail.forget()
        self._failed = False
        self._end_step()

    def settle(self) -> None:
        """Block the host until the last step's offloads are done: the mirrors can be read."""
        self.recover()
        self._tail.wait()

    def forget_mirrors(self) -> None:
        """Let go of tensors over host memory that was left for other; no step is under way."""
        self._movement.forget_mirrors()

    def last_times(self) -> StepTimes | None:
        """Return the times of the last step, which has completed."""
        if not self._used:
            return None
        used, left = self._used, self._left
        h2d_seconds = _seconds((events.prefetching, events.prefetched) for events in used)
        d2h_seconds = _seconds((events.offloading, events.offloaded) for events in used)
        if self._synchronous:
            # The host waited for every copy, and no update was issued meanwhile.
            return StepTimes(h2d_seconds, d2h_seconds, h2d_seconds + d2h_seconds)
        exposed_seconds = _seconds((events.wanted, events.granted) for events in used)
        exposed_seconds += _seconds((events.leaving, events.left) for events in left)
        return StepTimes(h2d_seconds, d2h_seconds, exposed_seconds)

    def _end_step(self) -> None:
        self._batches, self._updater = (), None

    def _execute(self, verb: Verb, position: int) -> None:
        if verb is Verb.PREFETCH:
            self._prefetch(position)
        elif verb is Verb.UPDATE:
            self._update(position)
        elif verb is Verb.OFFLOAD:
            self._offload(position)
        else:
            self._release(position)

    def _prefetch(self, position: int) -> None:
        batch, device = self._batches[position], self._device
        events = batch.events
        former = self._take_over(position)
        batch.progress = Progress.PREFETCHING
        if self._movement.acquire(position, batch):
            events.allocated.record(device.compute_stream())
            wait(device.h2d, events.allocated, Edge.ALLOCATED)
        if former is not None:
            wait(device.h2d, former.events.offloaded, Edge.REUSED)
        move_slots(batch.slots, SlotState.H2D, events.prefetched)
        events.prefetching.record(device.h2d)
        batch.pieces = self._movement.pieces(position, batch)
        for piece in batch.pieces:
            device.copy(device.h2d, piece.on_device, piece.on_host, blocking=self._synchronous)
            self.counts.add_h2d(piece.nbytes)
        events.prefetched.record(device.h2d)

    def _take_over(self, position: int) -> StepBatch | None:
        """Return the batch whose memory this position takes over; its states are home."""
        if not self._movement.reuses_memory or position < self._window:
            return None
        former = self._batches[position - self._window]
        _homecoming(former)
        return former

    def _update(self, position: int) -> None:
        batch, stream = self._batches[position], self._device.compute_stream()
        events = batch.events
        events.wanted.record(stream)
        wait(stream, events.prefetched, Edge.PREFETCHED)
        events.granted.record(stream)
        self._movement.bind(position, batch)
        move_slots(batch.slots, SlotState.DEVICE)
        assert self._updater is not None, "updates are part of a step"
        batch.progress = Progress.UPDATING
        with self._device.updating(
            f"update {position}",
            reads=(unit.gradient() for unit in batch.units),
            writes=_written(batch.units),
            launches=sum(unit.launches for unit in batch.units),
        ):
            self._updater.step_batch(batch.units)
        batch.progress = Progress.UPDATED
        events.updated.record(stream)

    def _offload(self, position: int) -> None:
        batch, device = self._batches[position], self._device
        events = batch.events
        wait(device.d2h, events.updated, Edge.UPDATED)
        events.offloading.record(device.d2h)
        for piece in batch.pieces:
            device.copy(device.d2h, piece.on_host, piece.on_device, blocking=self._synchronous)
            self.counts.add_d2h(piece.nbytes)
        events.offloaded.record(device.d2h)
        self._tail.add(events.offloaded, filter(None, (slot.buffer for slot in batch.slots)))
        move_slots(batch.slots, SlotState.D2H, events.offloaded)
        _bind_mirrors(batch.slots)
        batch.progress = Progress.OFFLOADED

    def _release(self, position: int) -> None:
        batch, stream = self._batches[position], self._device.compute_stream()
        events = batch.events
        # In stream order, so that whatever the caller allocates next may be this very memory.
        events.leaving.record(stream)
        wait(stream, events.offloaded, Edge.OFFLOADED)
        events.left.record(stream)
        self._left.append(events)
        self._movement.release(position, batch)
        _homecoming(batch)

    def _bring_home(self, position: int, batch: StepBatch) -> None:
        device, torn, pieces = self._device, set(batch.torn), batch.pieces
        if torn:
            sound = [slot for slot in batch.slots if slot not in torn]
            pieces = self._movement.pieces(position, replace(batch, slots=sound, whole=False))
        for piece in pieces:
            device.copy(device.d2h, piece.on_host, piece.on_device, blocking=True)


def _find_torn(batches: Sequence[StepBatch], updater: Updater) -> None:
    """Note the states of parameters whose update was begun, perhaps, and did not end.

    An update of several operators writes the parameter last. Before that, putting its states
    back to their mirrors undoes it.
    """
    for batch in batches:
        if batch.progress is Progress.UPDATING:
            unsound = (unit for unit in batch.units if not updater.is_updated(unit))
            batch.torn = [slot for unit in unsound for slot in unit.swapped()]


def _seconds(intervals: Iterable[tuple[Event, Event]]) -> float:
    return sum(begin.elapsed_time(end) for begin, end in intervals) * 1e-3


def _written(units: Sequence[MindSporeUnit]) -> Iterator[Tensor]:
    """Yield what an update of the units writes: parameters and states."""
    for unit in units:
        yield local_part(unit.param)
        yield from (slot.operand() for slot in unit.slots)


def _homecoming(batch: StepBatch) -> None:
    move_slots(batch.slots, SlotState.HOST, batch.events.offloaded)
    batch.progress = Progress.RELEASED


def _bind_mirrors(slots: Sequence[MindSporeSlot]) -> None:
    """Let every slot's ``tensor`` be its host mirror again."""
    for slot in slots:
        slot.tensor = slot.cpu_tensor


def _land(slots: Sequence[MindSporeSlot]) -> None:
    """Walk slots, by allowed moves, to HOST, whose mirror holds the valid value by now."""
    move_slots([slot for slot in slots if slot.state is SlotState.DEVICE], SlotState.D2H)
    move_slots([slot for slot in slots if slot.state is not SlotState.HOST], SlotState.HOST)
    _bind_mirrors(slots)
