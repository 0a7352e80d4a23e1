"""How much device memory a user gives to states between and during steps, beside `swap_times`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swapopt_common.config import SwapOptimizerConfig
from swapopt_common.errors import SwapConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """Device memory for states that could swap: at most one of the three is given.

    Attributes:
        device_memory_budget: bytes of them that may be on devices at any time, resident or in
            flight. What a step needs in flight is taken from it first, the rest is for states
            that stay.
        resident_bytes: bytes of them that stay on their devices.
        resident_fraction: the share of their bytes that stays, 0 to 1.

    Raises:
        SwapConfigError: a value breaks its rule, or more than one is given.
    """

    device_memory_budget: int | None = None
    resident_bytes: int = 0
    resident_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.device_memory_budget is not None:
            _require_bytes("device_memory_budget", self.device_memory_budget, "None, or ")
        _require_bytes("resident_bytes", self.resident_bytes)
        _require_fraction(self.resident_fraction)
        given = self.names_given
        if len(given) > 1:
            raise SwapConfigError(
                f"{' and '.join(given)} contradict each other: each says how many states stay on "
                "the device. Give one of them."
            )

    @property
    def names_given(self) -> tuple[str, ...]:
        """Which of the three differ from their defaults."""
        given = {
            "device_memory_budget": self.device_memory_budget is not None,
            "resident_bytes": self.resident_bytes > 0,
            "resident_fraction": self.resident_fraction > 0,
        }
        return tuple(name for name, is_given in given.items() if is_given)

    def check_with(self, config: SwapOptimizerConfig) -> None:
        """Raise SwapConfigError if a budget and a `swap_times` both bound a step's memory."""
        default = SwapOptimizerConfig().swap_times
        if self.device_memory_budget is not None and config.swap_times != default:
            raise SwapConfigError(
                f"device_memory_budget={self.device_memory_budget:,} picks swap_times by itself, "
                f"but config has swap_times={config.swap_times}. Leave it at {default}, or give "
                "resident_bytes beside it."
            )

    def resident_target_bytes(self, total_bytes: int, swap_times: int) -> int:
        """Return how many bytes of states should stay.

        Under a budget B, r bytes that stay leave 2 (S - r) / n in flight, of S bytes in all and
        with n = ``swap_times``: r = (B - 2 S / n) / (1 - 2 / n), or nothing if that is negative.

        Args:
            total_bytes: of all states that could swap.
            swap_times: what bounds the memory in flight.
        """
        if self.device_memory_budget is None:
            return self.resident_bytes or math.floor(self.resident_fraction * total_bytes)
        if self.device_memory_budget >= total_bytes:
            return total_bytes
        in_flight_share = 2 / swap_times
        if in_flight_share >= 1:
            return 0
        left_bytes = self.device_memory_budget - in_flight_share * total_bytes
        return max(0, math.floor(left_bytes / (1 - in_flight_share)))


def first_fit(sizes_bytes: Sequence[int], target_bytes: int) -> list[int]:
    """Return the indices of those that fit into ``target_bytes``, taken in order."""
    chosen, left_bytes = [], target_bytes
    for index, size_bytes in enumerate(sizes_bytes):
        if 0 < size_bytes <= left_bytes:
            chosen.append(index)
            left_bytes -= size_bytes
    return chosen


def _require_bytes(name: str, value: object, or_none: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SwapConfigError(
            f"{name} must be {or_none}a number of bytes, an int >= 0 such as 4 * 2**30; found "
            f"{value!r} ({type(value).__name__})"
        )


def _require_fraction(value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:  # type: ignore[operator]
        raise SwapConfigError(
            f"resident_fraction must be a number from 0 to 1; found {value!r} "
            f"({type(value).__name__})"
        )
