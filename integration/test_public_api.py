"""Both backends offer the same names, and the reference of the site lists every one of them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "api"
OWN_CLASS = {
    "swapopt_torch": "TorchSwapOptimizer",
    "swapopt_mindspore": "MindSporeSwapOptimizer",
}


def public_names(package: str) -> set[str]:
    """Return what __init__.py lists, without importing any framework."""
    (source,) = ROOT.glob(f"packages/*/src/{package}/__init__.py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return set(names)


def documented() -> set[str]:
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", text, re.M))


def test_backends_offer_the_same_names() -> None:
    torch, mindspore = (public_names(package) - {own} for package, own in OWN_CLASS.items())
    assert torch == mindspore
    assert {"swap_optimizer", "is_swap_optimizer", "SwapOptimizerConfig"} <= torch
    assert all(own in public_names(package) for package, own in OWN_CLASS.items())


def test_what_common_defines_is_handed_on_under_its_own_name() -> None:
    shared = public_names("swapopt_common") & public_names("swapopt_torch")
    assert shared == {
        *("SwapOptimizerConfig", "SwapConfigError", "HostMemoryError", "SwapStepError"),
    }


@pytest.mark.parametrize("package", ["swapopt_common", *OWN_CLASS])
def test_the_reference_lists_every_public_name(package: str) -> None:
    handed_on = public_names("swapopt_common") if package != "swapopt_common" else {"STATE_KEYS"}
    expected = {f"{package}.{name}" for name in public_names(package) - handed_on}
    assert expected
    assert expected <= documented()


def test_the_readme_of_common_lists_every_public_name() -> None:
    text = (ROOT / "packages" / "swapopt-common" / "README.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`[^|]+`) \|", text, re.M)
    listed = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert sorted(listed) == sorted(public_names("swapopt_common"))
