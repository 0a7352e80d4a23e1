"""Where the slots of a step live: host regions they return to, or move to from a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapopt_common import SlotState, move_slots
from swapopt_torch.host_memory import HostRegion
from swapopt_torch.movement import DevicePart, RegionMoves, StepBatch
from swapopt_torch.units import TorchSlot


def bind_mirrors(part: DevicePart, moved: RegionMoves) -> None:
    """Let every slot's ``tensor`` be its host mirror again, in the region it has gone to."""
    for slot in part.slots:
        new_region = moved.get(slot.region) if slot.region is not None else None
        if new_region is not None:
            slot.live_in(new_region)
            part.batch.version += 1
            if slot.whole is not None and slot.ends_whole:
                # All its ranges have gone there by now.
                _move_mirror(slot.whole, new_region)
        slot.tensor = slot.cpu_tensor


def reunite(batches: Sequence[StepBatch], moved: RegionMoves) -> None:
    """Let ranges of one slot live in one region again, where a failed step has parted them."""
    ranges = [
        (part, slot)
        for batch in batches
        for part in batch.parts
        for slot in part.slots
        if slot.whole is not None
    ]
    new_homes = {slot.whole: slot.region for _, slot in ranges if slot.region in moved.values()}
    for part, slot in ranges:
        new_region = new_homes.get(slot.whole)
        if new_region is None or slot.whole is None:
            continue
        if slot.region is not new_region:
            new_region.mirror(slot.host_offset, slot.shape).copy_(_mirror(slot))
            slot.live_in(new_region)
            part.batch.version += 1
            slot.tensor = slot.cpu_tensor
        has_moved = slot.whole.region is new_region and slot.whole.tensor is slot.whole.cpu_tensor
        if slot.ends_whole and not has_moved:
            _move_mirror(slot.whole, new_region)


def _move_mirror(slot: TorchSlot, region: HostRegion) -> None:
    slot.live_in(region)
    slot.tensor = slot.cpu_tensor


def _mirror(slot: TorchSlot) -> torch.Tensor:
    assert slot.cpu_tensor is not None, "what moves has host memory"
    return slot.cpu_tensor


def land(slots: Sequence[TorchSlot]) -> None:
    """Walk slots, by allowed moves, to HOST, whose mirror holds the valid value by now."""
    updated = [slot for slot in slots if slot.state is SlotState.DEVICE]
    move_slots(updated, SlotState.D2H)
    move_slots([slot for slot in slots if slot.state is not SlotState.HOST], SlotState.HOST)
