"""The demo from beginning to end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from rich.console import Console

from swapopt_torch.demo import figures, report
from swapopt_torch.demo.accelerator import Accelerator, choose_accelerator
from swapopt_torch.demo.corpus import read_corpus
from swapopt_torch.demo.model import ByteGPT
from swapopt_torch.demo.progress import show_progress
from swapopt_torch.demo.results import ResultRow, RunKind, RunResult, compare
from swapopt_torch.demo.settings import MODEL_SIZES, DemoSettings, ModelSize
from swapopt_torch.demo.table import mib, notes, result_table, verdict
from swapopt_torch.demo.training import train


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
    accelerator = choose_accelerator(settings)
    size = settings.model_size or MODEL_SIZES["small" if accelerator.is_virtual else "medium"]
    corpus = read_corpus()
    _introduce(console, accelerator, size, corpus)
    with _reproducible(accelerator):
        rows = compare(_train_all(settings, size, accelerator, corpus, console))
    console.print()
    console.print(result_table(rows, settings, accelerator))
    console.print(verdict(rows))
    console.print(notes(accelerator))
    _write_report(settings, size, accelerator, rows)
    console.print(
        f"\nReport in {settings.output}: loss.png, memory.png, timeline.png, report.json, "
        "trace.json (for Perfetto or chrome://tracing)",
        highlight=False,
    )
    return all(row.equal_to_native is not False for row in rows)


def _introduce(
    console: Console, accelerator: Accelerator, size: ModelSize, corpus: torch.Tensor
) -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in ByteGPT(size).parameters())
    lines = {
        "Device": f"{accelerator.title}: {accelerator.reason}",
        "Model": f"GPT over bytes, {size.layers} layers, width {size.width}, {size.heads} heads",
        "": f"{count / 1e6:.1f} million parameters, {mib(2 * 4 * count)} of optimizer states",
        "Data": f"the standard library's sources, {mib(len(corpus))}",
        "Batch": f"{size.batch} sequences of {size.context} bytes",
    }
    for name, text in lines.items():
        console.print(f"{name:<7} {text}", highlight=False)


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
