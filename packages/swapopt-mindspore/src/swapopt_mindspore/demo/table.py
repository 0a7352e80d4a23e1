"""The results as a table on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from swapopt_mindspore.demo.reported import REPORTED, Reported
from swapopt_mindspore.demo.results import Ratios, ResultRow, RunKind, Transfers

MIB = 2**20
NOTHING = "-"


def mib(nbytes: float) -> str:
    """Write bytes in MiB."""
    return f"{nbytes / MIB:,.1f} MiB"


def milliseconds(seconds: float) -> str:
    """Write seconds in ms."""
    return f"{seconds * 1e3:,.3f} ms"


def percent(share: float) -> str:
    """Write a share in percent."""
    return f"{share:.0%}".replace("%", " %")


def change(share: float) -> str:
    """Write a change as a signed share of native, as the specification does."""
    return f"{share:+.2%}".replace("%", " %")


def _moved(nbytes: int) -> str:
    return mib(nbytes) if nbytes else NOTHING


def _equal(row: ResultRow) -> Text:
    if row.equal_to_native is None:
        return Text(NOTHING)
    return Text("yes", "bold green") if row.equal_to_native else Text("NO", "bold red")


def _transfer(write: Callable[[Transfers], str]) -> Callable[[ResultRow], str]:
    return lambda row: NOTHING if row.run.transfers is None else write(row.run.transfers)


def _ratio(of: Callable[[Ratios], float]) -> Callable[[ResultRow], str]:
    return lambda row: NOTHING if row.ratios is None else change(of(row.ratios))


def _reported(of: Callable[[Reported], float], unit: str) -> Callable[[ResultRow], str]:
    """Return what writes a reported figure: native's as it is, the others' against native's."""

    def write(row: ResultRow) -> str:
        native, value = of(REPORTED[RunKind.NATIVE]), of(REPORTED[row.run.kind])
        return f"{value:,} {unit}" if row.run.kind is RunKind.NATIVE else change(value / native - 1)

    return write


_Line = tuple[str, Callable[[ResultRow], str | Text], bool]

_LINES: Sequence[_Line] = (
    ("Loss at the end (nats per byte)", lambda row: f"{row.run.losses[-1]:.6f}", False),
    ("Equal to native, bit for bit", _equal, True),
    ("Device memory, peak", lambda row: mib(row.run.peak_nbytes), False),
    ("  against native", _ratio(lambda ratios: ratios.peak_nbytes), False),
    ("Device memory, between steps", lambda row: mib(row.run.idle_nbytes), False),
    ("Host memory, pinned", lambda row: _moved(row.run.pinned_nbytes), True),
    ("Optimizer step", lambda row: milliseconds(row.run.step_seconds), False),
    ("  against native", _ratio(lambda ratios: ratios.step_seconds), False),
    ("Whole iteration", lambda row: milliseconds(row.run.iteration_seconds), False),
    ("  against native", _ratio(lambda ratios: ratios.iteration_seconds), True),
    ("Copied to the device, per step", _transfer(lambda it: mib(it.h2d_nbytes)), False),
    ("Copied to the host, per step", _transfer(lambda it: mib(it.d2h_nbytes)), False),
    ("Transfer time, per step", _transfer(lambda it: milliseconds(it.seconds)), False),
    ("  of it updates waited for", _transfer(lambda it: milliseconds(it.exposed_seconds)), False),
    ("  share hidden", _transfer(lambda it: percent(it.hidden_share)), True),
    ("Reported of DeepSeek-V3 on Ascend", lambda row: "", False),
    ("  optimizer step", _reported(lambda it: it.step_milliseconds, "ms"), False),
    ("  whole iteration", _reported(lambda it: it.iteration_milliseconds, "ms"), False),
    ("  device memory, peak", _reported(lambda it: it.peak_gigabytes, "G"), False),
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
