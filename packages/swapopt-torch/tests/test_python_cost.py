"""What a warm packed step costs Python, counted: operators and calls, never timed."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer

SWAP_TIMES = 16
NUMEL = 1024
EXPERT = 3
"""Parameters that have their gradients together."""
COUNTS = (96, 960, 1920)
"""Numbers of parameters that make 16 batches of whole ones."""
MOST_CALLS = 50
"""Calls per parameter; natively it is 11, which do more each."""
CHANGING_SET_FACTOR = 1.5


class Scene:
    """Small parameters under a swapped fused AdamW, warm."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.params = [torch.nn.Parameter(torch.ones(NUMEL, device=device)) for _ in range(count)]
        self._grads = [torch.full_like(param, 1e-3) for param in self.params]
        self.optimizer: TorchSwapOptimizer = swap_optimizer(
            torch.optim.AdamW(self.params, fused=True), SwapOptimizerConfig(swap_times=SWAP_TIMES)
        )
        for _ in range(2):
            self.give_gradients(range(count))
            self.optimizer.step()

    def give_gradients(self, indices: Sequence[int]) -> None:
        chosen = set(indices)
        for index, (param, grad) in enumerate(zip(self.params, self._grads, strict=True)):
            param.grad = grad if index in chosen else None

    def half_of_the_experts(self, odd: int) -> list[int]:
        return [i for i in range(len(self.params)) if i // EXPERT % 2 == odd]


class Operators(TorchDispatchMode):
    """Counts the operators on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        name = str(func)
        if name.startswith("aten."):
            self.counts[name.split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def calls_of(function: Callable[[], object]) -> int:
    """Return how many functions are called, Python's and C's."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def slopes(calls: Sequence[int], counts: Sequence[int]) -> list[float]:
    """Return the calls for each further parameter, between one count and the next."""
    return [(calls[i + 1] - calls[i]) / (counts[i + 1] - counts[i]) for i in range(len(counts) - 1)]


@pytest.mark.parametrize("count", COUNTS)
def test_a_warm_step_makes_no_views(device: torch.device, count: int) -> None:
    scene = Scene(device, count)
    with Operators() as operators:
        scene.optimizer.step()
    # Arenas in flight are told once that the copy streams, two of them, use them.
    streams = operators.counts.pop("record_stream")
    assert 0 < streams <= 2 * SWAP_TIMES
    assert operators.counts == {
        "copy_": 2 * SWAP_TIMES,
        "_fused_adamw_": SWAP_TIMES,
        "_foreach_add_": 1,
    }


@pytest.mark.parametrize("count", COUNTS)
def test_a_step_without_some_gradients_makes_two_views_per_run(
    device: torch.device, count: int
) -> None:
    scene = Scene(device, count)
    for odd in (0, 1):
        scene.give_gradients(scene.half_of_the_experts(odd))
        with Operators() as operators:
            scene.optimizer.step()
        counts = operators.counts
        experts = count // EXPERT // 2
        # An expert is a run, and one that lies in two batches is two.
        assert experts <= counts["copy_"] // 2 <= experts + SWAP_TIMES
        assert counts["slice"] <= counts["copy_"]
        assert set(counts) <= {"copy_", "slice", "_fused_adamw_", "_foreach_add_", "record_stream"}


def test_calls_grow_with_the_parameters_and_no_faster(device: torch.device) -> None:
    scenes = [Scene(device, count) for count in COUNTS]
    first, second = slopes([calls_of(scene.optimizer.step) for scene in scenes], COUNTS)
    assert second == pytest.approx(first, rel=0.02)
    assert second <= MOST_CALLS


def test_calls_grow_no_faster_where_the_set_of_gradients_changes(device: torch.device) -> None:
    scenes = [Scene(device, count) for count in COUNTS]
    same_set, _ = slopes([calls_of(scene.optimizer.step) for scene in scenes], COUNTS)
    active_counts = [count // 2 for count in COUNTS]
    for odd in (0, 1, 0):
        for scene in scenes:
            scene.give_gradients(scene.half_of_the_experts(odd))
        calls = [calls_of(scene.optimizer.step) for scene in scenes]
        first, second = slopes(calls, active_counts)
        assert second == pytest.approx(first, rel=0.05)
        assert second <= CHANGING_SET_FACTOR * same_set
