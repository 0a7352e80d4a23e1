"""The order of a step as data: four verbs on numbered batches."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

WINDOW = 2
"""Batches of states that may be on the device at a time; packed, each has a staging arena."""


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


def schedule(batch_count: int, *, reuses_memory: bool) -> Iterator[Action]:
    """Yield the actions of a step over ``batch_count`` batches.

    Args:
        batch_count: how many batches have a gradient in this step.
        reuses_memory: a batch takes over the memory of the one two places before it (packed), so
            that only the last owners release it; otherwise every batch does (per-tensor).
    """
    for position in range(min(WINDOW, batch_count)):
        yield Action(Verb.PREFETCH, position)
    for position in range(batch_count):
        yield Action(Verb.UPDATE, position)
        yield Action(Verb.OFFLOAD, position)
        if not reuses_memory:
            yield Action(Verb.RELEASE, position)
        if position + WINDOW < batch_count:
            yield Action(Verb.PREFETCH, position + WINDOW)
    if reuses_memory:
        for position in range(max(0, batch_count - WINDOW), batch_count):
            yield Action(Verb.RELEASE, position)
