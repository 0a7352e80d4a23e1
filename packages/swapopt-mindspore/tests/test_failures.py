"""Whatever fails in a step, at whatever point: states and parameters stay true (invariant 6)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from mindspore import nn

import mindformers_adamw
import swapopt_mindspore
from swapopt_common import SlotState, SwapOptimizerConfig, SwapStepError
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import Twins, adam, adamw, fail_at
from training import assert_same_bytes, of_parameter, snapshot

SHAPES = [(16, 8), (24,), (8, 8), (40,)]
ERRORS = [RuntimeError("made to fail"), KeyboardInterrupt()]


def make_twins(
    packed: bool, swap_times: int = 4, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> Twins:
    config = SwapOptimizerConfig(swap_times=swap_times, min_numel=0, packed_swap=packed)
    return Twins(adamw if packed else adam, shapes, EmulatedDevice(), config)


@pytest.fixture
def twins(packed: bool) -> Twins:
    twins = make_twins(packed)
    twins.step(2)
    return twins


def values_of(optimizer: nn.Optimizer) -> list[list[np.ndarray]]:
    """Return, for every parameter, its value and those of its states."""
    return [
        [tensor.asnumpy().copy() for tensor in of_parameter(optimizer, index).values()]
        for index in range(len(SHAPES))
    ]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


class FailedStep:
    """A step of the swapped twin that fails, between an old and a new state of the native one."""

    def __init__(self, twins: Twins) -> None:
        self.twins = twins
        self.device = twins.swapped._engine._device
        twins.swapped.synchronize()
        self.baseline_bytes = self.device.memory().allocated_bytes
        self.old, self.old_counters = values_of(twins.native), snapshot(twins.native).counters
        self.gradients = twins.gradients()

    def check(self) -> list[bool]:
        """Check that all is true; return which parameters are updated."""
        twins = self.twins
        for slot in twins.swapped._engine.layout.slots():
            assert slot.state is SlotState.HOST
            assert slot.tensor is slot.cpu_tensor
            assert not slot.is_home_moved
        assert self.device.memory().allocated_bytes == self.baseline_bytes
        counters = snapshot(twins.swapped).counters
        found = values_of(twins.swapped)
        twins.step_natively(self.gradients)
        new = values_of(twins.native)
        for index, values in enumerate(found):
            assert same(values, self.old[index]) or same(values, new[index]), f"parameter {index}"
        updated = [same(values, new[index]) for index, values in enumerate(found)]
        expected = snapshot(twins.native).counters if any(updated) else self.old_counters
        for name, value in counters.items():
            assert_same_bytes(value, expected[name], name)
        return updated

    def catch_up(self, updated: list[bool]) -> None:
        """Let the parameters that are not updated take the step; then both twins are equal."""
        if any(updated):
            native = self.twins.native
            for index, is_new in enumerate(updated):
                if not is_new:
                    pairs = zip(of_parameter(native, index).values(), self.old[index], strict=True)
                    for tensor, value in pairs:
                        tensor.asnumpy()[...] = value
        else:
            self.twins.swapped(self.gradients)
        self.twins.step(2)
        self.twins.assert_equal()


@pytest.mark.parametrize("error", ERRORS, ids=["exception", "interrupt"])
@pytest.mark.parametrize("call", [0, 1, 3])
@pytest.mark.parametrize("method", ["copy", "updating", "new_event"])
def test_a_device_that_fails(
    twins: Twins, method: str, call: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = FailedStep(twins)
    if method == "new_event":
        failed.twins.swapped._engine._events.clear()
    with monkeypatch.context() as patch:
        fail_at(patch, failed.device, method, call, error)
        with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught:
            twins.swapped(failed.gradients)
    updated = failed.check()
    assert_says_what_happened(caught.value, error, updated)
    failed.catch_up(updated)


@pytest.mark.parametrize("window", [4], indirect=True)
@pytest.mark.parametrize("call", [0, 4, 7])
def test_a_copy_that_fails_with_all_batches_in_flight(
    packed: bool, window: int, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = make_twins(packed, 2, [(16, 8)] * 4)
    assert twins.swapped._engine.layout.window == window
    failed = FailedStep(twins)
    with monkeypatch.context() as patch:
        fail_at(patch, failed.device, "copy", call, ERRORS[0])
        with pytest.raises(RuntimeError) as caught:
            twins.swapped(failed.gradients)
    updated = failed.check()
    assert_says_what_happened(caught.value, ERRORS[0], updated)
    failed.catch_up(updated)


@pytest.mark.parametrize("error", ERRORS, ids=["exception", "interrupt"])
@pytest.mark.parametrize("call", range(4))
def test_an_update_that_fails(
    twins: Twins, call: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = FailedStep(twins)
    with monkeypatch.context() as patch:
        fail_at(patch, twins.swapped._adapter, "update", call, error)
        with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught:
            twins.swapped(failed.gradients)
    updated = failed.check()
    assert updated == [index < call for index in range(4)]
    assert_says_what_happened(caught.value, error, updated)
    failed.catch_up(updated)


@pytest.mark.parametrize("call", [1, 4, 8])
def test_an_update_of_several_operators_that_fails_between_them(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MindFormers writes two moments, then the parameter: three copies for each parameter."""
    twins = make_twins(packed=True)
    twins.step(2)
    failed = FailedStep(twins)
    with monkeypatch.context() as patch:
        fail_at(patch, mindformers_adamw.home(), "inplace_copy", call, RuntimeError("no memory"))
        with pytest.raises(RuntimeError, match="no memory"):
            twins.swapped(failed.gradients)
    updated = failed.check()
    assert updated == [index < call // 3 for index in range(4)]
    failed.catch_up(updated)


def assert_says_what_happened(
    caught: BaseException, error: BaseException, updated: list[bool]
) -> None:
    """One parameter is one batch here."""
    if isinstance(error, KeyboardInterrupt):
        assert caught is error
        return
    if caught is error:
        assert not any(updated)
        return
    assert isinstance(caught, SwapStepError)
    assert caught.__cause__ is error
    assert list(caught.updated_batches) == [i for i, new in enumerate(updated) if new]
    assert str(error) in str(caught)


def test_what_fails_before_anything_moves_changes_nothing(twins: Twins) -> None:
    failed = FailedStep(twins)
    with pytest.raises(ValueError, match="4 gradients"):
        twins.swapped(failed.gradients[:3])
    updated = failed.check()
    assert not any(updated)
    failed.catch_up(updated)


def test_a_recovery_that_is_interrupted_goes_on_later(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = FailedStep(twins)
    with monkeypatch.context() as patch:
        fail_at(patch, twins.swapped._adapter, "update", 2, RuntimeError("made to fail"))
        fail_at(patch, failed.device, "synchronize", 0, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            twins.swapped(failed.gradients)
    twins.swapped.synchronize()
    updated = failed.check()
    assert updated == [True, True, False, False]
    failed.catch_up(updated)


SOURCES = Path(swapopt_mindspore.__file__).parent
# Where an interruption falls between an operator and the note that it ran, nobody can tell.
OURS = {
    str(SOURCES / name)
    for name in (
        "optimizer.py",
        "engine.py",
        "pipeline.py",
        "packed.py",
        "per_tensor.py",
        "staging.py",
    )
}


class InterruptAtLine:
    """Raises KeyboardInterrupt at the given line, counted as they run, of our own modules."""

    def __init__(self, line: int) -> None:
        self.lines_left = line

    def __enter__(self) -> InterruptAtLine:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if frame.f_code.co_filename not in OURS:
            return None
        if event == "line":
            if self.lines_left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            self.lines_left -= 1
        return self._trace


def test_a_step_interrupted_at_any_line(packed: bool) -> None:
    twins = make_twins(packed)
    twins.step(2)
    for line in itertools.count(0, 37):
        failed = FailedStep(twins)
        try:
            with InterruptAtLine(line):
                twins.swapped(failed.gradients)
        except KeyboardInterrupt:
            twins.swapped.synchronize()
            updated = failed.check()
            failed.catch_up(updated)
        else:
            assert line > 150, "a step has more lines than that"
            break
