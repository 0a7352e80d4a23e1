"""The demo from beginning to end."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import set_device
from mindspore.context import PYNATIVE_MODE, get_context, set_context
from rich.console import Console
from rich.text import Text

from swapopt_mindspore import SwapOptimizerConfig
from swapopt_mindspore.demo import figures, report, sentences
from swapopt_mindspore.demo.corpus import Text as Corpus
from swapopt_mindspore.demo.corpus import read_corpus
from swapopt_mindspore.demo.model import ByteGPT
from swapopt_mindspore.demo.optimizers import choose_optimizer, kinds_of
from swapopt_mindspore.demo.progress import show_progress
from swapopt_mindspore.demo.results import ResultRow, RunResult, compare
from swapopt_mindspore.demo.sentences import say
from swapopt_mindspore.demo.settings import DemoSettings
from swapopt_mindspore.demo.table import mib, result_table
from swapopt_mindspore.demo.training import train
from swapopt_mindspore.emulated import PROFILES

STATE_NBYTES_PER_PARAMETER = 2 * 4
"""Two moments in float32."""


def run_demo(settings: DemoSettings, console: Console) -> bool:
    """Train, compare, print and write the report.

    Returns:
        Whether every swapped run is equal to the native one, bit for bit.

    Raises:
        DemoError: the demo cannot run as asked.
    """
    report.make_folder(settings.output)
    optimizer_name = choose_optimizer(settings.optimizer)
    set_context(mode=PYNATIVE_MODE)
    if get_context("device_target") != "CPU":
        set_device("CPU")
    corpus = read_corpus()
    _introduce(console, settings, optimizer_name, corpus)
    rows = compare(_train_all(settings, optimizer_name, corpus, console))
    _conclude(console, settings, optimizer_name, rows)
    _write_report(settings, optimizer_name, rows)
    written = "loss.png, memory.png, timeline.png, report.json, trace.json"
    console.print()
    say(
        console,
        Text(f"Report in {settings.output}: {written} (for Perfetto or chrome://tracing)"),
    )
    return all(row.equal_to_native is not False for row in rows)


def _introduce(
    console: Console, settings: DemoSettings, optimizer_name: str, corpus: Corpus
) -> None:
    size = settings.model_size
    numels = [param.size for param in ByteGPT(size, settings.seed).trainable_params()]
    least = SwapOptimizerConfig().min_numel
    swapped_numel = sum(numel for numel in numels if numel >= least)
    lines = (
        ("Device", f"emulated on the CPU, with the speeds of the {settings.profile} profile"),
        ("Update", sentences.optimizer_note(optimizer_name, settings.optimizer)),
        ("Model", f"GPT over bytes: layers {size.layers}, width {size.width}, heads {size.heads}"),
        ("", f"{sum(numels) / 1e6:.1f} million parameters in {len(numels)} tensors"),
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


def _train_all(
    settings: DemoSettings, optimizer_name: str, corpus: Corpus, console: Console
) -> list[RunResult]:
    """Run natively and with every movement that serves the optimizer, one after another."""
    kinds, profile = kinds_of(optimizer_name), PROFILES[settings.profile]
    results: list[RunResult] = []
    with show_progress(console, kinds, settings.steps) as progress:
        for kind in kinds:
            progress.begin(kind)
            results.append(train(kind, optimizer_name, settings, profile, corpus, progress.step))
    return results


def _conclude(
    console: Console, settings: DemoSettings, optimizer_name: str, rows: Sequence[ResultRow]
) -> None:
    console.print()
    say(console, sentences.title(settings, optimizer_name))
    console.print(result_table(rows))
    for text in (
        sentences.caption(rows, settings),
        sentences.verdict(rows),
        sentences.cost(rows),
        *sentences.notes(),
    ):
        say(console, text)


def _write_report(settings: DemoSettings, optimizer_name: str, rows: Sequence[ResultRow]) -> None:
    folder, clock_name = settings.output, sentences.clock_name(settings)
    figures.draw_losses(folder / "loss.png", rows)
    figures.draw_memory(folder / "memory.png", rows, clock_name)
    figures.draw_timeline(folder / "timeline.png", rows, clock_name)
    report.write_json(folder / "report.json", rows, settings, optimizer_name)
    report.write_trace(folder / "trace.json", rows)
