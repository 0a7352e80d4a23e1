"""What wrapping refuses: a ValueError that says what to change, and nothing has changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
from mindspore import Tensor, nn
from mindspore import dtype as mstype

import mindformers_adamw
from swapopt_common import SwapConfigError, SwapOptimizerConfig
from swapopt_mindspore.adapters import (
    MindFormersAdamWAdapter,
    MindSporeNativeAdamAdapter,
    MindSporeNativeAdamWAdapter,
    make_adapter,
)
from training import Regressor, assert_same_run, snapshot

Make = Callable[[], nn.Optimizer]


def params(*dtypes: object) -> list[object]:
    return list(Regressor(dtypes or (mstype.float32,)).trainable_params())


def with_attribute(make: Make, name: str) -> Make:
    def made() -> nn.Optimizer:
        optimizer = make()
        setattr(optimizer, name, True)
        return optimizer

    return made


def adam() -> nn.Optimizer:
    return nn.Adam(params())


def adam_weight_decay() -> nn.Optimizer:
    return nn.AdamWeightDecay(params())


def mindformers(**options: object) -> nn.Optimizer:
    return mindformers_adamw.home().AdamW(params(), **options)


def mindformers_with_masters() -> nn.Optimizer:
    return mindformers_adamw.home().AdamW(params(mstype.float16))


REFUSED: dict[str, tuple[Make, SwapOptimizerConfig, str]] = {
    "packed adam": (
        adam,
        SwapOptimizerConfig(packed_swap=True),
        "packed_swap=True is served for MindFormers AdamW only; mindspore.nn.Adam needs",
    ),
    "packed adam weight decay": (
        adam_weight_decay,
        SwapOptimizerConfig(packed_swap=True),
        "mindspore.nn.AdamWeightDecay needs packed_swap=False",
    ),
    "lazy adam": (
        lambda: nn.Adam(params(), use_lazy=True),
        SwapOptimizerConfig(),
        "use_lazy=True; swap_optimizer needs it False",
    ),
    "offloaded adam": (
        lambda: nn.Adam(params(), use_offload=True),
        SwapOptimizerConfig(),
        "use_offload=True; swap_optimizer needs it False",
    ),
    "parallel adam": (
        with_attribute(adam, "use_parallel"),
        SwapOptimizerConfig(),
        "use_parallel=True",
    ),
    "parallel adam weight decay": (
        with_attribute(adam_weight_decay, "use_parallel"),
        SwapOptimizerConfig(),
        "use_parallel=True",
    ),
    "lazy adam weight decay": (
        with_attribute(adam_weight_decay, "use_lazy"),
        SwapOptimizerConfig(),
        "use_lazy=True",
    ),
    "offloaded adam weight decay": (
        with_attribute(adam_weight_decay, "use_offload"),
        SwapOptimizerConfig(),
        "use_offload=True",
    ),
    # MindFormers' constructor refuses the setting itself.
    "offloaded mindformers": (
        with_attribute(mindformers, "enable_cpu_offload"),
        SwapOptimizerConfig(),
        "MindFormers AdamW has enable_cpu_offload=True",
    ),
    "maxima without amsgrad": (
        adam,
        SwapOptimizerConfig(state_keys=["exp_avg", "max_exp_avg_sq"]),
        "'max_exp_avg_sq', which this mindspore.nn.Adam lacks.*needs use_amsgrad=True",
    ),
    "maxima of adam weight decay": (
        adam_weight_decay,
        SwapOptimizerConfig(state_keys=["max_exp_avg_sq"]),
        "It has exp_avg, exp_avg_sq; it has no AMSGrad",
    ),
    "maxima of unfused mindformers": (
        lambda: mindformers(amsgrad=True),
        SwapOptimizerConfig(state_keys=["max_exp_avg_sq"]),
        "needs the fused form and amsgrad=True",
    ),
    "maxima that are second moments": (
        lambda: mindformers(use_fused=True),
        SwapOptimizerConfig(state_keys=["max_exp_avg_sq"]),
        "needs the fused form and amsgrad=True",
    ),
    "masters of adam": (
        adam,
        SwapOptimizerConfig(state_keys=["master_param"], include_master_params=True),
        "only MindFormers AdamW owns master parameters",
    ),
    "masters of an fp32 model": (
        mindformers,
        SwapOptimizerConfig(state_keys=["master_param"], include_master_params=True),
        "only fp16 and bf16 parameters have masters",
    ),
    "masters without the flag": (
        mindformers_with_masters,
        SwapOptimizerConfig(state_keys=["exp_avg", "master_param"]),
        "include_master_params is False. Set include_master_params=True",
    ),
    "another optimizer": (
        lambda: nn.Momentum(params(), 0.1, 0.9),
        SwapOptimizerConfig(),
        "got mindspore.nn.optim.momentum.Momentum; it supports mindspore.nn.Adam, "
        "mindspore.nn.AdamWeightDecay, MindFormers AdamW",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_changes(name: str) -> None:
    make, config, said = REFUSED[name]
    optimizer = make()
    before, attributes = snapshot(optimizer), dict(vars(optimizer))
    with pytest.raises(SwapConfigError, match=said):
        make_adapter(optimizer, config)
    assert vars(optimizer) == attributes
    assert_same_run(snapshot(optimizer), before)


class RenamedAdam(nn.Adam):
    """Changes nothing of the update."""

    def get_lr(self) -> Tensor:
        return super().get_lr() * 2


class OtherConstruct(nn.Adam):
    def construct(self, gradients: tuple[Tensor, ...]) -> object:
        return super().construct(gradients)


class OtherDecay(nn.Adam):
    def decay_weight(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return gradients


@pytest.mark.parametrize("kind", [OtherConstruct, OtherDecay])
def test_a_subclass_with_an_update_of_its_own_is_refused(kind: type[nn.Adam]) -> None:
    with pytest.raises(SwapConfigError, match=f"got .*{kind.__name__}; it supports"):
        make_adapter(kind(params()), SwapOptimizerConfig())


def test_each_optimizer_gets_its_adapter_and_its_default_movement() -> None:
    found = [
        make_adapter(optimizer, SwapOptimizerConfig())
        for optimizer in (adam(), RenamedAdam(params()), adam_weight_decay(), mindformers())
    ]
    assert [type(adapter) for adapter in found] == [
        MindSporeNativeAdamAdapter,
        MindSporeNativeAdamAdapter,
        MindSporeNativeAdamWAdapter,
        MindFormersAdamWAdapter,
    ]
    assert [adapter.packed_by_default for adapter in found] == [False, False, False, True]


def test_mindformers_may_be_packed_or_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for packed in (True, False, None):
            make_adapter(mindformers(), SwapOptimizerConfig(packed_swap=packed))
            config = SwapOptimizerConfig(packed_swap=packed, include_master_params=True)
            make_adapter(mindformers_with_masters(), config)
