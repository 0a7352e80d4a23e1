"""How finely states travel: into how many parts the memory of two batches is divided.

A step's transfers take T = bytes / bandwidth in each direction. The first batch has no update to
hide behind and the last one no prefetch, so n equal batches take T (1 + 1/n), and each copy costs
the engine a time c beside its bytes: T (1 + 1/n) + n c. More and smaller batches in flight, in
the same memory, cut the first term; host and engine pay for each, so the number stays bounded.
"""

from __future__ import annotations

import math

_MIB = 2**20
_GIB = 2**30

LEAST_BATCH_BYTES = 8 * _MIB
"""No memory is divided into parts smaller than this: copies of less are not worth their cost."""

# At 1 GiB of states. sqrt(T / c) would be the best number, 76 to 100 on the profiles we know, but
# the host pays for every copy and launch: 32 are within one per cent of what it can afford.
_BATCHES_AT_GIB = 32


def window_of(total_bytes: int, swap_times: int) -> int:
    """Return how many batches may be on the device at a time.

    All of them together take twice ``total_bytes / swap_times`` bytes, so the largest batch takes
    that divided by the window.

    Args:
        total_bytes: bytes of all states that swap; 0 or more.
        swap_times: what bounds the memory, at least 1.

    Returns:
        2 where states are small; otherwise 3 or more, as many as make the step fastest.
    """
    memory_bytes = 2 * -(-total_bytes // swap_times)
    wanted = max(3, round(2 * _best_batches(total_bytes) / swap_times))
    return max(2, min(wanted, memory_bytes // LEAST_BATCH_BYTES))


def frugal_swap_times(total_bytes: int) -> int:
    """Return the ``swap_times`` of the least memory in which a step is as fast as in more.

    Three batches of the best size are in flight then: one that arrives, one that is updated, and
    one that leaves.

    Args:
        total_bytes: bytes of all states that swap; 0 or more.
    """
    return round(2 * _best_batches(total_bytes) / 3)


def _best_batches(total_bytes: int) -> float:
    return _BATCHES_AT_GIB * math.sqrt(max(1.0, total_bytes / _GIB))
