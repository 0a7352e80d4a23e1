"""What the pages show of demos and plans is what these print.

Memory and virtual time depend neither on the machine nor on how many steps are taken: a few will
do. Losses depend on both, and are left out.
"""

from __future__ import annotations

import re
import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import ROOT, Backend

PLANNING = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PLANNING, re.M | re.S)
(_, PLAN_COMMAND), (_, PLAN_OUTPUT) = BLOCKS[:2]
# A demo takes at least so many steps.
PAGES = {"torch": ("README.md", 5), "mindspore": ("packages/swapopt-mindspore/README.md", 3)}
RUNS = ["native", "per-tensor", "packed"]
ROWS = {
    "Device memory, peak",
    "Device memory, between steps",
    "Host memory, pinned",
    "Optimizer step",
    "Whole iteration",
    "Copied to the device, per step",
}


def printed_rows(output: str) -> dict[str, list[str]]:
    """Return the lines of the table on a terminal, by their labels."""
    lines = (re.split("[│┃]", line.strip("│┃")) for line in output.splitlines())
    rows = ([cell.strip() for cell in cells] for cells in lines if len(cells) == len(RUNS) + 1)
    return {label: ["" if cell == "-" else cell for cell in cells] for label, *cells in rows}


def told_rows(page: str) -> dict[str, list[str]]:
    """Return the same of a page; what it adds in brackets is left out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [
        [re.sub(r" \(.*\)", "", cell).strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.count("|") == len(RUNS) + 2
    ]
    return {label: cells for label, *cells in found}


@pytest.fixture(scope="module")
def printed(
    backends: tuple[Backend, Backend], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Return what both demos and the planning guide's command print, run side by side."""
    commands = {
        backend.framework: (backend, ["demo", "--steps", PAGES[backend.framework][1]])
        for backend in backends
    }
    program, *arguments = shlex.split(PLAN_COMMAND.removeprefix("python "))
    assert [program, arguments[0]] == ["-m", "swapopt_torch"]
    commands["plan"] = (commands["torch"][0], arguments[1:])

    def run(name: str) -> str:
        backend, arguments = commands[name]
        output = ["--output", tmp_path_factory.mktemp(name)]
        return backend.run("-m", f"swapopt_{backend.framework}", *arguments, *output)

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(commands, pool.map(run, commands), strict=True))


@pytest.mark.parametrize("framework", PAGES)
def test_a_page_shows_what_its_demo_prints(printed: dict[str, str], framework: str) -> None:
    page, _ = PAGES[framework]
    told, found = told_rows(page), printed_rows(printed[framework])
    assert found[""] == told[""] == RUNS
    shared = told.keys() & found.keys()
    assert shared >= ROWS
    for label in shared - {""}:
        if not label.startswith("Loss"):
            assert told[label] == found[label], label


def test_the_planning_guide_shows_what_plan_prints(printed: dict[str, str]) -> None:
    told, found = PLAN_OUTPUT.split(), printed["plan"].split()
    assert len(told) > 100
    assert found[: len(told)] == told
