"""The same training by both backends: swapped equals native, and the backends follow one curve.

Within a backend, equal means byte for byte. Across backends the losses may differ by what their
formulas differ (computed in float64), and by each backend's rounding; see reference.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from problem import (
    MINDSPORE_OPTIMIZERS,
    OPTIMIZERS,
    STEPS,
    TORCH_OPTIMIZERS,
    Arrays,
    Problem,
    load_arrays,
    make_problem,
)
from reference import formula_losses, rounding_bound

RUNS = [("torch", name) for name in TORCH_OPTIMIZERS]
RUNS += [("mindspore", name) for name in MINDSPORE_OPTIMIZERS]
IN_BOTH = [name for name in TORCH_OPTIMIZERS if name in MINDSPORE_OPTIMIZERS]
NAMES = {
    ("torch", "adam"): "torch Adam",
    ("torch", "adam_large_eps"): "torch Adam, eps 1e-3",
    ("torch", "adamw"): "torch AdamW",
    ("mindspore", "adam"): "nn.Adam",
    ("mindspore", "adam_large_eps"): "nn.Adam, eps 1e-3",
    ("mindspore", "adamw"): "MindFormers AdamW",
    ("mindspore", "adam_weight_decay"): "nn.AdamWeightDecay",
}


@pytest.fixture(scope="session")
def problem() -> Problem:
    return make_problem()


@pytest.fixture(scope="session")
def curves(recordings: dict[str, Path]) -> dict[str, Arrays]:
    return {backend: load_arrays(folder / "curves.npz") for backend, folder in recordings.items()}


@pytest.mark.parametrize(("backend", "optimizer"), RUNS)
def test_swapped_equals_native_byte_for_byte(
    curves: dict[str, Arrays], backend: str, optimizer: str
) -> None:
    found = curves[backend]
    ways = sorted({name.split("/")[1] for name in found if name.startswith(f"{optimizer}/")})
    packs = backend == "torch" or optimizer == "adamw"
    assert ways == (["native", "packed", "per_tensor"] if packs else ["native", "per_tensor"])
    native = {name for name in found if name.startswith(f"{optimizer}/native/")}
    # Losses, six parameters, two moments of each.
    assert len(native) >= 1 + 6 * 3
    for name in native:
        for way in ways:
            other = found[name.replace("/native/", f"/{way}/")]
            assert other.dtype == found[name].dtype
            assert other.tobytes() == found[name].tobytes(), f"{name}, {way}"


@pytest.mark.parametrize(("backend", "optimizer"), RUNS)
def test_a_backend_follows_its_formula(
    curves: dict[str, Arrays], problem: Problem, backend: str, optimizer: str
) -> None:
    losses = curves[backend][f"{optimizer}/native/losses"]
    exact = formula_losses(backend, optimizer, problem)
    assert losses.shape == (STEPS,)
    assert losses[-1] < 0.6 * losses[0], "it has learnt something"
    assert (np.abs(losses - exact) <= rounding_bound(backend, optimizer, problem)).all()


@pytest.mark.parametrize("optimizer", IN_BOTH)
def test_the_backends_align(curves: dict[str, Arrays], problem: Problem, optimizer: str) -> None:
    torch, mindspore = (
        curves[backend][f"{optimizer}/native/losses"].astype(float)
        for backend in ("torch", "mindspore")
    )
    formulas = [formula_losses(backend, optimizer, problem) for backend in ("torch", "mindspore")]
    roundings = [rounding_bound(backend, optimizer, problem) for backend in ("torch", "mindspore")]
    bound = np.abs(np.subtract(*formulas)) + np.add(*roundings)
    assert (np.abs(torch - mindspore) <= bound).all()
    if optimizer != "adam_large_eps":
        assert (bound < 1e-4 * torch).all(), "a bound that would let other optimizers pass"


def test_the_bound_tells_where_eps_enters(curves: dict[str, Arrays], problem: Problem) -> None:
    """With an eps that can be seen, neither backend is within rounding of the other's formula."""
    for backend, other in (("torch", "mindspore"), ("mindspore", "torch")):
        losses = curves[backend]["adam_large_eps/native/losses"]
        foreign = formula_losses(other, "adam_large_eps", problem)
        bound = rounding_bound(other, "adam_large_eps", problem)
        assert np.abs(losses - foreign).max() > 1000 * bound.max()


def test_missing_bias_correction_is_seen(curves: dict[str, Arrays], problem: Problem) -> None:
    """nn.AdamWeightDecay corrects no bias, so AdamW's formula is not its own."""
    losses = curves["mindspore"]["adam_weight_decay/native/losses"]
    bound = rounding_bound("mindspore", "adamw", problem)
    adamw = formula_losses("mindspore", "adamw", problem)
    assert np.abs(losses - adamw).max() > 1000 * bound.max()


def test_the_losses_are_drawn(
    curves: dict[str, Arrays], problem: Problem, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.config.getoption("--plot") or tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(2, len(OPTIMIZERS) // 2).flat
    for axes, optimizer in zip(panels, OPTIMIZERS, strict=True):
        for backend, found in curves.items():
            for way, width in (("native", 5.0), ("per_tensor", 2.5), ("packed", 1.0)):
                losses = found.get(f"{optimizer}/{way}/losses")
                if losses is not None:
                    label = f"{NAMES[backend, optimizer]}, {way.replace('_', ' ')}"
                    dashes = "-" if backend == "torch" else (0, (2, 2))
                    axes.plot(losses, label=label, linewidth=width, linestyle=dashes, alpha=0.7)
        axes.plot(formula_losses("mindspore", optimizer, problem), "k.", label="formula")
        axes.set(title=optimizer.replace("_", " "), xlabel="step", ylabel="loss")
        axes.legend(fontsize=7)
    drawn = sum(len(axes.lines) for axes in figure.axes)
    assert drawn == 3 * len(TORCH_OPTIMIZERS) + 2 * len(MINDSPORE_OPTIMIZERS) + 1 + len(OPTIMIZERS)
    figure.savefig(folder / "losses.png", dpi=80)
    assert (folder / "losses.png").stat().st_size > 10_000
