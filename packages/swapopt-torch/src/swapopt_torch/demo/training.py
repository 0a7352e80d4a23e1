"""One training run: native, per-tensor or packed, measured as it goes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LinearLR

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer
from swapopt_torch.demo.accelerator import Accelerator
from swapopt_torch.demo.corpus import iterate_batches
from swapopt_torch.demo.model import ByteGPT
from swapopt_torch.demo.observe import MemorySampler, Phase, StepRow
from swapopt_torch.demo.results import RunKind, RunResult, StepTime, take_fingerprints
from swapopt_torch.demo.settings import OBSERVED_STEPS, DemoSettings, ModelSize

LEARNING_RATE = 1e-3
WARMUP_STEPS = 10
_MOMENTS = ("exp_avg", "exp_avg_sq")

ReportStep = Callable[[float], None]
"""Called after each step with its loss."""


def train(
    kind: RunKind,
    settings: DemoSettings,
    size: ModelSize,
    accelerator: Accelerator,
    corpus: torch.Tensor,
    report_step: ReportStep,
) -> RunResult:
    """Train a new model from the seed, and return what was measured."""
    began = time.perf_counter()
    gc.collect()  # what is left of earlier runs would be counted, and given back midway
    accelerator.empty_cache()
    accelerator.reset_peak()
    pinned_before = accelerator.pinned_nbytes()
    trainer = _Trainer(kind, settings, size, accelerator)
    for index, tokens in enumerate(iterate_batches(corpus, size, settings.seed, settings.steps)):
        observed = index - (settings.steps - OBSERVED_STEPS)
        if index == 0:
            loss = trainer.plain_step(tokens)
        elif observed < 0:
            loss = trainer.timed_step(tokens)
        elif observed < OBSERVED_STEPS - 1:
            loss = trainer.sampled_step(tokens, index)
        else:
            loss = trainer.recorded_step(tokens)
        report_step(loss)
    return trainer.result(pinned_before, began)


def make_optimizer(
    kind: RunKind, settings: DemoSettings, model: torch.nn.Module
) -> torch.optim.Optimizer:
    """Return the optimizer that the settings name, swapped as ``kind`` says."""
    parameters = model.parameters()
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, foreach=False)
    elif settings.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=False)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    if kind is RunKind.NATIVE:
        return optimizer
    packed = kind is RunKind.PACKED
    config = SwapOptimizerConfig(swap_times=settings.swap_times, packed_swap=packed)
    return swap_optimizer(optimizer, config)


def _ignore_phase(phase: Phase) -> None:
    """Take no notice of what the training loop does next."""


class _Trainer:
    """Model, optimizer and measurements of one run."""

    def __init__(
        self, kind: RunKind, settings: DemoSettings, size: ModelSize, accelerator: Accelerator
    ) -> None:
        torch.manual_seed(settings.seed)
        self._kind = kind
        self._accelerator = accelerator
        self._model = ByteGPT(size).to(accelerator.device)
        self._optimizer = make_optimizer(kind, settings, self._model)
        self._scheduler = LinearLR(self._optimizer, start_factor=0.1, total_iters=WARMUP_STEPS)
        self._losses: list[float] = []
        self._step_times: list[StepTime] = []
        self._step_rows: list[StepRow] = []
        self._sampler = MemorySampler(accelerator.active_nbytes, accelerator.clock_seconds)
        self._idle_nbytes = 0

    def plain_step(self, tokens: torch.Tensor) -> float:
        """Train one step."""
        return self._step(tokens, self._optimizer.step)

    def timed_step(self, tokens: torch.Tensor) -> float:
        """Train one step, and time it and its update between moments when the device is idle."""
        began = self._accelerator.clock_seconds()
        return self._step(tokens, lambda: self._timed_update(began))

    def recorded_step(self, tokens: torch.Tensor) -> float:
        """Train one step, and record what its update ran."""
        return self._step(tokens, self._recorded_update)

    def sampled_step(self, tokens: torch.Tensor, index: int) -> float:
        """Train one step, and sample device memory after every operator."""

        def update_and_wait() -> None:
            self._optimizer.step()
            self._accelerator.synchronize()

        sampler = self._sampler
        with sampler:
            return self._step(
                tokens, update_and_wait, lambda phase: sampler.enter_phase(phase, index)
            )

    def _step(
        self,
        tokens: torch.Tensor,
        update: Callable[[], None],
        enter_phase: Callable[[Phase], None] = _ignore_phase,
    ) -> float:
        enter_phase("forward")
        loss = self._model.loss(tokens.to(self._accelerator.device))
        enter_phase("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        self._losses.append(loss.item())
        del loss
        enter_phase("update")
        update()
        enter_phase("between steps")
        self._scheduler.step()
        self._optimizer.zero_grad()
        self._accelerator.synchronize()
        self._idle_nbytes = self._accelerator.active_nbytes()
        return self._losses[-1]

    def _timed_update(self, iteration_began: float) -> None:
        accelerator = self._accelerator
        accelerator.synchronize()
        began = accelerator.clock_seconds()
        self._optimizer.step()
        accelerator.synchronize_updates()
        updated = accelerator.clock_seconds()
        accelerator.synchronize()
        idle = accelerator.clock_seconds()
        self._step_times.append(StepTime(idle - began, idle - updated, idle - iteration_began))

    def _recorded_update(self) -> None:
        self._accelerator.synchronize()
        with self._accelerator.recorder() as recorder:
            self._optimizer.step()
        self._accelerator.synchronize()
        self._step_rows = recorder.rows()

    def result(self, pinned_before: int | None, began: float) -> RunResult:
        """Return what was measured; ``pinned_before`` is what was pinned before the run."""
        accelerator, optimizer = self._accelerator, self._optimizer
        h2d_nbytes = d2h_nbytes = swapped_nbytes = 0
        if isinstance(optimizer, TorchSwapOptimizer):
            stats = optimizer.swap_stats()
            h2d_nbytes, d2h_nbytes = stats.last_step.h2d_nbytes, stats.last_step.d2h_nbytes
            swapped_nbytes = stats.swapped_nbytes
        pinned = accelerator.pinned_nbytes()
        pinned_nbytes = (
            swapped_nbytes if pinned is None or pinned_before is None else pinned - pinned_before
        )
        peak_nbytes = accelerator.peak_active_nbytes()  # before the comparison allocates
        states = optimizer.state.values()
        return RunResult(
            kind=self._kind,
            losses=self._losses,
            fingerprints=take_fingerprints(self._model, optimizer),
            state_nbytes=sum(state[key].nbytes for state in states for key in _MOMENTS),
            peak_nbytes=peak_nbytes,
            idle_nbytes=self._idle_nbytes,
            pinned_nbytes=pinned_nbytes,
            step_times=self._step_times,
            h2d_nbytes=h2d_nbytes,
            d2h_nbytes=d2h_nbytes,
            step_rows=self._step_rows,
            memory=self._sampler.samples,
            wall_seconds=time.perf_counter() - began,
        )
