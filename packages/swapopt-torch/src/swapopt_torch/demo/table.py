"""The results as a table on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from swapopt_torch.demo.results import ResultRow, RunKind

MIB = 2**20
NOTHING = "-"


def mib(nbytes: float) -> str:
    """Write bytes in MiB."""
    return f"{nbytes / MIB:,.1f} MiB"


def milliseconds(seconds: float) -> str:
    """Write seconds in ms."""
    return f"{seconds * 1e3:,.3f} ms"


def percent(share: float | None) -> str:
    """Write a share in percent; a dash for none."""
    return NOTHING if share is None else f"{share:.0%}".replace("%", " %")


def hidden_percent(share: float | None) -> str:
    """Write the share of transfer time hidden; "none" where it is below zero."""
    return "none" if share is not None and share < 0 else percent(share)


def _moved(nbytes: int) -> str:
    return mib(nbytes) if nbytes else NOTHING


def _equal(row: ResultRow) -> Text:
    if row.equal_to_native is None:
        return Text(NOTHING)
    return Text("yes", "bold green") if row.equal_to_native else Text("NO", "bold red")


def _tail(row: ResultRow) -> str:
    return NOTHING if row.run.kind is RunKind.NATIVE else milliseconds(row.run.tail_seconds)


def _transfer(row: ResultRow) -> str:
    return milliseconds(row.run.transfer_seconds) if row.run.transfer_seconds else NOTHING


_Line = tuple[str, Callable[[ResultRow], str | Text], bool]

_LINES: Sequence[_Line] = (
    ("Loss at the end (nats per byte)", lambda row: f"{row.run.losses[-1]:.6f}", False),
    ("Equal to native, bit for bit", _equal, True),
    ("Device memory, peak", lambda row: mib(row.run.peak_nbytes), False),
    ("Device memory, between steps", lambda row: mib(row.run.idle_nbytes), False),
    ("Host memory, pinned", lambda row: _moved(row.run.pinned_nbytes), True),
    ("Optimizer step", lambda row: milliseconds(row.run.step_seconds), False),
    ("  of it the tail", _tail, False),
    ("Whole iteration", lambda row: milliseconds(row.run.iteration_seconds), True),
    ("Copied to the device, per step", lambda row: _moved(row.run.h2d_nbytes), False),
    ("Copied to the host, per step", lambda row: _moved(row.run.d2h_nbytes), False),
    ("Transfer time, per step", _transfer, False),
    ("Share of transfer time hidden", lambda row: hidden_percent(row.hidden_share), False),
)


def result_table(rows: Sequence[ResultRow]) -> Table:
    """Return the table: a column for each run, a line for each figure."""
    table = Table()
    table.add_column("")
    for row in rows:
        table.add_column(row.run.kind.value, justify="right", no_wrap=True)
    for label, cell, ends_section in _LINES:
        table.add_row(label, *(cell(row) for row in rows), end_section=ends_section)
    return table
