"""One pool of two ranks and one of four, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pool import RankPool


def _pool(size: int, device_type: str) -> Iterator[RankPool]:
    if device_type != "virtual" and torch.get_device_module(device_type).device_count() < size:
        pytest.skip(f"needs {size} {device_type} devices")
    pool = RankPool(size, device_type)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks(device_type: str) -> Iterator[RankPool]:
    yield from _pool(2, device_type)


@pytest.fixture(scope="session")
def four_ranks(device_type: str) -> Iterator[RankPool]:
    yield from _pool(4, device_type)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """Return the pool that a test is parametrized with: ``indirect``, 2 or 4."""
    pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[request.param])
    assert isinstance(pool, RankPool)
    return pool
