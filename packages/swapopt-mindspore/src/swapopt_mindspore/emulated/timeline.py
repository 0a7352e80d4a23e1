"""What happened when, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

Lane = Literal["compute", "h2d", "d2h", "host"]


@dataclass(frozen=True)
class TimelineRow:
    """One update, computation or copy on a stream, or one wait of the host (lane "host").

    Attributes:
        stream: the stream's name, or "host".
        lane: which resource it took.
        operation: what it was called.
        nbytes: bytes copied, or read and written by an update.
        start_ns, end_ns: virtual time.
    """

    stream: str
    lane: Lane
    operation: str
    nbytes: int
    start_ns: int
    end_ns: int


def write_chrome_trace(
    rows: Sequence[TimelineRow], path: str | PathLike[str], device_name: str
) -> None:
    """Write rows as a Chrome trace (JSON) that Perfetto and chrome://tracing open.

    The device is one process with a track per stream and one per engine; the host is another.

    Args:
        rows: what happened.
        path: the file; it is replaced.
        device_name: how the device's process is called.
    """
    tracks = _tracks(rows)
    events = [*_names(tracks, device_name), *_slices(rows, tracks)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


_HOST, _DEVICE = 1, 2
_Tracks = dict[tuple[int, str], int]


def _tracks_of(row: TimelineRow) -> list[tuple[int, str]]:
    """Return the process and track names where a row is drawn."""
    if row.lane == "host":
        return [(_HOST, "waits")]
    return [(_DEVICE, f"stream: {row.stream}"), (_DEVICE, f"engine: {row.lane}")]


def _tracks(rows: Sequence[TimelineRow]) -> _Tracks:
    names = {track for row in rows for track in _tracks_of(row)}
    return {track: number for number, track in enumerate(sorted(names))}


def _names(tracks: _Tracks, device_name: str) -> Iterator[dict[str, object]]:
    for process, name in ((_HOST, "host"), (_DEVICE, device_name)):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for (process, name), track in tracks.items():
        base = {"ph": "M", "pid": process, "tid": track}
        yield {**base, "name": "thread_name", "args": {"name": name}}
        yield {**base, "name": "thread_sort_index", "args": {"sort_index": track}}


def _slices(rows: Sequence[TimelineRow], tracks: _Tracks) -> Iterator[dict[str, object]]:
    for row in rows:
        for process, name in _tracks_of(row):
            yield {
                "ph": "X",
                "name": row.operation,
                "cat": row.lane,
                "pid": process,
                "tid": tracks[process, name],
                "ts": row.start_ns / 1000,
                "dur": (row.end_ns - row.start_ns) / 1000,
                "args": {"nbytes": row.nbytes, "lane": row.lane},
            }
