"""Optimizers with swapped states beside their native twins, without a model around them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import mindformers_adamw
from cases import Case
from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore import MindSporeSwapOptimizer, swap_optimizer
from swapopt_mindspore.device import Device
from training import (
    Differentiate,
    Gradients,
    MakeOptimizer,
    Run,
    Step,
    assert_same_run,
    collect,
    eager_leaving_alone,
    snapshot,
    towards_targets,
    train,
)

Shape = tuple[int, ...]


def adam(params: list[Parameter]) -> nn.Optimizer:
    """Make an optimizer whose states move per tensor."""
    optimizer: nn.Optimizer = nn.Adam(params, learning_rate=0.02)
    return optimizer


def adamw(params: list[Parameter]) -> nn.Optimizer:
    """Make an optimizer whose states move either way."""
    optimizer: nn.Optimizer = mindformers_adamw.home().AdamW(params, learning_rate=0.02)
    return optimizer


def fused_adamw(params: list[Parameter]) -> nn.Optimizer:
    """Make an optimizer whose operator a test has to provide: see the fixture `no_operator`."""
    optimizer: nn.Optimizer = mindformers_adamw.home().AdamW(params, use_fused=True)
    return optimizer


def make_parameters(
    shapes: Sequence[Shape], dtypes: Sequence[ms.Type] = (ms.float32,), seed: int = 0
) -> list[Parameter]:
    """Return parameters with the given shapes, and dtypes in turn."""
    random = np.random.default_rng(seed)
    return [
        Parameter(
            Tensor(random.normal(0, 0.3, shape).astype(np.float32)).astype(
                dtypes[index % len(dtypes)]
            ),
            name=f"p{index}",
        )
        for index, shape in enumerate(shapes)
    ]


def make_gradients(
    params: Sequence[Parameter], step: int, missing: Collection[int] = ()
) -> Gradients:
    """Return the same gradients for the same step; None for the parameters that miss theirs."""
    random = np.random.default_rng(1000 + step)
    values = [random.normal(size=param.shape).astype(np.float32) for param in params]
    return tuple(
        None if index in missing else Tensor(value).astype(param.dtype)
        for index, (param, value) in enumerate(zip(params, values, strict=True))
    )


class Twins:
    """A native optimizer and a swapped one over equal parameters.

    Args:
        make: makes the optimizer.
        shapes, dtypes: of the parameters.
        device: where the swapped one swaps.
        config: how.
        options: further arguments of `swap_optimizer`.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        shapes: Sequence[Shape],
        device: Device | None,
        config: SwapOptimizerConfig,
        dtypes: Sequence[ms.Type] = (ms.float32,),
        **options: Any,
    ) -> None:
        self.native = make(make_parameters(shapes, dtypes))
        self.base = make(make_parameters(shapes, dtypes))
        self.swapped = swap_optimizer(self.base, config, device=device, **options)
        self.steps = 0

    @classmethod
    def of(cls, native: nn.Optimizer, base: nn.Optimizer, swapped: MindSporeSwapOptimizer) -> Twins:
        """Return twins that were made one by one."""
        twins = cls.__new__(cls)
        twins.native, twins.base, twins.swapped, twins.steps = native, base, swapped, 0
        return twins

    def gradients(self, missing: Collection[int] = ()) -> Gradients:
        """Return the gradients of the coming step, in the optimizer's order."""
        return make_gradients(list(self.native.parameters), self.steps, missing)

    def step(self, times: int = 1, missing: Collection[int] = ()) -> None:
        """Let both take steps."""
        for _ in range(times):
            gradients = self.gradients(missing)
            self.swapped(gradients)
            self.step_natively(gradients)

    def step_natively(self, gradients: Gradients) -> None:
        """Let the native one take a step, and count it."""
        eager_leaving_alone(self.native)(gradients)
        self.steps += 1

    def assert_equal(self) -> None:
        """Parameters, states and counters are equal byte for byte."""
        self.swapped.synchronize()
        assert_same_run(snapshot(self.swapped), snapshot(self.native))


def train_natively(
    case: Case,
    *,
    missing: Mapping[int, set[int]] | None = None,
    differentiate: Differentiate = towards_targets,
) -> Run:
    """Train a model without swapping."""
    return train(
        case.make,
        eager_leaving_alone,
        dtypes=case.dtypes,
        missing=missing,
        loss_scale=case.loss_scale,
        differentiate=differentiate,
    )


@cache
def trained_natively(case: Case, differentiate: Differentiate = towards_targets) -> Run:
    """Return what `train_natively` leaves with all gradients; made once, and only to be read."""
    return train_natively(case, differentiate=differentiate)


def train_swapped(
    case: Case,
    device: Device | None,
    config: SwapOptimizerConfig,
    *,
    missing: Mapping[int, set[int]] | None = None,
    differentiate: Differentiate = towards_targets,
    **options: Any,
) -> tuple[Run, MindSporeSwapOptimizer]:
    """Train a model with swapped states; nothing is joined until the end."""
    wrapped: list[MindSporeSwapOptimizer] = []

    def swapped(optimizer: nn.Optimizer) -> Step:
        wrapped.append(swap_optimizer(optimizer, config, device=device, **options))
        return wrapped[0]

    run = train(
        case.make,
        swapped,
        dtypes=case.dtypes,
        missing=missing,
        loss_scale=case.loss_scale,
        differentiate=differentiate,
    )
    wrapped[0].synchronize()
    collect(run, wrapped[0])
    return run, wrapped[0]


def fail_at(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, error: BaseException
) -> None:
    """Let the given call (from 0) of ``owner.name`` raise, once."""
    original = getattr(owner, name)
    calls = 0

    def counted(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls - 1 == call:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
