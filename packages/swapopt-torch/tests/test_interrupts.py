"""An exception at any line of a step: every parameter is old or new, and nothing is lost."""

from __future__ import annotations

import copy
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import swapopt_torch
from sharding import lone_rank, mesh_of
from swapopt_common import SlotState, grain
from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, layout, swap_optimizer
from swapopt_torch.packed import PackedMovement
from swapopt_torch.per_tensor import PerTensorMovement
from swapopt_torch.staging import Block
from training import bits

DEEP = os.environ.get("SWAPOPT_HYPOTHESIS") == "deep"
SOURCES = str(swapopt_torch.__file__).removesuffix("__init__.py")
# What runs after a failure is not interrupted a second time.
RECOVERY = {"recover", "restore_states", "drop_gradients", "invalidate", "__del__", "pin"}


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that our own code executes.

    Of a line that is executed again and again, for parameter after parameter, the first, second,
    fourth, eighth time count and so on; with SWAPOPT_HYPOTHESIS=deep all times do.
    """

    def __init__(self, at: int) -> None:
        self.lines_left = at
        self.happened = False
        self._times: Counter[tuple[CodeType, int]] = Counter()

    def __enter__(self) -> Interrupt:
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_function(self, frame: FrameType, event: str, argument: object) -> Any:
        ours = frame.f_code.co_filename.startswith(SOURCES)
        inside = frame.f_code.co_filename.removeprefix(SOURCES)
        counts = ours and not self.happened and not inside.startswith("virtual")
        return self._count if counts else None

    def _count(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not self.happened and self._is_new(frame) and not _recovering(frame):
            self.lines_left -= 1
            if self.lines_left < 0:
                self.happened = True
                raise KeyboardInterrupt(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return self._count

    def _is_new(self, frame: FrameType) -> bool:
        line = (frame.f_code, frame.f_lineno)
        self._times[line] += 1
        is_power_of_two = self._times[line].bit_count() == 1
        return DEEP or is_power_of_two


def _recovering(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in RECOVERY:
            return True
        frame = frame.f_back
    return False


def build(
    device: torch.device,
    swapped: bool,
    packed: bool,
    mesh: DeviceMesh | None = None,
    swap_times: int = 3,
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Make six parameters; with a mesh they are DTensors, of which 1024 elements are here."""
    values = [torch.linspace(0, i + 1, 1024, device=device) for i in range(6)]
    if mesh is not None:
        values = [DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for value in values]
    parameters = [nn.Parameter(value) for value in values]
    groups = [{"params": parameters[:3], "lr": 1e-2}, {"params": parameters[3:], "lr": 1e-3}]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, fused=True)
    if swapped:
        config = SwapOptimizerConfig(swap_times=swap_times, packed_swap=packed)
        optimizer = swap_optimizer(optimizer, config)
    return parameters, optimizer


def step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        values = torch.randn(1024, generator=generator).to(parameter.device)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            values = DTensor.from_local(values, mesh, placements, run_check=False)
        parameter.grad = values
    optimizer.step()


def blocks_of(optimizer: TorchSwapOptimizer) -> list[Block]:
    """Return all device memory that the states of an optimizer visit."""
    movement = optimizer._engine._movement
    if isinstance(movement, PackedMovement):
        return movement._arenas
    assert isinstance(movement, PerTensorMovement)
    return [block for _, groups in movement._groups.values() for _, block in groups]


def image(parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[bytes, ...]:
    """Return all that belongs to one parameter."""
    tensors = [parameter, *(state[key] for key in sorted(state))]
    return tuple(bits(tensor).numpy().tobytes() for tensor in tensors)


def images(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[tuple[bytes, ...]]:
    state = optimizer.state
    return [image(p, dict(state[p]) if p in state else {}) for p in parameters]


def zero_state(found: tuple[bytes, ...]) -> bool:
    return not any(any(part) for part in found[1:])


@pytest.fixture(params=[False, True], ids=["plain", "sharded"])
def mesh(request: pytest.FixtureRequest, device: torch.device) -> Iterator[DeviceMesh | None]:
    if not request.param:
        yield None
        return
    with lone_rank(device.type):
        yield mesh_of(device, [1, 2, 3])


@pytest.mark.parametrize(
    ("steps_before", "with_snapshot"),
    [(0, False), (1, False), (1, True)],
    ids=["first_step", "later_step", "snapshot_alive"],
)
def test_any_line_may_fail(
    device: torch.device,
    packed: bool,
    mesh: DeviceMesh | None,
    steps_before: int,
    with_snapshot: bool,
) -> None:
    native = build(device, False, packed, mesh)
    history = []
    for seed in range(3):
        history.append(images(*native))
        step(*native, seed)
    # Every line with SWAPOPT_HYPOTHESIS=deep; else one in five, others in each of the four cases,
    # and fewer of DTensors, whose lines are the same but for a few.
    stride = 1 if DEEP else 5 if mesh is None else 13
    at, happened = 3 * steps_before + packed, True
    while happened:
        parameters, optimizer = build(device, True, packed, mesh)
        assert isinstance(optimizer, TorchSwapOptimizer)
        for seed in range(steps_before):
            step(parameters, optimizer, seed)
        optimizer.synchronize()
        snapshot = optimizer.state_dict() if with_snapshot else None
        copied = copy.deepcopy(snapshot)
        module = torch.get_device_module(device)
        module.synchronize(device)
        place, current = "no interrupt", (module.current_stream(device), module.current_device())
        with Interrupt(at) as interrupt:
            try:
                step(parameters, optimizer, steps_before)
            except KeyboardInterrupt as error:
                place = f"interrupt {at} at {error}"
        happened = interrupt.happened
        assert (module.current_stream(device), module.current_device()) == current, place
        found = images(parameters, optimizer)
        assert_same_snapshot(snapshot, copied, place)
        for index, one in enumerate(found):
            old, new = history[steps_before][index], history[steps_before + 1][index]
            untouched = steps_before == 0 and one[0] == old[0] and zero_state(one)
            assert one in (old, new) or untouched, f"{place}: parameter {index} is neither"
        assert all(block.is_empty for block in blocks_of(optimizer)), place
        states = {slot.state for unit in optimizer._adapter.units for slot in unit.slots}
        assert states <= {SlotState.HOST, SlotState.PENDING}, f"{place}: {states}"
        # A fresh step works, and brings who was left behind to the same values.
        for parameter, one, new in zip(parameters, found, history[steps_before + 1], strict=True):
            if one == new:
                parameter.grad = None
        optimizer.step()
        for index, (one, new) in enumerate(
            zip(images(parameters, optimizer), history[steps_before + 1], strict=True)
        ):
            assert one == new, f"{place}: parameter {index} after the next step"
        at += stride
    assert at > 300


@pytest.mark.parametrize("with_snapshot", [False, True], ids=["no_snapshot", "snapshot_alive"])
def test_any_line_may_fail_where_parameters_are_cut(
    device: torch.device, packed: bool, with_snapshot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each range of a parameter is old or new, and its states with it; all are in one place."""
    monkeypatch.setattr(layout, "LEAST_DIVIDED_NBYTES", 1)
    monkeypatch.setattr(grain, "LEAST_BATCH_BYTES", 1024)
    native = build(device, False, packed)
    history = []
    for seed in range(3):
        history.append(ranges(*native))
        step(*native, seed)
    at, happened, mixed = 7 * with_snapshot + packed, True, 0
    while happened:
        parameters, optimizer = build(device, True, packed, swap_times=24)
        assert isinstance(optimizer, TorchSwapOptimizer)
        step(parameters, optimizer, 0)
        assert all(unit.is_cut for unit in optimizer._adapter.units)
        snapshot = optimizer.state_dict() if with_snapshot else None
        copied = copy.deepcopy(snapshot)
        place = "no interrupt"
        with Interrupt(at) as interrupt:
            try:
                step(parameters, optimizer, 1)
            except KeyboardInterrupt as error:
                place = f"interrupt {at} at {error}"
        happened = interrupt.happened
        found = ranges(parameters, optimizer)
        assert_same_snapshot(snapshot, copied, place)
        for index, one in enumerate(found):
            assert one in (history[1][index], history[2][index]), f"{place}: range {index}"
        new = [one == later for one, later in zip(found, history[2], strict=True)]
        mixed += any(a != b for a, b in zip(new[::2], new[1::2], strict=True))
        assert all(block.is_empty for block in blocks_of(optimizer)), place
        for unit in optimizer._adapter.units:
            for slot in unit.slots:
                assert slot.state is SlotState.HOST, place
                assert optimizer.state[unit.param][slot.name] is slot.cpu_tensor, place
                assert slot.cpu_tensor.data_ptr() == slot.host_address, place
        step(parameters, optimizer, 2)
        at += 1 if DEEP else 23
    assert mixed > 0, "no parameter was left half updated"
    assert at > 300


def ranges(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[tuple[bytes, ...]]:
    """Return all that belongs to each half of each parameter, the step count left out."""
    found = []
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        moments = [state[key] for key in ("exp_avg", "exp_avg_sq") if key in state]
        for part in (slice(0, 512), slice(512, 1024)):
            found.append(tuple(bits(t[part]).numpy().tobytes() for t in (parameter, *moments)))
    return found


def assert_same_snapshot(
    found: dict[str, Any] | None, expected: dict[str, Any] | None, place: str
) -> None:
    if found is None or expected is None:
        return
    for number, entries in expected["state"].items():
        for key, value in entries.items():
            assert torch.equal(bits(found["state"][number][key]), bits(value)), (
                f"{place}: {key} of {number} in the snapshot"
            )


def test_any_line_of_a_load_may_fail(device: torch.device, packed: bool) -> None:
    """Afterwards the checkpoint has been taken over as a whole, or not at all."""
    source, saving = build(device, True, packed)
    step(source, saving, 5)
    step(source, saving, 6)
    saved = copy.deepcopy(saving.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    at, happened, outcomes = int(packed), True, set()
    while happened:
        parameters, optimizer = build(device, True, packed)
        step(parameters, optimizer, 0)
        before = copy.deepcopy(optimizer.state_dict())
        place = "no interrupt"
        with Interrupt(at) as interrupt:
            try:
                optimizer.load_state_dict(saved)
            except KeyboardInterrupt as error:
                place = f"interrupt {at} at {error}"
        happened = interrupt.happened
        taken_over = optimizer.param_groups[0]["lr"] == 0.5
        assert_same_snapshot(optimizer.state_dict(), saved if taken_over else before, place)
        outcomes.add(taken_over)
        step(parameters, optimizer, 1)
        at += 1 if DEEP else 5
    assert outcomes == {True, False}


def test_any_line_of_unswap_may_fail(device: torch.device, packed: bool) -> None:
    """Afterwards either optimizer, and exactly one, steps on with the right values."""
    native, reference = build(device, False, packed)
    step(native, reference, 0)
    step(native, reference, 1)
    expected = images(native, reference)
    at, happened = int(packed), True
    while happened:
        parameters, optimizer = build(device, True, packed)
        assert isinstance(optimizer, TorchSwapOptimizer)
        step(parameters, optimizer, 0)
        place = "no interrupt"
        with Interrupt(at) as interrupt:
            try:
                optimizer.unswap()
            except KeyboardInterrupt as error:
                place = f"interrupt {at} at {error}"
        happened = interrupt.happened
        owner = optimizer._base if optimizer._unswapped else optimizer
        step(parameters, owner, 1)
        assert images(parameters, owner) == expected, place
        at += 1 if DEEP else 5


def test_any_line_of_wrapping_may_fail(device: torch.device, packed: bool) -> None:
    """Afterwards the optimizer is as it was, and steps, and can be wrapped."""
    native, reference = build(device, False, packed)
    for seed in range(3):
        step(native, reference, seed)
    expected = images(native, reference)
    at, happened = int(packed), True
    while happened:
        parameters, base = build(device, False, packed)
        step(parameters, base, 0)
        wrapped = None
        with Interrupt(at) as interrupt:
            try:
                wrapped = swap_optimizer(base, SwapOptimizerConfig(packed_swap=packed))
            except KeyboardInterrupt as error:
                place = f"interrupt {at} at {error}"
        happened = interrupt.happened
        if wrapped is None:
            step(parameters, base, 1)
            wrapped = swap_optimizer(base, SwapOptimizerConfig(packed_swap=packed))
        else:
            place = "no interrupt"
            step(parameters, wrapped, 1)
        step(parameters, wrapped, 2)
        assert images(parameters, wrapped) == expected, place
        at += 1 if DEEP else 7
