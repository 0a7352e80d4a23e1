"""CI: a workflow per package, started by the paths that concern it, that calls tox and no more."""

import configparser
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github" / "workflows"
SHARED = "tox.yml"
WORKFLOWS = sorted(path.name for path in FOLDER.glob("*.yml") if path.name != SHARED)
PACKAGES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))


def load(name: str) -> dict[Any, Any]:
    found = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def events(name: str) -> dict[str, Any]:
    found: dict[str, Any] = load(name)[True]  # YAML 1.1 reads the key `on` as a truth value
    return found


def environments(name: str) -> set[str]:
    (job,) = load(name)["jobs"].values()
    return set(job["with"]["environments"].split(","))


def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return listed.stdout.splitlines()


def matches(pattern: str, path: str) -> bool:
    """Say whether GitHub's filter takes a path: ** crosses folders, * does not."""
    parts = [re.escape(part).replace(r"\*", "[^/]*") for part in pattern.split("**")]
    return re.fullmatch(".*".join(parts), path) is not None


def starts(name: str, path: str) -> bool:
    return any(matches(pattern, path) for pattern in events(name)["push"]["paths"])


def test_the_shared_steps_call_tox_and_nothing_else() -> None:
    (job,) = load(SHARED)["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["pipx run tox run -e ${{ inputs.environments }}"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_one_job_with_the_shared_steps(name: str) -> None:
    (job,) = load(name)["jobs"].values()
    assert job.keys() == {"uses", "with"}
    assert job["uses"] == f"./.github/workflows/{SHARED}"
    found = events(name)
    assert found.keys() == {"push", "pull_request"}
    assert found["push"]["paths"] == found["pull_request"]["paths"]
    assert f".github/workflows/{name}" in found["push"]["paths"]


def test_together_they_run_what_plain_tox_runs() -> None:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "tox.ini", encoding="utf-8")
    env_list = {name.strip() for name in settings["tox"]["env_list"].split(",")}
    assert set().union(*map(environments, WORKFLOWS)) == env_list


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_path_that_is_named_exists(name: str) -> None:
    files = tracked_files()
    for pattern in events(name)["push"]["paths"]:
        assert any(matches(pattern, path) for path in files), pattern


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_starts_its_own_workflow_and_those_that_depend_on_it(package: str) -> None:
    own = f"{package.removeprefix('swapopt-')}.yml"
    files = [path for path in tracked_files() if path.startswith(f"packages/{package}/")]
    assert len(files) > 10
    for path in files:
        started = {name for name in WORKFLOWS if starts(name, path)}
        assert {own, "integration.yml", "packages.yml"} <= started, path
        if path.startswith("packages/swapopt-common/src/"):
            assert {"torch.yml", "mindspore.yml"} <= started, path
        other = {"swapopt-torch": "mindspore.yml", "swapopt-mindspore": "torch.yml"}.get(package)
        assert other not in started, path
