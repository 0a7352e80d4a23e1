"""What the user asks of the demo: the model's dimensions and the run's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar

OBSERVED_STEPS = 3
"""The last steps of a run, which are looked at closely and not timed."""
MIN_STEPS = OBSERVED_STEPS + 2
"""One step to warm up, one to time, and the observed ones."""

OPTIMIZERS: Mapping[str, str] = {
    "adamw-fused": "torch.optim.AdamW(fused=True)",
    "adamw": "torch.optim.AdamW(foreach=False)",
    "adam": "torch.optim.Adam(foreach=False)",
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
    "tiny": ModelSize(layers=2, width=64, heads=2, context=64, batch=4),
    "small": ModelSize(layers=4, width=512, heads=8, context=32, batch=12),
    "medium": ModelSize(layers=12, width=768, heads=12, context=256, batch=8),
}


def parse_model_size(text: str) -> ModelSize:
    """Return a named size, or ``small`` with some dimensions changed (``layers=6,width=256``).

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
        model_size: None means small on the virtual accelerator, medium on a real one.
        swap_times: batches of states in one step, as in SwapOptimizerConfig.
        profile: of the virtual accelerator; None means h200.
        device: "auto", "virtual", or a device as torch names it.
        optimizer: a key of `OPTIMIZERS`.
        output: the report folder.
        seed: of the parameters and of the order of the data.
    """

    command: ClassVar[str] = "demo"

    steps: int = 50
    model_size: ModelSize | None = None
    swap_times: int = 16
    profile: str | None = None
    device: str = "auto"
    optimizer: str = "adamw-fused"
    output: Path = field(default_factory=lambda: Path("swapopt-report"))
    seed: int = 0
