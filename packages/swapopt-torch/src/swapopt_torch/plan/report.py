"""A plan as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swapopt_torch.plan.case import Host
from swapopt_torch.plan.plan import Plan
from swapopt_torch.plan.rehearsal import Rehearsal

GIB = 2**30


def gib(nbytes: int) -> str:
    """Return bytes as GiB, or as MiB if they are few."""
    if nbytes >= GIB // 10:
        return f"{nbytes / GIB:,.2f} GiB"
    return f"{nbytes / 2**20:,.2f} MiB" if nbytes >= 2**20 else f"{nbytes:,} bytes"


def ms(ns: int) -> str:
    """Return nanoseconds as milliseconds."""
    return f"{ns / 1e6:,.2f} ms" if ns >= 10**7 else f"{ns / 1e6:.3f} ms"


def show(console: Console, plan: Plan) -> None:
    """Print what was planned and assumed, the step, and the trade of memory for time."""
    for name, text in _introduction(plan):
        console.print(Text(f"{name:<9}{text}"), soft_wrap=True)
    console.print(_step_table(plan))
    console.print(_trade_table(plan))
    for note in _notes(plan):
        console.print(Text(note))


def _introduction(plan: Plan) -> list[tuple[str, str]]:
    case, card, link = plan.case, plan.card, plan.link
    model, sizes = case.model(), case.shard_sizes()
    share = plan.host.share_bytes_per_second(card)
    limited = link.h2d_bytes_per_second < card.h2d_bytes_per_second
    ways = "in each direction" if card.full_duplex else "in one direction at a time"
    return [
        ("Model", f"{_count(model.numel)} parameters: {model.description}"),
        (
            "Rank",
            f"1 of {case.shards}: {sum(map(math.prod, sizes)):,} parameters in "
            f"{len(sizes):,} tensors ({case.dtype}), {case.optimizer}, {_way(plan)}",
        ),
        (
            "Link",
            f"{card.name}: {card.h2d_bytes_per_second / 1e9:,.1f} GB/s {ways}; the host's "
            f"{plan.host.bytes_per_second / 1e9:,.0f} GB/s (--host-bandwidth) leave "
            f"{share / 1e9:,.1f} GB/s to {_ranks(plan.host)}"
            + (": this limits the link" if limited else ""),
        ),
    ]


def _ranks(host: Host) -> str:
    return "its one rank" if host.ranks == 1 else f"each of {host.ranks} ranks"


def _count(numel: int) -> str:
    return f"{numel / 1e9:,.2f} billion" if numel >= 1e9 else f"{numel / 1e6:,.1f} million"


def _way(plan: Plan) -> str:
    return "packed" if plan.case.packed else "per tensor"


def _step_table(plan: Plan) -> Table:
    native, chosen = plan.trade.native, plan.chosen
    table = Table(box=SIMPLE_HEAD, title="The optimizer step of one rank", title_justify="left")
    table.add_column("")
    table.add_column("native", justify="right")
    table.add_column(f"swap_times={plan.trade.chosen}", justify="right")
    rows = [
        (
            "Device memory, peak in the step",
            gib(native.device_peak_bytes),
            gib(chosen.device_peak_bytes),
        ),
        ("  between steps", gib(native.device_idle_bytes), gib(chosen.device_idle_bytes)),
        ("  for the step alone", gib(native.staging_bytes), gib(chosen.staging_bytes)),
        ("Pinned host memory, this rank", "", gib(chosen.host_bytes)),
        (f"  all {plan.host.ranks} ranks of a host", "", gib(plan.host_bytes)),
        ("Step, until the device is idle", ms(native.step_ns), ms(chosen.step_ns)),
        ("  until the next forward can begin", ms(native.wait_ns), ms(chosen.wait_ns)),
        ("  until step() has returned", ms(native.issue_ns), ms(chosen.issue_ns)),
        ("Copied in each direction", "", gib(chosen.copied_bytes)),
        ("  the least time that takes", "", ms(plan.link_ns)),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _trade_table(plan: Plan) -> Table:
    trade = plan.trade
    table = Table(box=SIMPLE_HEAD, title="Device memory for time", title_justify="left")
    headings = ("swap_times", "device peak", "for the step", "step", "x native")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_row(*_trade_row("native", trade.native, plan))
    for count, found in trade.swapped.items():
        style = "bold" if count == trade.chosen else None if trade.fits(found) else "dim"
        table.add_row(*_trade_row(str(count), found, plan), style=style)
    return table


def _trade_row(name: str, found: Rehearsal, plan: Plan) -> tuple[str, ...]:
    trade = plan.trade
    mark = ""
    if found.swap_times is not None:
        over = "" if trade.fits(found) else "over budget"
        mark = "chosen" if found.swap_times == trade.chosen else over
    return (
        name,
        gib(found.device_peak_bytes),
        gib(found.staging_bytes),
        ms(found.step_ns),
        f"{found.step_ns / trade.native.step_ns:,.2f}",
        mark,
    )


def _notes(plan: Plan) -> list[str]:
    notes = [
        "Device memory is parameters, gradients and states; activations are not in it. Times are "
        "of the profile; Python's own time is not in them.",
        "A checkpoint that is alive during a step takes the pinned host memory once more.",
    ]
    if plan.trade.budget_bytes is not None:
        notes.insert(
            0,
            f"swap_times={plan.trade.least_swap_times} is the fewest that keeps a step's own "
            f"device memory within {plan.trade.budget_bytes:,} bytes; the fastest that does is "
            "chosen.",
        )
    return notes


def write_json(path: Path, plan: Plan) -> None:
    """Write everything that was asked, assumed and found."""
    case, trade = plan.case, plan.trade
    sizes = case.shard_sizes()
    content = {
        "case": asdict(case),
        "model": {"description": case.model().description, "numel": case.model().numel},
        "rank": {"tensors": len(sizes), "numel": sum(map(math.prod, sizes))},
        "host": asdict(plan.host),
        "profile": plan.card.name,
        "link": {
            "h2d_bytes_per_second": plan.link.h2d_bytes_per_second,
            "d2h_bytes_per_second": plan.link.d2h_bytes_per_second,
            "full_duplex": plan.link.full_duplex,
        },
        "chosen_swap_times": trade.chosen,
        "budget_bytes": trade.budget_bytes,
        "least_swap_times": trade.least_swap_times,
        "host_bytes_all_ranks": plan.host_bytes,
        "link_ns": plan.link_ns,
        "native": _figures(trade.native),
        "swapped": [_figures(found) for found in trade.swapped.values()],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _figures(found: Rehearsal) -> dict[str, int | None]:
    return {**asdict(found), "staging_bytes": found.staging_bytes}
