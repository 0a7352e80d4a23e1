"""Tests that tables of the guides name, as `path.py::function`."""

import ast
import re
from pathlib import Path


def cells_of(row: str) -> list[str]:
    """Return the cells of one line of a table."""
    return [cell.strip() for cell in row.strip("|").split("|")]


def named_tests(cell: str) -> list[tuple[str, str]]:
    """Return the paths and functions that a cell names."""
    return re.findall(r"`([\w/]+\.py)::(\w+)`", cell)


def assert_tests_exist(folder: Path, cell: str) -> None:
    """Whatever the cell names is a function at the top of its module below the folder."""
    for path, name in named_tests(cell):
        tree = ast.parse((folder / path).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path} has no function {name}"
