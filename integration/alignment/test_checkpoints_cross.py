"""AdamW's checkpoints change backends in the plain format of docs/checkpoints.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from problem import CROSSING, HALF, LAYERS, Arrays, load_arrays, make_problem
from reference import formula_losses, rounding_bound

WAYS = ("native", "per_tensor", "packed")
CROSSINGS = [("torch", "mindspore"), ("mindspore", "torch")]


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("backend", ["torch", "mindspore"])
def test_what_is_written(recordings: dict[str, Path], backend: str) -> None:
    plain = {way: load_arrays(recordings[backend] / f"plain-{way}.npz") for way in WAYS}
    parameters = {f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias")}
    moments = {f"{key}.{name}" for key in ("exp_avg", "exp_avg_sq") for name in parameters}
    written = plain["native"]
    assert set(written) == parameters | moments | {"step"}
    assert written["step"] == HALF
    assert written["step"].dtype == np.int64
    assert all(array.dtype == np.float32 for name, array in written.items() if name != "step")
    assert all(np.any(written[name]) for name in moments)
    for way in WAYS:
        assert_same(plain[way], written)


@pytest.mark.parametrize(("source", "target"), CROSSINGS)
@pytest.mark.parametrize("way", WAYS)
def test_read_by_the_other_and_written_back(
    recordings: dict[str, Path], source: str, target: str, way: str
) -> None:
    returned = load_arrays(recordings[target] / f"returned-{way}.npz")
    assert_same(returned, load_arrays(recordings[source] / "plain-packed.npz"))


@pytest.mark.parametrize(("source", "target"), CROSSINGS)
def test_training_goes_on_aligned(recordings: dict[str, Path], source: str, target: str) -> None:
    begun = load_arrays(recordings[source] / "curves.npz")[f"{CROSSING}/native/losses"][HALF:]
    resumed = load_arrays(recordings[target] / "resumed.npz")["native/losses"]
    problem = make_problem()
    # The bounds allow for errors since the first step; these have grown since the change only.
    formulas = [formula_losses(backend, CROSSING, problem)[HALF:] for backend in (source, target)]
    roundings = [rounding_bound(backend, CROSSING, problem)[HALF:] for backend in (source, target)]
    bound = np.abs(np.subtract(*formulas)) + np.add(*roundings)
    assert resumed.shape == begun.shape
    assert (np.abs(resumed.astype(float) - begun) <= bound).all()


@pytest.mark.parametrize("backend", ["torch", "mindspore"])
def test_swapped_goes_on_as_native_does(recordings: dict[str, Path], backend: str) -> None:
    found = load_arrays(recordings[backend] / "resumed.npz")
    native = {name: array for name, array in found.items() if name.startswith("native/")}
    assert len(native) >= 1 + 6 * 3
    for way in WAYS:
        for name, array in native.items():
            other = found[name.replace("native/", f"{way}/")]
            assert other.tobytes() == array.tobytes(), f"{name}, {way}"
