"""HyperParallel's AdamW side by side, native and swapped."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, optim, swap_optimizer
from training import assert_same_bits


def config(packed: bool | None, swap_times: int = 4) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(swap_times=swap_times, packed_swap=packed)


def counts(optimizer: torch.optim.Optimizer) -> list[int]:
    return [group["step"] for group in optimizer.param_groups]


class Pair:
    """Eight parameters in two groups, native and swapped; two of them in each of four batches.

    The second batch holds the first group's last parameter and the second group's first.
    """

    def __init__(
        self, device: torch.device, packed: bool | None, make: Callable[..., Any] = optim.AdamW
    ) -> None:
        self.device = device
        self.swapped = [
            nn.Parameter(torch.linspace(0, i + 1, 4096, device=device)) for i in range(8)
        ]
        self.native = [nn.Parameter(parameter.detach().clone()) for parameter in self.swapped]
        self.reference: torch.optim.Optimizer = make(self._groups(self.native))
        self.optimizer: TorchSwapOptimizer = swap_optimizer(
            make(self._groups(self.swapped)), config(packed)
        )

    @staticmethod
    def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": parameters[:3], "lr": 1e-2},
            {"params": parameters[3:], "lr": 3e-3, "betas": (0.8, 0.95)},
        ]

    def give_gradients(self, seed: int, active: set[int] | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        for index, (one, other) in enumerate(zip(self.swapped, self.native, strict=True)):
            grad = torch.randn(4096, generator=generator).to(self.device)
            wanted = active is None or index in active
            one.grad, other.grad = (grad, grad.clone()) if wanted else (None, None)

    def step(self, seed: int, active: set[int] | None = None) -> None:
        self.give_gradients(seed, active)
        self.optimizer.step()
        self.reference.step()

    def native_updates_only(self, updated: set[int]) -> None:
        for index, parameter in enumerate(self.native):
            parameter.grad = parameter.grad if index in updated else None
        self.reference.step()

    def assert_equal(self) -> None:
        assert counts(self.optimizer) == counts(self.reference)
        for index, (one, other) in enumerate(zip(self.swapped, self.native, strict=True)):
            assert_same_bits(one, other, f"parameter {index}")
            state, expected = self.optimizer.state.get(one, {}), self.reference.state.get(other, {})
            assert set(state) == set(expected)
            for key, value in state.items():
                assert_same_bits(value, expected[key], f"{key} of {index}")


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a checkpoint as it comes back from a file."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded
