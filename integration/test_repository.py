"""The repository's frame: what README, CI, tox and the packages say about one another agrees."""

import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
README_ZH = (ROOT / "README.zh.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def shell_blocks(text: str) -> list[str]:
    return [block.strip() for block in re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)]


def tox_environments() -> dict[str, str]:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "tox.ini", encoding="utf-8")
    names = (section.partition(":") for section in settings.sections())
    found = {name: f"{kind}:{name}" for kind, _, name in names if kind == "testenv" and name}
    return {name: settings[section].get("description", "") for name, section in found.items()}


def test_every_package_is_seen() -> None:
    names = {package.name for package in PACKAGES}
    assert {"swapopt-common", "swapopt-torch", "swapopt-mindspore"} <= names


def test_readme_opens_with_the_demo_and_the_tests() -> None:
    demo, tests = shell_blocks(README)[:2]
    set_up = "python3 -m venv .venv && .venv/bin/pip install -q tox && .venv/bin/tox run"
    assert demo == f"{set_up} -e demo"
    assert tests == set_up


def test_the_chinese_readme_has_the_same_commands() -> None:
    assert shell_blocks(README_ZH)[:2] == shell_blocks(README)[:2]


def test_ci_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[-1] == shell_blocks(README)[1]
    assert "set -euo pipefail" in lines
    assert script.stat().st_mode & 0o111


def test_plain_tox_runs_every_environment_but_those_that_only_show() -> None:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "tox.ini", encoding="utf-8")
    env_list = {name.strip() for name in settings["tox"]["env_list"].split(",")}
    assert env_list == set(tox_environments()) - {"demo", "demo-mindspore", "pictures"}
    assert all(tox_environments().values())


@pytest.mark.parametrize(
    "text", [README, README_ZH, CONTRIBUTING], ids=["README", "README.zh", "CONTRIBUTING"]
)
def test_named_environments_and_files_exist(text: str) -> None:
    for name in re.findall(r"tox run -e ([a-z,-]+)", text):
        assert set(name.split(",")) <= set(tox_environments())
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_each_package_carries_licence_readme_and_changelog(package: Path) -> None:
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert package.name in (package / "README.md").read_text(encoding="utf-8").splitlines()[0]
    module = package / "src" / package.name.replace("-", "_")
    assert (module / "py.typed").is_file()
    init = (module / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', init, re.M)
    assert f"## {version}" in (package / "CHANGELOG.md").read_text(encoding="utf-8")


def test_readme_lists_every_configuration_parameter() -> None:
    config = ROOT / "packages/swapopt-common/src/swapopt_common/config.py"
    parameters = re.findall(r"^    (\w+): [^=\n]+ = (\S+)$", config.read_text("utf-8"), re.M)
    assert len(parameters) == 5
    chinese = (ROOT / "docs" / "zh" / "getting-started.md").read_text(encoding="utf-8")
    for name, default in parameters:
        assert f"| `{name}` | `{default}` |" in README
        assert f"| `{name}` | `{default}` |" in chinese


def test_design_numbers_its_invariants() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    invariants = text.partition("## Invariants")[2].partition("\n## ")[0]
    assert [int(n) for n in re.findall(r"^(\d+)\. ", invariants, re.M)][:6] == [1, 2, 3, 4, 5, 6]
