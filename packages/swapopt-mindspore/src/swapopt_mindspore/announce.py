"""What a user is told at wrapping: one log line, and warnings where they help."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Sequence

from swapopt_mindspore.device import Device
from swapopt_mindspore.layout import SwapLayout
from swapopt_mindspore.slots import MindSporeUnit

logger = logging.getLogger("swapopt_mindspore")

# From the functions here to the line that calls swap_optimizer.
_CALLER = 4


def log_layout(device: Device, layout: SwapLayout, units: Sequence[MindSporeUnit]) -> None:
    """Log what moves, in how many batches, and the device memory that takes at most."""
    moving = [slot.storage_nbytes for slot in layout.slots()]
    stay = ", ".join(f"{count} {reason}" for reason, count in _reasons(units)) or "none"
    packed = f"packed, staging arenas: {layout.arena_count} x {layout.arena_nbytes:,} bytes"
    logger.info(
        "swapopt: %s states (%s bytes) live in pinned host memory; a step holds at most %s bytes "
        "of them on %s (%s; batches: %s); resident: %s",
        f"{len(moving):,}",
        f"{sum(moving):,}",
        f"{layout.bound_nbytes:,}",
        device.name,
        packed if layout.packed else "per tensor",
        len(layout.batches),
        stay,
    )


def warn_of_no_device() -> None:
    """Warn that MindSpore runs on the CPU, where there is nothing to swap from."""
    warnings.warn(
        "swapopt: MindSpore's device target is CPU, so no optimizer state is swapped and training "
        'goes on as without swap_optimizer. Set mindspore.set_context(device_target="Ascend") '
        "before wrapping, or, to try swapping without hardware, wrap inside "
        "`with swapopt_mindspore.emulated.EmulatedDevice():`.",
        stacklevel=_CALLER,
    )


def warn_of_no_effect(units: Sequence[MindSporeUnit]) -> None:
    """Warn if no state at all can swap; those that may appear on the device later still can."""
    if not units or any(unit.planned() for unit in units):
        return
    listed = ", ".join(f"{count} {reason}" for reason, count in _reasons(units))
    warnings.warn(
        f"swapopt: no optimizer state can be swapped ({listed}); training goes on as without "
        "swap_optimizer.",
        stacklevel=_CALLER,
    )


def warn_of_no_masters(serves: str) -> None:
    """Warn that there are no masters to include."""
    warnings.warn(
        f"swapopt: include_master_params=True has no effect: this {serves} has no master "
        "parameters. MindFormers AdamW has them for fp16 and bf16 parameters.",
        stacklevel=_CALLER,
    )


def _reasons(units: Sequence[MindSporeUnit]) -> list[tuple[str, int]]:
    slots = [slot for unit in units for slot in unit.slots]
    reasons = [slot.resident_reason for slot in slots if slot.resident_reason is not None]
    return Counter(reasons).most_common()
