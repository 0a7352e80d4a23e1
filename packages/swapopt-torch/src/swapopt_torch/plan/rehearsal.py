"""One rank's optimizer steps on the virtual accelerator, dry or not, and what they took."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swapopt_torch import SwapOptimizerConfig, virtual
from swapopt_torch.optimizer import TorchSwapOptimizer
from swapopt_torch.plan.case import DTYPES, OPTIMIZERS, Case
from swapopt_torch.wrapping import swap_optimizer

_DEVICE = "virtual:0"
_WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a step took.

    Attributes:
        swap_times: what was asked for; None: nothing swaps.
        batches: into how many batches the states were divided.
        device_idle_bytes: on the device between steps: parameters, gradients, resident states.
        device_peak_bytes: on the device during a step, at most.
        host_bytes: pinned for the states.
        copied_bytes: in each direction.
        step_ns: from an idle device to an idle device.
        wait_ns: until the device can begin the next forward; the last copies run beside it.
        issue_ns: until step() returned to the program.
    """

    swap_times: int | None
    batches: int
    device_idle_bytes: int
    device_peak_bytes: int
    host_bytes: int
    copied_bytes: int
    step_ns: int
    wait_ns: int
    issue_ns: int

    @property
    def staging_bytes(self) -> int:
        """On the device during a step, beside what is there between steps."""
        return self.device_peak_bytes - self.device_idle_bytes


MakeParameters = Callable[[Case], list[torch.nn.Parameter]]


def plain_parameters(case: Case) -> list[torch.nn.Parameter]:
    """Return the rank's parameters, each a tensor of what it holds."""
    return [
        torch.nn.Parameter(torch.empty(size, dtype=DTYPES[case.dtype], device=_DEVICE))
        for size in case.shard_sizes()
    ]


def rehearse(
    case: Case, swap_times: int | None, make_parameters: MakeParameters = plain_parameters
) -> Rehearsal:
    """Step the case's optimizer, natively if ``swap_times`` is None, until steps are alike.

    The virtual accelerator is enabled, with the profile to use.

    Args:
        case: what to step.
        swap_times: as in SwapOptimizerConfig.
        make_parameters: makes the rank's parameters.
    """
    _collect_garbage()
    device_bytes, host_bytes = _active_bytes(), _pinned_bytes()
    params = make_parameters(case)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = _optimizer(case, swap_times, params)
    for _ in range(_WARM_UP_STEPS):
        optimizer.step()
    torch.get_device_module(_DEVICE).synchronize(0)
    idle_bytes = _active_bytes() - device_bytes
    step_ns, wait_ns, issue_ns = _timed_step(optimizer)
    stats = optimizer.swap_stats() if isinstance(optimizer, TorchSwapOptimizer) else None
    found = Rehearsal(
        swap_times=swap_times,
        batches=stats.batches if stats is not None else 0,
        device_idle_bytes=idle_bytes,
        device_peak_bytes=_active_bytes("peak") - device_bytes,
        host_bytes=_pinned_bytes() - host_bytes,
        copied_bytes=stats.last_step.h2d_nbytes if stats is not None else 0,
        step_ns=step_ns,
        wait_ns=wait_ns,
        issue_ns=issue_ns,
    )
    del params, optimizer, stats
    _collect_garbage()
    return found


def _optimizer(
    case: Case, swap_times: int | None, params: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    native = OPTIMIZERS[case.optimizer](params)
    if swap_times is None:
        return native
    with warnings.catch_warnings():
        # It counts this machine's memory, and a dry device takes none of it.
        warnings.filterwarnings("ignore", message="swapopt: the states need")
        return swap_optimizer(
            native, SwapOptimizerConfig(swap_times=swap_times, packed_swap=case.packed)
        )


def _timed_step(optimizer: torch.optim.Optimizer) -> tuple[int, int, int]:
    device = torch.device(_DEVICE)
    module = torch.get_device_module(device)
    stream = module.current_stream(device)
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    start_ns = virtual.now_ns()
    begin.record(stream)
    optimizer.step()
    end.record(stream)
    issued_ns = virtual.now_ns()
    module.synchronize(device)
    step_ns = virtual.now_ns() - start_ns
    wait_ns = round(begin.elapsed_time(end) * 1e6)
    return step_ns, wait_ns, issued_ns - start_ns


def _active_bytes(which: str = "current") -> int:
    return int(torch.get_device_module(_DEVICE).memory_stats(0)[f"active_bytes.all.{which}"])


def _pinned_bytes() -> int:
    memory = virtual.host_memory()
    return memory.pinned_allocated_bytes + memory.registered_bytes


def _collect_garbage() -> None:
    # Optimizers are in cycles with their hooks; what is left would count in the next rehearsal.
    gc.collect()
    torch.get_device_module(_DEVICE).synchronize(0)
