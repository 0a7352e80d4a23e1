"""What both backends train: one small regression, as plain arrays that belong to neither.

The starting weights, the rows of every step, the learning rates and the hyperparameters. NumPy
only: both backends' environments read it, each with its own version of NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]
Arrays = dict[str, Array]

WIDTHS = (24, 64, 48, 16)
"""All parameters are of whole 64 bytes, so that no copy has a gap in it."""
LAYERS = ("first", "second", "third")
ROWS = 16
STEPS = 24
HALF = STEPS // 2
"""After so many steps a checkpoint changes backends."""
SWAP_TIMES = 3
"""Six parameters in three batches."""


class Hyperparameters(NamedTuple):
    """Of one optimizer; the learning rate is the problem's, step by step."""

    eps: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)


OPTIMIZERS = {
    "adam": Hyperparameters(eps=1e-8),
    "adam_large_eps": Hyperparameters(eps=1e-3),
    "adamw": Hyperparameters(eps=1e-8, weight_decay=0.1),
    "adam_weight_decay": Hyperparameters(eps=1e-6, weight_decay=0.1),
}
TORCH_OPTIMIZERS = ("adam", "adam_large_eps", "adamw")
MINDSPORE_OPTIMIZERS = tuple(OPTIMIZERS)
CROSSING = "adamw"
"""The optimizer whose checkpoints change backends."""


class Problem(NamedTuple):
    """All that a run needs to begin.

    Attributes:
        weights: by name, float32; names are those of the parameters in both backends.
        rows: (steps, rows, in).
        targets: (steps, rows, out).
        rates: (steps,), exact in float32, so that every backend takes the same ones.
    """

    weights: Arrays
    rows: Array
    targets: Array
    rates: Array

    def save(self, path: Path) -> None:
        """Write one .npz."""
        named = {f"weights/{name}": array for name, array in self.weights.items()}
        save_arrays(path, {"rows": self.rows, "targets": self.targets, "rates": self.rates} | named)


def load_problem(path: Path) -> Problem:
    """Read what `Problem.save` wrote."""
    arrays = load_arrays(path)
    weights = {
        name.removeprefix("weights/"): array
        for name, array in arrays.items()
        if name.startswith("weights/")
    }
    return Problem(weights, arrays["rows"], arrays["targets"], arrays["rates"])


def make_problem(seed: int = 7) -> Problem:
    """Return weights, rows that a fixed teacher answers, and a warm-up with a cosine after it."""
    random = np.random.RandomState(seed)  # its stream is the same in every version of NumPy
    weights: Arrays = {}
    for layer, inner, outer in zip(LAYERS, WIDTHS, WIDTHS[1:], strict=False):
        weights[f"{layer}.weight"] = random.normal(0, inner**-0.5, (outer, inner))
        weights[f"{layer}.bias"] = random.normal(0, 0.1, outer)
    rows = random.normal(size=(STEPS, ROWS, WIDTHS[0]))
    teacher = random.normal(size=(WIDTHS[0], WIDTHS[-1])) * WIDTHS[0] ** -0.5
    targets = np.sin(rows @ teacher) + 0.1 * random.normal(size=(STEPS, ROWS, WIDTHS[-1]))
    step = np.arange(STEPS)
    rates = 4e-3 * np.minimum(1, (step + 1) / 5) * (0.1 + 0.45 * (1 + np.cos(np.pi * step / STEPS)))
    return Problem(
        {name: array.astype(np.float32) for name, array in weights.items()},
        *(array.astype(np.float32) for array in (rows, targets, rates)),
    )


def save_arrays(path: Path, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Write arrays under their names."""
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type] # its other arguments are no arrays


def load_arrays(path: Path) -> Arrays:
    """Read all arrays of a .npz."""
    with np.load(path) as arrays:
        return dict(arrays)
