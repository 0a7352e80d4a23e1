"""Each package's version, its changelog and what the backends ask of swapopt-common agree."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.version import Version

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
NAMES = sorted(path.parent.name for path in PACKAGES.glob("*/pyproject.toml"))
BACKENDS = [name for name in NAMES if name != "swapopt-common"]


def settings_of(name: str) -> dict[str, Any]:
    return tomllib.loads((PACKAGES / name / "pyproject.toml").read_text(encoding="utf-8"))


def version_of(name: str) -> Version:
    """Return the version that hatch would read, from the one place where it stands."""
    place = settings_of(name)["tool"]["hatch"]["version"]["path"]
    tree = ast.parse((PACKAGES / name / place).read_text(encoding="utf-8"))
    (found,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )
    return Version(found)


def requirements_of(name: str) -> dict[str, Requirement]:
    found = map(Requirement, settings_of(name)["project"]["dependencies"])
    return {requirement.name: requirement for requirement in found}


def test_all_packages_are_seen() -> None:
    assert NAMES == ["swapopt-common", "swapopt-mindspore", "swapopt-torch"]


@pytest.mark.parametrize("name", NAMES)
def test_the_newest_entry_of_the_changelog_is_the_version(name: str) -> None:
    text = (PACKAGES / name / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = [Version(found) for found in re.findall(r"^## (\S+)$", text, re.M)]
    assert headings[0] == version_of(name)
    assert headings == sorted(headings, reverse=True)
    entry = text.partition(f"\n## {headings[0]}\n")[2].partition("\n## ")[0]
    assert entry.strip(), "it says what is new"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_takes_this_common_and_no_breaking_one(name: str) -> None:
    common, accepted = version_of("swapopt-common"), requirements_of(name)["swapopt-common"]
    assert accepted.specifier.contains(common)
    # Before 1.0 a minor version may break an interface, as the changelogs say.
    breaking = f"0.{common.minor + 1}.0" if common.major == 0 else f"{common.major + 1}.0.0"
    assert not accepted.specifier.contains(breaking)


def test_backends_ask_for_the_same_common() -> None:
    assert len({str(requirements_of(name)["swapopt-common"].specifier) for name in BACKENDS}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_package_needs_no_other_backend(name: str) -> None:
    assert {"swapopt-common": set()}.get(name, {"swapopt-common"}) == {
        other for other in requirements_of(name) if other.startswith("swapopt")
    }
