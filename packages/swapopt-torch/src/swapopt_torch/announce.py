"""What a user is told when states get a layout: one log line, and warnings where they help."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from swapopt_common import SwapOptimizerConfig
from swapopt_torch.host_memory import available_host_nbytes
from swapopt_torch.layout import SwapLayout
from swapopt_torch.units import TorchUnit

logger = logging.getLogger("swapopt_torch")


def log_layout(layout: SwapLayout) -> None:
    """Log what moves, in how many batches, and the device memory that takes at most."""
    slots = [slot for unit in layout.places for slot in unit.slots]
    moving = [slot.storage_nbytes for slot in slots if slot.swappable]
    reasons = Counter(slot.resident_reason for slot in slots if not slot.swappable)
    stay = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
    packed = f"packed, staging arenas: {layout.arena_count} x {layout.arena_nbytes:,} bytes"
    way = packed if layout.packed else "per tensor"
    logger.info(
        "swapopt: %s states (%s bytes) live in pinned host memory; a step holds at most %s bytes "
        "of them on %s (%s; batches: %s); resident: %s",
        f"{len(moving):,}",
        f"{sum(moving):,}",
        f"{layout.bound_nbytes:,}",
        _names(layout.devices) or "no device",
        way,
        len(layout.batches),
        stay,
    )


def warn_of_many_devices(devices: Iterable[torch.device]) -> None:
    """Warn that states move per tensor because they are on several devices."""
    warnings.warn(
        f"swapopt: states are on several devices ({_names(devices)}); they move per tensor instead "
        "of packed. Pass packed_swap=False to choose this, or use one optimizer per device.",
        stacklevel=2,
    )


def warn_if_host_is_small(units: Sequence[TorchUnit]) -> None:
    """Warn if the states that have no host memory yet need more than is free."""
    missing = [slot for unit in units for slot in unit.swapped() if slot.region is None]
    wanted_nbytes = sum(slot.storage_nbytes for slot in missing)
    available_nbytes = available_host_nbytes()
    if available_nbytes is not None and wanted_nbytes > available_nbytes:
        warnings.warn(
            f"swapopt: the states need {wanted_nbytes:,} bytes of pinned host memory, and "
            f"{available_nbytes:,} are free. Swap fewer states (state_keys, a larger min_numel) "
            "or give this host fewer ranks.",
            stacklevel=2,
        )


def warn_of_no_effect(config: SwapOptimizerConfig, units: Sequence[TorchUnit]) -> None:
    """Warn of what the user asked for and will not get: masters, or any swapping at all."""
    if config.include_master_params:
        warnings.warn(
            "swapopt: include_master_params=True has no effect on torch optimizers: only "
            "MindFormers AdamW owns master parameters.",
            stacklevel=4,
        )
    slots = [slot for unit in units for slot in unit.slots]
    if not slots or any(slot.swappable for slot in slots):
        return
    reasons = Counter(slot.resident_reason for slot in slots)
    listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    warnings.warn(
        f"swapopt: no optimizer state can be swapped ({listed}); training goes on as without "
        f"swap_optimizer{_until_when(reasons)}.",
        stacklevel=4,
    )


def _until_when(reasons: Iterable[str | None]) -> str:
    # Each step looks at where its parameters are.
    moves = {"on the CPU", "on the meta device"}.intersection(reasons)
    return " until the parameters are on an accelerator" if moves else ""


def _names(devices: Iterable[torch.device]) -> str:
    return ", ".join(sorted(map(str, devices)))
