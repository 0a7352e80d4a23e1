"""Real text that every machine has: the standard library's own source files, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swapopt_mindspore.demo.settings import DemoError, ModelSize

Text = npt.NDArray[np.uint8]


def read_corpus() -> Text:
    """Return the standard library's top-level modules, in order of their names, shape (n,).

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
    return np.frombuffer(text, np.uint8)


def iterate_batches(corpus: Text, size: ModelSize, seed: int, steps: int) -> Iterator[Text]:
    """Yield bytes of text, shape (batch, context + 1); the same ones for the same seed."""
    random = np.random.default_rng(seed)
    length = size.context + 1
    for _ in range(steps):
        starts = random.integers(len(corpus) - length, size=(size.batch, 1))
        yield corpus[starts + np.arange(length)]
