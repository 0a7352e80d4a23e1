"""partition(): order, count, and the optimum, against an exhaustive search over all cuts."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapopt_common import SwapConfigError, partition


@dataclass(eq=False)
class Unit:
    swappable_nbytes: int


def units_of(*sizes_bytes: int) -> list[Unit]:
    return [Unit(size_bytes) for size_bytes in sizes_bytes]


def batch_sizes(batches: list[list[Unit]]) -> list[int]:
    return [sum(unit.swappable_nbytes for unit in batch) for batch in batches]


def smallest_largest_batch(sizes_bytes: list[int], batches: int) -> int:
    units = len(sizes_bytes)
    return min(
        max(sum(sizes_bytes[a:b]) for a, b in itertools.pairwise((0, *cuts, units)))
        for cuts in itertools.combinations(range(1, units), batches - 1)
    )


sizes = st.one_of(
    st.integers(0, 3),
    st.sampled_from([0, 1024, 4096, 1 << 20]),
    st.integers(0, 1 << 40),
)


@given(st.lists(sizes, min_size=1, max_size=9), st.integers(1, 12))
def test_matches_exhaustive_search(sizes_bytes: list[int], swap_times: int) -> None:
    batches = partition(units_of(*sizes_bytes), swap_times)
    expected = smallest_largest_batch(sizes_bytes, min(swap_times, len(sizes_bytes)))
    assert max(batch_sizes(batches)) == expected


def test_matches_exhaustive_search_for_every_small_case() -> None:
    for count, swap_times in itertools.product(range(1, 7), range(1, 5)):
        for sizes_bytes in itertools.product((0, 1, 3, 4), repeat=count):
            batches = partition(units_of(*sizes_bytes), swap_times)
            expected = smallest_largest_batch(list(sizes_bytes), min(swap_times, count))
            assert max(batch_sizes(batches)) == expected, (sizes_bytes, swap_times)


@given(st.lists(sizes, max_size=60), st.integers(1, 70))
def test_exact_count_no_empty_batch_original_order(sizes_bytes: list[int], swap_times: int) -> None:
    units = units_of(*sizes_bytes)
    batches = partition(units, swap_times)
    assert len(batches) == min(swap_times, len(units))
    assert all(batches)
    assert [unit for batch in batches for unit in batch] == units


@given(st.integers(1, 200), st.integers(1, 20))
def test_equal_units_are_spread_evenly(count: int, swap_times: int) -> None:
    lengths = [len(batch) for batch in partition(units_of(*[4096] * count), swap_times)]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("sizes_bytes", "swap_times", "expected"),
    [
        ([5], 16, [5]),
        ([1, 2, 3], 3, [1, 2, 3]),
        ([1, 2, 3], 1, [6]),
        ([9, 1, 1, 1], 2, [9, 3]),
        ([1, 1, 1, 9], 2, [3, 9]),
        ([1, 1, 9, 1, 1], 3, [2, 9, 2]),
        ([0, 0, 7, 0, 0], 2, [0, 7]),
        ([0, 0, 0], 2, [0, 0]),
        # The cut nearest to an even share would put 20 and 50 together.
        ([20, 50, *[25] * 16], 10, [20, *[50] * 9]),
        ([1 << 62, 1 << 62, 1 << 62], 2, [1 << 63, 1 << 62]),
    ],
)
def test_examples(sizes_bytes: list[int], swap_times: int, expected: list[int]) -> None:
    found = batch_sizes(partition(units_of(*sizes_bytes), swap_times))
    assert max(found) == max(expected)
    assert sorted(found) == sorted(expected)


def test_no_units_no_batches() -> None:
    assert partition([], 16) == []


def test_returned_batches_are_the_callers_own() -> None:
    units = units_of(1, 2)
    partition(units, 1)[0].clear()
    assert len(units) == 2


@pytest.mark.parametrize("swap_times", [0, -1])
def test_refuses_fewer_than_one_batch(swap_times: int) -> None:
    for units in ([], units_of(1, 2)):
        with pytest.raises(SwapConfigError, match=f"swap_times must be .* 1; found {swap_times}"):
            partition(units, swap_times)


def test_refuses_negative_sizes() -> None:
    with pytest.raises(ValueError, match=r"swappable_nbytes must be >= 0; found -8"):
        partition(units_of(4, -8, 4), 2)
