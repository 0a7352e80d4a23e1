"""A budget for the device memory of states, and states that stay because there is room."""

from __future__ import annotations

import math
import re
from typing import Any

import mindspore as ms
import pytest
from mindspore import Parameter, nn

from swapopt_common import SwapConfigError, SwapOptimizerConfig
from swapopt_mindspore import MindSporeSwapOptimizer, swap_optimizer
from swapopt_mindspore.emulated import EmulatedDevice
from swapopt_mindspore.sizes import round_up
from swapping import Shape, Twins, adam, adamw, fused_adamw, make_gradients, make_parameters
from training import MakeOptimizer, assert_same_run, eager, snapshot

SHAPES: list[Shape] = [(64, 32), (3000,), (16,), (50, 100), (1500,), *[(2048,)] * 4]
SMALL = 2  # below min_numel
ROOMS: dict[str, dict[str, Any]] = {
    "bytes": {"resident_bytes": 60_000},
    "fraction": {"resident_fraction": 0.5},
    "budget": {"device_memory_budget": 150_000},
    "small budget": {"device_memory_budget": 82_000},
    "all": {"resident_fraction": 1.0},
}


def weight_decay(params: list[Parameter]) -> nn.Optimizer:
    optimizer: nn.Optimizer = nn.AdamWeightDecay(params, 0.02, weight_decay=0.1)
    return optimizer


def two_states_nbytes(shape: Shape) -> int:
    """Return the bytes of two fp32 states on the device, each in blocks of 512."""
    return 2 * round_up(4 * math.prod(shape))


def resident(optimizer: MindSporeSwapOptimizer) -> dict[str, int]:
    """Return the bytes that stay for each parameter because of the room."""
    kept: dict[str, int] = {}
    for state in optimizer.swap_stats().resident:
        if state.reason.startswith("kept by "):
            kept[state.parameter] = kept.get(state.parameter, 0) + state.nbytes
    return kept


def kept_nbytes(optimizer: MindSporeSwapOptimizer) -> int:
    """Return the device bytes of what stays because of the room."""
    return sum(
        round_up(state.nbytes)
        for state in optimizer.swap_stats().resident
        if state.reason.startswith("kept by ")
    )


@pytest.mark.filterwarnings("ignore:.*no optimizer state can be swapped")
@pytest.mark.parametrize(
    ("make", "packed", "room"),
    [
        (adam, False, "fraction"),
        (weight_decay, False, "small budget"),
        (adamw, False, "budget"),
        *((adamw, True, room) for room in ROOMS),
    ],
)
def test_numbers_are_the_same(make: MakeOptimizer, packed: bool, room: str) -> None:
    config = SwapOptimizerConfig(packed_swap=packed)
    twins = Twins(make, SHAPES, EmulatedDevice(), config, **ROOMS[room])
    twins.step()
    twins.step(missing=[0, 3, 7])
    twins.step()
    twins.assert_equal()
    stats = twins.swapped.swap_stats()
    assert (stats.swapped_nbytes > 0) == (stats.last_step.h2d_copies > 0) == (room != "all")
    assert bool(resident(twins.swapped)) == (room != "small budget" or not packed)


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        ({"resident_bytes": 0}, []),
        ({"resident_bytes": 40_000}, [4, 1]),  # not the largest, which takes 40,960
        ({"resident_bytes": 40_960}, [3]),
        ({"resident_bytes": 60_000}, [3, 0]),
        ({"resident_bytes": 10**9}, [i for i in range(9) if i != SMALL]),
        ({"resident_fraction": 0.6}, [3, 1, 0, 4]),
        ({"resident_fraction": 1}, [i for i in range(9) if i != SMALL]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no optimizer state can be swapped")
def test_the_largest_stay_as_they_fit(room: dict[str, Any], kept: list[int]) -> None:
    device = EmulatedDevice()
    params = make_parameters(SHAPES)
    base = adamw(params)
    before = {id(state): state.data_ptr() for state in [*base.exp_avg, *base.exp_avg_sq]}
    optimizer = swap_optimizer(base, device=device, **room)
    optimizer(make_gradients(params, 0))
    assert resident(optimizer) == {f"p{i}": 8 * math.prod(SHAPES[i]) for i in sorted(kept)}
    for index in range(len(SHAPES)):
        for state in (base.exp_avg[index], base.exp_avg_sq[index]):
            stays = index in kept or index == SMALL
            assert (state.data_ptr() == before[id(state)]) == stays, "what stays is not copied"
            assert device.holds(state) == stays


@pytest.mark.parametrize("swap_times", [2, 16])
def test_the_rest_swaps_with_the_config(packed: bool, swap_times: int) -> None:
    device = EmulatedDevice()
    params = make_parameters([(40_000,)] * 8)
    optimizer = swap_optimizer(
        adamw(params),
        SwapOptimizerConfig(swap_times=swap_times, packed_swap=packed),
        device=device,
        resident_fraction=0.25,
    )
    held_nbytes = device.memory().allocated_bytes
    device.reset_peak()
    optimizer(make_gradients(params, 0))
    stats = optimizer.swap_stats()
    assert stats.swap_times == swap_times
    assert f"(swap_times={swap_times})" in str(stats)
    assert resident(optimizer) == {"p0": 320_000, "p1": 320_000}
    # Six parameters: batches of three with swap_times=2, of one with 16.
    assert stats.bound_nbytes == 2 * (3 if swap_times == 2 else 1) * 2 * 160_000
    assert device.memory().peak_allocated_bytes - held_nbytes == stats.bound_nbytes
    params_nbytes = 8 * round_up(160_000)
    assert held_nbytes == params_nbytes + 2 * 2 * round_up(160_000)


UNEVEN: list[Shape] = [(60_000,), (3_000,), (17_000,), *[(20_000,)] * 12]
LARGEST: Shape = (250_000,)


def stepped(
    shapes: list[Shape], packed: bool, budget_nbytes: int
) -> tuple[MindSporeSwapOptimizer, int]:
    """Take two steps within a budget; return the optimizer and most bytes of states on device."""
    device = EmulatedDevice(dry=True)
    params = make_parameters(shapes)
    optimizer = swap_optimizer(
        fused_adamw(params),
        SwapOptimizerConfig(packed_swap=packed),
        device=device,
        device_memory_budget=budget_nbytes,
    )
    device.reset_peak()
    for step in range(2):
        optimizer(make_gradients(params, step))
    params_nbytes = sum(two_states_nbytes(shape) // 2 for shape in shapes)
    assert device.memory().allocated_bytes == params_nbytes + kept_nbytes(optimizer)
    return optimizer, device.memory().peak_allocated_bytes - params_nbytes


@pytest.mark.usefixtures("no_operator")
@pytest.mark.filterwarnings("ignore:.*no optimizer state can be swapped")
@pytest.mark.parametrize("share", [0.7, 0.75, 0.9, 0.99, 1.0, 3.0])
@pytest.mark.parametrize("last", [False, True], ids=["largest first", "largest last"])
def test_a_budget_is_kept_and_used(packed: bool, last: bool, share: float) -> None:
    """Where one parameter has 40 % of the bytes; it is not cut, so it is the first to stay."""
    shapes = [*UNEVEN, LARGEST] if last else [LARGEST, *UNEVEN]
    total_nbytes = sum(map(two_states_nbytes, shapes))
    budget_nbytes = int(share * total_nbytes)
    optimizer, held_nbytes = stepped(shapes, packed, budget_nbytes)
    kept = kept_nbytes(optimizer)
    assert held_nbytes == kept + optimizer.swap_stats().bound_nbytes
    assert held_nbytes <= budget_nbytes
    if share >= 1:
        assert kept == total_nbytes
    else:
        assert kept >= two_states_nbytes(LARGEST)
        assert held_nbytes > budget_nbytes - two_states_nbytes((60_000,))


@pytest.mark.usefixtures("no_operator")
@pytest.mark.parametrize("share", [0.07, 0.13, 0.3])
def test_a_small_budget_makes_batches_smaller(packed: bool, share: float) -> None:
    shapes: list[Shape] = [(2048,)] * 64
    budget_nbytes = int(share * sum(map(two_states_nbytes, shapes)))
    optimizer, held_nbytes = stepped(shapes, packed, budget_nbytes)
    assert 0.7 * budget_nbytes < held_nbytes <= budget_nbytes
    kept, stats = kept_nbytes(optimizer), optimizer.swap_stats()
    # Per tensor, the largest batches need not be there together.
    assert held_nbytes <= kept + stats.bound_nbytes <= budget_nbytes
    assert (kept > 0, stats.swap_times > 21) == (share > 0.1, share < 0.1)


@pytest.mark.usefixtures("no_operator")
def test_the_least_that_an_error_names_is_enough(packed: bool) -> None:
    """Packed, the largest stay then; per tensor, they pass with one neighbour."""
    shapes = [*UNEVEN[1:], UNEVEN[0], LARGEST]
    with pytest.raises(SwapConfigError, match="is too small") as caught:
        stepped(shapes, packed, 1)
    (least_nbytes,) = re.findall(
        r"([\d,]+) are on the device in a step at least", str(caught.value)
    )
    budget_nbytes = int(least_nbytes.replace(",", ""))
    if packed:
        largest_two_nbytes = two_states_nbytes(LARGEST) + two_states_nbytes((60_000,))
        assert budget_nbytes == largest_two_nbytes + 2 * round_up(2 * 4 * 20_000)
    else:
        # Two small states of a parameter share a storage.
        assert budget_nbytes == round_up(2 * 4 * 250_000) + round_up(2 * 4 * 60_000)
    assert stepped(shapes, packed, budget_nbytes)[1] == budget_nbytes
    with pytest.raises(SwapConfigError, match="is too small"):
        stepped(shapes, packed, budget_nbytes - 1)


def test_states_that_come_to_the_device_late_share_the_budget(packed: bool) -> None:
    """Where MindSpore gives states their storage with their first update, from then on."""
    shapes: list[Shape] = [(2048,)] * 24
    budget_nbytes = sum(map(two_states_nbytes, shapes)) // 2
    device = EmulatedDevice()
    config = SwapOptimizerConfig(packed_swap=packed)
    native, base = (adamw(make_parameters(shapes)) for _ in range(2))
    device.keep_on_host([*base.exp_avg, *base.exp_avg_sq[:12]])
    swapped = swap_optimizer(base, config, device=device, device_memory_budget=budget_nbytes)
    twins = Twins.of(native, base, swapped)
    chosen = resident(twins.swapped)
    assert chosen
    twins.step(missing=[0, 20])
    twins.step()
    held_nbytes = device.memory().allocated_bytes
    device.reset_peak()
    twins.step()
    twins.assert_equal()
    assert resident(twins.swapped) == chosen
    stats = twins.swapped.swap_stats()
    assert set(stats.resident_states) == {"kept by device_memory_budget"}
    assert kept_nbytes(twins.swapped) + stats.bound_nbytes <= budget_nbytes
    assert device.memory().peak_allocated_bytes - held_nbytes <= stats.bound_nbytes


@pytest.mark.parametrize("room", [{"resident_fraction": 0.5}, {"device_memory_budget": 150_000}])
def test_masters_stay_with_their_parameter(packed: bool, room: dict[str, Any]) -> None:
    config = SwapOptimizerConfig(packed_swap=packed, include_master_params=True)
    twins = Twins(adamw, SHAPES, EmulatedDevice(), config, (ms.bfloat16, ms.float32), **room)
    twins.step(3)
    twins.assert_equal()
    kept = [s for s in twins.swapped.swap_stats().resident if s.reason.startswith("kept by ")]
    keys: dict[str, set[str]] = {}
    for state in kept:
        keys.setdefault(state.parameter, set()).add(state.key)
    assert {"p0": 3, "p3": 2}.items() <= {name: len(found) for name, found in keys.items()}.items()


def test_checkpoints_and_unswap(packed: bool) -> None:
    """A checkpoint does not know what stayed, and fits an optimizer in which all swap."""
    config = SwapOptimizerConfig(packed_swap=packed)
    twins = Twins(adamw, SHAPES, EmulatedDevice(), config, resident_fraction=0.4)
    twins.step(2)
    saved = twins.swapped.state_dict()
    other = Twins(adamw, SHAPES, EmulatedDevice(), config)
    for param, trained in zip(other.base.parameters, twins.base.parameters, strict=True):
        param.set_data(trained.copy())
    other.swapped.load_state_dict(saved)
    assert resident(twins.swapped)
    assert not resident(other.swapped)
    twins.step(2)
    for step in (2, 3):
        other.swapped(make_gradients(list(other.base.parameters), step))
    twins.assert_equal()
    other.native = twins.native
    other.assert_equal()
    assert_same_run(snapshot(twins.swapped.unswap()), snapshot(twins.native))


def test_everything_stays_and_a_warning_says_so() -> None:
    base = adam(make_parameters([(2048,)] * 2))
    with pytest.warns(UserWarning, match=r"no optimizer state can be swapped \(4 kept by device_m"):
        swapped = swap_optimizer(base, device=EmulatedDevice(), device_memory_budget=2**30)
    assert swapped.swap_stats().bound_nbytes == 0


def test_without_a_device_nothing_swaps_and_nothing_is_too_small() -> None:
    base = adam(make_parameters([(2048,)] * 2))
    with pytest.warns(UserWarning, match="device target is CPU"):
        swapped = swap_optimizer(base, device_memory_budget=1)
    assert swapped.swap_stats().resident_states == {"on the CPU": 4}


@pytest.mark.parametrize(
    ("room", "config", "message"),
    [
        (
            {"device_memory_budget": 4096},
            {},
            r"4,096 bytes is too small: of 1,600,512 bytes of states, 1,600,000 are on .*"
            r"\(state_keys, a larger min_numel\), or try packed_swap=False",
        ),
        ({"device_memory_budget": 4096}, {"packed_swap": False}, r"a larger min_numel\)\.$"),
        ({"device_memory_budget": 1e6}, {}, "device_memory_budget must be None, or a number of"),
        ({"device_memory_budget": 2**20}, {"swap_times": 8}, "picks swap_times by itself, but"),
        ({"resident_bytes": -1}, {}, "resident_bytes must be a number of bytes"),
        ({"resident_fraction": 2}, {}, "from 0 to 1; found 2"),
        ({"resident_bytes": 1, "resident_fraction": 0.1}, {}, "contradict each other"),
    ],
)
def test_refused_before_anything_changes(
    room: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    params = make_parameters([(200_000,)])
    base = adamw(params)
    before = [state.data_ptr() for state in (*base.exp_avg, *base.exp_avg_sq)]
    with pytest.raises(SwapConfigError, match=message):
        swap_optimizer(base, SwapOptimizerConfig(**config), device=EmulatedDevice(), **room)
    assert [state.data_ptr() for state in (*base.exp_avg, *base.exp_avg_sq)] == before
    eager(base)(make_gradients(params, 0))
