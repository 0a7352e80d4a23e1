"""What the specification reports of real hardware, to lay beside the demo's figures.

MindFormers' AdamW and a DeepSeek-V3 model on Ascend. Sizes, batches of states and the number of
steps are not told, so only the changes against native can be compared, and those roughly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swapopt_mindspore.demo.results import RunKind


@dataclass(frozen=True, slots=True)
class Reported:
    """One run of the specification's table.

    Attributes:
        step_milliseconds: of the optimizer step.
        iteration_milliseconds: of a whole iteration, forward and backward included.
        peak_gigabytes: device memory.
    """

    step_milliseconds: int
    iteration_milliseconds: int
    peak_gigabytes: float


REPORTED: Mapping[RunKind, Reported] = {
    RunKind.NATIVE: Reported(366, 3528, 20.26),
    RunKind.PER_TENSOR: Reported(441, 3584, 19.40),
    RunKind.PACKED: Reported(392, 3534, 19.40),
}
