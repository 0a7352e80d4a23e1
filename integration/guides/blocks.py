"""The Python blocks of the guides, and what the line above each says of it.

<!-- runs: torch -->          it is run, after the page's earlier ones, in torch's environment
<!-- runs: mindspore -->      the same in MindSpore's
<!-- runs: torch, alone -->   it is a program of its own, in a process of its own
<!-- runs: torch, two processes -->   the same, started by torchrun
<!-- fragment: REASON -->     it cannot be run by itself
<!-- tested: PATH::TEST -->   that test runs it, or what it shows
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md")
    for path in ROOT.glob(pattern)
)
_BLOCK = re.compile(r"^(?P<above>[^\n]*)\n```python\n(?P<code>.*?)^```$", re.M | re.S)
_MARK = re.compile(r"<!-- (?P<kind>runs|fragment|tested): (?P<what>.+) -->")


class Block(NamedTuple):
    """A block of a page.

    Attributes:
        page: its path from the repository's root.
        line: where its code begins.
        kind: runs, fragment or tested; empty where nothing is said.
        what: what is said behind it.
        code: the block itself.
        framework: the backend that runs it.
        how: alone, or two processes; empty where it is run after the page's earlier ones.
    """

    page: str
    line: int
    kind: str
    what: str
    code: str

    @property
    def framework(self) -> str:
        return self.what.partition(", ")[0]

    @property
    def how(self) -> str:
        return self.what.partition(", ")[2]


def blocks_of(page: str) -> list[Block]:
    """Return the Python blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        mark = _MARK.fullmatch(match["above"])
        kind, what = (mark["kind"], mark["what"]) if mark else ("", "")
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(page, line, kind, what, match["code"]))
    return found
