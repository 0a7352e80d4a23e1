"""Draw the pictures of how-it-works.md, planning.md and benchmarks.md on the virtual accelerator.

`tox run -e pictures` does it, after a change that the pictures show. The runs are small and on
virtual time, so the same sources draw the same pictures on every machine. The losses of both
backends are drawn by `tox run -e integration -- integration/alignment --plot docs/img`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from swapopt_torch.demo import figures
from swapopt_torch.demo.accelerator import Accelerator, choose_accelerator
from swapopt_torch.demo.corpus import read_corpus
from swapopt_torch.demo.results import ResultRow, RunKind, compare
from swapopt_torch.demo.settings import DemoSettings, ModelSize
from swapopt_torch.demo.training import train

DOCS = Path(__file__).resolve().parents[1] / "docs"
SETTINGS = DemoSettings(steps=6, device="virtual", profile="h200", swap_times=8)
# Wide enough for copies to take longer than their launches, and quick enough for a CPU.
SIZE = ModelSize(layers=4, width=640, heads=8, context=64, batch=12)


# Commands of the guides, by the picture that they draw and its name in the guide.
COMMANDS = {
    "plan --params 70e9 --shards 64 --ranks-per-host 8 --profile ascend-910b": (
        "trade.png",
        "plan.png",
    ),
    "bench --workload uniform-512MiB --device virtual --profile h200": ("bench.png", "bench.png"),
}


def run_all(accelerator: Accelerator) -> list[ResultRow]:
    """Train natively, per tensor and packed; return what was seen."""
    corpus = read_corpus()
    return compare(
        [train(kind, SETTINGS, SIZE, accelerator, corpus, lambda loss: None) for kind in RunKind]
    )


def draw_by_command(command: str, drawn: str, path: Path) -> None:
    """Draw what a guide's own command draws; a dry device needs a process of its own."""
    program = [sys.executable, "-m", "swapopt_torch", *command.split()]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*program, "--output", folder], check=True, stdout=subprocess.DEVNULL)
        shutil.copy(Path(folder) / drawn, path)


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?", default=DOCS / "img")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    accelerator = choose_accelerator(SETTINGS)
    rows = run_all(accelerator)
    figures.draw_memory(folder / "memory.png", rows, accelerator)
    figures.draw_timeline(folder / "step.png", rows, accelerator)
    for command, (drawn, name) in COMMANDS.items():
        draw_by_command(command, drawn, folder / name)
    for name in ("memory.png", "step.png", *(name for _, name in COMMANDS.values())):
        print(f"{folder / name}: {(folder / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
