"""What states take: in a host buffer, in a staging arena, and in storages of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from mindspore import dtype as mstype

from swapopt_mindspore.device import ARENA_ALIGNMENT_BYTES
from swapopt_mindspore.host_buffer import numpy_dtype
from swapopt_mindspore.slots import MindSporeSlot

SLOT_ALIGNMENT_BYTES = 64
"""Where states begin in a host buffer and in an arena: operators want no less on Ascend."""

SMALL_STATE_NBYTES = 2**20
"""States below this share a device storage with such neighbours of their batch, per tensor: alone,
the copy of each would cost more than its bytes do."""


def round_up(nbytes: int) -> int:
    """Round bytes up to a multiple of 512."""
    return -(-nbytes // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES


def aligned_numel(slot: MindSporeSlot) -> int:
    """Return the elements a state takes in a buffer: the next one begins on a boundary."""
    step = SLOT_ALIGNMENT_BYTES // numpy_dtype(slot.dtype).itemsize
    return -(-slot.numel // step) * step


def nbytes_in_arena(slot: MindSporeSlot) -> int:
    """Return the bytes a state takes among others in an arena."""
    return aligned_numel(slot) * numpy_dtype(slot.dtype).itemsize


def nbytes_alone(slot: MindSporeSlot) -> int:
    """Return the device bytes of a state with a storage of its own."""
    return round_up(slot.storage_nbytes)


def span_nbytes(slots: Sequence[MindSporeSlot]) -> int:
    """Return the bytes from the first to the last of states that are neighbours in a buffer."""
    *others, last = slots
    return sum(map(nbytes_in_arena, others)) + last.storage_nbytes


def by_dtype(slots: Iterable[MindSporeSlot]) -> dict[mstype.Type, list[MindSporeSlot]]:
    """Sort states into those of one dtype each, which lie in one buffer; the order stays."""
    found: dict[mstype.Type, list[MindSporeSlot]] = {}
    for slot in slots:
        found.setdefault(slot.dtype, []).append(slot)
    return found


def sharing(slots: Sequence[MindSporeSlot], small_nbytes: int) -> list[list[MindSporeSlot]]:
    """Divide neighbours among storages: runs of states below a size together."""
    storages: list[list[MindSporeSlot]] = []
    for is_small, run in groupby(slots, lambda slot: slot.storage_nbytes < small_nbytes):
        states = list(run)
        storages += [states] if is_small else [[slot] for slot in states]
    return storages


def packed_nbytes(regions: Iterable[Sequence[MindSporeSlot]]) -> int:
    """Return the bytes of arena that regions take, each from a 512-byte boundary."""
    return sum(round_up(sum(map(nbytes_in_arena, slots))) for slots in regions)


def separate_nbytes(storages: Iterable[Sequence[MindSporeSlot]]) -> int:
    """Return the device bytes of storages, in 512-byte blocks."""
    return sum(round_up(span_nbytes(slots)) for slots in storages)
