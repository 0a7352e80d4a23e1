"""Real text that every machine has: the standard library's own source files, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from swapopt_torch.demo.settings import DemoError, ModelSize


def read_corpus() -> torch.Tensor:
    """Return the standard library's top-level modules, in order of their names, as uint8 (n,).

    Raises:
        DemoError: this Python has no source files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        raise DemoError(
            "The demo trains on the .py files of Python's standard library, but this Python "
            "comes without them. Use an interpreter with an unzipped standard library."
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def iterate_batches(
    corpus: torch.Tensor, size: ModelSize, seed: int, steps: int
) -> Iterator[torch.Tensor]:
    """Yield int64 tokens (batch, context + 1) on the CPU; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    length = size.context + 1
    for _ in range(steps):
        starts = torch.randint(len(corpus) - length, (size.batch, 1), generator=generator)
        yield corpus[starts + torch.arange(length)].long()
