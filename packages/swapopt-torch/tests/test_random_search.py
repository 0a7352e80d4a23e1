"""Any mix of shapes, dtypes, groups, missing gradients and settings: equal to native."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from swapopt_common import grain
from swapopt_torch import SwapOptimizerConfig, layout, swap_optimizer
from training import assert_same_bits

SHAPES = st.one_of(
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(1, 33), st.integers(1, 33)),
    st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 9)),
    st.just(()),
    st.tuples(st.integers(500, 3000)),
)
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])


@dataclass(frozen=True)
class Group:
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    options: dict[str, object]


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    result = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 6))
        options = {
            "lr": draw(st.sampled_from([1e-3, 1e-1])),
            "betas": draw(st.sampled_from([(0.9, 0.999), (0.5, 0.7)])),
            "eps": 1e-4,
            "weight_decay": draw(st.sampled_from([0.0, 0.1])),
            "amsgrad": draw(st.booleans()),
            "maximize": draw(st.booleans()),
        }
        result.append(
            Group(
                tuple(draw(SHAPES) for _ in range(count)),
                tuple(draw(DTYPES) for _ in range(count)),
                options,
            )
        )
    return result


CONFIGS = st.builds(
    SwapOptimizerConfig,
    swap_times=st.integers(1, 20),
    min_numel=st.sampled_from([0, 1, 17, 512]),
    state_keys=st.sampled_from(
        [
            None,
            ("exp_avg",),
            ("exp_avg_sq",),
            ("exp_avg", "exp_avg_sq"),
            ("max_exp_avg_sq",),
            ("exp_avg_sq", "max_exp_avg_sq"),
        ]
    ),
    packed_swap=st.booleans(),
)


ROOMS = st.sampled_from(
    [{}, {}, {"resident_fraction": 0.3}, {"resident_bytes": 10_000}, {"resident_fraction": 1.0}]
)


@contextmanager
def grain_of(least_batch_nbytes: int | None) -> Iterator[None]:
    """Treat small states as if they were large: cut them, with many batches in flight."""
    with pytest.MonkeyPatch.context() as patch:
        if least_batch_nbytes is not None:
            patch.setattr(layout, "LEAST_DIVIDED_NBYTES", 1)
            patch.setattr(grain, "LEAST_BATCH_BYTES", least_batch_nbytes)
        yield


# The device fixture only names the device: it need not be made anew for each example.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    groups=groups(),
    adamw=st.sampled_from(["adam", "adamw", "fused"]),
    config=CONFIGS,
    least_batch_nbytes=st.sampled_from([None, 512, 8192, 2**30]),
    room=ROOMS,
    synchronous=st.booleans(),
    data=st.data(),
)
@pytest.mark.filterwarnings("ignore:swapopt. no optimizer state can be swapped")
def test_any_training_is_equal_to_native(
    device: torch.device,
    groups: list[Group],
    adamw: str,
    config: SwapOptimizerConfig,
    least_batch_nbytes: int | None,
    room: dict[str, float],
    synchronous: bool,
    data: st.DataObject,
) -> None:
    with grain_of(least_batch_nbytes):
        compare(device, groups, adamw, config, room, synchronous, data)


def compare(
    device: torch.device,
    groups: list[Group],
    adamw: str,
    config: SwapOptimizerConfig,
    room: dict[str, Any],
    synchronous: bool,
    data: st.DataObject,
) -> None:
    generator = torch.Generator().manual_seed(0)
    if not any(group.options["amsgrad"] for group in groups):
        keys = tuple(key for key in config.state_keys or () if key != "max_exp_avg_sq")
        config = replace(config, state_keys=keys or None)  # the others are refused

    def build() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        made = torch.Generator().manual_seed(1)
        built = [
            {
                "params": [
                    nn.Parameter(torch.randn(shape, generator=made).to(device, dtype))
                    for shape, dtype in zip(group.shapes, group.dtypes, strict=True)
                ],
                **group.options,
            }
            for group in groups
        ]
        kind = torch.optim.Adam if adamw == "adam" else torch.optim.AdamW
        optimizer = kind(built, foreach=False, fused=adamw == "fused")
        return [p for group in built for p in group["params"]], optimizer

    native, reference = build()
    swapped, base = build()
    optimizer = swap_optimizer(base, config, **room, synchronous=synchronous)
    snapshots: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for step in range(4):
        if data.draw(st.booleans(), label=f"a snapshot before step {step}"):
            saved = optimizer.state_dict()
            snapshots.append((saved, copy.deepcopy(saved)))
        wanted = data.draw(st.lists(st.booleans(), min_size=len(native), max_size=len(native)))
        frozen = data.draw(st.sampled_from([None, *range(len(native))]), label=f"frozen at {step}")
        for index, (one, other) in enumerate(zip(native, swapped, strict=True)):
            has_gradient = wanted[index] and index != frozen
            for parameter in (one, other):
                parameter.requires_grad_(index != frozen)
            grad = torch.randn(one.shape, generator=generator).to(device, one.dtype)
            one.grad = grad if has_gradient else None
            other.grad = grad.clone() if has_gradient else None
        reference.step()
        optimizer.step()
    for saved, copied in snapshots:
        for number, entries in copied["state"].items():
            for key, value in entries.items():
                assert_same_bits(saved["state"][number][key], value, f"{key} in a snapshot")
    state = optimizer.state
    for index, (one, other) in enumerate(zip(native, swapped, strict=True)):
        assert_same_bits(other, one, f"parameter {index}")
        assert one.isfinite().all()
        assert (one in reference.state) == (other in state)
        for key, value in reference.state[one].items() if one in reference.state else ():
            assert_same_bits(state[other][key], value, f"{key} of parameter {index}")
