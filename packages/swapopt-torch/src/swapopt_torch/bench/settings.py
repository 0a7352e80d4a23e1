"""What the user asks of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

RFC_TRAINING_SECONDS = (123.18 - 42.75) * 1e-3
"""What the RFC's native training step takes besides its optimizer."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Everything that decides what the benchmark does.

    Attributes:
        workload: a name that `find_workload` knows.
        optimizer: a key of `OPTIMIZERS`.
        swap_times: batches of states in one step, as in SwapOptimizerConfig.
        rounds: how often every contender is measured; None takes what suits the device.
        training_seconds: how long what stands in for forward and backward takes.
        device: "auto", "virtual", or a device as torch names it.
        profile: of the virtual accelerator; None means h200.
        dry: whether the virtual accelerator is one without memory and values; None: yes.
        output: folder for bench.json and bench.png.
        markdown: print the table as Markdown.
    """

    command: ClassVar[str] = "bench"

    workload: str = "uniform-512MiB"
    optimizer: str = "adamw-fused"
    swap_times: int = 16
    rounds: int | None = None
    training_seconds: float = RFC_TRAINING_SECONDS
    device: str = "auto"
    profile: str | None = None
    dry: bool | None = None
    output: Path = field(default_factory=lambda: Path("swapopt-bench"))
    markdown: bool = False
