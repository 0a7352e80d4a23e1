"""How much of the states stays on the device."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapopt_common import (
    DeviceRoom,
    SwapConfigError,
    SwapOptimizerConfig,
    first_fit,
    frugal_swap_times,
    window_of,
)

MIB, GIB = 2**20, 2**30


def test_by_default_nothing_stays() -> None:
    assert DeviceRoom().names_given == ()
    assert DeviceRoom().resident_target_bytes(GIB, 16) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_memory_budget": 4e9}, "device_memory_budget must be None, or a number of bytes"),
        ({"device_memory_budget": -1}, r"int >= 0 such as 4 \* 2\*\*30; found -1 \(int\)"),
        ({"device_memory_budget": True}, r"found True \(bool\)"),
        ({"resident_bytes": 0.5}, r"resident_bytes must be a number of bytes.*found 0.5 \(float"),
        ({"resident_bytes": None}, "resident_bytes"),
        ({"resident_fraction": 1.5}, "resident_fraction must be a number from 0 to 1; found 1.5"),
        ({"resident_fraction": math.nan}, "found nan"),
        ({"resident_fraction": "half"}, "found 'half'"),
        ({"resident_fraction": True}, "found True"),
        (
            {"resident_bytes": 1, "resident_fraction": 0.5},
            "resident_bytes and resident_fraction contradict each other.*Give one of them",
        ),
        ({"device_memory_budget": 0, "resident_bytes": 1}, "device_memory_budget and resident_b"),
    ],
)
def test_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SwapConfigError, match=message):
        DeviceRoom(**options)  # type: ignore[arg-type]


def test_a_budget_and_swap_times_are_not_both_given() -> None:
    room = DeviceRoom(device_memory_budget=GIB)
    room.check_with(SwapOptimizerConfig())
    with pytest.raises(SwapConfigError, match=r"config has swap_times=8\. Leave it at 16"):
        room.check_with(SwapOptimizerConfig(swap_times=8))
    DeviceRoom(resident_bytes=1).check_with(SwapOptimizerConfig(swap_times=8))


def test_bytes_and_fraction() -> None:
    assert DeviceRoom(resident_bytes=100).resident_target_bytes(1000, 16) == 100
    assert DeviceRoom(resident_fraction=0.25).resident_target_bytes(1000, 16) == 250
    assert DeviceRoom(resident_fraction=1).resident_target_bytes(1000, 16) == 1000


@given(
    total_bytes=st.integers(1, 10**13),
    budget_share=st.floats(0, 1.2),
    swap_times=st.integers(1, 2000),
)
def test_what_stays_and_what_is_in_flight_fill_a_budget(
    total_bytes: int, budget_share: float, swap_times: int
) -> None:
    budget_bytes = int(budget_share * total_bytes)
    room = DeviceRoom(device_memory_budget=budget_bytes)
    resident_bytes = room.resident_target_bytes(total_bytes, swap_times)
    in_flight_bytes = 2 * (total_bytes - resident_bytes) / swap_times
    tolerance_bytes = 2 + total_bytes * 1e-9  # whole bytes, and a float's digits
    assert 0 <= resident_bytes <= total_bytes
    if resident_bytes == total_bytes:
        assert budget_bytes >= total_bytes - tolerance_bytes
    elif resident_bytes:
        assert abs(resident_bytes + in_flight_bytes - budget_bytes) <= tolerance_bytes
    else:
        assert swap_times <= 2 or in_flight_bytes >= budget_bytes - tolerance_bytes


@given(sizes=st.lists(st.integers(0, 100)), target_bytes=st.integers(0, 1000))
def test_first_fit_takes_in_order_what_fits(sizes: list[int], target_bytes: int) -> None:
    chosen = first_fit(sizes, target_bytes)
    assert chosen == sorted(set(chosen))
    left_bytes = target_bytes
    for index, size in enumerate(sizes):
        fits = 0 < size <= left_bytes
        assert (index in chosen) == fits
        left_bytes -= size if fits else 0


@pytest.mark.parametrize(
    ("total_bytes", "swap_times"), [(0, 21), (GIB, 21), (4 * GIB, 43), (64 * GIB, 171)]
)
def test_frugal_swap_times_keep_three_batches_in_flight(total_bytes: int, swap_times: int) -> None:
    assert frugal_swap_times(total_bytes) == swap_times
    assert window_of(total_bytes, swap_times) == (3 if total_bytes else 2)
