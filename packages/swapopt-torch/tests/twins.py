"""A swapped optimizer and its native twin, put through the same and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer
from swapopt_torch.local_tensor import local_of
from training import assert_same_bits

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

NUMELS = (2048, 3000, 16, 5000, 1500)  # the third is too small to swap
KINDS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "fused": {"fused": True},
}


@dataclass
class Twin:
    """One of the two; ``base`` is what was wrapped, or the native optimizer itself."""

    parameters: list[nn.Parameter]
    base: torch.optim.Optimizer
    optimizer: torch.optim.Optimizer
    seen: list[Any] = field(default_factory=list)

    @property
    def swapped(self) -> TorchSwapOptimizer:
        assert isinstance(self.optimizer, TorchSwapOptimizer)
        return self.optimizer

    def wrap(self, packed: bool, swap_times: int = 3) -> None:
        config = SwapOptimizerConfig(swap_times=swap_times, packed_swap=packed)
        self.optimizer = swap_optimizer(self.base, config)

    def give_gradients(self, step: int) -> None:
        """Fill every gradient with numbers that depend on the step alone."""
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters:
            values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = values.to(parameter.device)

    def train(self, steps: range | int) -> None:
        for step in range(steps) if isinstance(steps, int) else steps:
            self.give_gradients(step)
            self.optimizer.step()
            self.optimizer.zero_grad()


def make_twin(
    device: torch.device,
    make: MakeOptimizer,
    numels: Sequence[int] = NUMELS,
    dtype: torch.dtype = torch.float32,
) -> Twin:
    """Make parameters and a native optimizer over them; always the same."""
    parameters = [nn.Parameter(torch.linspace(-1, 1, numel).to(device, dtype)) for numel in numels]
    optimizer = make(parameters)
    return Twin(parameters, optimizer, optimizer)


def both(
    device: torch.device,
    packed: bool,
    make: MakeOptimizer,
    numels: Sequence[int] = NUMELS,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Twin]:
    """Yield the swapped one, then the native one; compare them when both have been used."""
    swapped = make_twin(device, make, numels, dtype)
    swapped.wrap(packed)
    yield swapped
    native = make_twin(device, make, numels, dtype)
    yield native
    assert_alike(swapped, native)


def assert_alike(found: Twin, expected: Twin) -> None:
    """Parameters, states, groups and what the test noted are equal bit for bit, and finite."""
    pairs = zip(found.parameters, expected.parameters, strict=True)
    for index, (one, other) in enumerate(pairs):
        assert local_of(one).isfinite().all(), f"parameter {index} is not finite"
        assert_same_bits(one, other, f"parameter {index}")
        state, reference = found.optimizer.state[one], expected.optimizer.state[other]
        assert set(state) == set(reference), f"states of parameter {index}: {list(state)}"
        for key, value in state.items():
            assert_same_bits(value, reference[key], f"{key} of parameter {index}")
    groups = zip(found.optimizer.param_groups, expected.optimizer.param_groups, strict=True)
    for index, (group, reference) in enumerate(groups):
        assert_same_group(group, reference, f"group {index}")
    assert found.seen == expected.seen


def assert_same_group(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """All settings but the parameters are equal and of the same types."""
    assert set(found) == set(expected), what
    for key in set(found) - {"params"}:
        assert type(found[key]) is type(expected[key]), f"{key} of {what}"
        assert found[key] == expected[key], f"{key} of {what}"
