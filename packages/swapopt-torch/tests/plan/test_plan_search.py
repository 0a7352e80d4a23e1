"""Which swap_times is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapopt_torch.plan.rehearsal import Rehearsal
from swapopt_torch.plan.search import MOST_SWAP_TIMES, TRIED_SWAP_TIMES, explore, least_fitting

NATIVE = Rehearsal(
    swap_times=None,
    batches=0,
    device_idle_bytes=1000,
    device_peak_bytes=1000,
    host_bytes=0,
    copied_bytes=0,
    step_ns=10,
    wait_ns=10,
    issue_ns=10,
)
STATE_BYTES, MOST_BATCHES = 7200, 100


def rehearse(swap_times: int | None) -> Rehearsal:
    """Two arenas of a batch each, at most 100 batches, and steps that are fastest with 24."""
    if swap_times is None:
        return NATIVE
    batches = min(swap_times, MOST_BATCHES)
    return replace(
        NATIVE,
        swap_times=swap_times,
        batches=batches,
        device_peak_bytes=1000 + 2 * -(-STATE_BYTES // batches),
        step_ns=100 + abs(batches - 24),
    )


@given(needed=st.lists(st.integers(0, 50), min_size=1, max_size=60), budget=st.integers(0, 50))
def test_the_least_that_fits_is_found_by_trying_few(needed: list[int], budget: int) -> None:
    needed.sort(reverse=True)
    tried: list[int] = []

    def needed_bytes(count: int) -> int:
        tried.append(count)
        return needed[count - 1]

    found = least_fitting(needed_bytes, budget, len(needed))
    fitting = [count for count, value in enumerate(needed, 1) if value <= budget]
    assert found == (fitting[0] if fitting else None)
    assert len(tried) <= 2 * len(needed).bit_length() + 3


def test_without_a_wish_the_default_is_chosen() -> None:
    trade = explore(rehearse)
    assert trade.chosen == 16
    assert trade.native is NATIVE
    assert list(trade.swapped) == list(TRIED_SWAP_TIMES)
    assert trade.least_swap_times is None


def test_a_wish_is_chosen_and_shown_among_the_others() -> None:
    trade = explore(rehearse, swap_times=17)
    assert trade.chosen == 17
    assert list(trade.swapped) == sorted({*TRIED_SWAP_TIMES, 17})


def test_within_a_budget_the_fastest_is_chosen_and_the_fewest_batches_are_told() -> None:
    trade = explore(rehearse, budget_bytes=2 * 720)
    assert trade.least_swap_times == 10
    assert trade.chosen == 24
    assert not trade.fits(trade.swapped[8])
    assert trade.fits(trade.swapped[10])


def test_the_fastest_has_to_fit() -> None:
    trade = explore(rehearse, budget_bytes=2 * 150)
    assert trade.least_swap_times == trade.chosen == 48


def test_swap_times_that_make_no_more_batches_are_left_out() -> None:
    trade = explore(rehearse, budget_bytes=2 * 72)
    assert max(trade.swapped) < MOST_SWAP_TIMES
    batches = [found.batches for found in trade.swapped.values()]
    assert len(batches) == len(set(batches))  # two of each here, so memory differs with them


def test_as_many_batches_in_less_memory_are_another_choice() -> None:
    def rehearse_ninety_six(swap_times: int | None) -> Rehearsal:
        found = rehearse(swap_times)
        return found if swap_times is None else replace(found, batches=96)

    trade = explore(rehearse_ninety_six)
    staging = [found.staging_bytes for found in trade.swapped.values()]
    assert list(trade.swapped) == list(TRIED_SWAP_TIMES)
    assert staging == sorted(set(staging), reverse=True)


def test_a_budget_that_cannot_be_kept_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"below 100 bytes: with 100 batches it is still 144\."):
        explore(rehearse, budget_bytes=100)
