"""An adapter's update, parameter by parameter, equals the optimizer's own step byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mindspore import nn

import mindformers_adamw
from adapting import Adapted
from cases import FUSED, MINDFORMERS, NATIVE, Case
from training import (
    Differentiate,
    Run,
    Step,
    assert_same_run,
    compiled,
    eager,
    through_the_model,
    towards_targets,
    train,
)

# Compiling takes seconds; one case for each way in which the two optimizers compute.
COMPILED = (
    "adam",
    "adam_nesterov",
    "adam_amsgrad",
    "adam_weight_decay_and_loss_scale",
    "adam_groups_schedules",
    "adam_fp16",
    "adam_weight_decay_groups",
    "adam_weight_decay_rising_decay",
    "adam_weight_decay_fp16",
)


def train_case(
    case: Case,
    stepped: Callable[[nn.Optimizer], Step],
    differentiate: Differentiate = towards_targets,
) -> Run:
    return train(
        case.make,
        stepped,
        dtypes=case.dtypes,
        loss_scale=case.loss_scale,
        differentiate=differentiate,
    )


@pytest.mark.parametrize("name", NATIVE)
def test_native_update_equals_the_eager_step(name: str) -> None:
    case = NATIVE[name]
    assert_same_run(train_case(case, Adapted), train_case(case, eager))


@pytest.mark.parametrize("name", COMPILED)
def test_native_update_equals_the_compiled_step(name: str) -> None:
    case = NATIVE[name]
    found = train_case(case, Adapted, through_the_model)
    assert_same_run(found, train_case(case, compiled, through_the_model))


@pytest.mark.parametrize("name", MINDFORMERS)
def test_mindformers_update_equals_its_step(name: str) -> None:
    case = MINDFORMERS[name]
    assert_same_run(train_case(case, Adapted), train_case(case, eager))


@pytest.mark.parametrize("name", FUSED)
def test_fused_mindformers_update_calls_the_operator_as_its_step_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = mindformers_adamw.FusedOperator()
    monkeypatch.setattr(mindformers_adamw.home().gen, "AdamW", lambda: operator)
    case = FUSED[name]
    expected = train_case(case, eager)
    calls, operator.maxima_are_second_moments = operator.maxima_are_second_moments, []
    assert_same_run(train_case(case, Adapted), expected)
    assert operator.maxima_are_second_moments == calls
    assert set(calls) == {"amsgrad" not in name}
