"""One interrupted training run; as a program, it resumes from a file and takes the next step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from twins import KINDS, Twin, make_twin

STEPS = 58


def make_optimizer(parameters: Sequence[nn.Parameter], kind: str) -> torch.optim.Optimizer:
    """Make two groups that differ in everything a checkpoint keeps."""
    groups = [
        {"params": parameters[:2], "weight_decay": 0.1, "eps": 1e-6},
        {"params": parameters[2:], "betas": (0.8, 0.95), "amsgrad": True},
    ]
    return torch.optim.AdamW(groups, 1e-2, **KINDS[kind])


def start(device: torch.device, kind: str, packed: bool | None) -> tuple[Twin, LRScheduler]:
    """Build everything anew; ``packed=None`` is the native optimizer."""
    twin = make_twin(device, lambda parameters: make_optimizer(parameters, kind))
    if packed is not None:
        twin.wrap(packed)
    # Cycles the momentum, too: lr and betas differ in every step.
    return twin, OneCycleLR(twin.optimizer, [2e-2, 1e-2], total_steps=2 * STEPS)


def proceed(twin: Twin, scheduler: LRScheduler, steps: range) -> None:
    for step in steps:
        twin.train(range(step, step + 1))
        scheduler.step()


def checkpoint(twin: Twin, scheduler: LRScheduler) -> dict[str, Any]:
    """Return what a trainer saves; the model's part on the CPU."""
    return {
        "parameters": [parameter.detach().cpu() for parameter in twin.parameters],
        "optimizer": twin.optimizer.state_dict(),
        "scheduler": {
            key: value
            for key, value in scheduler.state_dict().items()
            if isinstance(value, (int, float, bool, str, list))
        },
    }


def resume(twin: Twin, scheduler: LRScheduler, saved: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter, value in zip(twin.parameters, saved["parameters"], strict=True):
            parameter.copy_(value)
    scheduler.load_state_dict(saved["scheduler"])
    twin.optimizer.load_state_dict(saved["optimizer"])


def main(device_type: str, source: str, target: str) -> None:
    """Resume every run in ``source``, in both movements; save what one step more gives."""
    torch.set_num_threads(1)
    if device_type == "virtual":
        from swapopt_torch import virtual

        virtual.enable("h200", device_count=2, races="raise", late_copies=True)
    device = torch.device(device_type, 0)
    results = {}
    for (kind, was_packed), saved in torch.load(source, weights_only=True).items():
        for packed in (True, False):
            twin, scheduler = start(device, kind, packed)
            resume(twin, scheduler, saved)
            proceed(twin, scheduler, range(STEPS, STEPS + 1))
            results[kind, was_packed, packed] = checkpoint(twin, scheduler)
    torch.save(results, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
