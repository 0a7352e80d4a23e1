"""The order of a step as data: four verbs on numbered batches."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

AHEAD = 2
"""So many prefetches are issued before the first update; the host is never further ahead."""


class Verb(str, Enum):
    """What can be done with a batch; the waits follow from the verb.

    PREFETCH: host to device; waits for the memory it takes over to be free.
    UPDATE:   the optimizer's arithmetic on the caller's stream; waits for the prefetch.
    OFFLOAD:  device to host; waits for the update.
    RELEASE:  the memory is given back; waits for the offload.
    """

    PREFETCH = "H2D"
    UPDATE = "UPD"
    OFFLOAD = "D2H"
    RELEASE = "REL"


class Action(NamedTuple):
    """One verb on the batch at one position of the step."""

    verb: Verb
    position: int

    def __str__(self) -> str:
        return f"{self.verb.value}{self.position}"


def schedule(batch_count: int, *, window: int, reuses_memory: bool) -> Iterator[Action]:
    """Yield the actions of a step over ``batch_count`` batches.

    Args:
        batch_count: how many batches have a gradient in this step.
        window: how many batches may be on the device at a time, 2 or more.
        reuses_memory: a batch takes over the memory of the one ``window`` places before it
            (packed), so that only the last owners release it; otherwise every batch does
            (per-tensor), as late as the window allows.
    """
    released = max(0, batch_count - window) if reuses_memory else 0
    for position in range(min(AHEAD, batch_count)):
        yield Action(Verb.PREFETCH, position)
    for position in range(batch_count):
        yield Action(Verb.UPDATE, position)
        yield Action(Verb.OFFLOAD, position)
        following = position + AHEAD
        if not reuses_memory and following >= window:
            yield Action(Verb.RELEASE, released)
            released += 1
        if following < batch_count:
            yield Action(Verb.PREFETCH, following)
    for position in range(released, batch_count):
        yield Action(Verb.RELEASE, position)
