"""The virtual accelerator, collecting races, for every test in this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from swapopt_torch import virtual


@pytest.fixture(scope="session", autouse=True)
def virtual_device() -> None:
    torch.set_num_threads(1)
    try:
        virtual.enable("h200", device_count=2, races="collect")
    except virtual.VirtualUnavailableError as error:
        if os.environ.get("SWAPOPT_REQUIRE_VIRTUAL") == "1":
            raise
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def clean_device(virtual_device: None) -> Iterator[None]:
    """Default settings before, and no race left after, every test."""
    virtual.enable("h200", device_count=2, races="collect")
    torch.virtual.set_device(0)
    torch.virtual.synchronize()
    virtual.races()
    virtual.reset_clock()
    virtual.clear_timeline()
    yield
    left = virtual.races()
    assert not left, "\n".join(map(str, left))
