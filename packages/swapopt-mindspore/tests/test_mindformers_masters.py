"""MindFormers' fp32 masters: when model parameters follow them, and when they follow those."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

import mindformers_adamw
from adapting import Adapted
from cases import MINDFORMERS
from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore.adapters import MindFormersAdamWAdapter, make_adapter
from swapopt_mindspore.slots import MindSporeSlot, MindSporeUnit
from training import (
    Regressor,
    assert_same_run,
    copy_of,
    eager,
    snapshot,
    towards_targets,
    train,
)

SWAPPED = SwapOptimizerConfig(include_master_params=True)
NOT_SELECTED = SwapOptimizerConfig(include_master_params=True, state_keys=["exp_avg"])


def half_precision() -> nn.Optimizer:
    model = Regressor((mstype.bfloat16, mstype.float16, mstype.float32))
    return mindformers_adamw.home().AdamW(list(model.trainable_params()), learning_rate=0.02)


def prepared(optimizer: nn.Optimizer, config: SwapOptimizerConfig) -> MindFormersAdamWAdapter:
    adapter = make_adapter(optimizer, config)
    assert isinstance(adapter, MindFormersAdamWAdapter)
    adapter.register_units(None)
    _, gradients = towards_targets(nn.Cell(), optimizer, 0, 1.0)
    adapter.prepare_step(gradients)
    return adapter


def follows_its_master(unit: MindSporeUnit) -> bool:
    assert unit.master is not None
    master = unit.master.operand().astype(unit.param.dtype)
    return copy_of(unit.param).tobytes() == copy_of(master).tobytes()


@pytest.mark.parametrize("config", [SWAPPED, NOT_SELECTED], ids=["swapped", "resident"])
def test_equals_the_native_step_wherever_masters_are(config: SwapOptimizerConfig) -> None:
    case = MINDFORMERS["mindformers_masters"]

    def adapted(optimizer: nn.Optimizer) -> Adapted:
        return Adapted(optimizer, config)

    found, expected = (
        train(case.make, stepped, dtypes=case.dtypes, differentiate=towards_targets)
        for stepped in (adapted, eager)
    )
    assert_same_run(found, expected)


@pytest.mark.parametrize("end", ["finish_step", "abandon_step"])
def test_swapped_masters_are_written_inside_their_batch(end: str) -> None:
    adapter = prepared(half_precision(), SWAPPED)
    with_master = [unit for unit in adapter.units if unit.master is not None]
    adapter.step_batch(adapter.units[:3])
    assert [follows_its_master(unit) for unit in with_master] == [True] * 4
    # What leaves the device after its batch is not read again.
    for unit in with_master[:2]:
        unit.master.tensor = ops.full_like(unit.master.operand(), np.nan)
    if end == "finish_step":
        adapter.step_batch(adapter.units[3:])
        adapter.finish_step()
    else:
        adapter.abandon_step()
    for unit in with_master:
        assert np.isfinite(copy_of(unit.param).astype(np.float32)).all()


@pytest.mark.parametrize("config", [SwapOptimizerConfig(), NOT_SELECTED], ids=["off", "unnamed"])
def test_resident_masters_are_all_written_at_the_end(config: SwapOptimizerConfig) -> None:
    adapter = prepared(half_precision(), config)
    with_master = [unit for unit in adapter.units if unit.master is not None]
    before = [copy_of(unit.param).tobytes() for unit in with_master]
    adapter.step_batch(adapter.units)
    assert [copy_of(unit.param).tobytes() for unit in with_master] == before
    assert not any(follows_its_master(unit) for unit in with_master)
    adapter.finish_step()
    assert all(follows_its_master(unit) for unit in with_master)


def test_model_parameters_follow_what_a_failed_step_has_updated() -> None:
    optimizer = half_precision()
    adapter = prepared(optimizer, SwapOptimizerConfig())
    before = [copy_of(param) for param in optimizer.parameters]
    adapter.step_batch(adapter.units[:2])
    adapter.abandon_step()
    changed = [
        copy_of(param).tobytes() != old.tobytes()
        for param, old in zip(optimizer.parameters, before, strict=True)
    ]
    assert changed == [True, True, False, False, False, False]
    assert all(follows_its_master(unit) for unit in adapter.units[:2])


def test_masters_are_reloaded_from_the_model_wherever_they_are() -> None:
    """As MindFormers' own reload_main_params_from_model."""
    optimizer, reference = half_precision(), half_precision()
    adapter = make_adapter(optimizer, SWAPPED)
    assert isinstance(adapter, MindFormersAdamWAdapter)
    adapter.register_units(None)
    for owner in (optimizer, reference):
        for param in owner.parameters:
            values = np.random.default_rng(7).normal(size=param.shape).astype(np.float32)
            param.copy_(Tensor(values, param.dtype))
    reference.reload_main_params_from_model()
    mirrors: dict[str, Tensor] = {}

    def store(slot: MindSporeSlot, value: Tensor) -> None:
        mirrors[slot.parameter.name] = value

    adapter.reload_masters(store)
    assert len(mirrors) == 4
    for name, value in mirrors.items():
        (expected,) = (master for master in reference.fp32_params if master.name == name)
        assert value.dtype == mstype.float32
        assert copy_of(value).tobytes() == copy_of(expected).tobytes()
    for unit in adapter.units:
        if unit.master is not None:
            unit.master.operand().copy_(mirrors[unit.master.parameter.name])
    assert_same_run(snapshot(optimizer), snapshot(reference))
