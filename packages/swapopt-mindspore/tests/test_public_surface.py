"""The public names, and what importing the package brings along."""

from __future__ import annotations

import subprocess
import sys

import swapopt_mindspore
from swapopt_common import SwapOptimizerConfig


def test_public_names() -> None:
    assert sorted(swapopt_mindspore.__all__) == [
        "HostMemoryError",
        "MindSporeSwapOptimizer",
        "ResidentState",
        "StepTimes",
        "SwapConfigError",
        "SwapOptimizerConfig",
        "SwapStats",
        "SwapStepError",
        "TransferCounts",
        "is_swap_optimizer",
        "swap_optimizer",
    ]
    assert all(hasattr(swapopt_mindspore, name) for name in swapopt_mindspore.__all__)
    assert swapopt_mindspore.SwapOptimizerConfig is SwapOptimizerConfig


def test_importing_brings_nothing_else() -> None:
    code = (
        "import sys, swapopt_mindspore; "
        "found = {'torch', 'mindformers', 'hyper_parallel', 'rich', 'matplotlib', "
        "'swapopt_mindspore.emulated', 'swapopt_mindspore.cli', 'swapopt_mindspore.demo'}"
        " & set(sys.modules); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
