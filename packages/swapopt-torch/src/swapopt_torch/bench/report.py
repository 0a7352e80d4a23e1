"""The result as text: a table on the terminal or in Markdown, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec

import torch

from swapopt_torch import __version__
from swapopt_torch.bench.contenders import OPTIMIZERS
from swapopt_torch.bench.measure import Measured
from swapopt_torch.bench.run import BenchResult
from swapopt_torch.bench.settings import BenchSettings

MIB = 2**20
NOTHING = "-"
_WIDEST = 1000
TableLine = tuple[str, list[str]]
_Cell = Callable[[BenchResult, Measured], str]


def mib(nbytes: float) -> str:
    """Write bytes in MiB."""
    return f"{nbytes / MIB:,.1f} MiB"


def milliseconds(seconds: float) -> str:
    """Write seconds in ms."""
    return f"{seconds * 1e3:,.3f} ms"


def percent(share: float) -> str:
    """Write a share in percent."""
    return f"{share * 100:,.1f} %"


def _gigabytes(rate: float) -> str:
    return f"{rate * 1e-9:,.1f} GB/s"


def introduce(result: BenchResult, settings: BenchSettings) -> list[TableLine]:
    """Return what the figures are about, a line for each thing."""
    workload, link, demand = result.workload, result.link, result.demand
    duplex = "both at once" if link.full_duplex else "one at a time"
    transfer_seconds = link.transfer_seconds(demand.nbytes)
    optimum = result.optimum
    bound = "transfers" if transfer_seconds >= demand.update_seconds else "updates"
    pairs = [
        ("Device", result.device_title),
        ("Workload", f"{workload.name}: {workload.title}"),
        ("", f"{workload.numel:,} parameters in {len(workload.shapes):,} tensors"),
        ("States", f"{mib(workload.state_nbytes)}; {mib(demand.nbytes)} move in a step, each way"),
        ("Optimizer", f"{OPTIMIZERS[settings.optimizer].title}, swap_times={settings.swap_times}"),
        (
            f"Link ({link.source})",
            f"{_gigabytes(link.h2d_bytes_per_second)} to the device, "
            f"{_gigabytes(link.d2h_bytes_per_second)} to the host, {duplex}",
        ),
        (
            "Floor",
            f"{milliseconds(result.floor_seconds)}, set by {bound} (transfers "
            f"{milliseconds(transfer_seconds)}, updates alone "
            f"{milliseconds(demand.update_seconds)})",
        ),
        (
            "Optimum",
            f"{optimum.ratio:.3f} x the floor, with {optimum.pieces} equal pieces in the memory "
            "of two arenas",
        ),
        ("Training", f"{milliseconds(settings.training_seconds)} stand for forward and backward"),
        ("Times", result.clock_name),
    ]
    return [(name, [text]) for name, text in pairs]


def _ratio(result: BenchResult, row: Measured) -> str:
    return NOTHING if row is result.native else f"{result.ratio(row):.3f}"


def _exposed(result: BenchResult, row: Measured) -> str:
    return _longer(result, row, result.exposed_seconds(row))


def _longer(result: BenchResult, row: Measured, seconds: float) -> str:
    return NOTHING if row is result.native else milliseconds(max(0.0, seconds))


def _counts(result: BenchResult, row: Measured) -> str:
    del result
    counts = row.counts
    if counts is None or counts.h2d_copies == 0:
        return NOTHING
    return f"{counts.h2d_copies:,} / {counts.d2h_copies:,}"


def _per_piece(result: BenchResult, row: Measured) -> str:
    del result
    counts = row.counts
    return f"{counts.per_piece:.1f}" if counts is not None and counts.h2d_copies else NOTHING


def _python(result: BenchResult, row: Measured) -> str:
    del result
    return f"{row.python * 1e6:,.1f} us" if row.python_seconds else NOTHING


def _python_ratio(result: BenchResult, row: Measured) -> str:
    return f"{row.python / result.native.python:,.2f}" if row.python_seconds else NOTHING


_LINES: Sequence[tuple[str, _Cell]] = (
    ("Optimizer step", lambda _, row: milliseconds(row.step)),
    ("  over the floor", _ratio),
    ("  exposed transfer", _exposed),
    ("Training step", lambda _, row: milliseconds(row.training)),
    (
        "  longer than native",
        lambda result, row: _longer(result, row, row.training - result.native.training),
    ),
    ("Device memory, peak", lambda _, row: mib(row.peak_nbytes)),
    ("  between steps", lambda _, row: mib(row.idle_nbytes)),
    ("  taken by a step", lambda _, row: mib(row.working_nbytes)),
    ("Host memory", lambda _, row: mib(row.host_nbytes) if row.host_nbytes else NOTHING),
    ("step() returns after", lambda _, row: milliseconds(row.returns)),
    ("  share of the floor", lambda result, row: percent(row.returns / result.floor_seconds)),
    ("Python per parameter", _python),
    ("  over native", _python_ratio),
    ("Copies to device / host", _counts),
    ("Launches", lambda _, row: NOTHING if row.counts is None else f"{row.counts.launches:,}"),
    ("Copies, launches per piece", _per_piece),
)
_SECTION_ENDS = {"  longer than native", "Host memory"}
_LEAST: tuple[str, _Cell] = ("  least", lambda _, row: milliseconds(min(row.step_seconds)))


def table_lines(result: BenchResult) -> list[TableLine]:
    """Return the table's lines: a label, and a cell for each contender.

    Lines that nobody has a figure in are left out.
    """
    lines = list(_LINES)
    if not result.is_virtual:
        lines.insert(1, _LEAST)
    cells = [(label, [cell(result, row) for row in result.rows]) for label, cell in lines]
    return [(label, row) for label, row in cells if set(row) != {NOTHING}]


def footnotes(result: BenchResult) -> list[str]:
    """Return what has to be said about single contenders."""
    notes = [f"{row.name}: {row.note}" for row in result.rows if row.note]
    return [*notes, *result.absent]


def print_result(result: BenchResult, settings: BenchSettings) -> None:
    """Print what was measured, with rich where it is installed."""
    introduction, lines = introduce(result, settings), table_lines(result)
    names = [row.name for row in result.rows]
    if settings.markdown:
        print("\n".join(_markdown(introduction, names, lines)))
    else:
        print("\n".join(_aligned(introduction)) + "\n")
        if find_spec("rich") is None:
            print("\n".join(_aligned([("", names), *lines], right=True)))
        else:
            _print_rich(names, lines)
    print("".join(f"\n{note}" for note in footnotes(result)))


def _aligned(lines: Sequence[TableLine], *, right: bool = False) -> list[str]:
    label_width = max(len(label) for label, _ in lines)
    columns = zip(*(cells for _, cells in lines), strict=True)
    widths = [max(map(len, column)) for column in columns]
    rows = []
    for label, cells in lines:
        texts = [
            cell.rjust(width) if right else cell for cell, width in zip(cells, widths, strict=True)
        ]
        rows.append("  ".join([label.ljust(label_width), *texts]).rstrip())
    return rows


def _print_rich(names: Sequence[str], lines: Sequence[TableLine]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for label, cells in lines:
        table.add_row(label, *cells, end_section=label in _SECTION_ENDS)
    console = Console()
    # Lines longer than a narrow terminal can be read; columns cut short cannot.
    needed = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    Console(width=max(console.width, needed)).print(table)


def _markdown(
    introduction: Sequence[TableLine], names: Sequence[str], lines: Sequence[TableLine]
) -> list[str]:
    facts = [f"- {name}: {text}" if name else f"  {text}" for name, (text,) in introduction]
    header = [f"| | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    body = [f"| {_indented(label)} | {' | '.join(cells)} |" for label, cells in lines]
    return [*facts, "", *header, *body]


def _indented(label: str) -> str:
    inner = label.lstrip()
    return "&nbsp;" * (len(label) - len(inner)) + inner


def content_of(result: BenchResult, settings: BenchSettings) -> dict[str, object]:
    """Return every figure, in the units of its name, as JSON has it."""
    workload = result.workload
    return {
        "swapopt_torch": __version__,
        "torch": torch.__version__,
        "device": result.device_title,
        "clock": result.clock_name,
        "workload": {
            "name": workload.name,
            "parameters": workload.numel,
            "tensors": len(workload.shapes),
            "dtype": str(workload.dtype),
            "state_nbytes": workload.state_nbytes,
        },
        "optimizer": settings.optimizer,
        "swap_times": settings.swap_times,
        "training_seconds": settings.training_seconds,
        "link": asdict(result.link),
        "demand": asdict(result.demand),
        "floor_seconds": result.floor_seconds,
        "optimum": asdict(result.optimum),
        "contenders": [_row_content(result, row) for row in result.rows],
        "not_measured": list(result.absent),
    }


def _row_content(result: BenchResult, row: Measured) -> dict[str, object]:
    return {
        **asdict(row),
        "step": row.step,
        "training": row.training,
        "returns": row.returns,
        "floor_ratio": result.ratio(row),
        "exposed_seconds": result.exposed_seconds(row),
        "working_nbytes": row.working_nbytes,
    }
