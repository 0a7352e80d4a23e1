"""Build every package, look inside, install each backend alone and import it.

python tools/check_packages.py WORK_FOLDER --torch torch==2.13.0 --mindspore mindspore==2.10.0

Needs the packages `build` and `hatchling`. Prints a line per thing shown; ends with exit code 1 at
the first that is not so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]

# Runs in the clean environment, outside the repository.
PROBE = """
import importlib, importlib.metadata, importlib.util, sys
framework = sys.argv[1]
modules, absent = (names.split(",") for names in sys.argv[2:])
for name in modules:
    importlib.import_module(name)
installed = [name for name in absent if importlib.util.find_spec(name)]
assert not installed, f"installed without being asked for: {installed}"
origin = importlib.util.find_spec(modules[0]).origin
assert origin.startswith(sys.prefix), f"imported from {origin}, not from the wheel"
version = importlib.metadata.version(framework)
print(f"ok: import {', '.join(modules)}, {framework} {version}; absent: {', '.join(absent)}")
"""


class Backend(NamedTuple):
    """What is to be importable, and what absent, where one backend is installed by itself."""

    package: str
    framework: str
    modules: tuple[str, ...]
    absent: tuple[str, ...]


BACKENDS = (
    Backend(
        "swapopt-torch",
        "torch",
        ("swapopt_torch", "swapopt_torch.virtual"),
        ("mindspore", "swapopt_mindspore", "rich", "matplotlib", "hyper_parallel"),
    ),
    Backend(
        "swapopt-mindspore",
        "mindspore",
        ("swapopt_mindspore", "swapopt_mindspore.emulated"),
        ("torch", "swapopt_torch", "rich", "matplotlib", "hyper_parallel", "mindformers"),
    ),
)


class Package(NamedTuple):
    """One distribution of this repository and what its metadata and contents must say."""

    name: str
    requires: frozenset[str]
    needed_suffixes: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The package's folder in the repository."""
        return REPOSITORY / "packages" / self.name

    @property
    def module(self) -> str:
        """The name that a user imports."""
        return self.name.replace("-", "_")


PACKAGES = (
    Package("swapopt-common", frozenset(), (".py", "/py.typed")),
    Package(
        "swapopt-torch",
        frozenset({"swapopt-common<0.2,>=0.1", "torch>=2.10"}),
        (".py", "/py.typed", ".cpp", ".h"),
    ),
    Package(
        "swapopt-mindspore",
        frozenset({"swapopt-common<0.2,>=0.1", "mindspore>=2.10", "numpy<2"}),
        (".py", "/py.typed"),
    ),
)


class CheckError(Exception):
    """Something is not as it must be."""


def require(condition: bool, message: str) -> None:
    """Raise CheckError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise CheckError(message)


def source_files(package: Package) -> set[str]:
    """Return the files below src, as paths inside a wheel."""
    src = package.folder / "src"
    return {
        path.relative_to(src).as_posix()
        for path in (src / package.module).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def build(package: Package, into: Path) -> tuple[Path, Path]:
    """Build an sdist, and a wheel from that sdist; return (sdist, wheel)."""
    # This environment holds `build` and the backend and nothing else, and `build` refuses to build
    # where something that pyproject.toml requires is absent. So environments of its own, two for
    # each package, would show no more.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into)]
    command.append(str(package.folder))
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    require(run.returncode == 0, f"{package.name} does not build\n{run.stdout}\n{run.stderr}")
    (sdist,) = into.glob(f"{package.module}-*.tar.gz")
    (wheel,) = into.glob(f"{package.module}-*.whl")
    print(f"ok: built {sdist.name} and {wheel.name}")
    return sdist, wheel


def check_wheel(package: Package, wheel: Path) -> None:
    """Show that the wheel holds the sources, the licence and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        info = metadata_name.removesuffix("METADATA")
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
        licence = f"{info}licenses/LICENSE"
        require(licence in names, f"{wheel.name} holds no licence ({licence})")
        require(
            archive.read(licence) == (REPOSITORY / "LICENSE").read_bytes(),
            f"the licence in {wheel.name} differs from the repository's",
        )
    expected, found = source_files(package), {name for name in names if not name.startswith(info)}
    require(
        found == expected,
        f"{wheel.name}: missing {sorted(expected - found)}, surplus {sorted(found - expected)}",
    )
    for suffix in package.needed_suffixes:
        require(any(name.endswith(suffix) for name in found), f"{wheel.name} holds no {suffix}")
    check_metadata(package, metadata)
    print(f"ok: {wheel.name} holds the licence and the {len(found)} files of src, nothing else")


def check_metadata(package: Package, metadata: Message) -> None:
    """Show that licence, name and unconditional requirements are as declared."""
    require(metadata["License-Expression"] == "Apache-2.0", f"{package.name}: licence expression")
    every = metadata.get_all("Requires-Dist", [])
    always = {
        requirement.replace(" ", "") for requirement in every if "extra ==" not in requirement
    }
    require(
        always == package.requires,
        f"{package.name} requires {sorted(always)}, expected {sorted(package.requires)}",
    )


def check_sdist(package: Package, sdist: Path) -> None:
    """Show that the sdist holds sources, tests, licence, readme and changelog, and no more."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {f"src/{name}" for name in source_files(package)}
    expected |= {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"}
    require(expected <= names, f"{sdist.name}: missing {sorted(expected - names)}")
    tests = [name for name in names if name.startswith("tests/") and "/test_" in name]
    require(bool(tests), f"{sdist.name} holds no tests")
    beside = {name for name in names - expected if not name.startswith(("tests/", "benchmarks/"))}
    # hatchling puts in what git ignores, so that others leave out the same.
    surplus = sorted({name for name in beside if name != ".gitignore"} | _caches(names))
    require(not surplus, f"{sdist.name}: surplus {surplus}")
    print(f"ok: {sdist.name} holds sources, tests, licence, readme and changelog, and no more")


def _caches(names: set[str]) -> set[str]:
    return {name for name in names if "__pycache__" in name or name.endswith((".so", ".o"))}


def check_clean_environment(
    backend: Backend, folder: Path, wheels: list[Path], framework: str
) -> None:
    """Install the wheels of common and one backend in a fresh environment and import it there."""
    venv.create(folder / "clean", with_pip=True)
    python = str(folder / "clean" / ("Scripts" if os.name == "nt" else "bin") / "python")
    pip = [python, "-I", "-m", "pip", "--disable-pip-version-check"]
    # Of thousands of modules few are imported: compiling them all would take longer than the rest.
    install = [*pip, "install", "-q", "--no-compile", framework, *map(str, wheels)]
    subprocess.run(install, check=True)
    subprocess.run([*pip, "check"], check=True)
    # A cache folder of its own shows that importing builds nothing.
    cache = folder / "cache"
    cache.mkdir()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    # torch mentions at import that numpy is absent, as it may well be.
    quiet = ["-W", "ignore:Failed to initialize NumPy"]
    names = [backend.framework, ",".join(backend.modules), ",".join(backend.absent)]
    command = [python, "-I", *quiet, "-c", PROBE, *names]
    subprocess.run(command, check=True, cwd=folder, env=environment)
    left = sorted(path.name for path in cache.iterdir())
    require(not left, f"importing wrote {left} into the cache folder")
    # An environment takes gigabytes: one at a time.
    shutil.rmtree(folder)


def main() -> int:
    """Run all checks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where to build and install; must be empty")
    for backend in BACKENDS:
        name = backend.framework
        parser.add_argument(f"--{name}", default=name, help=f"requirement that pins {name}")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    dist = folder / "dist"
    try:
        wheels = {}
        for package in PACKAGES:
            sdist, wheel = build(package, dist)
            check_sdist(package, sdist)
            check_wheel(package, wheel)
            wheels[package.name] = wheel
        for backend in BACKENDS:
            alone = [wheels["swapopt-common"], wheels[backend.package]]
            framework: str = vars(options)[backend.framework]
            check_clean_environment(backend, folder / backend.framework, alone, framework)
    except (CheckError, subprocess.CalledProcessError) as problem:
        print(f"FAILED: {problem}", file=sys.stderr)
        return 1
    print("ok: packages are as they should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
