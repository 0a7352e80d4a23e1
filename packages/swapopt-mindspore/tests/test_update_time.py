"""What updates cost in virtual time: a launch for every operator that the optimizer issues."""

from __future__ import annotations

import pytest

from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore import swap_optimizer
from swapopt_mindspore.emulated import PROFILES, EmulatedDevice
from swapping import adam, adamw, make_gradients, make_parameters
from training import MakeOptimizer

SHAPES = [(32, 32), (64, 16), (32, 32)]


@pytest.mark.parametrize(("make", "launches"), [(adam, 1), (adamw, 16)])
def test_an_update_is_charged_what_its_optimizer_launches(
    make: MakeOptimizer, launches: int
) -> None:
    device = EmulatedDevice("ascend-910b")
    params = make_parameters(SHAPES)
    config = SwapOptimizerConfig(swap_times=1, min_numel=0)
    optimizer = swap_optimizer(make(params), config, device=device)
    device.clear_timeline()
    optimizer(make_gradients(params, 0))
    (update,) = [row for row in device.timeline() if row.lane == "compute"]
    # So few bytes pass while the host is at the next launch, all but the last launch's.
    issued_ns = (launches * len(params) - 1) * PROFILES["ascend-910b"].host_issue_ns
    assert 0 < update.end_ns - update.start_ns - issued_ns < 1000
