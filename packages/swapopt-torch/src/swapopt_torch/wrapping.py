"""`swap_optimizer`, which wraps an optimizer."""

from __future__ import annotations

import torch

from swapopt_common import DeviceRoom, SwapConfigError, SwapOptimizerConfig
from swapopt_torch.optimizer import TorchSwapOptimizer


def swap_optimizer(
    optimizer: torch.optim.Optimizer,
    config: SwapOptimizerConfig | None = None,
    *,
    device_memory_budget: int | None = None,
    resident_bytes: int = 0,
    resident_fraction: float = 0.0,
    synchronous: bool = False,
    pageable_fallback: bool = False,
) -> TorchSwapOptimizer:
    """Wrap an Adam or AdamW optimizer so that its states live in pinned host memory.

    States that exist are copied to the host at once; states that do not exist yet are born there.
    During ``step()`` they visit the device batch by batch. Results equal the wrapped optimizer's
    bit for bit.

    Args:
        optimizer: a torch.optim.Adam, a torch.optim.AdamW, or HyperParallel's AdamW
            (`swapopt_torch.optim.AdamW` or its original). It keeps its groups and its state, but
            its own ``step()`` must not be called any more.
        config: what to swap and how; the defaults suit most models. ``packed_swap=None`` means
            packed, unless the states are on several devices.
        device_memory_budget: bytes of device memory, over all devices of this process, that
            states which could swap may take at any time: instead of ``swap_times``. A step gets
            what it needs to be fast; states stay on the device as far as the rest goes.
        resident_bytes: keep states of so many bytes on the device: whole parameters, in the
            optimizer's order, as they fit. The others swap with the config's ``swap_times``.
        resident_fraction: the same as a share of the bytes of all that could swap, 0 to 1.
        synchronous: make every copy block the host. Slow; for finding faults, or where
            asynchronous copies must be ruled out.
        pageable_fallback: where host memory cannot be pinned, warn and go on in pageable memory,
            whose copies block the host, instead of raising HostMemoryError.

    Returns:
        An optimizer to use in place of ``optimizer``.

    Raises:
        ValueError: the optimizer or its settings cannot be served, a step does not fit into the
            budget, or more than one of budget, bytes and fraction is given; nothing has changed.
        HostMemoryError: pinned host memory ran out; nothing has changed.
    """
    if config is not None and not isinstance(config, SwapOptimizerConfig):
        raise SwapConfigError(
            f"config must be a SwapOptimizerConfig or None, found {config!r}. Write for example "
            "swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=16))."
        )
    return TorchSwapOptimizer(
        optimizer,
        config or SwapOptimizerConfig(),
        DeviceRoom(
            device_memory_budget=device_memory_budget,
            resident_bytes=resident_bytes,
            resident_fraction=resident_fraction,
        ),
        synchronous=synchronous,
        pageable_fallback=pageable_fallback,
    )


def is_swap_optimizer(optimizer: object) -> bool:
    """Say whether ``optimizer`` came from `swap_optimizer`."""
    return isinstance(optimizer, TorchSwapOptimizer)
