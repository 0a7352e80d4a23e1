"""One pool of four ranks, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
