"""What forward and backward take on the emulated device, and what is drawn of it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor
from mindspore.ops import square
from mindspore.ops.function.grad.grad_func import value_and_grad

from swapopt_mindspore.demo.observe import StepObserver, WatchedDevice
from swapopt_mindspore.emulated import PROFILES

BLOCK_NBYTES = 64 * 64 * 4


@pytest.fixture
def device() -> WatchedDevice:
    return WatchedDevice(PROFILES["ascend-910b"])


@pytest.fixture
def params(device: WatchedDevice) -> list[Parameter]:
    random = np.random.default_rng(0)
    params = [
        Parameter(Tensor(random.normal(size=(64, 64)).astype(np.float32)), name=f"p{index}")
        for index in range(2)
    ]
    device.adopt(params)
    return params


def test_kept_tensors_and_gradients_take_memory_and_give_it_back(
    device: WatchedDevice, params: list[Parameter]
) -> None:
    observer = StepObserver(device, params)
    inputs = Tensor(np.ones((64, 64), np.float32))

    def loss(inputs: Tensor) -> Tensor:
        hidden = inputs.matmul(params[0])  # keeps the inputs and the parameter
        return square(hidden.matmul(params[1])).sum()  # keeps hidden, and what is squared

    differentiate = value_and_grad(loss, None, ParameterTuple(params))
    gradients = None
    with observer.step(3, sampling=True):
        _, gradients = differentiate(inputs)
    gc.collect()
    held = device.memory().allocated_bytes
    assert held == 4 * BLOCK_NBYTES  # two parameters, two gradients
    observer.drop_gradients()
    assert device.memory().allocated_bytes == 2 * BLOCK_NBYTES
    forward = [sample.nbytes for sample in observer.samples if sample.phase == "forward"]
    assert forward == sorted(forward)
    # Parameters are on the device anyway, and each other tensor counts once, however often kept.
    most = max(forward) - 2 * BLOCK_NBYTES
    assert 3 * BLOCK_NBYTES <= most < 4 * BLOCK_NBYTES
    assert {sample.step for sample in observer.samples} == {3}
    assert len(gradients) == 2


def test_an_operator_costs_its_launch_and_its_bytes(
    device: WatchedDevice, params: list[Parameter]
) -> None:
    observer = StepObserver(device, params)
    with observer.step(0, sampling=False):
        square(params[0])
        differentiate = value_and_grad(lambda rows: square(rows).sum(), 0)
        differentiate(params[1])
    device.synchronize()
    rows = [row for row in device.timeline() if row.lane == "compute"]
    assert [row.operation for row in rows].count("forward") >= 1
    assert [row.operation for row in rows].count("backward") >= 1
    whole_ns = round(2 * BLOCK_NBYTES / device.profile.memory_bytes_per_second * 1e9)
    assert whole_ns in {row.end_ns - row.start_ns for row in rows}
    assert device.now_ns >= len(rows) * device.profile.host_issue_ns
    assert observer.samples == []


def test_rows_are_told_from_the_beginning_of_the_step(device: WatchedDevice) -> None:
    device.compute("before", 1e-3)
    device.synchronize()
    device.clear_timeline()
    start_ns = device.now_ns
    device.compute("update", 2e-3)
    device.synchronize()
    (row,) = device.step_rows(start_ns)
    issue_seconds = device.profile.host_issue_seconds
    assert (row.lane, row.operation) == ("compute", "update")
    assert row.start_seconds == pytest.approx(issue_seconds, abs=1e-9)
    assert row.seconds == pytest.approx(2e-3, abs=1e-9)
