"""Keep the states of a torch Adam optimizer in host memory, and stream them during its steps."""

from swapopt_common import HostMemoryError, SwapConfigError, SwapOptimizerConfig, SwapStepError
from swapopt_torch.optimizer import TorchSwapOptimizer
from swapopt_torch.stats import ResidentState, StepTimes, SwapStats, TransferCounts
from swapopt_torch.wrapping import is_swap_optimizer, swap_optimizer

__all__ = [
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

__version__ = "0.1.0"
