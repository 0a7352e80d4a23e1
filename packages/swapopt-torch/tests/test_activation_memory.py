"""Recomputation and activation swap: the same numbers, and their memory saved beside ours."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from activation_memory import TECHNIQUES
from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from training import Run, allocated, assert_same_run, collect

WIDTH = 64
ROWS = 512
STEPS = 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 150)
        self.down = nn.Linear(150, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(hidden))), 0.1)
        return hidden + self.down(inner)


def make_model(technique: Callable[[nn.Module], nn.Module] | None) -> nn.Module:
    layers = [Layer() for _ in range(3)]
    wrapped = layers if technique is None else [technique(layer) for layer in layers]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *wrapped, nn.Linear(WIDTH, 1))


@dataclass
class Elapsed:
    """Virtual time of the last steps of a run, and what it went into."""

    total_ns: int = 0
    busy_ns: dict[str, int] = field(default_factory=dict)
    launches: int = 0
    waits: int = 0


def train(
    device: torch.device,
    technique: Callable[[nn.Module], nn.Module] | None,
    config: SwapOptimizerConfig | None,
    *,
    measured: int = 1,
) -> tuple[Run, Elapsed]:
    """Train for some steps; peak and time are those of so many last ones, with all that they do."""
    module = torch.get_device_module(device)
    before = allocated(device)
    module.manual_seed_all(0)
    torch.manual_seed(0)
    model = make_model(technique).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if config is not None:
        optimizer = swap_optimizer(optimizer, config)
    run, elapsed = Run(optimizer=optimizer), Elapsed()
    data = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        if step == STEPS - measured:
            module.synchronize(device)
            module.reset_peak_memory_stats(device)
            started_ns = _begin(device)
        loss = model(torch.randn(ROWS, WIDTH, generator=data).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.detach().cpu())
    module.synchronize(device)
    if device.type == "virtual":
        elapsed = _end(started_ns)
    run.peak_bytes = module.max_memory_allocated(device) - before
    run.idle_bytes = allocated(device) - before
    collect(run, list(model.parameters()))
    del model, optimizer, loss
    run.optimizer = None
    gc.collect()
    return run, elapsed


def _begin(device: torch.device) -> int:
    if device.type != "virtual":
        return 0
    from swapopt_torch import virtual

    virtual.clear_timeline()
    return virtual.now_ns()


def _end(started_ns: int) -> Elapsed:
    from swapopt_torch import virtual

    elapsed = Elapsed(total_ns=virtual.now_ns() - started_ns)
    for row in virtual.timeline():
        if row.lane == "host":
            elapsed.waits += 1
        else:
            elapsed.launches += 1
            elapsed.busy_ns[row.lane] = elapsed.busy_ns.get(row.lane, 0) + row.end_ns - row.start_ns
    return elapsed


@pytest.mark.parametrize("name", list(TECHNIQUES))
def test_with_fewer_activations(device: torch.device, name: str) -> None:
    """The same numbers as with neither; and each saves its memory, whatever the other does.

    All peaks are in the backward pass: two batches of states take less than the activations.
    """
    plain, _ = train(device, None, None)
    native, _ = train(device, TECHNIQUES[name], None)
    assert_same_run(native, plain)
    assert native.peak_bytes < plain.peak_bytes
    for packed in (True, False):
        config = SwapOptimizerConfig(swap_times=4, packed_swap=packed)
        swapped, _ = train(device, TECHNIQUES[name], config)
        assert_same_run(swapped, plain)
        states_bytes = native.idle_bytes - swapped.idle_bytes
        assert native.peak_bytes - swapped.peak_bytes == states_bytes > 0


@pytest.fixture
def swap(device_type: str, packed: bool) -> SwapOptimizerConfig:
    if device_type != "virtual":
        pytest.skip("only virtual time is deterministic")
    return SwapOptimizerConfig(swap_times=4, packed_swap=packed)


@pytest.mark.asynchronous
@pytest.mark.parametrize("name", ["saved on the host", "offloaded"])
def test_steps_take_at_most_their_copies_longer(
    device: torch.device, swap: SwapOptimizerConfig, name: str
) -> None:
    """States and activations share the engines of the link: the last offloads of a step run in the
    next one's forward pass.

    All queues are in the order of issue: what a step has in addition delays the rest by no more
    than it takes by itself, wherever it queues.
    """
    from swapopt_torch import virtual

    native, swapped = (
        train(device, TECHNIQUES[name], config, measured=3)[1] for config in (None, swap)
    )
    assert swapped.busy_ns["d2h"] > native.busy_ns["d2h"] > 0
    assert swapped.busy_ns["h2d"] > native.busy_ns["h2d"] > 0
    profile = virtual.PROFILES["h200"]
    added_ns = sum(swapped.busy_ns.values()) - sum(native.busy_ns.values())
    issued_ns = (swapped.launches - native.launches) * profile.host_issue_seconds * 1e9
    waited_ns = (swapped.waits - native.waits) * profile.sync_seconds * 1e9
    assert native.total_ns < swapped.total_ns <= native.total_ns + added_ns + issued_ns + waited_ns


@pytest.mark.parametrize("name", ["saved on the host", "offloaded"])
def test_swapping_takes_as_long_as_with_all_activations(
    device: torch.device, swap: SwapOptimizerConfig, name: str
) -> None:
    """A step by itself has no copies of activations left when those of states begin."""
    added_ns = []
    for technique in (None, TECHNIQUES[name]):
        native, swapped = (train(device, technique, config)[1] for config in (None, swap))
        added_ns.append(swapped.total_ns - native.total_ns)
    assert added_ns[0] == added_ns[1] > 0
