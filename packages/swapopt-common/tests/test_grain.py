"""How many batches share the memory of two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapopt_common import window_of
from swapopt_common.grain import LEAST_BATCH_BYTES

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("total_bytes", "swap_times", "window"),
    [
        (0, 16, 2),
        (64 * MIB, 16, 2),  # two batches of 4 MiB are too small to be divided
        (192 * MIB, 16, 3),
        (256 * MIB, 16, 4),
        (512 * MIB, 16, 4),
        (GIB, 16, 4),
        (GIB, 8, 8),
        (GIB, 64, 3),
        (4 * GIB, 16, 8),
        (64 * GIB, 16, 32),
    ],
)
def test_window_of_known_sizes(total_bytes: int, swap_times: int, window: int) -> None:
    assert window_of(total_bytes, swap_times) == window


@given(total_bytes=st.integers(0, 10**13), swap_times=st.integers(1, 2000))
def test_parts_of_the_memory_are_never_small(total_bytes: int, swap_times: int) -> None:
    window = window_of(total_bytes, swap_times)
    memory_bytes = 2 * -(-total_bytes // swap_times)
    assert window >= 2
    assert window == 2 or memory_bytes >= window * LEAST_BATCH_BYTES
