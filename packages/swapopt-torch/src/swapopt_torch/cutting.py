"""Cutting host regions so that a pinned allocator that rounds to powers of two wastes little."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from swapopt_torch.device_traits import pinned_block_nbytes

# What one more region is taken to cost: a page, and so does not pay for less.
_REGION_COST_NBYTES = 4096


def cut_to_fit(sizes_nbytes: Sequence[int]) -> list[int]:
    """Cut a row of slots into contiguous regions that take the fewest pinned bytes.

    A region takes the next power of two of its size. The best row of the first ``j`` slots ends
    with a region that is filled as far as its power of two allows, so every power of two is tried
    once per slot: about 40 trials each, however many slots there are.

    Args:
        sizes_nbytes: bytes of each slot, in order.

    Returns:
        How many slots each region holds.
    """
    ends = [0, *accumulate(sizes_nbytes)]
    block_sizes = _block_sizes(sizes_nbytes)
    starts = [0] * len(block_sizes)
    costs, best_starts = [0], [0]
    for end in range(1, len(ends)):
        best: tuple[int, int] | None = None
        for index, block_nbytes in enumerate(block_sizes):
            while ends[end] - ends[starts[index]] > block_nbytes:
                starts[index] += 1
            start = starts[index]
            if start < end:
                cost = costs[start] + block_nbytes + _REGION_COST_NBYTES
                best = (cost, start) if best is None else min(best, (cost, start))
        assert best is not None, "the largest block holds every slot"
        costs.append(best[0])
        best_starts.append(best[1])
    return _lengths(best_starts)


def _block_sizes(sizes_nbytes: Sequence[int]) -> list[int]:
    if not sizes_nbytes:
        return []
    smallest = pinned_block_nbytes(min(sizes_nbytes))
    largest = pinned_block_nbytes(sum(sizes_nbytes))
    return [smallest << shift for shift in range((largest // smallest).bit_length())]


def _lengths(best_starts: Sequence[int]) -> list[int]:
    lengths = []
    end = len(best_starts) - 1
    while end > 0:
        lengths.append(end - best_starts[end])
        end = best_starts[end]
    return lengths[::-1]
