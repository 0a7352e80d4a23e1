"""What a checkpoint costs: state_dict() copied on write, beside cloning every state at once.

    python packages/swapopt-torch/benchmarks/save.py --mebibytes 512

Prints, for both ways, the time until the dictionary is there, the time of the next step while it
is alive or not, and the host memory that is held after that step for the dictionary's sake. Runs
on the accelerator torch finds, else on the virtual one; times are of the host's clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer

PARAMETERS = 64


def build(device: torch.device, mebibytes: int) -> TorchSwapOptimizer:
    """Return a stepped optimizer with so many MiB of states."""
    numel = mebibytes * 2**20 // (2 * 4 * PARAMETERS)
    parameters = [torch.nn.Parameter(torch.ones(numel, device=device)) for _ in range(PARAMETERS)]
    optimizer = swap_optimizer(torch.optim.AdamW(parameters, fused=True), SwapOptimizerConfig())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.step()
    optimizer.synchronize()
    return optimizer


def clone(optimizer: TorchSwapOptimizer) -> dict[str, Any]:
    """Return what a save without copy on write would: every state cloned at once."""
    return {
        "state": {
            number: {key: value.clone() for key, value in entries.items()}
            for number, entries in enumerate(optimizer.state.values())
        }
    }


def measure(
    optimizer: TorchSwapOptimizer,
    save: Callable[[TorchSwapOptimizer], dict[str, Any]],
    *,
    keep: bool,
) -> tuple[float, float, float]:
    """Return seconds of the save and of the next step, and MiB held; the snapshot lives or not."""
    started = time.perf_counter()
    saved: dict[str, Any] | None = save(optimizer)
    saved_seconds = time.perf_counter() - started
    if not keep:
        saved = None
    started = time.perf_counter()
    optimizer.step()
    optimizer.synchronize()
    step_seconds = time.perf_counter() - started
    mirrors = {value.data_ptr() for e in optimizer.state.values() for value in e.values()}
    held = [
        value.nbytes
        for entries in (saved or {"state": {}})["state"].values()
        for value in entries.values()
        if value.data_ptr() not in mirrors
    ]
    return saved_seconds, step_seconds, sum(held) / 2**20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=512, help="states (default: 512)")
    parser.add_argument("--repeat", type=int, default=5, help="best of so many (default: 5)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator()
    if device is None:
        from swapopt_torch import virtual

        virtual.enable("h200", races="off", timeline=False)
        device = torch.device("virtual", 0)
    optimizer = build(torch.device(device.type, 0), arguments.mebibytes)
    nothing: dict[str, Any] = {"state": {}}
    plain = min(
        measure(optimizer, lambda _: nothing, keep=False)[1] for _ in range(arguments.repeat)
    )
    print(f"{arguments.mebibytes} MiB of states on {device}; a step without a save: {plain:.3f} s")
    print(f"{'':34}{'save':>10}{'next step':>12}{'host memory':>14}")
    ways: list[tuple[str, Callable[[TorchSwapOptimizer], dict[str, Any]], bool]] = [
        ("state_dict(), dropped at once", TorchSwapOptimizer.state_dict, False),
        ("state_dict(), alive in the step", TorchSwapOptimizer.state_dict, True),
        ("every state cloned", clone, True),
    ]
    for name, save, keep in ways:
        runs = [measure(optimizer, save, keep=keep) for _ in range(arguments.repeat)]
        saved_seconds, step_seconds, mebibytes = (min(column) for column in zip(*runs, strict=True))
        print(f"{name:<34}{saved_seconds:>8.3f} s{step_seconds:>10.3f} s{mebibytes:>10.0f} MiB")


if __name__ == "__main__":
    main()
