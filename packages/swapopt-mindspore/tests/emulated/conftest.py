from __future__ import annotations

from collections.abc import Iterator

import pytest

from swapopt_mindspore.emulated import EmulatedDevice


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """A device on which every test leaves no race that it did not look at."""
    device = EmulatedDevice("half-duplex")
    yield device
    device.synchronize()
    assert device.take_races() == []
