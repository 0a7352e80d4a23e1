"""Clock, detector and allocator accounting, tested in C++ apart from torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from swapopt_torch import virtual

HERE = Path(__file__).parent
HEADERS = Path(virtual.__file__).parent / "csrc"


def test_core_headers(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    if compiler is None:
        assert os.environ.get("SWAPOPT_REQUIRE_VIRTUAL") != "1", "no C++ compiler: install g++"
        pytest.skip("no C++ compiler: install g++")
    program = tmp_path / "core_tests"
    source = HERE / "cpp" / "core_tests.cpp"
    subprocess.run(
        [compiler, "-std=c++20", "-O0", "-I", str(HEADERS), str(source), "-o", str(program)],
        check=True,
    )
    result = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("ok ") >= 25
