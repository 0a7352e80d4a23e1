"""The virtual clock and what happened when."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

from ._native import native

Lane = Literal["compute", "h2d", "d2h", "host", "collective"]
_LANES: tuple[Lane, ...] = get_args(Lane)
_HOST_DEVICE_INDEX = -1


@dataclass(frozen=True)
class TimelineRow:
    """One operation on a stream, or one wait of the host (``device_index`` -1, lane "host")."""

    device_index: int
    stream_id: int
    lane: Lane
    operation: str
    nbytes: int
    start_ns: int
    end_ns: int


def timeline() -> list[TimelineRow]:
    """Everything since the last `clear_timeline`, in the order of issue."""
    return [
        TimelineRow(device, stream, _lane(lane), operation, nbytes, start, end)
        for device, stream, lane, operation, nbytes, start, end in native().timeline()
    ]


def clear_timeline() -> None:
    """Forget the rows so far."""
    native().clear_timeline()


def reset_clock() -> None:
    """Host and streams start again at zero, and all work issued so far counts as done."""
    native().reset_clock()


def now_ns() -> int:
    """The virtual time of the host, in nanoseconds."""
    return native().now_ns()


def advance_host(seconds: float) -> None:
    """Let the host be busy for `seconds` of virtual time (data loading, Python overhead).

    Raises:
        ValueError: a negative time.
    """
    if not seconds >= 0:
        raise ValueError(f"seconds must be 0 or more, found {seconds!r}")
    native().advance_host(round(seconds * 1e9))


def operator_counts() -> dict[str, int]:
    """How often each operator ran on the device since the last `clear_operator_counts`."""
    return native().operator_counts()


def clear_operator_counts() -> None:
    """Start counting anew."""
    native().clear_operator_counts()


def write_chrome_trace(path: str | PathLike[str]) -> None:
    """Write the timeline as a Chrome trace (JSON) that Perfetto and chrome://tracing open.

    One process per device with a track per stream and one per copy engine and the compute units;
    one process for the host.
    """
    rows = timeline()
    events = [*_names(rows), *_slices(rows)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _lane(name: str) -> Lane:
    for lane in _LANES:
        if lane == name:
            return lane
    raise AssertionError(f"the extension knows a lane that Python does not: {name}")


_ENGINE_TRACKS: dict[Lane, int] = {"compute": 1_000_001, "h2d": 1_000_002, "d2h": 1_000_003}


def _process(row: TimelineRow) -> int:
    return row.device_index + 2


def _tracks(row: TimelineRow) -> Iterator[tuple[int, str]]:
    if row.lane == "host":
        yield 0, "host waits"
        return
    yield row.stream_id, f"stream {row.stream_id}" if row.stream_id else "default stream"
    if row.lane in _ENGINE_TRACKS:  # transfers between devices do not queue for an engine
        yield _ENGINE_TRACKS[row.lane], f"engine: {row.lane}"


def _process_name(row: TimelineRow) -> str:
    return "host" if row.device_index == _HOST_DEVICE_INDEX else f"virtual:{row.device_index}"


def _names(rows: Iterable[TimelineRow]) -> Iterator[dict[str, object]]:
    processes: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    for row in rows:
        processes[_process(row)] = _process_name(row)
        for track, name in _tracks(row):
            tracks[_process(row), track] = name
    for process, name in sorted(processes.items()):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for (process, track), name in sorted(tracks.items()):
        base = {"ph": "M", "pid": process, "tid": track}
        yield {**base, "name": "thread_name", "args": {"name": name}}
        yield {**base, "name": "thread_sort_index", "args": {"sort_index": track}}


def _slices(rows: Iterable[TimelineRow]) -> Iterator[dict[str, object]]:
    for row in rows:
        for track, _ in _tracks(row):
            yield {
                "ph": "X",
                "name": row.operation,
                "cat": row.lane,
                "pid": _process(row),
                "tid": track,
                "ts": row.start_ns / 1000,
                "dur": (row.end_ns - row.start_ns) / 1000,
                "args": {"nbytes": row.nbytes, "stream": row.stream_id, "lane": row.lane},
            }
