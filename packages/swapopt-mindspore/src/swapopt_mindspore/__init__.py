"""Keep the states of a MindSpore Adam optimizer in host memory, and stream them during steps."""

from swapopt_common import HostMemoryError, SwapConfigError, SwapOptimizerConfig, SwapStepError
from swapopt_mindspore.optimizer import (
    MindSporeSwapOptimizer,
    is_swap_optimizer,
    swap_optimizer,
)
from swapopt_mindspore.stats import ResidentState, StepTimes, SwapStats, TransferCounts

__all__ = [
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

__version__ = "0.1.0"
