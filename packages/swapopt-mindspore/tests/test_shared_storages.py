"""Per tensor, small neighbours travel together where the optimizer's operators take views."""

from __future__ import annotations

import pytest
from mindspore import Parameter, nn

import mindformers_adamw
from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore import MindSporeSwapOptimizer, swap_optimizer
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import Shape, Twins, adam, adamw, make_gradients, make_parameters
from training import MakeOptimizer

SMALL: Shape = (64, 16)
LARGE: Shape = (512, 512)  # a state of 1 MiB
PER_TENSOR = SwapOptimizerConfig(swap_times=1, min_numel=0, packed_swap=False)


def copies_of(
    make: MakeOptimizer, shapes: list[Shape], missing: tuple[int, ...] = ()
) -> tuple[int, int, MindSporeSwapOptimizer]:
    """Return copies per direction and device memory of a step, and the optimizer."""
    device = EmulatedDevice()
    params = make_parameters(shapes)
    optimizer = swap_optimizer(make(params), PER_TENSOR, device=device)
    baseline_bytes = device.memory().allocated_bytes
    device.reset_peak()
    optimizer(make_gradients(params, 0, missing))
    moved = optimizer.swap_stats().last_step
    assert moved.h2d_copies == moved.d2h_copies
    return moved.h2d_copies, device.memory().peak_allocated_bytes - baseline_bytes, optimizer


@pytest.mark.parametrize(
    ("shapes", "missing", "copies"),
    [
        ([SMALL] * 6, (), 1),
        ([SMALL] * 6, (2,), 2),
        ([SMALL] * 6, (0, 1), 1),
        ([LARGE] * 2, (), 4),
        ([SMALL, LARGE, SMALL, SMALL], (), 4),
        ([SMALL, LARGE, SMALL, SMALL], (0,), 3),
    ],
)
def test_small_neighbours_are_one_copy(
    shapes: list[Shape], missing: tuple[int, ...], copies: int
) -> None:
    assert copies_of(adamw, shapes, missing)[0] == copies


def test_operators_that_lose_what_they_write_to_views_get_storages_of_their_own() -> None:
    def adam_weight_decay(params: list[Parameter]) -> nn.Optimizer:
        return nn.AdamWeightDecay(params)

    for make in (adam, adam_weight_decay):
        copies, _, optimizer = copies_of(make, [SMALL] * 6)
        assert copies == 12
        assert all(
            len(storage) == 1
            for batch in optimizer._engine.layout.batches
            for region in batch.regions
            for storage in region.storages
        )


def test_a_shared_storage_takes_its_states_and_no_more() -> None:
    # Each state of 28 bytes begins on a boundary of 64; alone it would take a block of 512.
    _, taken_bytes, optimizer = copies_of(adamw, [(7,)] * 20)
    assert optimizer.swap_stats().bound_nbytes == taken_bytes == 40 * 64


def test_swapped_equals_native_with_gaps_and_snapshots() -> None:
    config = SwapOptimizerConfig(swap_times=2, min_numel=0, packed_swap=False)
    twins = Twins(
        adamw, [SMALL, (7,), (300, 40), LARGE, (2, 3, 5), SMALL], EmulatedDevice(), config
    )
    twins.step(missing=[1])
    kept = twins.swapped.state_dict()
    twins.step(2, missing=[0, 4])
    twins.step(2)
    twins.assert_equal()
    assert len(kept) > 0


def test_a_fused_operator_sees_views(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = mindformers_adamw.FusedOperator()
    monkeypatch.setattr(mindformers_adamw.home().gen, "AdamW", lambda: operator)
    twins = Twins(
        lambda params: mindformers_adamw.home().AdamW(params, 0.02, use_fused=True),
        [SMALL, (7,), (9, 15)],
        EmulatedDevice(),
        PER_TENSOR,
    )
    twins.step(3)
    twins.assert_equal()
