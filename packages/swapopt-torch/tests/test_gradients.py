"""Parameters without a gradient, with a late first one, frozen midway: as native."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer
from training import allocated, assert_same_bits


class Pair:
    """The same parameters and gradients under a native and a swapped optimizer."""

    def __init__(
        self, device: torch.device, numels: Sequence[int], config: SwapOptimizerConfig, fused: bool
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        values = [torch.randn(numel, generator=generator) for numel in numels]
        self.native = [nn.Parameter(value.to(device)) for value in values]
        self.swapped = [nn.Parameter(value.to(device)) for value in values]
        self.reference = self._optimizer(self.native, fused)
        self.optimizer: TorchSwapOptimizer = swap_optimizer(
            self._optimizer(self.swapped, fused), config
        )
        self._generator = generator

    @staticmethod
    def _optimizer(parameters: list[nn.Parameter], fused: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, 1e-2, weight_decay=0.1, amsgrad=True, fused=fused, foreach=False
        )

    def step(self, with_gradient: Sequence[bool], scale: float = 1.0) -> None:
        self.give_gradients(with_gradient, scale)
        self.reference.step()
        self.optimizer.step()

    def give_gradients(self, with_gradient: Sequence[bool], scale: float = 1.0) -> None:
        for native, swapped, wanted in zip(self.native, self.swapped, with_gradient, strict=True):
            grad = torch.randn(native.shape, generator=self._generator) * scale
            native.grad = grad.to(native.device) if wanted else None
            swapped.grad = grad.to(native.device) if wanted else None

    def assert_equal(self) -> None:
        for index, (native, swapped) in enumerate(zip(self.native, self.swapped, strict=True)):
            assert_same_bits(swapped, native, f"parameter {index}")
            assert (native in self.reference.state) == (swapped in self.optimizer.state)
            state = self.optimizer.state[swapped] if native in self.reference.state else {}
            for key, value in state.items():
                assert_same_bits(value, self.reference.state[native][key], f"{key} of {index}")


NUMELS = [2048, 3000, 1500, 4096, 1025, 2000, 600, 5000]
ALL = [True] * len(NUMELS)


@pytest.fixture(params=[False, True], ids=["loop", "fused"])
def fused(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def make_pair(device: torch.device, packed: bool, fused: bool, swap_times: int = 4) -> Pair:
    config = SwapOptimizerConfig(swap_times=swap_times, packed_swap=packed)
    return Pair(device, NUMELS, config, fused)


def test_n1_amsgrad_swaps_all_three_states(device: torch.device, packed: bool, fused: bool) -> None:
    pair = make_pair(device, packed, fused)
    pair.step(ALL, 10.0)
    pair.step(ALL, 0.1)
    pair.assert_equal()
    state = pair.optimizer.state[pair.swapped[0]]
    assert not torch.equal(state["exp_avg_sq"], state["max_exp_avg_sq"])
    assert pair.optimizer.swap_stats().swapped_states == 3 * 7


def test_n4_a_missing_gradient_leaves_everything_alone(
    device: torch.device, packed: bool, fused: bool
) -> None:
    pair = make_pair(device, packed, fused)
    some = [index % 3 != 1 for index in range(len(NUMELS))]
    for pattern in (ALL, some, ALL):
        before = {
            index: (pair.swapped[index].detach().clone(), dict(pair.optimizer.state))
            for index, wanted in enumerate(pattern)
            if not wanted
        }
        pair.step(pattern)
        pair.assert_equal()
        for index, (value, _) in before.items():
            assert_same_bits(pair.swapped[index], value, f"parameter {index}")


def test_first_gradient_at_step_nine(device: torch.device, packed: bool, fused: bool) -> None:
    pair = make_pair(device, packed, fused)
    late = [index not in (2, 5) for index in range(len(NUMELS))]
    batches = pair.optimizer.swap_stats().batches
    for _ in range(8):
        pair.step(late)
    mirrors = {
        key: value.data_ptr() for key, value in pair.optimizer.state[pair.swapped[0]].items()
    }
    bound = pair.optimizer.swap_stats().bound_nbytes
    for _ in range(3):
        pair.step(ALL)
    pair.assert_equal()
    assert pair.optimizer.swap_stats().batches == batches
    assert pair.optimizer.swap_stats().bound_nbytes == bound
    for key, address in mirrors.items():
        assert pair.optimizer.state[pair.swapped[0]][key].data_ptr() == address


def test_unfrozen_after_the_first_step(device: torch.device, packed: bool, fused: bool) -> None:
    """All are planned anew, in the optimizer's order; states stay in the host memory they have."""
    pair = make_pair(device, packed, fused)
    for parameter in (pair.swapped[3], pair.native[3]):
        parameter.requires_grad_(False)
    without = [index != 3 for index in range(len(NUMELS))]
    pair.step(without)
    pair.step(without)
    before = pair.optimizer.swap_stats()
    mirrors = [value.data_ptr() for value in pair.optimizer.state[pair.swapped[0]].values()]
    for parameter in (pair.swapped[3], pair.native[3]):
        parameter.requires_grad_(True)
    pair.step(ALL)
    pair.step(ALL)
    pair.assert_equal()
    after = pair.optimizer.swap_stats()
    assert after.batches == before.batches
    assert after.swapped_states == before.swapped_states + 3
    batches = pair.optimizer._engine.layout.batches
    planned = [unit.param for batch in batches for unit in batch.units]
    assert all(one is other for one, other in zip(planned, pair.swapped, strict=True))
    kept = [value.data_ptr() for value in pair.optimizer.state[pair.swapped[0]].values()]
    assert kept == mirrors


def test_frozen_between_wrapping_and_the_first_step(device: torch.device, packed: bool) -> None:
    """The plan follows the parameters that really train: batches stay small."""
    pair = make_pair(device, packed, True)
    planned = pair.optimizer.swap_stats()
    keep = {0, 1, 4, 5}
    for index, (native, swapped) in enumerate(zip(pair.native, pair.swapped, strict=True)):
        native.requires_grad_(index in keep)
        swapped.requires_grad_(index in keep)
    pair.step([index in keep for index in range(len(NUMELS))])
    pair.assert_equal()
    stats = pair.optimizer.swap_stats()
    assert stats.batches == planned.batches == 4
    assert stats.bound_nbytes < planned.bound_nbytes


def test_frozen_with_a_resident_state_when_the_first_mirror_is_made(
    device: torch.device, packed: bool
) -> None:
    """Found by the random search: the new plan must keep the parameters that have states."""
    pair = Pair(device, [2048, 1], SwapOptimizerConfig(packed_swap=packed), False)
    pair.step([False, True])
    for parameters in (pair.native, pair.swapped):
        parameters[1].requires_grad_(False)
    pair.step([True, False])
    for parameters in (pair.native, pair.swapped):
        parameters[1].requires_grad_(True)
    pair.step([False, True])
    pair.step([True, True])
    pair.assert_equal()


def test_frozen_midway(device: torch.device, packed: bool, fused: bool) -> None:
    pair = make_pair(device, packed, fused)
    pair.step(ALL)
    for parameters in (pair.native, pair.swapped):
        for parameter in parameters[:4]:
            parameter.requires_grad_(False)
    for _ in range(3):
        pair.step([False] * 4 + [True] * 4)
    pair.assert_equal()


def test_steps_without_any_gradient(device: torch.device, packed: bool, fused: bool) -> None:
    pair = make_pair(device, packed, fused)
    none = [False] * len(NUMELS)
    pair.step(none)
    assert not pair.optimizer.state
    pair.step(ALL)
    pair.step(none)
    pair.assert_equal()


def test_add_param_group_before_and_after_steps(device: torch.device, packed: bool) -> None:
    pair = make_pair(device, packed, False)
    extra = [torch.randn(3333, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    for index, value in enumerate(extra):
        for parameters, optimizer in (
            (pair.native, pair.reference),
            (pair.swapped, pair.optimizer),
        ):
            parameter = nn.Parameter(value.to(device))
            parameters.append(parameter)
            group = {"params": [parameter], "lr": 0.03, "amsgrad": index == 1, "betas": (0.7, 0.9)}
            optimizer.add_param_group(group)
        for _ in range(3):
            pair.step([True] * len(pair.native))
    pair.assert_equal()
    assert pair.optimizer.param_groups is pair.optimizer._base.param_groups


@pytest.mark.parametrize("where", ["first", "middle", "last", "scattered"])
def test_batches_with_nothing_to_move(device: torch.device, packed: bool, where: str) -> None:
    """Whole batches of small parameters, or of parameters without a gradient."""
    small = {
        "first": range(3),
        "middle": range(4, 8),
        "last": range(9, 12),
        "scattered": range(0, 12, 2),
    }
    numels = [100 if index in small[where] else 2048 for index in range(12)]
    pair = Pair(device, numels, SwapOptimizerConfig(swap_times=12, packed_swap=packed), True)
    for step in range(4):
        pair.step([True if step % 2 == 0 else numel == 100 or step == 3 for numel in numels])
    pair.assert_equal()
    pair.step([numel == 100 for numel in numels])
    pair.assert_equal()
    for pattern in ([numel == 100 for numel in numels], [True] * 12):
        pair.give_gradients(pattern)
        held = allocated(device)
        pair.optimizer.step()
        assert allocated(device) == held, "an arena was left behind"
        pair.reference.step()
    pair.assert_equal()


def test_copies_of_a_step(device: torch.device) -> None:
    """One per direction, batch, dtype and contiguous run; the same when experts drop out."""
    parameters = [
        nn.Parameter(torch.ones(2048, dtype=dtype, device=device))
        for dtype in (torch.float32, torch.bfloat16)
        for _ in range(8)
    ]
    optimizer = swap_optimizer(
        torch.optim.AdamW(parameters, fused=True),
        SwapOptimizerConfig(swap_times=3, packed_swap=True),
    )

    def copies(active: set[int]) -> int:
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.ones_like(parameter) if index in active else None
        optimizer.step()
        counts = optimizer.swap_stats().last_step
        assert counts.h2d_copies == counts.d2h_copies
        nbytes = sum(2 * parameters[index].nbytes for index in active)
        assert counts.h2d_nbytes == counts.d2h_nbytes == nbytes
        return counts.h2d_copies

    everyone = set(range(16))
    batches = [list(map(id, (u.param for u in b.units))) for b in optimizer._engine.layout.batches]
    where = {p: b for b, members in enumerate(batches) for p in members}
    keys = [(where[id(p)], p.dtype) for p in parameters]
    assert copies(everyone) == len(set(keys))
    for active in ({0, 1, 2}, {0, 2, 4}, {1, 7, 8, 9, 15}, everyone - {3}, everyone):
        ordered = sorted(active)
        runs = sum(
            position == 0 or ordered[position - 1] != index - 1 or keys[index] != keys[index - 1]
            for position, index in enumerate(ordered)
        )
        assert copies(active) == runs


@pytest.mark.parametrize(("numel", "expected"), [(2048, 1), (300_000, 6)])
def test_copies_per_tensor(device: torch.device, numel: int, expected: int) -> None:
    """One for each state; small ones that are neighbours in a batch share a storage and a copy."""
    parameters = [nn.Parameter(torch.ones(numel, device=device)) for _ in range(5)]
    optimizer = swap_optimizer(
        torch.optim.AdamW(parameters), SwapOptimizerConfig(swap_times=1, packed_swap=False)
    )
    for parameter in parameters[:3]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    counts = optimizer.swap_stats().last_step
    assert (counts.h2d_copies, counts.d2h_copies) == (expected, expected)


def test_n5_step_counters_stay_on_the_cpu(
    device: torch.device, device_type: str, packed: bool
) -> None:
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator counts copies")
    from swapopt_torch import virtual

    parameters = [nn.Parameter(torch.ones(8, device=device)) for _ in range(2048)]
    optimizer = swap_optimizer(
        torch.optim.AdamW(parameters, foreach=False),
        SwapOptimizerConfig(min_numel=0, packed_swap=packed),
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.get_device_module(device).synchronize(device)
    virtual.clear_timeline()
    optimizer.step()
    optimizer.synchronize()
    rows = [row for row in virtual.timeline() if row.lane == "d2h"]
    assert len(rows) == optimizer.swap_stats().last_step.d2h_copies
    assert sum(row.nbytes for row in rows) == optimizer.swap_stats().last_step.d2h_nbytes
    for state in optimizer.state.values():
        assert state["step"].device.type == "cpu"
