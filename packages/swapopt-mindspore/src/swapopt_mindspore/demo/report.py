"""The report folder: settings and rows as JSON, and the recorded steps as a Chrome trace."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from mindspore.version import __version__ as mindspore_version

from swapopt_mindspore import __version__
from swapopt_mindspore.demo.observe import Lane
from swapopt_mindspore.demo.reported import REPORTED
from swapopt_mindspore.demo.results import ResultRow
from swapopt_mindspore.demo.sentences import COUNTED, STEP_DEFINITION, TRANSFER_DEFINITION
from swapopt_mindspore.demo.settings import OPTIMIZERS, DemoError, DemoSettings

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

LANES: dict[Lane, str] = {
    "h2d": "host to device",
    "compute": "update",
    "d2h": "device to host",
}
"""The lanes of a step, in the order in which a batch passes through them."""


def make_folder(folder: Path) -> None:
    """Make the report folder, before the training that fills it.

    Raises:
        DemoError: it cannot be made or written to.
    """
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DemoError(
            f"The report folder {folder} cannot be written ({error.strerror}). Choose another one "
            "with --output."
        ) from error


def write_json(
    path: Path,
    rows: Sequence[ResultRow],
    settings: DemoSettings,
    optimizer_name: str,
) -> None:
    """Write settings, versions, definitions, reported figures and one row for each run."""
    report: Json = {
        "settings": {
            "steps": settings.steps,
            "model": str(settings.model_size),
            "swap_times": settings.swap_times,
            "optimizer": OPTIMIZERS[optimizer_name],
            "seed": settings.seed,
        },
        "device": {"type": "emulated", "profile": settings.profile, "times": "virtual"},
        "versions": {
            "swapopt-mindspore": __version__,
            "mindspore": mindspore_version,
            "python": platform.python_version(),
        },
        "definitions": {
            "transfers": TRANSFER_DEFINITION,
            "step_seconds": STEP_DEFINITION,
            "counted": COUNTED,
        },
        "reported": {
            kind.value: {
                "step_seconds": reported.step_milliseconds / 1e3,
                "iteration_seconds": reported.iteration_milliseconds / 1e3,
                "peak_gigabytes": reported.peak_gigabytes,
            }
            for kind, reported in REPORTED.items()
        },
        "rows": [_row(row) for row in rows],
    }
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def _row(row: ResultRow) -> Json:
    run = row.run
    equal = {None: None, True: "yes", False: "no"}[row.equal_to_native]
    ratios: Json = None if row.ratios is None else {**asdict(row.ratios)}
    return {
        "run": run.kind.value,
        "equal_to_native": equal,
        "differences": list(row.differences),
        "losses": [loss if math.isfinite(loss) else None for loss in run.losses],
        "state_nbytes": run.state_nbytes,
        "peak_nbytes": run.peak_nbytes,
        "idle_nbytes": run.idle_nbytes,
        "pinned_nbytes": run.pinned_nbytes,
        "step_seconds": run.step_seconds,
        "iteration_seconds": run.iteration_seconds,
        "transfers": None if run.transfers is None else {**asdict(run.transfers)},
        "against_native": ratios,
        "wall_seconds": run.wall_seconds,
        "fingerprints": dict(run.fingerprints),
    }


def write_trace(path: Path, rows: Sequence[ResultRow]) -> None:
    """Write the recorded optimizer step of every run as a Chrome trace.

    Each run is a process and each lane a thread; Perfetto and chrome://tracing open it.
    """
    events: list[Json] = []
    for process, row in enumerate(rows, start=1):
        events.append(_name_event("process_name", process, 0, f"{row.run.kind.value} step"))
        for thread, name in enumerate(LANES.values(), start=1):
            events.append(_name_event("thread_name", process, thread, name))
        threads = {lane: thread for thread, lane in enumerate(LANES, start=1)}
        events.extend(
            {
                "name": item.operation,
                "cat": item.lane,
                "ph": "X",
                "pid": process,
                "tid": threads[item.lane],
                "ts": item.start_seconds * 1e6,
                "dur": item.seconds * 1e6,
                "args": {"bytes": item.nbytes},
            }
            for item in row.run.step_rows
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _name_event(kind: str, process: int, thread: int, name: str) -> Json:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
