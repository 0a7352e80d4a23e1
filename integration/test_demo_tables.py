"""The tables of the READMEs are what the demos print.

Memory and virtual time depend neither on the machine nor on how many steps are taken: a few will
do. Losses depend on both, and are left out.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import ROOT, Backend

# Each with the fewest steps that its demo takes.
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
    lines = (line.strip("│┃").split("│" if "│" in line else "┃") for line in output.splitlines())
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
) -> dict[str, dict[str, list[str]]]:
    def demo(backend: Backend) -> str:
        _, steps = PAGES[backend.framework]
        folder: Path = tmp_path_factory.mktemp(backend.framework)
        module = f"swapopt_{backend.framework}"
        return backend.run("-m", module, "demo", "--steps", steps, "--output", folder)

    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(demo, backends))
    return {
        backend.framework: printed_rows(output)
        for backend, output in zip(backends, outputs, strict=True)
    }


@pytest.mark.parametrize("framework", PAGES)
def test_a_page_shows_what_its_demo_prints(
    printed: dict[str, dict[str, list[str]]], framework: str
) -> None:
    page, _ = PAGES[framework]
    told, found = told_rows(page), printed[framework]
    assert found[""] == told[""] == RUNS
    shared = told.keys() & found.keys()
    assert shared >= ROWS
    for label in shared - {""}:
        if not label.startswith("Loss"):
            assert told[label] == found[label], label
