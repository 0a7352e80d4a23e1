"""HyperParallel's own AdamW, played by a stand-in: recognised, and updated by its own function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hyper import Pair, counts, saved
from swapopt_torch import SwapStepError, optim, swap_optimizer
from training import fail_at


@pytest.fixture
def hyper_parallel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module in the place of HyperParallel's, with a class and a functional of its own.

    Its groups have no count before the first step, and none of torch's own flags.
    """
    name = "hyper_parallel.core.optimizer.adamw"
    module: Any = ModuleType(name)
    module.calls = []

    def adamw(params: list[torch.Tensor], *tensors: Any, **options: Any) -> None:
        module.calls.append((len(params), tensors[-1]))
        optim.adamw(params, *tensors, **options)

    class AdamW(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, dict.fromkeys(("amsgrad", "maximize"), False))

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                params = [p for p in group["params"] if p.grad is not None]
                if not params:
                    continue
                group["step"] = group.get("step", 0) + 1
                for p in params:
                    for key in () if self.state[p] else ("exp_avg", "exp_avg_sq"):
                        self.state[p][key] = torch.zeros_like(p)
                module.adamw(
                    params,
                    [p.grad for p in params],
                    [self.state[p]["exp_avg"] for p in params],
                    [self.state[p]["exp_avg_sq"] for p in params],
                    [],
                    group["step"],
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )

    module.adamw, module.AdamW = adamw, AdamW
    monkeypatch.setitem(sys.modules, name, module)
    yield module


def with_settings(module: Any) -> Callable[..., torch.optim.Optimizer]:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        rest = {"betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-8}
        return module.AdamW([{**rest, **group} for group in groups])

    return make


def test_hyper_parallels_own_class(
    device: torch.device, packed: bool, hyper_parallel: ModuleType
) -> None:
    """Recognised without an import; its own functional runs, once per batch and group."""
    pair = Pair(device, packed, with_settings(hyper_parallel))
    assert "step" not in pair.optimizer.param_groups[0]
    pair.step(0, {3, 4, 5, 6, 7})
    assert "step" not in pair.optimizer.param_groups[0]
    pair.step(1)
    hyper_parallel.calls.clear()
    pair.give_gradients(2)
    pair.optimizer.step()
    assert hyper_parallel.calls == [(2, 2), (1, 2), (1, 3), (2, 3), (2, 3)]
    pair.reference.step()
    pair.assert_equal()
    fresh = Pair(device, packed, with_settings(hyper_parallel))
    fresh.optimizer.load_state_dict(saved(pair.reference))
    assert counts(fresh.optimizer) == [2, 3]
    assert (
        swap_optimizer(with_settings(hyper_parallel)([{"params": pair.native, "lr": 1.0}]))
        .swap_stats()
        .packed
    )


def test_hyper_parallels_first_update_fails(
    device: torch.device, packed: bool, hyper_parallel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(device, packed, with_settings(hyper_parallel))
    pair.give_gradients(0)
    with monkeypatch.context() as patch:
        fail_at(patch, hyper_parallel, "adamw", 0, ValueError("boom"))
        with pytest.raises(SwapStepError, match="boom"):
            pair.optimizer.step()
    assert ["step" in group for group in pair.optimizer.param_groups] == [False, False]
    pair.step(1)
    assert counts(pair.optimizer) == [1, 1]


def test_hyper_parallels_class_that_cannot_be_served(
    device: torch.device, hyper_parallel: Any
) -> None:
    parameter = nn.Parameter(torch.ones(4096, device=device))

    class OwnGroups(hyper_parallel.AdamW):  # type: ignore[misc]
        def _init_group(self) -> None: ...

    with pytest.raises(ValueError, match="override neither step nor _init_group"):
        swap_optimizer(OwnGroups([parameter]))
    del hyper_parallel.adamw
    with pytest.raises(ValueError, match="no function adamw"):
        swap_optimizer(hyper_parallel.AdamW([parameter]))
