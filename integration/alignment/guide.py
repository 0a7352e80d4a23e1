"""The functions that docs/checkpoints.md prints, so that what is tested is what users get."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
SECTION = "## From one backend to the other"


def plain_functions(framework: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return ``write_plain`` and ``read_plain`` of the block that imports a framework."""
    text = GUIDE.read_text(encoding="utf-8").partition(f"\n{SECTION}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    (block,) = (block for block in blocks if f"import {framework}\n" in block)
    names: dict[str, Any] = {}  # whatever the block defines
    exec(compile(block, str(GUIDE), "exec"), names)
    return names["write_plain"], names["read_plain"]
