"""One training run: native, per-tensor or packed, measured as it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.ops.function.grad.grad_func import value_and_grad

from swapopt_mindspore import MindSporeSwapOptimizer, SwapOptimizerConfig
from swapopt_mindspore.adapters import make_adapter
from swapopt_mindspore.demo.corpus import Text, iterate_batches
from swapopt_mindspore.demo.model import ByteGPT, one_hot
from swapopt_mindspore.demo.observe import StepObserver, StepRow, WatchedDevice
from swapopt_mindspore.demo.optimizers import make_native, moments_of, swap, take_fingerprints
from swapopt_mindspore.demo.results import RunKind, RunResult, StepTime, Transfers
from swapopt_mindspore.demo.settings import DRAWN_STEPS, DemoSettings
from swapopt_mindspore.emulated import Profile

Gradients = Sequence[Tensor]

ReportStep = Callable[[float], None]
"""Called after each step with its loss."""


def train(
    kind: RunKind,
    optimizer_name: str,
    settings: DemoSettings,
    profile: Profile,
    corpus: Text,
    report_step: ReportStep,
) -> RunResult:
    """Train a new model from the seed on a new device, and return what was measured."""
    began = time.perf_counter()
    trainer = _Trainer(kind, optimizer_name, settings, WatchedDevice(profile))
    batches = iterate_batches(corpus, settings.model_size, settings.seed, settings.steps)
    for index, text in enumerate(batches):
        drawn = index >= settings.steps - DRAWN_STEPS
        report_step(trainer.step(index, text, drawn=drawn))
    return trainer.result(began)


class _Trainer:
    """Model, optimizer and measurements of one run."""

    def __init__(
        self, kind: RunKind, optimizer_name: str, settings: DemoSettings, device: WatchedDevice
    ) -> None:
        self._kind = kind
        self._name = optimizer_name
        self._device = device
        model = ByteGPT(settings.model_size, settings.seed)
        params: list[Parameter] = list(model.trainable_params())
        native = make_native(optimizer_name, params)
        self._states = moments_of(optimizer_name, native)
        # Before wrapping: MindSpore's optimizers make their states when they are made.
        device.adopt([*params, *self._states])
        # Native issues the operators that swapped updates issue, all in one go.
        self._launches = make_adapter(native, SwapOptimizerConfig()).launches_per_update
        self._optimizer = (
            native if kind is RunKind.NATIVE else swap(native, kind, settings.swap_times, device)
        )
        self._differentiate = value_and_grad(model, None, ParameterTuple(params))
        self._observer = StepObserver(device, params)
        self._losses: list[float] = []
        self._step_times: list[StepTime] = []
        self._step_rows: list[StepRow] = []
        self._idle_nbytes = 0
        device.reset_peak()

    def step(self, index: int, text: Text, *, drawn: bool) -> float:
        """Train one step on text (batch, context + 1); return its loss."""
        device = self._device
        device.synchronize()
        began_ns = device.now_ns
        with self._observer.step(index, sampling=drawn):
            loss, gradients = self._differentiate(*one_hot(text))
            self._observer.enter("update")
            update_seconds = self._timed_update(gradients)
            iteration_seconds = (device.now_ns - began_ns) / 1e9
        self._observer.drop_gradients()
        self._idle_nbytes = device.memory().allocated_bytes
        if index > 0:
            self._step_times.append(StepTime(update_seconds, iteration_seconds))
        self._losses.append(float(loss.asnumpy()))
        return self._losses[-1]

    def _timed_update(self, gradients: Gradients) -> float:
        """Take an optimizer step from an idle device to an idle device; return its time."""
        device = self._device
        device.synchronize()
        device.clear_timeline()
        began_ns = device.now_ns
        if self._kind is RunKind.NATIVE:
            self._update_natively(gradients)
        else:
            self._optimizer(gradients)
        device.synchronize()
        self._step_rows = device.step_rows(began_ns)
        return (device.now_ns - began_ns) / 1e9

    def _update_natively(self, gradients: Gradients) -> None:
        params = list(self._optimizer.parameters)
        with self._device.updating(
            "update",
            reads=gradients,
            writes=[*params, *self._states],
            launches=self._launches * len(params),
        ):
            self._optimizer(gradients)

    def result(self, began: float) -> RunResult:
        """Return what was measured."""
        device, optimizer = self._device, self._optimizer
        return RunResult(
            kind=self._kind,
            losses=self._losses,
            fingerprints=take_fingerprints(self._name, optimizer),
            state_nbytes=sum(state.nbytes for state in self._states),
            peak_nbytes=device.memory().peak_allocated_bytes,
            idle_nbytes=self._idle_nbytes,
            pinned_nbytes=device.memory().pinned_bytes,
            step_times=self._step_times,
            transfers=_transfers(optimizer),
            step_rows=self._step_rows,
            memory=self._observer.samples,
            wall_seconds=time.perf_counter() - began,
        )


def _transfers(optimizer: nn.Optimizer) -> Transfers | None:
    if not isinstance(optimizer, MindSporeSwapOptimizer):
        return None
    stats = optimizer.swap_stats()
    counts, times = stats.last_step, stats.last_times
    assert times is not None, "the run has taken steps"
    return Transfers(
        h2d_nbytes=counts.h2d_nbytes,
        d2h_nbytes=counts.d2h_nbytes,
        seconds=times.h2d_seconds + times.d2h_seconds,
        exposed_seconds=times.exposed_seconds,
        hidden_share=times.hidden_share,
    )
