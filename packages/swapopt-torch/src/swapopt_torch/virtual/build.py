"""Compile the extension once, into a cache, and load it from there ever after."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

logger = logging.getLogger(__name__)

KNOWN_TORCH_VERSIONS = ("2.13",)
_MODULE_NAME = "swapopt_virtual_device"
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O1", "-DNDEBUG", "-g0", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")
_DONE_MARK = "complete"
_UNIT_COUNT = 4


class VirtualUnavailableError(RuntimeError):
    """The virtual accelerator cannot be built here.

    There is no compiler, no ninja, no folder to build into, or torch is an unknown version.
    """


def load_extension() -> ModuleType:
    """The compiled extension, built on the first call on this machine (a minute or two).

    Raises:
        VirtualUnavailableError: something that the build needs is missing.
    """
    _check_torch_version()
    compiler = _find_compiler()
    folder = cache_folder() / _cache_key(compiler)
    with _locked(folder):
        return _import_cached(folder) or _build(folder, compiler)


def cache_folder() -> Path:
    """Where builds are kept.

    ``$SWAPOPT_VIRTUAL_CACHE``, else swapopt/virtual below ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """
    chosen = os.environ.get("SWAPOPT_VIRTUAL_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "swapopt" / "virtual"


def _check_torch_version() -> None:
    version = torch.__version__
    if not version.startswith(tuple(f"{known}." for known in KNOWN_TORCH_VERSIONS)):
        raise VirtualUnavailableError(
            f"the virtual accelerator is built against internals of torch that change between "
            f"versions; it is known to work with torch {', '.join(KNOWN_TORCH_VERSIONS)}, and this "
            f"is torch {version}. Install one of those versions to use it."
        )


def _find_compiler() -> str:
    """The program that CXX names, else c++ or g++."""
    chosen = os.environ.get("CXX")
    found = shutil.which(chosen) if chosen else shutil.which("c++") or shutil.which("g++")
    if chosen and found is None:
        raise VirtualUnavailableError(
            f"CXX is {chosen!r}, and there is no such program: set it to the name or path of a C++ "
            "compiler (g++ 11 or newer), without options, or unset it to use c++ or g++"
        )
    if found is None:
        raise VirtualUnavailableError(
            "the virtual accelerator is compiled on first use and there is no C++ compiler: "
            "install g++ 11 or newer (Debian and Ubuntu: apt-get install g++), or set CXX"
        )
    return found


def _compiler_version(compiler: str) -> str:
    """The first line of what the compiler says it is."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise _not_a_compiler(compiler, str(error)) from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise _not_a_compiler(compiler, f"exit status {done.returncode}, {len(lines)} lines")
    return lines[0]


def _not_a_compiler(program: str, found: str) -> VirtualUnavailableError:
    return VirtualUnavailableError(
        f"expected a C++ compiler that answers `{program} --version`, found {found}: set CXX to "
        "g++ 11 or newer"
    )


def _cache_key(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*")):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.relative_to(_SOURCES).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    for part in (*_FLAGS, torch.__version__, sys.version, _compiler_version(compiler)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with _naming_the_cache(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_suffix(".lock"), "w")  # noqa: SIM115  # closed just below
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _naming_the_cache(cache: Path) -> Iterator[None]:
    """Say which folder it was, and which variable moves it, where the cache cannot be written."""
    try:
        yield
    except OSError as error:
        chosen = bool(os.environ.get("SWAPOPT_VIRTUAL_CACHE"))
        raise VirtualUnavailableError(
            f"the virtual accelerator is built into the folder {cache}"
            f"{' (SWAPOPT_VIRTUAL_CACHE)' if chosen else ''}, which cannot be written "
            f"({error.strerror}): set SWAPOPT_VIRTUAL_CACHE to a folder that can be"
        ) from error


def _import_cached(folder: Path) -> ModuleType | None:
    """The extension if the cache holds a whole build of it; a damaged one counts as none."""
    library = folder / f"{_MODULE_NAME}.so"
    mark = folder / _DONE_MARK
    if not library.exists() or not mark.exists():
        return None
    if mark.read_text() != str(library.stat().st_size):
        return None
    loader = importlib.machinery.ExtensionFileLoader(_MODULE_NAME, str(library))
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, library, loader=loader)
    if spec is None:
        return None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError:
        return None
    loader.exec_module(module)
    return module


def _build(folder: Path, compiler: str) -> ModuleType:
    with _naming_the_cache(folder.parent):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        units = _write_units(folder)
    with _build_environment(compiler):
        from torch.utils import cpp_extension

        if not cpp_extension.is_ninja_available():
            raise VirtualUnavailableError(
                "the build of the virtual accelerator needs ninja: pip install ninja "
                "(or install swapopt-torch[virtual])"
            )
        logger.warning("building the virtual accelerator, once: this takes a minute or two")
        try:
            module: ModuleType = cpp_extension.load(
                _MODULE_NAME,
                [str(path) for path in units],
                extra_cflags=list(_FLAGS),
                build_directory=str(folder),
            )
        except (RuntimeError, OSError) as error:
            raise VirtualUnavailableError(
                "the compiler failed to build the virtual accelerator; it needs g++ 11 or newer "
                f"and the headers of Python. Its last words:\n{str(error)[-2000:]}"
            ) from error
    size_bytes = (folder / f"{_MODULE_NAME}.so").stat().st_size
    (folder / _DONE_MARK).write_text(str(size_bytes))
    return module


def _write_units(folder: Path) -> list[Path]:
    """Write a few files that include all sources: most of a compilation is torch's headers."""
    sources = sorted(_SOURCES.rglob("*.cpp"))
    units = []
    for index in range(_UNIT_COUNT):
        unit = folder / f"unit{index}.cpp"
        included = sources[index::_UNIT_COUNT]
        unit.write_text("".join(f'#include "{path.as_posix()}"\n' for path in included))
        units.append(unit)
    return units


@contextlib.contextmanager
def _build_environment(compiler: str) -> Iterator[None]:
    """Let ninja be found beside the interpreter, also in an environment not activated."""
    changed = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "CXX": compiler,
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
