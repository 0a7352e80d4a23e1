"""A2: gradient scaling, clipping, accumulation and autocast, bit for bit as native."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from training import Run, TinyGPT, assert_same_run, bits, collect
from twins import KINDS, Twin, both

STEPS = 5
SCALE = 1024.0


def two_groups(parameters: Sequence[nn.Parameter], **options: Any) -> torch.optim.AdamW:
    groups = [
        {"params": parameters[:2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": parameters[2:], "lr": 3e-3, "betas": (0.8, 0.95), "amsgrad": True},
    ]
    return torch.optim.AdamW(groups, **{"foreach": False, **options})


def scaled_loss(twin: Twin, step: int) -> torch.Tensor:
    """A loss whose gradients differ from element to element and step to step."""
    generator = torch.Generator().manual_seed(step)
    losses = []
    for parameter in twin.parameters:
        weights = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        losses.append((weights * parameter + parameter.square()).sum())
    return torch.stack(losses).sum()


def gradient_bytes(parameter: nn.Parameter) -> bytes:
    """Fused updates unscale the gradients in place: that counts as a result, too."""
    assert parameter.grad is not None
    return bits(parameter.grad).numpy().tobytes()


def scaled_step(
    twin: Twin,
    scaler: torch.amp.GradScaler,
    step: int,
    *,
    overflow: bool = False,
    clip: str | None = None,
    backward_passes: int = 1,
) -> None:
    for part in range(backward_passes):
        scaler.scale(scaled_loss(twin, 100 * part + step) / backward_passes).backward()
    if overflow:
        gradient = twin.parameters[-1].grad
        assert gradient is not None
        gradient[7] = float("inf")
    if clip is not None:
        scaler.unscale_(twin.optimizer)
    if clip == "norm":
        norm = nn.utils.clip_grad_norm_(twin.parameters, 1.0)
        twin.seen.append(str(norm.item()))
    elif clip == "value":
        nn.utils.clip_grad_value_(twin.parameters, 0.5)
    before = [parameter.detach().clone() for parameter in twin.parameters]
    scaler.step(twin.optimizer)
    scaler.update()
    moved = [not torch.equal(*pair) for pair in zip(before, twin.parameters, strict=True)]
    assert moved == [not overflow] * len(moved)
    twin.seen.append((scaler.get_scale(), [gradient_bytes(p) for p in twin.parameters]))
    twin.optimizer.zero_grad()
    assert not hasattr(twin.optimizer, "grad_scale")
    assert not hasattr(twin.optimizer, "found_inf")


@pytest.mark.parametrize("clip", [None, "norm", "value", "unscale only"])
@pytest.mark.parametrize("overflows", [(), (0, 2, 3)], ids=["finite", "inf"])
@pytest.mark.parametrize("kind", KINDS)
def test_a2_grad_scaler(
    device: torch.device, packed: bool, kind: str, overflows: tuple[int, ...], clip: str | None
) -> None:
    for twin in both(device, packed, lambda p: two_groups(p, **KINDS[kind])):
        scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, growth_interval=2)
        for step in range(STEPS):
            scaled_step(twin, scaler, step, overflow=step in overflows, clip=clip)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, "norm"])
def test_a2_accumulated_gradients(
    device: torch.device, packed: bool, kind: str, clip: str | None
) -> None:
    for twin in both(device, packed, lambda p: two_groups(p, **KINDS[kind])):
        scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
        for step in range(STEPS):
            scaled_step(twin, scaler, step, overflow=step == 2, clip=clip, backward_passes=3)


@pytest.mark.parametrize("kind", KINDS)
def test_a2_a_parameter_without_gradient(device: torch.device, packed: bool, kind: str) -> None:
    for twin in both(device, packed, lambda p: two_groups(p, **KINDS[kind])):
        scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
        for step in range(STEPS):
            scaler.scale(scaled_loss(twin, step)).backward()
            twin.parameters[step % len(twin.parameters)].grad = None
            scaler.step(twin.optimizer)
            scaler.update()
            twin.optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_a2_two_optimizers_share_a_scaler(device: torch.device, packed: bool, kind: str) -> None:
    """One overflows, the other does not: each is skipped for itself, the scale falls for both."""
    pairs = zip(
        both(device, packed, lambda p: two_groups(p, **KINDS[kind])),
        both(device, packed, lambda p: two_groups(p, **KINDS[kind])),
        strict=True,
    )
    for pair in pairs:
        scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
        for step in range(STEPS):
            for number, twin in enumerate(pair):
                scaler.scale(scaled_loss(twin, step + number)).backward()
            if step == 1:
                gradient = pair[0].parameters[0].grad
                assert gradient is not None
                gradient[0] = float("nan")
            for twin in pair:
                scaler.step(twin.optimizer)
            scaler.update()
            for twin in pair:
                twin.seen.append(scaler.get_scale())
                twin.optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_a2_scaling_can_be_switched_off(device: torch.device, packed: bool, kind: str) -> None:
    for twin in both(device, packed, lambda p: two_groups(p, **KINDS[kind])):
        scaler = torch.amp.GradScaler(device.type, enabled=False)
        for step in range(3):
            scaled_step(twin, scaler, step)


@pytest.mark.parametrize("clip", ["norm", "norm without foreach", "value"])
@pytest.mark.parametrize("kind", KINDS)
def test_clipping(device: torch.device, packed: bool, kind: str, clip: str) -> None:
    for twin in both(device, packed, lambda p: two_groups(p, **KINDS[kind])):
        for step in range(3):
            twin.give_gradients(step)
            if clip == "value":
                nn.utils.clip_grad_value_(twin.parameters, 0.3)
            else:
                foreach = False if clip.endswith("foreach") else None
                nn.utils.clip_grad_norm_(twin.parameters, 0.7, foreach=foreach)
            twin.optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(device: torch.device, packed: bool, kind: str, low: torch.dtype) -> None:
    """fp16 with a scaler, bf16 without; two micro-batches per step."""

    def train(swap: bool) -> Run:
        torch.manual_seed(0)
        model = TinyGPT().to(device)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), 1e-2, **KINDS[kind]
        )
        if swap:
            config = SwapOptimizerConfig(swap_times=4, packed_swap=packed)
            optimizer = swap_optimizer(optimizer, config)
        scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=low is torch.float16)
        run = Run(optimizer=optimizer)
        data = torch.Generator().manual_seed(1)
        for _ in range(3):
            for _ in range(2):
                tokens = torch.randint(0, 67, (2, 9), generator=data).to(device)
                with torch.autocast(device.type, low):
                    logits = model(tokens[:, :-1]).flatten(0, 1)
                    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
                scaler.scale(loss / 2).backward()
                run.losses.append(loss.detach().cpu())
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        collect(run, list(model.parameters()))
        return run

    assert_same_run(train(True), train(False))
