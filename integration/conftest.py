"""Both backends, each in a process and an environment of its own, and what they recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALIGNMENT = ROOT / "integration" / "alignment"
INTERPRETERS = {"torch": "SWAPOPT_TORCH_PYTHON", "mindspore": "SWAPOPT_MINDSPORE_PYTHON"}
"""The variables in which tox says where an interpreter is that has the framework."""
TIMEOUT_SECONDS = 600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plot", type=Path, help="the folder to draw the losses into")


@dataclass(frozen=True)
class Backend:
    """A framework and the interpreter that has it; our packages are those of this checkout."""

    framework: str
    python: Path

    def run(self, *arguments: object) -> str:
        """Run Python with these arguments; return what it printed, or fail with it."""
        packages = ("swapopt-common", f"swapopt-{self.framework}")
        sources = [str(ROOT / "packages" / package / "src") for package in packages]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sources),
            "OMP_NUM_THREADS": "1",
            # Where the virtual accelerator's build looks for ninja.
            "PATH": os.pathsep.join([str(self.python.parent), os.environ["PATH"]]),
        }
        found = subprocess.run(
            [str(self.python), *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
        if found.returncode:
            called = " ".join(map(str, arguments))
            pytest.fail(
                f"{called} with {self.framework}:\n{found.stdout}{found.stderr}", pytrace=False
            )
        return found.stdout


@pytest.fixture(scope="session")
def backends() -> tuple[Backend, Backend]:
    """Return torch and MindSpore."""
    missing = [name for name in INTERPRETERS.values() if name not in os.environ]
    if missing:
        pytest.skip(f"set {' and '.join(missing)}, or let tox run -e integration do it")
    torch, mindspore = (
        Backend(framework, Path(os.environ[name])) for framework, name in INTERPRETERS.items()
    )
    return torch, mindspore


@pytest.fixture(scope="session")
def recordings(
    backends: tuple[Backend, Backend], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return the folder of each backend: all it trained, and what it made of the other's file."""
    sys.path.insert(0, str(ALIGNMENT))
    from problem import make_problem

    top = tmp_path_factory.mktemp("alignment")
    make_problem().save(top / "problem.npz")
    folders = {backend.framework: top / backend.framework for backend in backends}
    for folder in folders.values():
        folder.mkdir()

    def run(command: str) -> None:
        def one(backend: Backend, other: Backend) -> None:
            script = ALIGNMENT / f"train_{backend.framework}.py"
            given = [folders[other.framework] / "plain-packed.npz"] if command == "resume" else []
            folder = folders[backend.framework]
            backend.run(script, command, top / "problem.npz", folder, *given)

        with ThreadPoolExecutor() as pool:
            list(pool.map(one, backends, reversed(backends)))

    run("train")
    run("resume")
    return folders
