"""docs/user-problems.md: no number is left out, and every test that the table names exists."""

import re
from pathlib import Path

import pytest
from named_tests import assert_tests_exist, cells_of, named_tests

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "packages" / "swapopt-mindspore" / "tests"
LINES = (ROOT / "docs" / "user-problems.md").read_text(encoding="utf-8").splitlines()
ROWS = [cells_of(line) for line in LINES if re.match(r"\| [A-Z]\d ", line)]
NUMBERS = {"N": 5, "M": 7, "R": 5, "C": 6, "D": 1, "A": 3, "F": 2}


def test_every_number_has_a_row() -> None:
    expected = [
        f"{letter}{number + 1}" for letter, last in NUMBERS.items() for number in range(last)
    ]
    assert [row[0] for row in ROWS] == expected
    assert all(len(row) == 3 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_tests_that_exist_or_says_why_there_is_none(row: list[str]) -> None:
    says_why = row[2].startswith("does not apply, because ")
    assert named_tests(row[2]) or says_why, row[2]
    assert_tests_exist(TESTS, row[2])
