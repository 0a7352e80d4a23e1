"""docs/parallelism.md: every test that its table names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "packages" / "swapopt-torch" / "tests"
GUIDE = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")


def table_rows() -> list[list[str]]:
    """Return the cells of the table whose last column is the test."""
    lines = GUIDE.split("\n| technique | what is compared", 1)[1].splitlines()[2:]
    rows = (line for line in lines if line.startswith("|"))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


ROWS = table_rows()


def test_the_table_is_read() -> None:
    techniques = " ".join(row[0] for row in ROWS)
    for word in ("FSDP2", "Tensor parallel", "Pipeline parallel", "Expert parallel", "DDP"):
        assert word in techniques
    assert all(len(row) == 4 for row in ROWS)
    assert sum(line.startswith("| ") and "::test_" in line for line in GUIDE.splitlines()) == len(
        ROWS
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_tests_that_exist(row: list[str]) -> None:
    references = re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])
    assert references, f"no test in {row[-1]!r}"
    for path, name in references:
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path} has no function {name}"
