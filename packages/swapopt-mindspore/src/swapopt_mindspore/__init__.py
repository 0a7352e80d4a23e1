"""Keep the states of a MindSpore Adam optimizer in host memory, and stream them during steps."""

from swapopt_common import HostMemoryError, SwapConfigError, SwapOptimizerConfig, SwapStepError

__all__ = [
    "HostMemoryError",
    "SwapConfigError",
    "SwapOptimizerConfig",
    "SwapStepError",
]

__version__ = "0.1.0"
