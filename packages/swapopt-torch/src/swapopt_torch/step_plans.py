"""Which slots a step moves, batch by batch and device by device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapopt_torch.layout import SwapLayout
from swapopt_torch.movement import BatchEvents, DevicePart, StepBatch
from swapopt_torch.streams import copy_streams
from swapopt_torch.units import Batch, Share, TorchSlot, TorchUnit


class StepPlans:
    """Makes the batches of steps over one layout; those that are whole are made once.

    Args:
        layout: has a place for every unit that a step updates.
    """

    def __init__(self, layout: SwapLayout) -> None:
        self._layout = layout
        self._events: dict[tuple[Batch, torch.device], BatchEvents] = {}
        self._whole_parts: dict[Batch, tuple[int, list[DevicePart]]] = {}
        self._whole_step: tuple[int, list[StepBatch]] = (-1, [])

    def batches_of(self, units: Sequence[TorchUnit]) -> list[StepBatch]:
        """Return what a step over ``units``, all of them planned, does batch by batch."""
        if len(units) < len(self._layout.places):
            return self._make_batches(units)
        version, batches = self._whole_step
        if version != self._layout.version:
            batches = self._make_batches(units)
            self._whole_step = self._layout.version, batches
        return batches

    def _make_batches(self, units: Sequence[TorchUnit]) -> list[StepBatch]:
        found: dict[Batch, list[Share]] = {}
        for unit in units:
            for batch, share in self._layout.places[unit]:
                found.setdefault(batch, []).append(share)
        batches: list[StepBatch] = []
        for batch, shares in found.items():
            parts = self._parts(batch, shares)
            if parts or not batches:
                batches.append(StepBatch(shares, parts))
            else:
                # Nothing to move here. A batch without states would break the chain of hand-overs
                # from one owner of a staging arena to the next, so its units join the one before.
                batches[-1].shares.extend(shares)
        return batches

    def _parts(self, batch: Batch, shares: list[Share]) -> list[DevicePart]:
        if len(shares) < len(batch.shares):
            return self._make_parts(batch, shares)
        version, parts = self._whole_parts.get(batch, (-1, []))
        if version != batch.version:
            parts = self._make_parts(batch, shares)
            self._whole_parts[batch] = batch.version, parts
        return parts

    def _make_parts(self, batch: Batch, shares: list[Share]) -> list[DevicePart]:
        by_device: dict[torch.device, list[TorchSlot]] = {}
        for share in shares:
            for slot in share.slots:
                by_device.setdefault(slot.device, []).append(slot)
        whole = sum(map(len, by_device.values())) == batch.materialised
        return [
            DevicePart(batch, copy_streams(device), slots, self._events_of(batch, device), whole)
            for device, slots in by_device.items()
        ]

    def _events_of(self, batch: Batch, device: torch.device) -> BatchEvents:
        events = self._events.get((batch, device))
        if events is None:
            events = self._events[batch, device] = BatchEvents(device)
        return events
