"""The results as a table on the terminal, and the sentences around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from swapopt_torch.demo.accelerator import Accelerator
from swapopt_torch.demo.results import ResultRow, RunKind
from swapopt_torch.demo.settings import OPTIMIZERS, DemoSettings

MIB = 2**20
NOTHING = "-"

HIDDEN_SHARE_DEFINITION = (
    "Share of transfer time hidden = 1 - (optimizer step - native optimizer step) / transfer "
    "time, where transfer time is what the step's copies take by themselves, both directions "
    "added up. 100 %: the step takes no longer than the native one. On a full-duplex link the two "
    "directions hide up to half of it behind each other; hiding more takes longer updates."
)
TAIL_DEFINITION = (
    "An optimizer step is timed from an idle device to an idle device, so it includes its tail, "
    "the last copies to the host. Training does not wait for the tail: it runs beside the next "
    "forward."
)


def mib(nbytes: float) -> str:
    """Write bytes in MiB."""
    return f"{nbytes / MIB:,.1f} MiB"


def milliseconds(seconds: float) -> str:
    """Write seconds in ms."""
    return f"{seconds * 1e3:,.3f} ms"


def percent(share: float | None) -> str:
    """Write a share in percent; a dash for none."""
    return NOTHING if share is None else f"{share:.0%}".replace("%", " %")


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
    ("  of it the tail", _tail, True),
    ("Copied to the device, per step", lambda row: _moved(row.run.h2d_nbytes), False),
    ("Copied to the host, per step", lambda row: _moved(row.run.d2h_nbytes), False),
    ("Transfer time, per step", _transfer, False),
    ("Share of transfer time hidden", lambda row: percent(row.hidden_share), False),
)


def result_table(
    rows: Sequence[ResultRow], settings: DemoSettings, accelerator: Accelerator
) -> Table:
    """Return the table: a column for each run, a line for each figure."""
    table = Table(
        title=f"{OPTIMIZERS[settings.optimizer]}, {settings.steps} steps",
        caption=f"Times: {accelerator.clock_name}, mean of {len(rows[0].run.step_times)} steps.",
        title_style="bold",
        caption_justify="left",
    )
    table.add_column("")
    for row in rows:
        table.add_column(row.run.kind.value, justify="right", no_wrap=True)
    for label, cell, ends_section in _LINES:
        table.add_row(label, *(cell(row) for row in rows), end_section=ends_section)
    return table


def verdict(rows: Sequence[ResultRow]) -> Text:
    """Say in one or two sentences what the table shows."""
    native = next(row.run for row in rows if row.run.kind is RunKind.NATIVE)
    packed = next(row for row in rows if row.run.kind is RunKind.PACKED)
    unequal = [row for row in rows if row.equal_to_native is False]
    if unequal:
        return Text(
            "\n".join(
                f"The {row.run.kind.value} run differs from the native one in "
                f"{', '.join(row.differences[:5])}"
                f"{' and more' if len(row.differences) > 5 else ''}."
                for row in unequal
            ),
            "bold red",
        )
    return Text.assemble(
        ("Every loss, parameter and state is equal to native, bit for bit. ", "bold green"),
        f"Packed swapping took {percent(1 - packed.run.peak_nbytes / native.peak_nbytes)} off the "
        f"peak of device memory and {percent(1 - packed.run.idle_nbytes / native.idle_nbytes)} "
        "off what is held between steps.",
    )


def notes(accelerator: Accelerator) -> Group:
    """Say how the figures are meant, and on a real card what nvidia-smi shows."""
    lines = [Text(TAIL_DEFINITION, "dim"), Text(HIDDEN_SHARE_DEFINITION, "dim")]
    if not accelerator.is_virtual:
        lines.append(Text(cache_note(accelerator.device.type), "yellow"))
    return Group(*lines)


def cache_note(device_type: str) -> str:
    """Say why a card's own tool may show no saving, and what does."""
    tool = {"cuda": "nvidia-smi", "npu": "npu-smi", "xpu": "xpu-smi"}.get(device_type, "its tool")
    return (
        f"{tool} may show no saving. torch's caching allocator keeps freed memory reserved for "
        "itself, and the tool counts what is reserved. The saving is real: the memory is there "
        f"for activations and larger models. torch.{device_type}.max_memory_allocated() and "
        f"memory_allocated() show it; torch.{device_type}.empty_cache() hands unused memory back, "
        f"and then {tool} shows it too."
    )
