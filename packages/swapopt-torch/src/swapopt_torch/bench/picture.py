"""The picture: time and device memory of every contender."""

from __future__ import annotations

from pathlib import Path

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from swapopt_torch.bench.report import MIB, mib, milliseconds
from swapopt_torch.bench.run import BenchResult
from swapopt_torch.demo.figures import INK, MUTED, STYLE

_OWN = ("per-tensor", "packed")
_OWN_COLOR, _OTHER_COLOR, _WORKING_COLOR = "#0b6fb8", "#9aa5b1", "#e08a1e"


def draw(path: Path, result: BenchResult) -> None:
    """Draw optimizer steps beside the floor, and the device memory they take."""
    with style.context(STYLE):
        figure = Figure(figsize=(10.5, 1.9 + 0.5 * len(result.rows)), layout="constrained")
        times, memory = figure.subplots(1, 2, sharey=True)
        names = [row.name for row in result.rows]
        _draw_times(times, result)
        _draw_memory(memory, result)
        times.set_yticks(range(len(names)), names)
        times.invert_yaxis()
        for axes in (times, memory):
            axes.tick_params(axis="y", length=0, labelcolor=INK)
            axes.grid(axis="x")
        figure.suptitle(f"{result.workload.name} on {result.device_title}", x=0.01, ha="left")
        figure.savefig(path)


def _draw_times(axes: Axes, result: BenchResult) -> None:
    floor_ms = result.floor_seconds * 1e3
    for place, row in enumerate(result.rows):
        color = _OWN_COLOR if row.name in _OWN else _OTHER_COLOR
        axes.barh(place, row.step * 1e3, color=color, height=0.62)
        ratio = "" if row is result.native else f" ({result.ratio(row):.2f})"
        label = f"  {milliseconds(row.step)}{ratio}"
        axes.annotate(label, (row.step * 1e3, place), va="center", fontsize=8.5)
    axes.axvline(floor_ms, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, max(row.step for row in result.rows) * 1e3 * 1.45)
    axes.set_title("Optimizer step")
    axes.set_xlabel(
        f"ms, {result.clock_name}\n"
        f"dashed: the floor, {milliseconds(result.floor_seconds)}; in brackets: step / floor"
    )


def _draw_memory(axes: Axes, result: BenchResult) -> None:
    shared_mib = 2 * result.workload.nbytes / MIB
    for place, row in enumerate(result.rows):
        idle_mib = row.idle_nbytes / MIB
        color = _OWN_COLOR if row.name in _OWN else _OTHER_COLOR
        axes.barh(place, idle_mib, color=color, height=0.62)
        axes.barh(place, row.working_nbytes / MIB, left=idle_mib, color=_WORKING_COLOR, height=0.62)
        axes.annotate(
            f"  {mib(row.peak_nbytes)}", (row.peak_nbytes / MIB, place), va="center", fontsize=8.5
        )
    axes.axvline(shared_mib, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
    axes.set_xlim(0, max(row.peak_nbytes for row in result.rows) / MIB * 1.3)
    axes.set_title("Device memory, peak")
    axes.set_xlabel(
        "MiB; orange: only while a step runs\ndotted: parameters and gradients, which all share"
    )
