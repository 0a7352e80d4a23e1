"""Parallel training to compare on every rank: natively and with swapped states, in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from mindspore import Parameter, nn
from pool import Rank

from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore import MindSporeSwapOptimizer, swap_optimizer
from swapopt_mindspore.emulated import EmulatedDevice
from training import (
    Gradients,
    MakeOptimizer,
    Run,
    assert_same_run,
    collect,
    eager_leaving_alone,
    of_parameter,
)

STEPS = 8
MIN_NUMEL = 1024


class Training(Protocol):
    """One model on one rank, ready to train.

    Attributes:
        parameters: of this rank.
    """

    parameters: Sequence[Parameter]

    def give_gradients(self, step: int) -> tuple[np.ndarray, Gradients]:
        """Run forward and backward; return the loss over all ranks, and this rank's gradients."""


Build = Callable[[Rank], Training]


@dataclass
class Outcome:
    """What a training left on one rank; bytes are of parameters and states on the device.

    ``peak_nbytes`` is the peak from the second step on; ``swappable_nbytes`` what the states of
    at least `MIN_NUMEL` elements take natively.
    """

    run: Run = field(default_factory=Run)
    idle_nbytes: int = 0
    peak_nbytes: int = 0
    swappable_nbytes: int = 0

    def losses(self) -> list[float]:
        return [float(loss) for loss in self.run.losses]


def train(
    rank: Rank, build: Build, make: MakeOptimizer, config: SwapOptimizerConfig | None
) -> Outcome:
    """Train for `STEPS` steps; native without a config, swapped with one."""
    device = EmulatedDevice()
    training = build(rank)
    optimizer = make(list(training.parameters))
    states = _states_of(optimizer)
    outcome = Outcome(swappable_nbytes=sum(map(_swappable_nbytes, states)))
    if config is None:
        device.adopt([_local(tensor) for tensor in (*optimizer.parameters, *states)])
        step = eager_leaving_alone(optimizer)
    else:
        optimizer = step = swap_optimizer(optimizer, config, device=device)
    for index in range(STEPS):
        loss, gradients = training.give_gradients(index)
        step(gradients)
        outcome.run.losses.append(loss)
        if index == 0:
            device.reset_peak()
    _measure(outcome, device, optimizer)
    collect(outcome.run, optimizer)
    return outcome


def _measure(outcome: Outcome, device: EmulatedDevice, optimizer: nn.Optimizer) -> None:
    if isinstance(optimizer, MindSporeSwapOptimizer):
        optimizer.synchronize()
    gc.collect()
    memory = device.memory()
    outcome.idle_nbytes, outcome.peak_nbytes = memory.allocated_bytes, memory.peak_allocated_bytes


def _states_of(optimizer: nn.Optimizer) -> list[Parameter]:
    """Return moments and maxima, but not fp32 parameters, which MindFormers lists as masters."""
    found: dict[int, Parameter] = {}
    for index, param in enumerate(optimizer.parameters):
        found |= {id(state): state for state in of_parameter(optimizer, index).values()}
        found.pop(id(param))
    return list(found.values())


def _local(tensor: Parameter) -> Parameter:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _swappable_nbytes(state: Parameter) -> int:
    """Return the device bytes (512-byte blocks) of a state's local part, if that may swap."""
    local = _local(state)
    return -(-local.nbytes // 512) * 512 if local.size >= MIN_NUMEL else 0


def assert_same_outcome(found: Outcome, native: Outcome) -> None:
    """All of the training is the same, and the device holds less."""
    assert_same_run(found.run, native.run)
    assert native.swappable_nbytes > 0, "nothing is swapped"
    assert found.idle_nbytes == native.idle_nbytes - native.swappable_nbytes, (
        f"{found.idle_nbytes:,} bytes between steps, natively {native.idle_nbytes:,}, of which "
        f"{native.swappable_nbytes:,} may leave"
    )
    assert found.peak_nbytes < native.peak_nbytes, (
        f"peak {found.peak_nbytes:,} bytes, natively {native.peak_nbytes:,}"
    )


def compare(
    rank: Rank,
    build: Build,
    make: MakeOptimizer,
    movements: Sequence[bool],
    *,
    masters: bool = False,
) -> Outcome:
    """Train natively and with each movement; assert that all is the same; return the native one.

    Args:
        rank: this rank.
        build: makes the model; the same at every call.
        make: makes the native optimizer.
        movements: values of ``packed_swap``.
        masters: whether there are masters, which then swap, too.
    """
    native = train(rank, build, make, None)
    still = [name for name, values in native.run.states.items() if not values.any()]
    assert not still, f"never updated: {still}"
    for packed in movements:
        config = SwapOptimizerConfig(
            swap_times=8, min_numel=MIN_NUMEL, packed_swap=packed, include_master_params=masters
        )
        assert_same_outcome(train(rank, build, make, config), native)
    return native
