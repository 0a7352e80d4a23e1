"""The demo from beginning to end."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from rich.console import Console
from rich.text import Text

from swapopt_torch import SwapOptimizerConfig
from swapopt_torch.demo import figures, report, sentences
from swapopt_torch.demo.accelerator import Accelerator, choose_accelerator
from swapopt_torch.demo.corpus import read_corpus
from swapopt_torch.demo.model import ByteGPT
from swapopt_torch.demo.progress import show_progress
from swapopt_torch.demo.results import ResultRow, RunKind, RunResult, compare
from swapopt_torch.demo.sentences import say
from swapopt_torch.demo.settings import MODEL_SIZES, DemoSettings, ModelSize
from swapopt_torch.demo.table import mib, result_table
from swapopt_torch.demo.training import train

STATE_NBYTES_PER_PARAMETER = 2 * 4
"""Two moments in float32."""


class _FillsMemory(Protocol):
    """What torch.utils.deterministic is, but does not declare."""

    fill_uninitialized_memory: bool


_fills_memory = cast(_FillsMemory, torch.utils.deterministic)


def run_demo(settings: DemoSettings, console: Console) -> bool:
    """Train, compare, print and write the report.

    Returns:
        Whether every swapped run is equal to the native one, bit for bit.

    Raises:
        DemoError: the demo cannot run as asked.
    """
    report.make_folder(settings.output)
    with _build_announced(console):
        accelerator = choose_accelerator(settings)
    size = settings.model_size or MODEL_SIZES["small" if accelerator.is_virtual else "medium"]
    corpus = read_corpus()
    _introduce(console, accelerator, size, corpus)
    with _reproducible(accelerator):
        rows = compare(_train_all(settings, size, accelerator, corpus, console))
    _conclude(console, settings, rows, accelerator)
    _write_report(settings, size, accelerator, rows)
    written = "loss.png, memory.png, timeline.png, report.json, trace.json"
    console.print()
    say(
        console,
        Text(f"Report in {settings.output}: {written} (for Perfetto or chrome://tracing)"),
    )
    return all(row.equal_to_native is not False for row in rows)


@contextmanager
def _build_announced(console: Console) -> Iterator[None]:
    """Show what the virtual accelerator logs, which is that it is being built, while entered."""
    virtual_logger = logging.getLogger("swapopt_torch.virtual")
    handler = _ToConsole(console)
    virtual_logger.addHandler(handler)
    try:
        yield
    finally:
        virtual_logger.removeHandler(handler)


class _ToConsole(logging.Handler):
    """Prints log messages among the demo's own lines."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of ``record``."""
        say(self._console, Text(record.getMessage()))


def _introduce(
    console: Console, accelerator: Accelerator, size: ModelSize, corpus: torch.Tensor
) -> None:
    with torch.device("meta"):
        numels = [parameter.numel() for parameter in ByteGPT(size).parameters()]
    least = SwapOptimizerConfig().min_numel
    swapped_numel = sum(numel for numel in numels if numel >= least)
    lines = (
        ("Device", f"{accelerator.title}: {accelerator.reason}"),
        ("Model", f"GPT over bytes, {size.layers} layers, width {size.width}, {size.heads} heads"),
        ("", f"{sum(numels) / 1e6:.1f} million parameters"),
        ("States", f"{mib(STATE_NBYTES_PER_PARAMETER * sum(numels))} of two float32 moments"),
        (
            "",
            f"{mib(STATE_NBYTES_PER_PARAMETER * swapped_numel)} of them are swapped; "
            f"those of fewer than {least} elements stay",
        ),
        ("Data", f"the standard library's sources, {mib(len(corpus))}"),
        ("Batch", f"{size.batch} sequences of {size.context} bytes"),
    )
    for name, text in lines:
        say(console, Text(f"{name:<7} {text}"))


def _conclude(
    console: Console,
    settings: DemoSettings,
    rows: Sequence[ResultRow],
    accelerator: Accelerator,
) -> None:
    console.print()
    say(console, sentences.title(settings))
    console.print(result_table(rows))
    for text in (
        sentences.caption(rows, accelerator),
        sentences.verdict(rows),
        sentences.cost(rows, accelerator),
        *sentences.notes(rows, accelerator),
    ):
        say(console, text)


def _train_all(
    settings: DemoSettings,
    size: ModelSize,
    accelerator: Accelerator,
    corpus: torch.Tensor,
    console: Console,
) -> list[RunResult]:
    """Run native, per-tensor and packed, one after another."""
    results: list[RunResult] = []
    with show_progress(console, settings.steps) as progress:
        for kind in RunKind:
            progress.begin(kind)
            results.append(train(kind, settings, size, accelerator, corpus, progress.step))
    return results


@contextmanager
def _reproducible(accelerator: Accelerator) -> Iterator[None]:
    """Make equal runs give equal bits, for as long as this is entered.

    The virtual accelerator computes with the CPU's kernels, which are deterministic for a fixed
    number of threads; one thread is the fastest where others share the machine. Real cards need
    torch's deterministic algorithms.
    """
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = _fills_memory.fill_uninitialized_memory
    try:
        if accelerator.is_virtual:
            torch.set_num_threads(1)
        else:
            # cuBLAS reads it when its handle is made, which no kernel has asked for yet.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            _fills_memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        _fills_memory.fill_uninitialized_memory = fill


def _write_report(
    settings: DemoSettings, size: ModelSize, accelerator: Accelerator, rows: list[ResultRow]
) -> None:
    folder = settings.output
    figures.draw_losses(folder / "loss.png", rows)
    figures.draw_memory(folder / "memory.png", rows, accelerator)
    figures.draw_timeline(folder / "timeline.png", rows, accelerator)
    report.write_json(folder / "report.json", rows, settings, size, accelerator)
    report.write_trace(folder / "trace.json", rows)
