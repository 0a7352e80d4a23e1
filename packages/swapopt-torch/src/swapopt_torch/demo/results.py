"""What one run measured, and what follows from comparing it with the native run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

import torch

from swapopt_torch.demo.observe import MemorySample, StepRow
from swapopt_torch.demo.settings import DemoError


class RunKind(str, Enum):
    """How a run treats its optimizer states."""

    NATIVE = "native"
    PER_TENSOR = "per-tensor"
    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class StepTime:
    """One training iteration, and the optimizer step in it, from an idle device to an idle one.

    Attributes:
        seconds: of the optimizer step, the last copies to the host included.
        tail_seconds: the part of it after the last update, when only copies were left. Training
            does not wait for them: they run beside the next forward.
        iteration_seconds: of forward, backward and optimizer step, one after another.
    """

    seconds: float
    tail_seconds: float
    iteration_seconds: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """Everything one run measured.

    Attributes:
        losses: of every step, in nats per byte.
        fingerprints: of every parameter and state at the end; equal if and only if the bytes are.
        state_nbytes: bytes of the optimizer's moments, wherever they live.
        peak_nbytes: most device bytes in use at any moment, the first step included.
        idle_nbytes: device bytes in use after a step and zero_grad, when nothing is under way.
        pinned_nbytes: host bytes pinned for the run.
        step_times: of the timed steps.
        h2d_nbytes, d2h_nbytes: copied by the swapped optimizer in one step.
        step_rows: what ran in one optimizer step.
        memory: device memory through several steps.
        wall_seconds: how long the run took.
    """

    kind: RunKind
    losses: Sequence[float]
    fingerprints: Mapping[str, str]
    state_nbytes: int
    peak_nbytes: int
    idle_nbytes: int
    pinned_nbytes: int
    step_times: Sequence[StepTime]
    h2d_nbytes: int
    d2h_nbytes: int
    step_rows: Sequence[StepRow]
    memory: Sequence[MemorySample]
    wall_seconds: float

    @property
    def step_seconds(self) -> float:
        """Mean time of an optimizer step, its tail included."""
        return fmean(step.seconds for step in self.step_times)

    @property
    def tail_seconds(self) -> float:
        """Mean time of the tail of an optimizer step."""
        return fmean(step.tail_seconds for step in self.step_times)

    @property
    def iteration_seconds(self) -> float:
        """Mean time of forward, backward and optimizer step, one after another."""
        return fmean(step.iteration_seconds for step in self.step_times)

    @property
    def transfer_seconds(self) -> float:
        """Time of one step's copies by themselves, both directions added up."""
        return sum(row.seconds for row in self.step_rows if row.lane != "compute")


def hidden_share(
    swapped_seconds: float, native_seconds: float, transfer_seconds: float
) -> float | None:
    """Return the share of the transfer time that a step does not take longer for.

    Args:
        swapped_seconds: time of a swapped optimizer step.
        native_seconds: time of the native one.
        transfer_seconds: time of the step's copies by themselves.

    Returns:
        1 if the step takes no longer than the native one, 0 if it takes longer by the whole
        transfer time, less than 0 if by more; None if nothing was transferred.
    """
    if transfer_seconds == 0:
        return None
    return 1 - max(0.0, swapped_seconds - native_seconds) / transfer_seconds


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A run beside the native one; one column of the table, one row of report.json.

    Attributes:
        equal_to_native: None for the native run itself.
        hidden_share: see `hidden_share`; None for the native run.
        differences: what is not equal to native: "losses", or names of parameters and states.
    """

    run: RunResult
    equal_to_native: bool | None
    hidden_share: float | None
    differences: Sequence[str]


def compare(results: Sequence[RunResult]) -> list[ResultRow]:
    """Put every run beside the native one, which is among them."""
    native = next(run for run in results if run.kind is RunKind.NATIVE)
    rows = []
    for run in results:
        if run is native:
            rows.append(ResultRow(run, None, None, ()))
            continue
        differences = find_differences(native, run)
        share = hidden_share(run.step_seconds, native.step_seconds, run.transfer_seconds)
        rows.append(ResultRow(run, not differences, share, differences))
    return rows


def find_differences(native: RunResult, run: RunResult) -> list[str]:
    """Return what differs in any bit: "losses", and the names of parameters and states."""
    # As hexadecimal text, so that NaN equals NaN and 0.0 does not equal -0.0.
    same_losses = [x.hex() for x in native.losses] == [x.hex() for x in run.losses]
    names = sorted(native.fingerprints.keys() | run.fingerprints.keys())
    differing = [n for n in names if native.fingerprints.get(n) != run.fingerprints.get(n)]
    return ([] if same_losses else ["losses"]) + differing


def take_fingerprints(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return a digest of the bytes, dtype and shape of every parameter and optimizer state."""
    prints: dict[str, str] = {}
    states = optimizer.state
    for name, parameter in model.named_parameters():
        prints[name] = _fingerprint(parameter.detach())
        for key, value in states[parameter].items():
            prints[f"{name}/{key}"] = _fingerprint(value)
    if len(prints) == len(list(model.parameters())):
        raise DemoError("The optimizer has no states to compare after the last step.")
    return prints


def _fingerprint(tensor: torch.Tensor) -> str:
    on_host = tensor.cpu().contiguous()
    digest = hashlib.blake2b(f"{on_host.dtype} {tuple(on_host.shape)}".encode(), digest_size=16)
    digest.update(on_host.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
