"""The three pictures of the report: loss curves, memory over time, the streams of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from swapopt_torch.demo.accelerator import Accelerator
from swapopt_torch.demo.observe import Lane, Phase, StepRow
from swapopt_torch.demo.report import LANES
from swapopt_torch.demo.results import ResultRow, RunKind, RunResult
from swapopt_torch.demo.table import MIB, hidden_percent, mib, percent

INK, MUTED, PALE = "#1f2933", "#66727f", "#e3e8ee"
RUN_COLORS = {
    RunKind.NATIVE: "#9aa5b1",
    RunKind.PER_TENSOR: "#e08a1e",
    RunKind.PACKED: "#0b6fb8",
}
LANE_COLORS: dict[Lane, tuple[str, str]] = {
    "h2d": ("#0b6fb8", "#6cb0e0"),
    "compute": ("#1b8a5a", "#1b8a5a"),
    "d2h": ("#c2571a", "#eda06f"),
}
"""Two shades of the copies, so that neighbours can be told apart."""
GAPS_NOTE = (
    "Gaps between copies to the device: a copy waits until the batch that was in its memory before "
    "is\nupdated and copied to the host. Small copies also wait for their launch."
)
PHASE_COLORS: dict[Phase, str] = {
    "forward": "#b49ae0",
    "backward": "#d9d04f",
    "update": "#7cc6a0",
}
PHASE_LABELS: dict[Phase, str] = {
    "forward": "forward",
    "backward": "backward",
    "update": "update, and waiting for its copies",
}

# matplotlib's own type of a style: values of any kind under their names.
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": PALE,
    "legend.frameon": False,
    "savefig.dpi": 160,
}


def draw_losses(path: Path, rows: Sequence[ResultRow]) -> None:
    """Draw the loss of every run; native lies broad under the others."""
    differ = any("losses" in row.differences for row in rows)
    title = "The losses differ" if differ else "The same loss to the last bit"
    strokes = {
        RunKind.NATIVE: (8.0, "-"),
        RunKind.PER_TENSOR: (3.6, "-"),
        RunKind.PACKED: (1.5, (0, (3, 2))),
    }
    with style.context(STYLE):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for row in rows:
            kind, losses = row.run.kind, row.run.losses
            width, dashes = strokes[kind]
            axes.plot(
                range(1, len(losses) + 1),
                losses,
                color=INK if kind is RunKind.PACKED else RUN_COLORS[kind],
                linewidth=width,
                linestyle=dashes,
                label=kind.value,
                solid_capstyle="round",
            )
        axes.set(title=title, xlabel="training step", ylabel="loss (nats per byte)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.grid(axis="y")
        axes.legend(handlelength=3.2, labelspacing=0.9)
        figure.savefig(path)


def draw_memory(path: Path, rows: Sequence[ResultRow], accelerator: Accelerator) -> None:
    """Draw the device memory of every run through the sampled steps, one panel for each."""
    native = next(row.run for row in rows if row.run.kind is RunKind.NATIVE)
    with style.context(STYLE):
        figure = Figure(figsize=(7.6, 7.2), layout="constrained")
        panels = figure.subplots(len(rows), 1, sharey=True)
        for axes, row in zip(panels, rows, strict=True):
            _draw_memory_panel(axes, row.run, native)
        panels[0].set_ylim(0, native.peak_nbytes / MIB * 1.22)
        panels[-1].set_xlabel(
            f"ms ({accelerator.clock_name}); each run has a time scale of its own"
        )
        figure.supylabel("device memory in use (MiB)", fontsize=9.5)
        figure.legend(
            handles=[
                Patch(color=color, label=PHASE_LABELS[phase])
                for phase, color in PHASE_COLORS.items()
            ],
            loc="outside upper right",
            ncols=len(PHASE_COLORS),
        )
        figure.savefig(path)


def _draw_memory_panel(axes: Axes, run: RunResult, native: RunResult) -> None:
    origin = run.memory[0].seconds
    times = [(sample.seconds - origin) * 1e3 for sample in run.memory]
    sizes = [sample.nbytes / MIB for sample in run.memory]
    color = RUN_COLORS[run.kind]
    for phase, first, last in _phases(run, origin):
        axes.axvspan(first, last, 0.93, 1, color=PHASE_COLORS.get(phase, "white"), linewidth=0)
    axes.fill_between(times, sizes, step="post", color=color, alpha=0.45, linewidth=0)
    axes.plot(times, sizes, drawstyle="steps-post", color=color, linewidth=1.3)
    for nbytes, name in ((run.peak_nbytes, "peak"), (run.idle_nbytes, "between steps")):
        axes.axhline(nbytes / MIB, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{name}\n{mib(nbytes)}",
            (1.01, nbytes / MIB),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8.5,
            annotation_clip=False,
        )
    saved = 1 - run.peak_nbytes / native.peak_nbytes
    detail = "" if run is native else f": peak {percent(-saved)}"
    axes.set_title(f"{run.kind.value}{detail}")
    axes.set_xlim(times[0], times[-1])


def _phases(run: RunResult, origin: float) -> Iterator[tuple[Phase, float, float]]:
    """Yield each phase of the sampled steps with its first and last moment in ms."""
    for (_, phase), samples in groupby(run.memory, key=lambda item: (item.step, item.phase)):
        moments = [(sample.seconds - origin) * 1e3 for sample in samples]
        yield phase, moments[0], moments[-1]


def draw_timeline(path: Path, rows: Sequence[ResultRow], accelerator: Accelerator) -> None:
    """Draw the streams of one optimizer step of each swapped run, in the order of the table."""
    shown = [row for row in rows if row.run.kind is not RunKind.NATIVE]
    with style.context(STYLE):
        figure = Figure(figsize=(9.0, 6.0), layout="constrained")
        panels = figure.subplots(len(shown), 1, sharex=True)
        for axes, row in zip(panels, shown, strict=True):
            _draw_lanes(axes, row)
        panels[-1].set_xlabel(
            f"ms since the optimizer step began ({accelerator.clock_name})\n\n{GAPS_NOTE}"
        )
        figure.legend(
            handles=[
                tuple(Patch(color=shade) for shade in LANE_COLORS[lane]) for lane in ("h2d", "d2h")
            ]
            + [(Patch(color=LANE_COLORS["compute"][0]),)],
            labels=[
                "copies to the device, dark and light in turn",
                "copies to the host, likewise",
                "updates",
            ],
            handler_map={tuple: HandlerTuple(ndivide=None)},
            loc="outside upper left",
            ncols=3,
        )
        figure.savefig(path)


def _draw_lanes(axes: Axes, row: ResultRow) -> None:
    lanes = list(LANES)
    labels = []
    for place, lane in enumerate(lanes):
        items = [item for item in row.run.step_rows if item.lane == lane]
        shades = [LANE_COLORS[lane][index % 2] for index in range(len(items))]
        axes.broken_barh(
            [(item.start_seconds * 1e3, item.seconds * 1e3) for item in items],
            (place - 0.36, 0.72),
            facecolors=shades,
            edgecolors=shades,
            # An update may be too short to be seen without an edge.
            linewidth=0.8 if lane == "compute" else 0,
        )
        labels.append(_lane_label(lane, items))
    _mark_tail(axes, row.run.step_rows)
    axes.set_yticks(range(len(lanes)), labels)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(axis="x")
    axes.margins(x=0.01)
    axes.set_title(
        f"{row.run.kind.value}: {hidden_percent(row.hidden_share)} of the transfer time hidden"
    )


def _lane_label(lane: Lane, items: Sequence[StepRow]) -> str:
    busy = f"busy {sum(item.seconds for item in items) * 1e3:.2f} ms"
    if lane == "compute":
        return f"{LANES[lane]}\n{busy}"
    moved = sum(item.nbytes for item in items)
    return f"{LANES[lane]}\n{mib(moved)} in {len(items)} copies\n{busy}"


def _mark_tail(axes: Axes, items: Sequence[StepRow]) -> None:
    """Shade the time after the last update, when only copies to the host are left."""
    updated = max((item.end_seconds for item in items if item.lane == "compute"), default=0.0)
    done = max((item.end_seconds for item in items), default=0.0)
    if done > updated:
        axes.axvspan(updated * 1e3, done * 1e3, color=PALE, alpha=0.8, linewidth=0, zorder=0)
        axes.annotate(
            f"tail: {(done - updated) * 1e3:.2f} ms,\nbeside the\nnext forward",
            (done * 1e3, list(LANES).index("compute")),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            annotation_clip=False,
        )
