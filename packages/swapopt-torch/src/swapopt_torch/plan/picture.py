"""The trade of device memory for time over swap_times, as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from swapopt_torch.demo.figures import INK, MUTED, PALE, RUN_COLORS, STYLE
from swapopt_torch.demo.results import RunKind
from swapopt_torch.plan.plan import Plan
from swapopt_torch.plan.report import GIB, gib, ms

_LIMIT_COLOR = "#c2571a"


def draw_trade(path: Path, plan: Plan) -> None:
    """Draw the device's peak and the step's time over swap_times, with native beside them."""
    with style.context(STYLE):
        figure = Figure(figsize=(7.6, 6.4), layout="constrained")
        memory, time = figure.subplots(2, 1, sharex=True)
        _draw_memory(memory, plan)
        _draw_time(time, plan)
        counts = list(plan.trade.swapped)
        for axes in (memory, time):
            axes.axvline(plan.trade.chosen, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
            axes.grid(axis="y")
        time.set_xscale("log", base=2)
        time.set_xlim(counts[0] / 1.15, counts[-1] * 1.15)
        ticks = [2**power for power in range(counts[-1].bit_length())]
        time.xaxis.set_major_locator(FixedLocator(ticks))
        time.xaxis.set_minor_locator(NullLocator())
        time.set_xticklabels([f"{count}" for count in ticks])
        time.set_xlabel("swap_times")
        figure.suptitle(
            f"{plan.case.optimizer}, {'packed' if plan.case.packed else 'per tensor'}, "
            f"{plan.link.name}",
            fontsize=9.5,
            color=MUTED,
        )
        figure.savefig(path)


def _draw_memory(axes: Axes, plan: Plan) -> None:
    chosen, native = plan.chosen, plan.trade.native
    counts = list(plan.trade.swapped)
    peaks = [found.device_peak_bytes / GIB for found in plan.trade.swapped.values()]
    idle = [found.device_idle_bytes / GIB for found in plan.trade.swapped.values()]
    axes.fill_between(counts, idle, color=PALE, linewidth=0)
    axes.plot(counts, peaks, color=_color(plan), marker="o", markersize=4)
    axes.annotate(
        f"between steps: {gib(chosen.device_idle_bytes)}",
        (counts[0], idle[0] / 2),
        xytext=(6, 0),
        textcoords="offset points",
        fontsize=8.5,
        color=MUTED,
    )
    _line(axes, native.device_peak_bytes / GIB, f"native: {gib(native.device_peak_bytes)}", MUTED)
    if plan.trade.budget_bytes is not None:
        allowed = (chosen.device_idle_bytes + plan.trade.budget_bytes) / GIB
        _line(axes, allowed, f"budget: {gib(plan.trade.budget_bytes)} more", _LIMIT_COLOR)
    _name_chosen(axes, plan, chosen.device_peak_bytes / GIB, gib(chosen.device_peak_bytes))
    axes.set_ylim(0, max(*peaks, native.device_peak_bytes / GIB) * 1.25)
    axes.set(title="Peak of device memory in the step: parameters, gradients, states", ylabel="GiB")


def _draw_time(axes: Axes, plan: Plan) -> None:
    chosen, native = plan.chosen, plan.trade.native
    counts = list(plan.trade.swapped)
    times = [found.step_ns / 1e6 for found in plan.trade.swapped.values()]
    axes.plot(counts, times, color=_color(plan), marker="o", markersize=4)
    _line(axes, native.step_ns / 1e6, f"native: {ms(native.step_ns)}", MUTED)
    link = f"the link alone: {ms(plan.link_ns)}"
    _line(axes, plan.link_ns / 1e6, link, _LIMIT_COLOR, below=True)
    _name_chosen(axes, plan, chosen.step_ns / 1e6, ms(chosen.step_ns))
    axes.set_ylim(0, max(times) * 1.2)
    axes.set(title="Time of the optimizer step", ylabel="ms")


def _color(plan: Plan) -> str:
    return RUN_COLORS[RunKind.PACKED if plan.case.packed else RunKind.PER_TENSOR]


def _line(axes: Axes, height: float, text: str, color: str, *, below: bool = False) -> None:
    axes.axhline(height, color=color, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        text,
        (0.995, height),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4 if below else 3),
        textcoords="offset points",
        ha="right",
        va="top" if below else "bottom",
        fontsize=8.5,
        color=color,
    )


def _name_chosen(axes: Axes, plan: Plan, height: float, text: str) -> None:
    axes.plot(
        plan.trade.chosen,
        height,
        "o",
        markersize=10,
        markerfacecolor="none",
        markeredgecolor=INK,
    )
    axes.annotate(
        f"swap_times={plan.trade.chosen}: {text}",
        (plan.trade.chosen, height),
        xytext=(8, 9),
        textcoords="offset points",
        fontsize=8.5,
    )
