"""Divides parameters into batches of limited size, cut where a parameter does not fit.

Arithmetic on sizes only; `layout` makes batches of what is found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

CUT_NUMEL = 512
"""Parameters are cut at multiples of so many elements.

Kernels treat the last few elements of a tensor apart from the others, in other instructions, which
may round differently. Multiples of 512 are multiples of every vector and block of theirs, so that
an element is treated in the same way whether its tensor is cut or not.
"""

# What stays empty of a batch so that a parameter need not be cut: a cut costs a copy and a launch.
_SPARE_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class Size:
    """What the division has to know of one parameter.

    Attributes:
        nbytes: of its states that swap, as they lie in a batch.
        numel: how many elements it has.
        element_nbytes: bytes of its states per element; 0 if it must not be cut.
    """

    nbytes: int
    numel: int
    element_nbytes: int


class Cut(NamedTuple):
    """The elements ``start`` to ``stop`` of parameter ``number``."""

    number: int
    start: int
    stop: int


def grain_nbytes(sizes: Sequence[Size]) -> int:
    """Return the most that a batch has to leave empty because cuts are coarse."""
    return CUT_NUMEL * max((size.element_nbytes for size in sizes), default=0)


def divide(
    sizes: Sequence[Size], capacity_nbytes: int, at_most: int | None = None
) -> list[list[Cut]]:
    """Divide parameters, in their order, into batches of at most ``capacity_nbytes``.

    A parameter that must not be cut and is larger has a batch of its own. A batch may stay a
    little emptier than it could be so that a parameter need not be cut, unless that makes more
    than ``at_most`` batches. Of the capacities that make no more batches than the given one, the
    smallest is taken, within a hundredth: equal batches overlap best.
    """
    spare_share = _SPARE_SHARE
    batches = _filled(sizes, capacity_nbytes, spare_share)
    if at_most is not None and len(batches) > at_most:
        spare_share = 0.0
        batches = _filled(sizes, capacity_nbytes, spare_share)
    total_nbytes = sum(size.nbytes for size in sizes)
    low, high = min(-(-total_nbytes // len(batches)), capacity_nbytes), capacity_nbytes
    while high - low > capacity_nbytes // 100:
        middle = (low + high) // 2
        found = _filled(sizes, middle, spare_share)
        if len(found) > len(batches):
            low = middle + 1
        else:
            batches, high = found, middle
    return batches


def _filled(sizes: Sequence[Size], capacity_nbytes: int, spare_share: float) -> list[list[Cut]]:
    batches: list[list[Cut]] = [[]]
    room_nbytes = capacity_nbytes
    for number, size in enumerate(sizes):
        start, left_nbytes = 0, size.nbytes
        while left_nbytes > room_nbytes:
            numel = 0
            if room_nbytes >= capacity_nbytes * spare_share:
                numel = _fitting(size, room_nbytes)
            if numel:
                batches[-1].append(Cut(number, start, start + numel))
                start += numel
                left_nbytes -= numel * size.element_nbytes
            elif not batches[-1]:
                break
            batches.append([])
            room_nbytes = capacity_nbytes
        batches[-1].append(Cut(number, start, size.numel))
        room_nbytes -= left_nbytes
    return batches


def _fitting(size: Size, room_nbytes: int) -> int:
    """Return how many elements of a parameter go where it does not fit as a whole."""
    if not size.element_nbytes:
        return 0
    return room_nbytes // size.element_nbytes // CUT_NUMEL * CUT_NUMEL
