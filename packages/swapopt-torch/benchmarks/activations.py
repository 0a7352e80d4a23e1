"""Swapped states beside recomputation and activation swap: memory and time of a training step.

    python packages/swapopt-torch/benchmarks/activations.py --layers 4 --width 512 --rows 2048
    python packages/swapopt-torch/benchmarks/activations.py --ranks 8

Prints, for every way to hold activations and every way to hold states, the peak of device memory
and the time of one step: forward, backward and update. Runs on the accelerator torch finds, else
on the virtual one, dry, whose time is virtual and leaves arithmetic out. With several ranks, which
needs the virtual one, it is the first of them, under FSDP2, and communication takes no time.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from swapopt_torch import SwapOptimizerConfig, swap_optimizer

STEPS = 2

Activations = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


def keep(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return layer(hidden)


def recompute(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, hidden, use_reentrant=False)


def swap(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    with save_on_cpu(pin_memory=True, device_type=hidden.device.type):
        return layer(hidden)


ACTIVATIONS: dict[str, Activations] = {"kept": keep, "recomputed": recompute, "swapped": swap}
STATES: dict[str, bool | None] = {"native": None, "packed": True, "per tensor": False}


def measure(
    model: nn.Sequential, rows: torch.Tensor, activations: Activations, packed: bool | None
) -> tuple[float, float]:
    """Return MiB of device memory at the peak of the last step, and its milliseconds."""
    device = rows.device
    module = torch.get_device_module(device)
    now = module.now if device.type == "virtual" else time.perf_counter
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if packed is not None:
        optimizer = swap_optimizer(optimizer, SwapOptimizerConfig(packed_swap=packed))
    for _ in range(STEPS):
        module.synchronize(device)
        module.reset_peak_memory_stats(device)
        started = now()
        hidden = rows
        for layer in model:
            hidden = activations(layer, hidden)
        hidden.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    module.synchronize(device)
    return module.max_memory_allocated(device) / 2**20, (now() - started) * 1e3


def shard(model: nn.Sequential, ranks: int) -> None:
    """Leave the first rank's part of a model, each layer in a group of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(
        "cpu:fake,virtual:fake", store=FakeStore(), rank=0, world_size=ranks
    )
    mesh = init_device_mesh("virtual", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4, help="default: 4")
    parser.add_argument("--width", type=int, default=512, help="default: 512")
    parser.add_argument("--rows", type=int, default=2048, help="tokens of a batch (default: 2048)")
    parser.add_argument("--ranks", type=int, default=1, help="shard over so many (default: 1)")
    arguments = parser.parse_args()
    found = torch.accelerator.current_accelerator()
    if found is not None and arguments.ranks > 1:
        parser.error("--ranks needs the virtual accelerator, and torch finds another one")
    if found is None:
        from swapopt_torch import virtual

        virtual.enable("h200", races="off", timeline=False, dry=True)
    device = torch.device("virtual" if found is None else found.type, 0)
    model = nn.Sequential(*(Layer(arguments.width) for _ in range(arguments.layers))).to(device)
    if arguments.ranks > 1:
        shard(model, arguments.ranks)
    rows = torch.randn(arguments.rows, arguments.width, device=device)
    numel = sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
        for parameter in model.parameters()
    )
    print(f"{numel * 8 / 2**20:.0f} MiB of states on {device}, {arguments.rows} rows")
    print(f"{'activations':14}" + "".join(f"{name:>26}" for name in STATES))
    for name, activations in ACTIVATIONS.items():
        cells = []
        for packed in STATES.values():
            mebibytes, milliseconds = measure(model, rows, activations, packed)
            gc.collect()
            cells.append(f"{mebibytes:>11.1f} MiB{milliseconds:>8.3f} ms")
        print(f"{name:14}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    main()
