"""docs/user-problems.md: no number is left out, and every test that the table names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "packages" / "swapopt-mindspore" / "tests"
LINES = (ROOT / "docs" / "user-problems.md").read_text(encoding="utf-8").splitlines()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in LINES
    if re.match(r"\| [A-Z]\d ", line)
]
NUMBERS = {"N": 5, "M": 7, "R": 5, "C": 6, "D": 1, "A": 3, "F": 2}


def test_every_number_has_a_row() -> None:
    expected = [
        f"{letter}{number + 1}" for letter, last in NUMBERS.items() for number in range(last)
    ]
    assert [row[0] for row in ROWS] == expected
    assert all(len(row) == 3 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_tests_that_exist_or_says_why_there_is_none(row: list[str]) -> None:
    references = re.findall(r"`([\w/]+\.py)::(\w+)`", row[2])
    assert references or row[2].startswith("does not apply, because "), row[2]
    for path, name in references:
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path} has no function {name}"
