"""The build: its cache, what heals, and what is said when it cannot be."""

from __future__ import annotations

import fcntl
import logging
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from swapopt_torch.virtual import VirtualUnavailableError, _enable, build


@pytest.fixture
def cached_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of this session's build in a cache of its own."""
    folder = build.cache_folder() / build._cache_key(build._find_compiler())
    copied = tmp_path / folder.name
    shutil.copytree(folder, copied)
    monkeypatch.setenv("SWAPOPT_VIRTUAL_CACHE", str(tmp_path))
    return copied


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that would be built into."""
    asked: list[Path] = []

    def pretend(folder: Path, compiler: str) -> types.ModuleType:
        asked.append(folder)
        return types.ModuleType("pretended")

    monkeypatch.setattr(build, "_build", pretend)
    return asked


LOAD_BUT_DO_NOT_BUILD = """
from swapopt_torch import virtual
def fail(*arguments): raise AssertionError("it was built again")
virtual.build._build = fail
virtual.enable(device_count=3)
import torch
assert torch.virtual.device_count() == 3
"""


def test_a_whole_build_is_loaded_without_building(cached_build: Path) -> None:
    subprocess.run([sys.executable, "-c", LOAD_BUT_DO_NOT_BUILD], check=True)


@pytest.mark.parametrize("damage", ["truncated", "no mark", "no library", "garbage"])
def test_a_damaged_build_is_built_anew(cached_build: Path, builds: list[Path], damage: str) -> None:
    library = cached_build / f"{build._MODULE_NAME}.so"
    mark = cached_build / build._DONE_MARK
    match damage:
        case "truncated":
            library.write_bytes(library.read_bytes()[:1000])
        case "no mark":
            mark.unlink()
        case "no library":
            library.unlink()
        case "garbage":
            library.unlink()
            library.write_bytes(b"not a library")
            mark.write_text(str(library.stat().st_size))
    build.load_extension()
    assert builds == [cached_build]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWAPOPT_VIRTUAL_CACHE", str(tmp_path / "mine"))
    assert build.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("SWAPOPT_VIRTUAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_folder() == tmp_path / "xdg" / "swapopt" / "virtual"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / ".cache" / "swapopt" / "virtual"


def test_the_key_follows_sources_and_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = build._find_compiler()
    before = build._cache_key(compiler)
    assert build._cache_key(compiler) == before
    copied = tmp_path / "csrc"
    shutil.copytree(build._SOURCES, copied)
    monkeypatch.setattr(build, "_SOURCES", copied)
    assert build._cache_key(compiler) == before
    (copied / "core" / "engine.h").write_text("// changed")
    changed = build._cache_key(compiler)
    assert changed != before
    monkeypatch.setattr(build, "_compiler_version", lambda compiler: "another")
    assert build._cache_key(compiler) not in (before, changed)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(VirtualUnavailableError, match=r"install g\+\+"):
        build.load_extension()


def test_a_compiler_that_is_not_there_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nope/g++")
    with pytest.raises(VirtualUnavailableError, match=r"CXX is '/nope/g\+\+'.*no such program"):
        build.load_extension()


def test_a_program_that_is_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "g++"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    with pytest.raises(VirtualUnavailableError, match=r"exit status 3.*set CXX to"):
        build.load_extension()
    program.write_text("no program at all")
    with pytest.raises(VirtualUnavailableError, match=r"Exec format error.*set CXX to"):
        build.load_extension()


@pytest.mark.parametrize("place", ["file", "file/below", "unwritable"])
def test_a_cache_that_cannot_be_written(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    chosen = Path("/proc/unwritable") if place == "unwritable" else tmp_path / place
    monkeypatch.setenv("SWAPOPT_VIRTUAL_CACHE", str(chosen))
    expected = f"folder {chosen} .SWAPOPT_VIRTUAL_CACHE., which cannot be written"
    with pytest.raises(VirtualUnavailableError, match=expected):
        build.load_extension()
    monkeypatch.delenv("SWAPOPT_VIRTUAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(chosen))
    expected = f"folder {chosen}/swapopt/virtual, which .*set SWAPOPT_VIRTUAL_CACHE to a folder"
    with pytest.raises(VirtualUnavailableError, match=expected):
        build.load_extension()


def test_unknown_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(VirtualUnavailableError, match=r"2\.13.*this is torch 2\.99\.0"):
        build.load_extension()


@pytest.mark.parametrize("missing", ["ninja", "headers"])
def test_failed_builds_say_what_to_do(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils import cpp_extension

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("fatal error: Python.h: No such file or directory")

    monkeypatch.setattr(cpp_extension, "load", fail)
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: missing != "ninja")
    expected = "pip install ninja" if missing == "ninja" else r"compiler failed(.|\n)*Python\.h"
    with (
        caplog.at_level(logging.WARNING, logger=build.__name__),
        pytest.raises(VirtualUnavailableError, match=expected),
    ):
        build._build(tmp_path / "new", build._find_compiler())
    announced = [
        message for message in caplog.messages if "once: this takes a minute or two" in message
    ]
    assert len(announced) == (0 if missing == "ninja" else 1)


def test_only_one_process_builds_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "key"
    with (
        build._locked(folder),
        open(folder.with_suffix(".lock")) as second,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(folder.with_suffix(".lock")) as third:
        fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_every_source_is_in_exactly_one_unit(tmp_path: Path) -> None:
    texts = "".join(unit.read_text() for unit in build._write_units(tmp_path))
    for source in build._SOURCES.glob("*.cpp"):
        assert texts.count(f'"{source.as_posix()}"') == 1


def test_another_device_behind_the_same_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    with pytest.raises(RuntimeError, match=r"torch_npu already uses"):
        _enable._check_door_is_free()
