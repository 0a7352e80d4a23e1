"""Every Python block of README and guides is run, tested elsewhere, or marked as a fragment."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

import pytest
from blocks import PAGES, ROOT, Block, blocks_of

from conftest import Backend

RUNNER = Path(__file__).with_name("run_blocks.py")
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
FRAMEWORKS = ("torch", "mindspore")
TOGETHER = [block for block in BLOCKS if block.kind == "runs" and not block.how]
ALONE = [block for block in BLOCKS if block.kind == "runs" and block.how]


def place_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


def test_no_block_is_overlooked() -> None:
    fences = [
        line
        for page in PAGES
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines()
        if line.lstrip().startswith("```python")
    ]
    assert len(BLOCKS) == len(fences) > 20


@pytest.mark.parametrize("block", BLOCKS, ids=place_of)
def test_a_block_says_what_becomes_of_it(block: Block) -> None:
    ast.parse(block.code)
    if block.kind == "runs":
        assert block.framework in FRAMEWORKS
        assert block.how in ("", "alone", "two processes")
    elif block.kind == "tested":
        path, _, name = block.what.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    else:
        assert block.kind == "fragment", "say above the block what becomes of it, see blocks.py"


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_what_exists(page: str) -> None:
    """Environments of tox, our packages and their extras, and files that Python is to run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "tox.ini", encoding="utf-8")
    for names in re.findall(r"tox run -e ([a-z,-]+)", text):
        assert all(f"testenv:{name}" in settings for name in names.split(",")), names
    for package, extras in re.findall(r"\./packages/([\w-]+)(?:\[([\w,]+)\])?", text):
        declared = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
        for extra in filter(None, extras.split(",")):
            assert re.search(rf"^{extra} = \[", declared, re.M), f"{package}[{extra}]"
    for script in re.findall(r"python ((?:packages|tools)/[\w/.-]+\.py)", text):
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_blocks_run(
    backends: tuple[Backend, Backend],
    framework: str,
) -> None:
    (backend,) = (backend for backend in backends if backend.framework == framework)
    printed = backend.run(RUNNER, framework).splitlines()
    expected = [place_of(block) for block in TOGETHER if block.framework == framework]
    assert [line for line in printed if re.fullmatch(r"[\w./-]+\.md:\d+", line)] == expected


@pytest.mark.parametrize("block", ALONE, ids=place_of)
def test_programs_of_their_own_run(backends: tuple[Backend, Backend], block: Block) -> None:
    (backend,) = (backend for backend in backends if backend.framework == block.framework)
    assert place_of(block) in backend.run(RUNNER, block.framework, block.page, block.line)
