"""The scenarios of the specification: a swapped optimizer trains as the native one, in less memory.

Equal means byte for byte: the loss of every step, parameters, states, masters and counters. The
reference is the same optimizer, stepped eagerly.
"""

from __future__ import annotations

import pytest
from mindspore import nn

import mindformers_adamw
from cases import FUSED, MINDFORMERS, NATIVE, Case
from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import train_natively, train_swapped, trained_natively
from training import Regressor, assert_same_run, through_the_model, towards_targets


def align(
    case: Case, *, packed: bool | None = None, masters: bool = False, model: bool = True
) -> None:
    """Train natively and swapped, and compare; measure device memory on the way."""
    config = SwapOptimizerConfig(
        swap_times=4, min_numel=0, packed_swap=packed, include_master_params=masters
    )
    device = EmulatedDevice()
    differentiate = through_the_model if model else towards_targets
    expected = trained_natively(case, differentiate)
    found, optimizer = train_swapped(case, device, config, differentiate=differentiate)
    assert_same_run(found, expected)
    assert optimizer.swap_stats().packed is bool(packed)
    device.reset_peak()
    _, gradients = towards_targets(nn.Cell(), optimizer, 8, 1.0)
    optimizer(gradients)
    assert device.memory().peak_allocated_bytes < native_nbytes(case)


def native_nbytes(case: Case) -> int:
    """Return the device bytes of a native optimizer's parameters and states."""
    optimizer = case.make(list(Regressor(case.dtypes).trainable_params()))
    device = EmulatedDevice()
    for name in ("parameters", "moment1", "moment2", "vhat", "moments1", "moments2"):
        device.adopt(getattr(optimizer, name, None) or ())
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "fp32_params"):
        device.adopt(getattr(optimizer, name, None) or ())
    return device.memory().allocated_bytes


def test_native_adam_swap_optimizer_state_align() -> None:
    align(NATIVE["adam"])


def test_native_adam_nesterov_swap_optimizer_state_align() -> None:
    align(NATIVE["adam_nesterov"])


def test_native_adam_amsgrad_swap_optimizer_state_align() -> None:
    align(NATIVE["adam_amsgrad"])


def test_native_adam_weight_decay_swap_optimizer_state_align() -> None:
    align(NATIVE["adam_weight_decay"])


@pytest.mark.parametrize("masters", [True, False], ids=["masters_swap", "masters_stay"])
def test_mindformers_adamw_non_fused_swap_optimizer_state_align(
    packed: bool, masters: bool
) -> None:
    align(MINDFORMERS["mindformers_masters"], packed=packed, masters=masters)


@pytest.mark.parametrize("name", FUSED)
def test_mindformers_adamw_fused_swap_optimizer_state_align(
    name: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in takes the operator's place in both: the CPU has no kernel for it."""
    operator = mindformers_adamw.FusedOperator()
    monkeypatch.setattr(mindformers_adamw.home().gen, "AdamW", lambda: operator)
    align(FUSED[name], packed=packed, masters="masters" in name, model=False)
    assert set(operator.maxima_are_second_moments) == {"amsgrad" not in name}


@pytest.mark.parametrize(
    "name",
    ["adam_groups_schedules", "adam_fp16_and_fp32", "adam_weight_decay_groups_rising_decay"],
)
def test_groups_schedules_and_dtypes_align(name: str) -> None:
    align(NATIVE[name], model=False)


def test_missing_gradients_align(packed: bool) -> None:
    case = MINDFORMERS["mindformers_masters"]
    config = SwapOptimizerConfig(
        swap_times=3, min_numel=0, packed_swap=packed, include_master_params=True
    )
    # Step 5 has no gradient at all; its counters advance all the same.
    missing = {0: {1}, 2: {0, 5}, 3: {1, 2, 3, 4, 5}, 5: set(range(6))}
    found, _ = train_swapped(case, EmulatedDevice(), config, missing=missing)
    assert_same_run(found, train_natively(case, missing=missing))


def test_synchronous_copies_align() -> None:
    case = MINDFORMERS["mindformers"]
    found, _ = train_swapped(
        case, EmulatedDevice(), SwapOptimizerConfig(min_numel=0), synchronous=True
    )
    assert_same_run(found, trained_natively(case))
