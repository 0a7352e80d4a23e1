"""What the user asks of the demo: the model's dimensions and the run's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

DRAWN_STEPS = 2
"""The last steps of a run, whose memory is drawn."""
MIN_STEPS = DRAWN_STEPS + 1
"""One step to warm up, which is not timed, and the drawn ones."""

MINDFORMERS_ADAMW = "mindformers-adamw"

OPTIMIZERS: Mapping[str, str] = {
    MINDFORMERS_ADAMW: "MindFormers AdamW",
    "adam": "mindspore.nn.Adam",
    "adam-weight-decay": "mindspore.nn.AdamWeightDecay",
}


class DemoError(Exception):
    """The demo cannot run as asked; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The dimensions of the GPT and of one batch of text.

    Attributes:
        layers, width, heads: of the transformer.
        context: bytes of text in one sequence.
        batch: sequences in one training step.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch: int

    def __post_init__(self) -> None:
        for name in _DIMENSIONS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got width={self.width}, heads={self.heads}"
            )

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in _DIMENSIONS)


_DIMENSIONS = tuple(item.name for item in fields(ModelSize))

MODEL_SIZES: Mapping[str, ModelSize] = {
    "tiny": ModelSize(layers=1, width=64, heads=2, context=16, batch=2),
    "small": ModelSize(layers=4, width=256, heads=4, context=32, batch=4),
    "medium": ModelSize(layers=6, width=512, heads=8, context=64, batch=8),
}


def parse_model_size(text: str) -> ModelSize:
    """Return a named size, or ``small`` with some dimensions changed (``layers=6,width=512``).

    Raises:
        ValueError: what is wrong with ``text`` and what would be right.
    """
    if text in MODEL_SIZES:
        return MODEL_SIZES[text]
    changes: dict[str, int] = {}
    for item in text.split(","):
        name, equals, value = item.partition("=")
        if not equals or name not in _DIMENSIONS or not value.isdecimal():
            raise ValueError(
                f"{item!r} is neither a size ({', '.join(MODEL_SIZES)}) nor one of "
                f"{', '.join(f'{name}=N' for name in _DIMENSIONS)}"
            )
        changes[name] = int(value)
    return replace(MODEL_SIZES["small"], **changes)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Everything that decides what the demo does.

    Attributes:
        steps: training steps of each run, at least `MIN_STEPS`.
        model_size: of the model and of its batches of text.
        swap_times: batches of states in one step, as in SwapOptimizerConfig.
        profile: of the emulated device.
        optimizer: a key of `OPTIMIZERS`; None takes MindFormers' where it is installed.
        output: the report folder.
        seed: of the parameters and of the order of the data.
    """

    steps: int = 20
    model_size: ModelSize = MODEL_SIZES["small"]
    swap_times: int = 16
    profile: str = "ascend-910b"
    optimizer: str | None = None
    output: Path = field(default_factory=lambda: Path("swapopt-report-mindspore"))
    seed: int = 0
