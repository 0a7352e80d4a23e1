"""Optimizers to compare, one for each thing that a step does differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mindspore as ms
from mindspore import Parameter, Tensor, nn

import mindformers_adamw
from training import MakeOptimizer

RATES = [0.02 / (1 + step) for step in range(20)]


@dataclass(frozen=True)
class Case:
    """An optimizer, and the parameters it is tried on."""

    make: MakeOptimizer
    dtypes: Sequence[ms.Type] = (ms.float32,)
    loss_scale: float = 1.0


class RisingDecay(nn.Cell):
    """A weight decay that depends on the step."""

    def construct(self, global_step: Tensor) -> Tensor:
        return global_step.astype(ms.float32).reshape(()) * 0.003 + 0.01


def cosine() -> nn.CosineDecayLR:
    return nn.CosineDecayLR(0.001, 0.02, 10)


def grouped(first: dict[str, object], second: dict[str, object]) -> Callable[..., list[object]]:
    """Return what makes two groups, in another order than the model's, of parameters."""

    def make(params: list[Parameter]) -> list[object]:
        weights = [param for param in params if "weight" in param.name]
        others = [param for param in params if "weight" not in param.name]
        return [{"params": weights, **first}, {"params": others, **second}]

    return make


def _adam(groups: Callable[..., list[object]] = list, **options: object) -> MakeOptimizer:
    return lambda params: nn.Adam(groups(params), **{"learning_rate": 0.02, **options})


def _adam_weight_decay(
    groups: Callable[..., list[object]] = list, **options: object
) -> MakeOptimizer:
    return lambda params: nn.AdamWeightDecay(groups(params), **{"learning_rate": 0.02, **options})


def _mindformers(groups: Callable[..., list[object]] = list, **options: object) -> MakeOptimizer:
    return lambda params: mindformers_adamw.home().AdamW(
        groups(params), **{"learning_rate": 0.02, **options}
    )


def _unfused_form(params: list[Parameter]) -> nn.Optimizer:
    optimizer = nn.AdamWeightDecay(params, learning_rate=0.02, weight_decay=0.1)
    optimizer.use_fused_opt = False
    return optimizer


NATIVE = {
    "adam": Case(_adam()),
    "adam_nesterov": Case(_adam(use_nesterov=True)),
    "adam_amsgrad": Case(_adam(use_amsgrad=True)),
    "adam_weight_decay_and_loss_scale": Case(
        _adam(weight_decay=0.1, loss_scale=128.0), loss_scale=128.0
    ),
    "adam_groups": Case(
        _adam(grouped({"lr": 0.05, "weight_decay": 0.1}, {"weight_decay": 0.0}), loss_scale=2.0),
        loss_scale=2.0,
    ),
    "adam_groups_amsgrad": Case(_adam(grouped({"lr": 0.05}, {"lr": 0.01}), use_amsgrad=True)),
    "adam_groups_schedules": Case(_adam(grouped({"lr": RATES}, {"lr": cosine()}))),
    "adam_groups_one_rate": Case(_adam(grouped({"weight_decay": 0.2}, {}))),
    "adam_rates": Case(_adam(learning_rate=RATES)),
    "adam_schedule": Case(_adam(learning_rate=cosine())),
    "adam_rising_decay": Case(_adam(weight_decay=RisingDecay())),
    "adam_groups_rising_decay": Case(
        _adam(grouped({"weight_decay": RisingDecay()}, {"weight_decay": 0.1}))
    ),
    "adam_fp16": Case(_adam(eps=1e-3, weight_decay=0.1), (ms.float16,)),
    "adam_fp16_and_fp32": Case(_adam(eps=1e-3), (ms.float16, ms.float32)),
    "adam_weight_decay": Case(_adam_weight_decay(weight_decay=0.1)),
    "adam_weight_decay_groups": Case(
        _adam_weight_decay(grouped({"lr": 0.05, "weight_decay": 0.1}, {"weight_decay": 0.0}))
    ),
    "adam_weight_decay_groups_one_rate": Case(
        _adam_weight_decay(grouped({"weight_decay": 0.2}, {}))
    ),
    "adam_weight_decay_rates": Case(_adam_weight_decay(learning_rate=RATES)),
    "adam_weight_decay_schedules": Case(
        _adam_weight_decay(grouped({"lr": RATES}, {"lr": cosine()}), weight_decay=0.1)
    ),
    "adam_weight_decay_rising_decay": Case(_adam_weight_decay(weight_decay=RisingDecay())),
    "adam_weight_decay_groups_rising_decay": Case(
        _adam_weight_decay(grouped({"weight_decay": RisingDecay()}, {"weight_decay": 0.1}))
    ),
    "adam_weight_decay_fp16": Case(
        _adam_weight_decay(eps=1e-3, weight_decay=0.1), (ms.float16, ms.float32)
    ),
    "adam_weight_decay_unfused": Case(_unfused_form),
}

MINDFORMERS = {
    "mindformers": Case(_mindformers(weight_decay=0.1)),
    "mindformers_masters": Case(
        _mindformers(weight_decay=0.1), (ms.float16, ms.float32, ms.bfloat16)
    ),
    "mindformers_groups": Case(
        _mindformers(grouped({"lr": 0.05, "weight_decay": 0.1}, {"weight_decay": 0.0})),
        (ms.bfloat16,),
    ),
    "mindformers_rates": Case(_mindformers(learning_rate=RATES)),
    "mindformers_schedules": Case(_mindformers(grouped({"lr": RATES}, {"lr": cosine()}))),
    "mindformers_groups_rising_decay": Case(
        _mindformers(grouped({"weight_decay": RisingDecay()}, {"weight_decay": 0.1}))
    ),
    "mindformers_amsgrad_unfused": Case(_mindformers(amsgrad=True), (ms.float16, ms.float32)),
}

FUSED = {
    "mindformers_fused": Case(_mindformers(use_fused=True, weight_decay=0.1)),
    "mindformers_fused_masters": Case(
        _mindformers(enable_fused_opt=True, weight_decay=0.1),
        (ms.float16, ms.float32, ms.bfloat16),
    ),
    "mindformers_fused_amsgrad": Case(
        _mindformers(use_fused=True, amsgrad=True, maximize=True), (ms.bfloat16, ms.float32)
    ),
}
