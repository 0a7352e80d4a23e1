"""Parallel training to compare on every rank: natively, packed and per tensor, in turn."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from pool import Rank
from torch import nn
from torch.distributed.tensor import DTensor

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer, virtual
from swapopt_torch.layout import round_up
from training import allocated, assert_same_bits

STEPS = 5
MIN_NUMEL = 1024
PATIENCE_SECONDS = 30.0


@dataclass
class Training:
    """One model on one rank, ready to train.

    Attributes:
        module: everything with parameters.
        optimizers: native ones, over parameters of the module; one for each pipeline stage.
        give_gradients: runs forward and backward of a step and returns the loss as this rank
            knows it; a rank without a loss returns any scalar.
        max_norm: what the norm of all gradients is clipped to before the step, if at all.
        scaler: steps the optimizers, where ``give_gradients`` scaled the loss with it.
    """

    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    give_gradients: Callable[[int], torch.Tensor]
    max_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None


Build = Callable[[Rank], Training]


@dataclass
class Outcome:
    """What a training left on one rank; device bytes beyond what was there before it.

    ``peak_nbytes`` is the peak of the last step, forward and backward included; ``freed_nbytes``
    what the swapped states would take natively; ``collectives`` what was communicated from the
    second step on, by name and bytes.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    collectives: Counter[tuple[str, int]] = field(default_factory=Counter)
    idle_nbytes: int = 0
    peak_nbytes: int = 0
    freed_nbytes: int = 0
    bound_nbytes: int = 0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(
    rank: Rank, build: Build, config: SwapOptimizerConfig | None, steps: int = STEPS
) -> Outcome:
    """Train for some steps; native without a config, swapped with one."""
    module = torch.get_device_module(rank.device)
    before = allocated(rank.device)
    torch.manual_seed(0)
    training = build(rank)
    optimizers = training.optimizers
    if config is not None:
        optimizers = [swap_optimizer(optimizer, config) for optimizer in optimizers]
    outcome = Outcome()
    for index in range(steps):
        if index == 1:
            virtual.clear_timeline()
        if index == steps - 1:
            module.synchronize(rank.device)
            module.reset_peak_memory_stats(rank.device)
        outcome.losses.append(training.give_gradients(index).detach().clone())
        _update(training, optimizers, outcome)
    module.synchronize(rank.device)
    outcome.peak_nbytes = module.max_memory_allocated(rank.device) - before
    outcome.collectives = Counter(
        (row.operation, row.nbytes) for row in virtual.timeline() if row.lane == "collective"
    )
    outcome.idle_nbytes = allocated(rank.device) - before
    outcome.losses, outcome.norms = map(_on_the_cpu, (outcome.losses, outcome.norms))
    _collect(outcome, training.module, optimizers, config)
    gone = weakref.ref(training.module)
    del training, optimizers
    _wait_until(lambda: gone() is None)
    return outcome


def _update(training: Training, optimizers: list[torch.optim.Optimizer], outcome: Outcome) -> None:
    """Clip, step and forget the gradients; note what they were clipped and scaled by."""
    if training.max_norm is not None:
        outcome.norms.append(_clip(training, optimizers, training.max_norm))
    if training.scaler is None:
        for optimizer in optimizers:
            optimizer.step()
    else:
        outcome.scales.append(training.scaler.get_scale())
        _step_scaled(training.scaler, optimizers)
    for optimizer in optimizers:
        optimizer.zero_grad()


def _wait_until(is_gone: Callable[[], bool]) -> None:
    """Wait for the threads of autograd, which let go of the last backward in their own time.

    A model that they still hold would count as memory that was there before the next training.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_gone():
        assert time.monotonic() < deadline, "the model of a training lives on"
        gc.collect()
        time.sleep(0.001)


def _clip(
    training: Training, optimizers: list[torch.optim.Optimizer], max_norm: float
) -> torch.Tensor:
    """Clip the gradients, unscaled first, and return the norm they had over all ranks."""
    if training.scaler is not None:
        for optimizer in optimizers:
            training.scaler.unscale_(optimizer)
    parameters = list(training.module.parameters())
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    assert isinstance(norm, DTensor) == any(isinstance(p, DTensor) for p in parameters)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _on_the_cpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    # Only when training is over: reading a value sooner would order what nothing else orders.
    return [tensor.cpu() for tensor in tensors]


def _step_scaled(scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def _collect(
    outcome: Outcome,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    config: SwapOptimizerConfig | None,
) -> None:
    """Copy parameters and states of this rank to the CPU."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    outcome.parameters = {name: copied(parameter) for parameter, name in names.items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if config is not None and not local(parameter).is_cpu:
                    outcome.freed_nbytes += _freed_nbytes(key, value, config.min_numel)
                outcome.states[f"{names[parameter]}.{key}"] = copied(value)
        if isinstance(optimizer, TorchSwapOptimizer):
            outcome.bound_nbytes += optimizer.swap_stats().bound_nbytes


def _freed_nbytes(key: str, state: torch.Tensor, min_numel: int) -> int:
    """Return the device bytes (512-byte blocks) that a state would take natively, if swapped."""
    values = local(state)
    if values.numel() < min_numel or values.dim() == 0:
        return 0
    assert state.device.type == values.device.type == "cpu", f"{key} is on {state.device}"
    return round_up(values.nbytes)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor.detach()).cpu().clone()


def assert_same_training(found: Outcome, expected: Outcome) -> None:
    """Losses, shards, states and communication are the same."""
    for index, (loss, other) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert loss.isfinite(), f"loss of step {index} is {loss}"
        assert_same_bits(loss, other, f"loss of step {index}")
    for index, (norm, other) in enumerate(zip(found.norms, expected.norms, strict=True)):
        assert_same_bits(norm, other, f"norm of the gradients of step {index}")
    assert found.scales == expected.scales, "another step overflowed"
    for kind in ("parameters", "states"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert set(ours) == set(theirs), f"{kind}: {set(ours) ^ set(theirs)}"
        for name, value in ours.items():
            assert value.isfinite().all(), f"{name} is not finite"
            assert_same_bits(value, theirs[name], name)
    assert found.collectives == expected.collectives, "the model communicated something else"


def assert_same_outcome(found: Outcome, expected: Outcome) -> None:
    """All of the training is the same, and the device holds less."""
    assert_same_training(found, expected)
    assert found.freed_nbytes > 0, "nothing is swapped"
    assert found.idle_nbytes == expected.idle_nbytes - found.freed_nbytes, (
        f"{found.idle_nbytes:,} bytes between steps, natively {expected.idle_nbytes:,}, "
        f"freed {found.freed_nbytes:,}"
    )
    assert found.peak_nbytes < expected.peak_nbytes, (
        f"peak {found.peak_nbytes:,} bytes, natively {expected.peak_nbytes:,}"
    )
    # Whenever the native peak was: instead of all swapped states a step holds two batches of them.
    most = expected.peak_nbytes - found.freed_nbytes + found.bound_nbytes
    assert found.peak_nbytes <= most, f"peak {found.peak_nbytes:,} bytes, at most {most:,}"


def compare(
    rank: Rank,
    build: Build,
    *,
    min_numel: int = MIN_NUMEL,
    steps: int = STEPS,
) -> dict[str, Outcome]:
    """Train natively, packed and per tensor; assert that all is the same and return all three."""
    native = train(rank, build, None, steps)
    outcomes = {"native": native}
    assert native.collectives, "nothing was communicated"
    for name, packed in (("packed", True), ("per tensor", False)):
        config = SwapOptimizerConfig(swap_times=4, min_numel=min_numel, packed_swap=packed)
        outcomes[name] = train(rank, build, config, steps)
        assert_same_outcome(outcomes[name], native)
    return outcomes
