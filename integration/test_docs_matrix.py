"""docs/parallelism.md and docs/mindspore.md: every test that their tables name exists."""

from pathlib import Path

import pytest
from named_tests import assert_tests_exist, cells_of, named_tests

ROOT = Path(__file__).resolve().parents[1]
GUIDES = {
    name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("parallelism", "mindspore")
}
TESTS = {
    "parallelism": ROOT / "packages" / "swapopt-torch" / "tests",
    "mindspore": ROOT / "packages" / "swapopt-mindspore" / "tests",
}
TECHNIQUES = {
    "parallelism": ("FSDP2", "Tensor parallel", "Pipeline parallel", "Expert parallel", "DDP"),
    "mindspore": ("Fully sharded", "Tensor parallel", "Expert parallel", "Cell.recompute"),
}


def table_rows(guide: str) -> list[list[str]]:
    """Return the cells of the table whose last column is the test."""
    lines = guide.split("\n| technique | what is compared", 1)[1].splitlines()[2:]
    return [cells_of(line) for line in lines if line.startswith("|")]


ROWS = [(name, row) for name, guide in GUIDES.items() for row in table_rows(guide)]


@pytest.mark.parametrize("name", GUIDES)
def test_the_table_is_read(name: str) -> None:
    rows = [row for of, row in ROWS if of == name]
    techniques = " ".join(row[0] for row in rows)
    for word in TECHNIQUES[name]:
        assert word in techniques
    assert all(len(row) == 4 for row in rows)
    naming = [line for line in GUIDES[name].splitlines() if line.startswith("| ")]
    assert sum("::test_" in line for line in naming) == len(rows)


@pytest.mark.parametrize(
    ("name", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_a_row_names_tests_that_exist(name: str, row: list[str]) -> None:
    assert named_tests(row[-1]), f"no test in {row[-1]!r}"
    assert_tests_exist(TESTS[name], row[-1])
