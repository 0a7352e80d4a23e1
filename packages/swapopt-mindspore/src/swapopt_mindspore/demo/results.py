"""What one run measured, and what follows from comparing it with the native run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from swapopt_mindspore.demo.observe import MemorySample, StepRow


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
        iteration_seconds: of forward, backward and optimizer step, one after another.
    """

    seconds: float
    iteration_seconds: float


@dataclass(frozen=True, slots=True)
class Transfers:
    """The copies of one step, as the swapped optimizer's statistics tell.

    Attributes:
        h2d_nbytes, d2h_nbytes: bytes copied.
        seconds: while batches were being copied, both directions added up.
        exposed_seconds: while updates waited for that.
        hidden_share: share of ``seconds`` that nothing waited for.
    """

    h2d_nbytes: int
    d2h_nbytes: int
    seconds: float
    exposed_seconds: float
    hidden_share: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """Everything one run measured.

    Attributes:
        losses: of every step, in nats per byte.
        fingerprints: of every parameter, state and counter at the end; equal if and only if the
            bytes are.
        state_nbytes: bytes of the optimizer's moments, wherever they live.
        peak_nbytes: most device bytes in use at any moment from the first step on.
        idle_nbytes: device bytes in use after a step, when gradients are gone and nothing is
            under way.
        pinned_nbytes: host bytes pinned for the run.
        step_times: of the timed steps.
        transfers: what the swapped optimizer copied in one step; None natively.
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
    transfers: Transfers | None
    step_rows: Sequence[StepRow]
    memory: Sequence[MemorySample]
    wall_seconds: float

    @property
    def step_seconds(self) -> float:
        """Mean time of an optimizer step."""
        return fmean(step.seconds for step in self.step_times)

    @property
    def iteration_seconds(self) -> float:
        """Mean time of forward, backward and optimizer step, one after another."""
        return fmean(step.iteration_seconds for step in self.step_times)


@dataclass(frozen=True, slots=True)
class Ratios:
    """What swapping changes, as shares of native: 0.2 is a fifth more, -0.2 a fifth less."""

    step_seconds: float
    iteration_seconds: float
    peak_nbytes: float


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A run beside the native one; one column of the table, one row of report.json.

    Attributes:
        equal_to_native, ratios: None for the native run itself.
        differences: what is not equal to native: "losses", or names of parameters and states.
    """

    run: RunResult
    equal_to_native: bool | None
    ratios: Ratios | None
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
        ratios = Ratios(
            run.step_seconds / native.step_seconds - 1,
            run.iteration_seconds / native.iteration_seconds - 1,
            run.peak_nbytes / native.peak_nbytes - 1,
        )
        rows.append(ResultRow(run, not differences, ratios, differences))
    return rows


def find_differences(native: RunResult, run: RunResult) -> list[str]:
    """Return what differs in any bit: "losses", and the names of parameters and states."""
    # As hexadecimal text, so that NaN equals NaN and 0.0 does not equal -0.0.
    same_losses = [x.hex() for x in native.losses] == [x.hex() for x in run.losses]
    names = sorted(native.fingerprints.keys() | run.fingerprints.keys())
    differing = [n for n in names if native.fingerprints.get(n) != run.fingerprints.get(n)]
    return ([] if same_losses else ["losses"]) + differing
