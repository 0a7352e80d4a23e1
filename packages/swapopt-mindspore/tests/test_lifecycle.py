"""What happens to the states between wrapping and unwrapping, besides steps."""

from __future__ import annotations

import gc

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from swapopt_common import HostMemoryError, SwapConfigError, SwapOptimizerConfig
from swapopt_mindspore import swap_optimizer
from swapopt_mindspore.device import DeviceMemoryError
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import Twins, adam, adamw, fail_at, make_gradients, make_parameters
from training import assert_same_run, eager, snapshot

EVERYTHING = SwapOptimizerConfig(swap_times=3, min_numel=0)
SHAPES = [(16, 8), (24,), (8, 8), (5, 7)]


@pytest.fixture(params=[adam, adamw], ids=["per_tensor", "packed"])
def twins(request: pytest.FixtureRequest) -> Twins:
    return Twins(request.param, SHAPES, EmulatedDevice(), EVERYTHING)


# ------------------------------------------------------------------ wrapping
def test_wrapping_a_trained_optimizer_takes_its_states_over() -> None:
    native, base = (adam(make_parameters(SHAPES)) for _ in range(2))
    for step in range(3):
        gradients = make_gradients(list(native.parameters), step)
        eager(native)(gradients)
        base(gradients)  # compiled
    device = EmulatedDevice()
    swapped = swap_optimizer(base, EVERYTHING, device=device)
    for step in range(3, 6):
        gradients = make_gradients(list(native.parameters), step)
        eager(native)(gradients)
        swapped(gradients)
    swapped.synchronize()
    assert_same_run(snapshot(swapped), snapshot(native))
    unswapped = swapped.unswap()
    gradients = make_gradients(list(native.parameters), 6)
    eager(native)(gradients)
    unswapped(gradients)
    assert_same_run(snapshot(unswapped), snapshot(native))


@pytest.mark.parametrize("call", [0, 2, 7])
@pytest.mark.parametrize("error", [RuntimeError("made to fail"), KeyboardInterrupt()])
def test_wrapping_that_fails_leaves_the_optimizer_as_it_was(
    call: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, base = (adam(make_parameters(SHAPES)) for _ in range(2))
    device = EmulatedDevice()
    with monkeypatch.context() as patch:
        fail_at(patch, device, "copy", call, error)
        with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught:
            swap_optimizer(base, EVERYTHING, device=device)
    assert caught.value is error
    error.__traceback__ = None  # its frames hold what was being made
    del caught
    gc.collect()
    assert device.memory().pinned_bytes == 0
    for step in range(2):
        gradients = make_gradients(list(native.parameters), step)
        eager(native)(gradients)
        base(gradients)
    assert_same_run(snapshot(base), snapshot(native))
    swap_optimizer(base, EVERYTHING, device=device)


def test_wrapping_without_enough_host_memory_leaves_everything_as_it_was() -> None:
    device = EmulatedDevice(pinned_limit_bytes=1024)
    base = adam(make_parameters(SHAPES))
    addresses = [state.data_ptr() for state in base.moment1]
    with pytest.raises(HostMemoryError, match="state_keys"):
        swap_optimizer(base, EVERYTHING, device=device)
    assert [state.data_ptr() for state in base.moment1] == addresses
    base(make_gradients(list(base.parameters), 0))


# ------------------------------------------------------------------ between steps
def test_the_optimizers_own_states_are_the_mirrors(twins: Twins) -> None:
    twins.step(2)
    twins.swapped.synchronize()
    for slot in twins.swapped._engine.layout.slots():
        assert slot.parameter.data_ptr() == slot.cpu_tensor.data_ptr()
        # A storage of its own, of exactly its size (invariant 2).
        assert slot.cpu_tensor.storage_offset() == 0
        assert slot.cpu_tensor.untyped_storage().nbytes() == slot.storage_nbytes
    twins.assert_equal()


def test_values_written_into_states_between_steps_are_used(twins: Twins) -> None:
    twins.step()
    name = "moment1" if hasattr(twins.native, "moment1") else "exp_avg"
    for optimizer in (twins.swapped, twins.native):
        for state in getattr(optimizer, name):
            state.copy_(state * 0.5)
    twins.step(2)
    twins.assert_equal()


def test_values_put_in_place_of_states_are_taken_over(twins: Twins) -> None:
    """As load_param_into_net does it: the state gets other memory, the mirror keeps its own."""
    twins.step()
    twins.swapped.synchronize()
    addresses = [slot.host_address for slot in twins.swapped._engine.layout.slots()]
    for optimizer in (twins.swapped, twins.native):
        values = {
            name: Parameter(Tensor(found.asnumpy() * np.float32(0.5)), name=name)
            for name, found in optimizer.parameters_dict().items()
            if found.dtype == ms.float32
        }
        assert len(values) >= 12
        ms.load_param_into_net(optimizer, values)
    twins.swapped.synchronize()
    twins.assert_equal()
    twins.step(2)
    twins.assert_equal()
    slots = twins.swapped._engine.layout.slots()
    assert [slot.host_address for slot in slots] == addresses
    assert not any(slot.is_home_moved for slot in slots)


def test_values_put_in_place_of_states_right_before_a_step_are_used(twins: Twins) -> None:
    twins.step()
    name = "moment2" if hasattr(twins.native, "moment2") else "exp_avg_sq"
    for optimizer in (twins.swapped, twins.native):
        state = getattr(optimizer, name)[0]
        state.set_data(Tensor(np.full(state.shape, 0.25, np.float32)))
    twins.step(2)
    twins.assert_equal()


def test_a_replacement_that_does_not_fit_is_refused() -> None:
    twins = Twins(adam, SHAPES, EmulatedDevice(), EVERYTHING)
    twins.step()
    slot = twins.swapped._engine.layout.slots()[0]
    slot.home.data = Tensor(np.zeros((3,), np.float32))
    with pytest.raises(SwapConfigError, match=r"moment1.p0.*\(3,\).*\(16, 8\)"):
        twins.swapped(twins.gradients())
    slot.home.data = slot.cpu_tensor
    twins.step()
    twins.assert_equal()


# ------------------------------------------------------------------ states that appear late
def late_twins(late: slice, config: SwapOptimizerConfig = EVERYTHING) -> Twins:
    """Return twins whose first moments are on the host until their first update, as on Ascend."""
    device = EmulatedDevice()
    native, base = (adam(make_parameters(SHAPES)) for _ in range(2))
    device.keep_on_host([*base.moment1[late], *base.moment2[late]])
    return Twins.of(native, base, swap_optimizer(base, config, device=device))


def test_states_that_appear_with_the_first_step_are_laid_out_as_at_wrapping() -> None:
    twins, early = late_twins(slice(None)), Twins(adam, SHAPES, EmulatedDevice(), EVERYTHING)
    assert twins.swapped.swap_stats().swapped_states == 0
    twins.step()
    stats, expected = twins.swapped.swap_stats(), early.swapped.swap_stats()
    assert stats.swapped_states == expected.swapped_states == 8
    assert (stats.batches, stats.bound_nbytes, stats.pinned_nbytes) == (
        expected.batches,
        expected.bound_nbytes,
        expected.pinned_nbytes,
    )
    assert stats.resident == ()
    twins.step(3)
    twins.assert_equal()


def test_states_that_appear_later_are_appended() -> None:
    twins = late_twins(slice(2, 4))
    mirrors = {slot.parameter.name: slot.host_address for slot in layout_slots(twins)}
    assert len(mirrors) == 4
    twins.step(missing={3})
    assert len(layout_slots(twins)) == 6
    twins.step(2)
    later = {slot.parameter.name: slot.host_address for slot in layout_slots(twins)}
    assert len(later) == 8
    assert mirrors.items() <= later.items(), "what had host memory keeps it"
    twins.step(2)
    twins.assert_equal()


def layout_slots(twins: Twins) -> list[object]:
    return list(twins.swapped._engine.layout.slots())


def test_states_that_appear_and_find_no_host_memory_stay() -> None:
    device = EmulatedDevice(pinned_limit_bytes=1024)
    base = adam(make_parameters(SHAPES))
    device.keep_on_host([*base.moment1, *base.moment2])
    optimizer = swap_optimizer(base, EVERYTHING, device=device)
    native = adam(make_parameters(SHAPES))
    gradients = make_gradients(list(native.parameters), 0)
    eager(native)(gradients)
    with pytest.raises(HostMemoryError):
        optimizer(gradients)
    assert_same_run(snapshot(optimizer), snapshot(native))
    for step in range(1, 3):
        gradients = make_gradients(list(native.parameters), step)
        eager(native)(gradients)
        optimizer(gradients)
    assert_same_run(snapshot(optimizer), snapshot(native))
    assert optimizer.swap_stats().resident_states == {"no pinned host memory was left for it": 8}


# ------------------------------------------------------------------ masters
@pytest.mark.parametrize("masters", [True, False], ids=["swapped", "resident"])
def test_masters_are_reloaded_from_the_model_wherever_they_are(masters: bool) -> None:
    config = SwapOptimizerConfig(swap_times=3, min_numel=0, include_master_params=masters)
    twins = Twins(adamw, SHAPES, EmulatedDevice(), config, (ms.bfloat16, ms.float32))
    twins.step(2)
    for optimizer in (twins.swapped, twins.native):
        for index, param in enumerate(optimizer.parameters):
            values = np.random.default_rng(index).normal(size=param.shape).astype(np.float32)
            param.copy_(Tensor(values).astype(param.dtype))
        optimizer.reload_main_params_from_model()
    twins.assert_equal()
    twins.step(2)
    twins.assert_equal()


def test_only_mindformers_has_masters_to_reload() -> None:
    twins = Twins(adam, SHAPES, EmulatedDevice(), EVERYTHING)
    with pytest.raises(SwapConfigError, match="no master"):
        twins.swapped.reload_main_params_from_model()


# ------------------------------------------------------------------ unwrapping
def test_unswapping_gives_the_states_back(twins: Twins) -> None:
    device = twins.swapped._engine._device
    twins.step(2)
    base = twins.swapped.unswap()
    assert base is twins.base
    assert_same_run(snapshot(base), snapshot(twins.native))
    gc.collect()
    assert device.memory().pinned_bytes == 0
    for _ in range(2):
        gradients = twins.gradients()
        base(gradients)
        twins.step_natively(gradients)
    assert_same_run(snapshot(base), snapshot(twins.native))
    with pytest.raises(RuntimeError, match="wrap it again"):
        twins.swapped(twins.gradients())
    twins.swapped = swap_optimizer(base, EVERYTHING, device=device)
    twins.step(2)
    twins.assert_equal()


def test_unswapping_where_the_states_do_not_fit_changes_nothing() -> None:
    base, native = (adam(make_parameters(SHAPES)) for _ in range(2))
    device = EmulatedDevice(capacity_bytes=20_000)
    swapped = swap_optimizer(base, EVERYTHING, device=device)
    ballast = device.empty((14_000 // 4,), ms.float32)
    with pytest.raises(DeviceMemoryError):
        swapped.unswap()
    gc.collect()
    device.release(ballast)
    gradients = make_gradients(list(native.parameters), 0)
    swapped(gradients)
    eager(native)(gradients)
    swapped.synchronize()
    assert_same_run(snapshot(swapped), snapshot(native))
    swapped.unswap()
