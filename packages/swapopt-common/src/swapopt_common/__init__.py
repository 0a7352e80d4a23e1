"""What the swapopt backends share: configuration, data types, partitioning, errors."""

from swapopt_common.adapter import OptimizerSwapAdapter
from swapopt_common.config import STATE_KEYS, SwapOptimizerConfig
from swapopt_common.errors import HostMemoryError, SwapConfigError, SwapStepError
from swapopt_common.grain import frugal_swap_times, window_of
from swapopt_common.partition import partition
from swapopt_common.room import DeviceRoom, first_fit
from swapopt_common.slots import SlotState, SwapSlot, UpdateUnit, move_slots

__version__ = "0.1.0"

__all__ = [
    "STATE_KEYS",
    "DeviceRoom",
    "HostMemoryError",
    "OptimizerSwapAdapter",
    "SlotState",
    "SwapConfigError",
    "SwapOptimizerConfig",
    "SwapSlot",
    "SwapStepError",
    "UpdateUnit",
    "first_fit",
    "frugal_swap_times",
    "move_slots",
    "partition",
    "window_of",
]
