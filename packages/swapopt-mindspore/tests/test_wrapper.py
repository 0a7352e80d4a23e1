"""The swapped optimizer in MindSpore's own surroundings: trainers, modes, attributes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore import dataset as ds

from swapopt_common import SwapConfigError, SwapOptimizerConfig
from swapopt_mindspore import (
    MindSporeSwapOptimizer,
    is_swap_optimizer,
    swap_optimizer,
)
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import Twins, adam, adamw, make_gradients, make_parameters
from training import Regressor, assert_same_run, snapshot

EVERYTHING = SwapOptimizerConfig(swap_times=3, min_numel=0)
SHAPES = [(16, 8), (24,), (8, 8)]


def test_it_is_an_optimizer_that_returns_what_native_returns() -> None:
    twins = Twins(adam, SHAPES, EmulatedDevice(), EVERYTHING)
    assert isinstance(twins.swapped, nn.Optimizer)
    assert is_swap_optimizer(twins.swapped)
    assert not is_swap_optimizer(twins.native)
    gradients = twins.gradients()
    results = twins.swapped(gradients)
    assert isinstance(results, tuple)
    assert results == (True, True, True)
    assert len(results) == len(type(twins.native).construct.__wrapped__(twins.native, gradients))
    assert twins.swapped.construct(twins.gradients({1})) == (True, None, True)
    assert twins.swapped(gradients=list(gradients)) == results


def test_seen_as_a_cell_it_is_the_wrapped_optimizer() -> None:
    twins = Twins(adam, SHAPES, EmulatedDevice(), EVERYTHING)
    names = [name for name, _ in twins.swapped.parameters_and_names()]
    assert names == [name for name, _ in twins.native.parameters_and_names()]
    assert list(twins.swapped.parameters_dict()) == list(twins.native.parameters_dict())
    for name in ("learning_rate", "global_step", "beta1_power", "parameters", "loss_scale"):
        assert getattr(twins.swapped, name) is getattr(twins.base, name)
    assert twins.swapped.get_lr() == twins.native.get_lr()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = twins.swapped.no_such_thing


def test_attributes_set_on_it_are_the_wrapped_optimizers() -> None:
    twins = Twins(adam, SHAPES, EmulatedDevice(), EVERYTHING)
    twins.step()
    settings = {
        "eps": Tensor(np.float32(0.1)),
        "learning_rate": Parameter(Tensor(np.float32(0.5)), name="learning_rate"),
        "unique": False,
    }
    for name, value in settings.items():
        for optimizer in (twins.native, twins.swapped):
            setattr(optimizer, name, value)
        assert getattr(twins.base, name) is getattr(twins.swapped, name) is value
    before = twins.native.parameters[0].asnumpy().copy()
    twins.step(2)
    twins.assert_equal()
    assert np.abs(twins.native.parameters[0].asnumpy() - before).max() > 0.1, "the new rate"
    twins.swapped.note = "its own"
    assert not hasattr(twins.base, "note")
    twins.swapped.construct = twins.swapped.construct
    with pytest.raises(RuntimeError, match="call the optimizer that swap_optimizer returned"):
        twins.base(twins.gradients())


def test_states_read_through_the_wrapper_are_complete() -> None:
    twins = Twins(adam, SHAPES, EmulatedDevice(), EVERYTHING)
    for _ in range(2):
        twins.step()
        # Without synchronize(): the last offloads have not happened yet.
        for ours, native in zip(twins.swapped.moment2, twins.native.moment2, strict=True):
            assert ours.asnumpy().tobytes() == native.asnumpy().tobytes()


def test_parameters_are_read_without_waiting() -> None:
    device = EmulatedDevice()
    twins = Twins(adam, SHAPES, device, EVERYTHING)
    twins.step()
    device.clear_timeline()
    assert len(twins.swapped.parameters) == 3
    assert [row for row in device.timeline() if row.lane == "host"] == []
    assert len(twins.swapped.moment1) == 3
    assert [row.operation for row in device.timeline()] == ["synchronize event"]


def train_one_step(model: nn.Cell, optimizer: nn.Optimizer, steps: int) -> list[np.ndarray]:
    cell = nn.TrainOneStepCell(nn.WithLossCell(model, nn.MSELoss()), optimizer)
    cell.set_train()
    return [cell(*rows_and_targets(step)).asnumpy() for step in range(steps)]


def train_by_model(model: nn.Cell, optimizer: nn.Optimizer, steps: int) -> list[np.ndarray]:
    losses: list[np.ndarray] = []

    class Record(ms.Callback):
        def on_train_step_end(self, run_context: ms.RunContext) -> None:
            losses.append(run_context.original_args().net_outputs.asnumpy())

    data = ds.GeneratorDataset(
        lambda: (tuple(t.asnumpy() for t in rows_and_targets(step)) for step in range(steps)),
        ["rows", "targets"],
    )
    trainer = ms.Model(model, nn.MSELoss(), optimizer)
    trainer.train(1, data, callbacks=[Record()], dataset_sink_mode=False)
    return losses


def rows_and_targets(step: int) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng([1, step])
    rows = random.normal(size=(12, 16)).astype(np.float32)
    return Tensor(rows), Tensor(random.normal(size=(12, 8)).astype(np.float32))


@pytest.mark.parametrize("trained", [train_one_step, train_by_model])
def test_mindspores_trainers_take_it(trained: Callable[..., list[np.ndarray]]) -> None:
    losses, runs = [], []
    for config in (None, EVERYTHING):
        model = Regressor((ms.float32,))
        optimizer = adam(list(model.trainable_params()))
        if config is not None:
            optimizer = swap_optimizer(optimizer, config, device=EmulatedDevice())
        losses.append([loss.tobytes() for loss in trained(model, optimizer, 8)])
        if isinstance(optimizer, MindSporeSwapOptimizer):
            optimizer.synchronize()
        runs.append(snapshot(optimizer))
    assert len(losses[0]) == 8
    assert losses[0] == losses[1]
    assert_same_run(runs[1], runs[0])


@pytest.fixture
def graph_mode() -> object:
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def test_wrapping_in_graph_mode_is_refused(graph_mode: object) -> None:
    del graph_mode
    optimizer = adam(make_parameters(SHAPES))
    with pytest.raises(SwapConfigError, match=r"GRAPH_MODE.*PYNATIVE_MODE"):
        swap_optimizer(optimizer, EVERYTHING, device=EmulatedDevice())
    assert "construct" not in vars(optimizer)


def test_a_step_in_graph_mode_is_refused() -> None:
    twins = Twins(adam, SHAPES, EmulatedDevice(), EVERYTHING)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(ValueError, match=r"GRAPH_MODE.*PYNATIVE_MODE"):
            twins.swapped(twins.gradients())
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    twins.step(2)
    twins.assert_equal()


def test_a_step_inside_jit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a compiler that fails leaves a report where it runs
    twins = Twins(adam, SHAPES, EmulatedDevice(), EVERYTHING)
    swapped = twins.swapped

    @ms.jit
    def compiled(gradients: tuple[Tensor, ...]) -> object:
        return swapped(gradients)

    with pytest.raises(ValueError, match="cannot be part of a compiled graph"):
        compiled(twins.gradients())
    twins.step(2)
    twins.assert_equal()


def test_the_wrapped_optimizer_refuses_to_step_and_to_be_wrapped_again() -> None:
    twins = Twins(adam, SHAPES, EmulatedDevice(), EVERYTHING)
    with pytest.raises(RuntimeError, match="call the optimizer that swap_optimizer returned"):
        twins.base(twins.gradients())
    with pytest.raises(SwapConfigError, match="swapped already"):
        swap_optimizer(twins.base, EVERYTHING, device=EmulatedDevice())
    with pytest.raises(SwapConfigError, match="MindSporeSwapOptimizer is swapped already"):
        swap_optimizer(twins.swapped, EVERYTHING, device=EmulatedDevice())
    twins.step(2)
    twins.assert_equal()


def test_what_is_refused_leaves_the_optimizer_as_it_was() -> None:
    device = EmulatedDevice()
    optimizer = adam(make_parameters(SHAPES))
    addresses = [state.data_ptr() for state in optimizer.moment1]
    for config in (SwapOptimizerConfig(packed_swap=True), {"swap_times": 3}):
        with pytest.raises(ValueError):
            swap_optimizer(optimizer, config, device=device)
    assert [state.data_ptr() for state in optimizer.moment1] == addresses
    assert "construct" not in vars(optimizer)
    assert device.memory().allocated_bytes == device.memory().pinned_bytes == 0
    optimizer(make_gradients(list(optimizer.parameters), 0))


@pytest.mark.parametrize("device", ["ascend-910b", 0, EmulatedDevice], ids=repr)
def test_what_is_no_device_is_refused(device: object) -> None:
    optimizer = adam(make_parameters(SHAPES))
    with pytest.raises(SwapConfigError, match="device must be a device object or None, found"):
        swap_optimizer(optimizer, EVERYTHING, device=device)
    assert "construct" not in vars(optimizer)
    optimizer(make_gradients(list(optimizer.parameters), 0))


def test_without_a_device_one_warning_and_native_results() -> None:
    with pytest.warns(UserWarning, match="EmulatedDevice") as caught:
        twins = Twins(adam, SHAPES, None, EVERYTHING)
    assert len(caught) == 1
    assert caught[0].filename.endswith("swapping.py"), "the line that called swap_optimizer"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twins.step(2)
        twins.step(missing={1})
    twins.assert_equal()
    stats = twins.swapped.swap_stats()
    assert stats.swapped_states == stats.pinned_nbytes == 0
    assert stats.resident_states == {"on the CPU": 6}
    assert twins.swapped.unswap() is twins.base


def test_an_emulated_device_is_chosen_by_its_block() -> None:
    with EmulatedDevice() as device:
        optimizer = swap_optimizer(adam(make_parameters(SHAPES)), EVERYTHING)
    assert device.memory().pinned_bytes == optimizer.swap_stats().pinned_nbytes > 0


def test_nothing_to_swap_is_warned_of() -> None:
    config = SwapOptimizerConfig(min_numel=1_000_000)
    with pytest.warns(UserWarning, match=r"6 smaller than min_numel=1000000"):
        swap_optimizer(adam(make_parameters(SHAPES)), config, device=EmulatedDevice())


@pytest.mark.parametrize("make", [adam, adamw])
def test_masters_that_do_not_exist_are_warned_of(make: Callable[..., nn.Optimizer]) -> None:
    config = SwapOptimizerConfig(min_numel=0, include_master_params=True)
    with pytest.warns(UserWarning, match="include_master_params=True has no effect") as caught:
        optimizer = swap_optimizer(make(make_parameters(SHAPES)), config, device=EmulatedDevice())
    assert len(caught) == 1
    assert optimizer.swap_stats().swapped_states == 6


def test_a_warning_that_is_an_error_leaves_everything_as_it_was() -> None:
    device = EmulatedDevice()
    optimizer = adam(make_parameters(SHAPES))
    config = SwapOptimizerConfig(min_numel=0, include_master_params=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            swap_optimizer(optimizer, config, device=device)
    assert device.memory().allocated_bytes == device.memory().pinned_bytes == 0
    swap_optimizer(optimizer, EVERYTHING, device=device)
