"""Hypothesis looks for a combination of settings in which a swapped optimizer is not native."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
from hypothesis import given, note
from hypothesis import strategies as st
from mindspore import Parameter, nn

import mindformers_adamw
from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import Twins

# Sizes around the 64-byte and 512-byte boundaries.
SHAPES = st.sampled_from([(1,), (3, 5), (16,), (17,), (128,), (9, 15), (2, 3, 4)])


def _adam(groups: bool, amsgrad: bool, nesterov: bool) -> Callable[..., nn.Optimizer]:
    def make(params: list[Parameter]) -> nn.Optimizer:
        options = {"use_amsgrad": amsgrad, "use_nesterov": nesterov and not amsgrad, "eps": 1e-3}
        return nn.Adam(_grouped(params, groups), 0.02, **options)

    return make


def _adam_weight_decay(groups: bool) -> Callable[..., nn.Optimizer]:
    return lambda params: nn.AdamWeightDecay(
        _grouped(params, groups), 0.02, eps=1e-3, weight_decay=0.1
    )


def _mindformers(groups: bool) -> Callable[..., nn.Optimizer]:
    return lambda params: mindformers_adamw.home().AdamW(
        _grouped(params, groups), 0.02, weight_decay=0.1
    )


def _grouped(params: list[Parameter], groups: bool) -> list[object]:
    half = len(params) // 2
    if not groups or half == 0:
        return list(params)
    return [{"params": params[half:], "lr": 0.05}, {"params": params[:half], "weight_decay": 0.2}]


@given(data=st.data())
def test_swapped_equals_native(data: st.DataObject) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(["adam", "adam_weight_decay", "mindformers"]))
    groups, amsgrad = draw(st.booleans()), draw(st.booleans())
    keys = ["exp_avg", "exp_avg_sq"]
    if kind == "adam":
        make = _adam(groups, amsgrad, draw(st.booleans()))
        keys += ["max_exp_avg_sq"] * amsgrad
    else:
        make = _adam_weight_decay(groups) if kind == "adam_weight_decay" else _mindformers(groups)
    # The CPU has no AMSGrad for fp16, and Adam for bf16 in MindFormers only.
    halves = [] if amsgrad and kind == "adam" else [ms.float16]
    dtypes = [ms.float32, *halves, *([ms.bfloat16] if kind == "mindformers" else [])]
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    config = SwapOptimizerConfig(
        swap_times=draw(st.integers(1, 8)),
        min_numel=draw(st.sampled_from([0, 2, 16, 100])),
        state_keys=draw(st.none() | st.lists(st.sampled_from(keys), min_size=1, unique=True)),
        packed_swap=draw(st.none() | st.booleans()) if kind == "mindformers" else None,
        include_master_params=kind == "mindformers" and draw(st.booleans()),
    )
    missing = st.sets(st.integers(0, len(shapes) - 1))
    used = draw(st.lists(st.sampled_from(dtypes), min_size=1, max_size=3))
    note(f"{kind} groups={groups} amsgrad={amsgrad} shapes={shapes} dtypes={used} {config}")
    twins = Twins(make, shapes, EmulatedDevice(), config, used, synchronous=draw(st.booleans()))
    for _ in range(3):
        twins.step(missing=draw(missing))
    twins.assert_equal()
    layout = twins.swapped._engine.layout
    assert len(layout.batches) == min(config.swap_times, len(shapes))
