"""The public names, and what importing the package brings along."""

from __future__ import annotations

import subprocess
import sys

import swapopt_torch
from swapopt_common import SwapOptimizerConfig


def test_public_names() -> None:
    assert sorted(swapopt_torch.__all__) == [
        "HostMemoryError",
        "ResidentState",
        "StepTimes",
        "SwapConfigError",
        "SwapOptimizerConfig",
        "SwapStats",
        "SwapStepError",
        "TorchSwapOptimizer",
        "TransferCounts",
        "is_swap_optimizer",
        "swap_optimizer",
    ]
    assert all(hasattr(swapopt_torch, name) for name in swapopt_torch.__all__)
    assert swapopt_torch.SwapOptimizerConfig is SwapOptimizerConfig


def test_importing_brings_nothing_else() -> None:
    code = (
        "import sys, swapopt_torch; "
        "found = {'mindspore', 'hyper_parallel', 'rich', 'matplotlib', 'ninja', "
        "'swapopt_torch.virtual', 'swapopt_torch.cli', 'swapopt_torch.demo'} & set(sys.modules); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
