"""The benchmark as the command sets it up: no race detector, copies at once."""

from __future__ import annotations

import pytest
import torch
from bench_devices import OpenDevice

from swapopt_torch import virtual
from swapopt_torch.bench.device import VirtualBenchDevice, choose_device
from swapopt_torch.bench.settings import BenchSettings


@pytest.fixture
def open_device(device: torch.device) -> OpenDevice:
    """Return what opens the virtual accelerator with a profile; its clock begins at zero."""
    del device  # the fixture skips where there is no compiler

    def open_with(profile: str) -> VirtualBenchDevice:
        chosen = choose_device(BenchSettings(device="virtual", profile=profile, dry=False))
        assert isinstance(chosen, VirtualBenchDevice)
        virtual.reset_clock()
        return chosen

    return open_with
