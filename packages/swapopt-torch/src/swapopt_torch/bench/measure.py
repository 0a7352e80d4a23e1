"""Measuring the contenders, each warm, on the same parameters and gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch

from swapopt_torch.bench.contenders import Contender, Entry, OptimizerKind, Scene
from swapopt_torch.bench.device import BenchDevice, StepCounts
from swapopt_torch.bench.workloads import Workload

_WARM_STEPS = 2
_TRAINING_STEPS = 3
_PYTHON_STEPS = 3


@dataclass(slots=True)
class Measured:
    """What was measured of one contender.

    Attributes:
        name: its name.
        note: what it does, if its name does not say.
        step_seconds: of each optimizer step, from an idle device to an idle device.
        return_seconds: of each, until ``step()`` returned.
        training_seconds: of one training step among several, each measurement.
        python_seconds: process time of ``step()`` per parameter with a gradient, each measurement.
        peak_nbytes: most device bytes in use in a step: parameters, gradients and its own.
        idle_nbytes: device bytes in use between steps: parameters, gradients and its own.
        host_nbytes: bytes of host memory it holds.
        pinned_nbytes: bytes of it that the device says are pinned; None if it does not tell.
        counts: what one step issues; None where the device does not tell.
    """

    name: str
    note: str
    step_seconds: list[float] = field(default_factory=list)
    return_seconds: list[float] = field(default_factory=list)
    training_seconds: list[float] = field(default_factory=list)
    python_seconds: list[float] = field(default_factory=list)
    peak_nbytes: int = 0
    idle_nbytes: int = 0
    host_nbytes: int = 0
    pinned_nbytes: int | None = None
    counts: StepCounts | None = None

    @property
    def working_nbytes(self) -> int:
        """Device bytes that a step takes beside what is there between steps."""
        return self.peak_nbytes - self.idle_nbytes

    @property
    def step(self) -> float:
        """Seconds of an optimizer step; see `typical`."""
        return typical(self.step_seconds)

    @property
    def training(self) -> float:
        """Seconds of a training step."""
        return typical(self.training_seconds)

    @property
    def returns(self) -> float:
        """Seconds until ``step()`` returns."""
        return typical(self.return_seconds)

    @property
    def python(self) -> float:
        """Least process time of ``step()`` per parameter: the rest is other processes' doing."""
        return min(self.python_seconds)


def typical(samples: Sequence[float]) -> float:
    """Return the mean of samples that differ by the step, and the median of those that repeat.

    Few samples, as on the virtual accelerator, differ only in what the steps are about.
    """
    return fmean(samples) if len(samples) < 5 else median(samples)


def _elapsed(began_seconds: float, ended_seconds: float) -> float:
    """Return the seconds between, in whole nanoseconds: equal steps then are equal numbers."""
    return round(ended_seconds - began_seconds, 9)


def make_scene(
    workload: Workload, kind: OptimizerKind, swap_times: int, device: torch.device
) -> Scene:
    """Make the parameters and gradients that all contenders share."""
    values = [torch.ones(shape, dtype=workload.dtype, device=device) for shape in workload.shapes]
    params = [torch.nn.Parameter(value) for value in values]
    grads = [torch.full_like(value, 1e-3) for value in values]
    return Scene(params, grads, kind, swap_times)


def measure(
    entries: Sequence[Entry],
    scene: Scene,
    workload: Workload,
    device: BenchDevice,
    *,
    rounds: int,
    training_seconds: float,
    say: Callable[[str], None],
) -> list[Measured]:
    """Measure every contender in every round; where time is measured, they take turns.

    Args:
        entries: whom.
        scene: what they work on.
        workload: tells which parameters have gradients in which round.
        device: where.
        rounds: how often.
        training_seconds: length of what stands in for forward and backward.
        say: is told whose turn it is.
    """
    measured: list[Measured] = []
    turns = [[entry] for entry in entries] if not device.measures_host else [list(entries)]
    for group in turns:
        runs = []
        for entry in group:
            say(entry.name)
            runs.append(_Run(entry, scene, workload, device, training_seconds))
        for number in range(rounds):
            for run in runs:
                run.measure(number)
        measured += [run.finish() for run in runs]
    return measured


class _Run:
    """One contender, made and warm."""

    def __init__(
        self,
        entry: Entry,
        scene: Scene,
        workload: Workload,
        device: BenchDevice,
        training_seconds: float,
    ) -> None:
        self._workload, self._device = workload, device
        self._training_seconds = training_seconds
        self._scene_nbytes = 2 * workload.nbytes
        # Others may be there, too: only the difference is this one's.
        before = device.idle_nbytes()
        pinned_before = device.accelerator.pinned_nbytes()
        self._contender: Contender = entry.make(scene)
        self.result = Measured(entry.name, self._contender.note)
        for number in range(_WARM_STEPS):
            self._give_gradients(-1 - number)
            self._contender.step()
        self.result.idle_nbytes = self._scene_nbytes + device.idle_nbytes() - before
        self.result.host_nbytes = self._contender.host_nbytes()
        pinned = device.accelerator.pinned_nbytes()
        if pinned is not None and pinned_before is not None:
            self.result.pinned_nbytes = pinned - pinned_before

    def _give_gradients(self, number: int) -> None:
        # A warm step gives every parameter a gradient, so that all states exist.
        indices: Iterable[int] = (
            range(len(self._workload.shapes)) if number < 0 else self._workload.active(number)
        )
        self._contender.give_gradients(list(indices))

    def measure(self, number: int) -> None:
        """Measure one optimizer step, some training steps, and Python's part of some steps."""
        self._measure_step(number)
        self._measure_training(number)
        if self._device.measures_host:
            self._measure_python(number)

    def _measure_step(self, number: int) -> None:
        accelerator, result = self._device.accelerator, self.result
        self._give_gradients(number)
        idle = self._device.idle_nbytes()
        accelerator.reset_peak()
        self._device.begin_counting()
        began = accelerator.clock_seconds()
        self._contender.step()
        returned = accelerator.clock_seconds()
        accelerator.synchronize()
        result.step_seconds.append(_elapsed(began, accelerator.clock_seconds()))
        result.return_seconds.append(_elapsed(began, returned))
        result.counts = self._device.counts()
        peak = accelerator.peak_active_nbytes() - idle + result.idle_nbytes
        result.peak_nbytes = max(result.peak_nbytes, peak)

    def _measure_training(self, number: int) -> None:
        accelerator = self._device.accelerator
        accelerator.synchronize()
        began = accelerator.clock_seconds()
        for _ in range(_TRAINING_STEPS):
            self._give_gradients(number)
            self._contender.step()
            self._device.train(self._training_seconds)
        accelerator.synchronize()
        seconds = _elapsed(began, accelerator.clock_seconds()) / _TRAINING_STEPS
        self.result.training_seconds.append(seconds)

    def _measure_python(self, number: int) -> None:
        count = len(self._workload.active(number))
        for _ in range(_PYTHON_STEPS):
            self._give_gradients(number)
            self._device.accelerator.synchronize()
            began = time.process_time()
            self._contender.step()
            seconds = time.process_time() - began
            self.result.python_seconds.append(seconds / count)

    def finish(self) -> Measured:
        """Let go of the contender; return what was measured."""
        self._give_gradients(0)
        del self._contender
        return self.result
