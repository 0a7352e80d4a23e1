"""The one loop that executes a step's schedule on streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from swapopt_common import SlotState, move_slots
from swapopt_torch.homes import bind_mirrors, land, reunite
from swapopt_torch.movement import (
    STAY,
    BatchEvents,
    DevicePart,
    Movement,
    Progress,
    RegionMoves,
    StepBatch,
)
from swapopt_torch.outcome import outcome_of
from swapopt_torch.schedule import Verb, schedule
from swapopt_torch.stats import StepTimes, TransferCounts
from swapopt_torch.streams import CallersStreams, CopyStreams, Edge, compute_stream, wait
from swapopt_torch.units import Share, TorchSlot


class PipelineSwapRuntime:
    """Executes schedules: issues copies, updates and waits; never waits on the host in a step.

    Args:
        movement: where states are while they are on the device.
        window: how many batches may be on the device at a time.
        synchronous: make every copy block the host until it is done.
    """

    def __init__(self, movement: Movement, *, window: int, synchronous: bool) -> None:
        self._movement = movement
        self._window = window
        self._synchronous = synchronous
        self._batches: Sequence[StepBatch] = ()
        self._step_batch: Callable[[Sequence[Share]], None] = _no_update
        self._moved: RegionMoves = STAY
        self._failed = False
        self.counts = TransferCounts()
        self._used: list[BatchEvents] = []
        self._left: list[BatchEvents] = []
        self._callers = CallersStreams()

    def run_pipeline(
        self,
        batches: Sequence[StepBatch],
        step_batch: Callable[[Sequence[Share]], None],
        moved: RegionMoves = STAY,
    ) -> None:
        """Update all batches; returns when everything is issued, not when it is done.

        States come from their regions and return to them, or to where ``moved`` says; then their
        slots belong to the new region.

        Updates run on the caller's current stream of each device. Work that the caller issues
        there afterwards sees the updated parameters.

        Raises:
            SwapStepError: something failed when updates had begun; chains the cause. Before that
                the cause itself is raised. Either way all states are in their host mirrors again
                and no device memory is held.
        """
        self.recover()
        for batch in batches:
            batch.progress = Progress.WAITING
        self._batches, self._step_batch, self._moved = batches, step_batch, moved
        self.counts = TransferCounts()
        self._used = [part.events for batch in batches for part in batch.parts]
        self._left = []
        self._callers = CallersStreams(streams.device for streams in _streams_of(batches))
        try:
            for streams in _streams_of(batches):
                # Until the last step's offloads are done its device memory is in use: starting
                # before that would need it twice.
                streams.settle()
            self._movement.begin(len(batches))
            for verb, position in schedule(
                len(batches), window=self._window, reuses_memory=self._movement.reuses_memory
            ):
                self._execute(verb, position)
        except BaseException as error:
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
        self._callers.restore()
        for streams in _streams_of(self._batches):
            streams.drain()
        for position, batch in enumerate(self._batches):
            came_home = STAY
            if batch.progress in (Progress.UPDATING, Progress.UPDATED):
                self._bring_home(position, batch)
                came_home = self._moved
            for part in batch.parts:
                land(part.slots)
                bind_mirrors(part, came_home)
            batch.progress = Progress.RELEASED
        reunite(self._batches, self._moved)
        self._movement.release_all()
        self._failed = False
        self._end_step()

    def _end_step(self) -> None:
        self._batches, self._step_batch, self._moved = (), _no_update, STAY

    def last_times(self) -> StepTimes | None:
        """Return the times of the last step, which has completed."""
        if not self._used:
            return None
        exposed_ms = sum(events.wanted.elapsed_time(events.granted) for events in self._used)
        exposed_ms += sum(events.leaving.elapsed_time(events.left) for events in self._left)
        h2d_ms = sum(events.prefetching.elapsed_time(events.prefetched) for events in self._used)
        d2h_ms = sum(events.offloading.elapsed_time(events.offloaded) for events in self._used)
        if self._synchronous:
            exposed_ms = h2d_ms + d2h_ms  # the host waited, and no update was issued meanwhile
        return StepTimes(h2d_ms * 1e-3, d2h_ms * 1e-3, exposed_ms * 1e-3)

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
        batch = self._batches[position]
        former = self._take_over(position)
        batch.progress = Progress.PREFETCHING
        for part in batch.parts:
            streams, events = part.streams, part.events
            if self._movement.acquire(position, part):
                events.allocated.record(self._callers.of(streams.device))
                wait(streams.h2d, events.allocated, Edge.ALLOCATED)
            for former_part in former:
                wait(streams.h2d, former_part.events.offloaded, Edge.REUSED)
            move_slots(part.slots, SlotState.H2D, events.prefetched)
            with streams.h2d:
                events.prefetching.record(streams.h2d)
                for device_piece, host_piece in self._movement.pieces(position, part, STAY):
                    device_piece.copy_(host_piece, non_blocking=not self._synchronous)
                    self.counts.add_h2d(host_piece)
                events.prefetched.record(streams.h2d)

    def _take_over(self, position: int) -> Sequence[DevicePart]:
        """Return the parts whose memory this position takes over; their states are home."""
        if not self._movement.reuses_memory or position < self._window:
            return ()
        former = self._batches[position - self._window]
        self._homecoming(former)
        return former.parts

    def _update(self, position: int) -> None:
        batch = self._batches[position]
        for part in batch.parts:
            stream, events = self._callers.of(part.streams.device), part.events
            events.wanted.record(stream)
            wait(stream, events.prefetched, Edge.PREFETCHED)
            events.granted.record(stream)
            self._movement.bind(position, part)
            move_slots(part.slots, SlotState.DEVICE)
        batch.progress = Progress.UPDATING
        self._step_batch(batch.shares)
        batch.progress = Progress.UPDATED
        for part in batch.parts:
            part.events.updated.record(self._callers.of(part.streams.device))

    def _offload(self, position: int) -> None:
        batch = self._batches[position]
        for part in batch.parts:
            streams, events = part.streams, part.events
            wait(streams.d2h, events.updated, Edge.UPDATED)
            with streams.d2h:
                events.offloading.record(streams.d2h)
                pieces = self._movement.pieces(position, part, self._moved)
                for device_piece, host_piece in pieces:
                    host_piece.copy_(device_piece, non_blocking=not self._synchronous)
                    self.counts.add_d2h(host_piece)
                events.offloaded.record(streams.d2h)
            streams.offloaded(events.offloaded)
            move_slots(part.slots, SlotState.D2H, events.offloaded)
            bind_mirrors(part, self._moved)
        batch.progress = Progress.OFFLOADED

    def _release(self, position: int) -> None:
        batch = self._batches[position]
        memory_is_wanted = position + self._window < len(self._batches)
        for part in batch.parts:
            readers: tuple[torch.Stream, ...] = ()
            if memory_is_wanted:
                # In stream order, so that the next prefetch's allocation gets this very memory.
                stream, events = self._callers.of(part.streams.device), part.events
                events.leaving.record(stream)
                wait(stream, events.offloaded, Edge.OFFLOADED)
                events.left.record(stream)
                self._left.append(events)
            else:
                # The caller's stream does not wait: the tail hides under the next forward.
                readers = (part.streams.h2d, part.streams.d2h)
            self._movement.release(position, part, readers)
        self._homecoming(batch)

    def _homecoming(self, batch: StepBatch) -> None:
        for part in batch.parts:
            move_slots(part.slots, SlotState.HOST, part.events.offloaded)
        batch.progress = Progress.RELEASED

    def _bring_home(self, position: int, batch: StepBatch) -> None:
        for part in batch.parts:
            for device_piece, host_piece in self._movement.pieces(position, part, self._moved):
                host_piece.copy_(device_piece)


def offload_states(
    states: Sequence[tuple[TorchSlot, torch.Tensor]], streams: CopyStreams, *, synchronous: bool
) -> torch.Event:
    """Copy states that exist on a device into their slots' host mirrors.

    Runs on the device's D2H stream after everything on the caller's current stream; the caller
    may drop the device tensors at once. The mirrors are valid after the event returned.
    """
    event = torch.Event(streams.device)
    event.record(compute_stream(streams.device))
    wait(streams.d2h, event, Edge.SETTLED)
    with streams.d2h:
        for slot, tensor in states:
            assert slot.cpu_tensor is not None, "materialised before it is filled"
            slot.cpu_tensor.copy_(tensor, non_blocking=not synchronous)
            tensor.record_stream(streams.d2h)
        event.record(streams.d2h)
    streams.offloaded(event)
    return event


def _no_update(shares: Sequence[Share]) -> None:
    raise AssertionError(f"{len(shares)} shares outside a step")


def _streams_of(batches: Sequence[StepBatch]) -> list[CopyStreams]:
    return list({part.streams: None for batch in batches for part in batch.parts})
