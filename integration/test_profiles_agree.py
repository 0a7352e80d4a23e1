"""The figures of the modelled accelerators are written twice, once per backend, and are equal.

Both modules are data on the standard library: they are read here without their packages, so that
no framework is needed.
"""

import importlib.util
import sys
from pathlib import Path

PACKAGES = Path(__file__).parents[1] / "packages"
# MindSpore's adapters launch parameter by parameter: there are no operators on lists. Its emulated
# device is one process.
ONLY_TORCH = {"list_launch", "interconnect_bytes_per_second", "interconnect_latency_seconds"}


def figures_in(source: Path) -> dict[str, dict[str, object]]:
    spec = importlib.util.spec_from_file_location(f"profiles_of_{source.parts[-3]}", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return {
        name: {key: value for key, value in vars(profile).items() if key != "sources"}
        for name, profile in module.PROFILES.items()
    }


def test_both_backends_model_the_same_accelerators() -> None:
    torch = figures_in(PACKAGES / "swapopt-torch/src/swapopt_torch/virtual/profiles.py")
    mindspore = figures_in(
        PACKAGES / "swapopt-mindspore/src/swapopt_mindspore/emulated/profiles.py"
    )
    assert set(torch) == set(mindspore) != set()
    for name, figures in torch.items():
        assert {key: value for key, value in figures.items() if key not in ONLY_TORCH} == (
            mindspore[name]
        )
        assert ONLY_TORCH.isdisjoint(mindspore[name])
