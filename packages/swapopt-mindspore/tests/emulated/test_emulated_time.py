"""Virtual time on the emulated device: engines, events, determinism, the timeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from steps import adopted, follow, host_tensor, random

from swapopt_mindspore.emulated import PROFILES, EmulatedDevice, TimelineRow

NUMEL = 25_000
COPY_NS = 8_000 + 4 * NUMEL * 1_000_000_000 // 25_000_000_000
ISSUE_NS = 10_000


def both_ways(device: EmulatedDevice) -> list[TimelineRow]:
    """One copy each way that nothing orders; returns their rows."""
    down, up = adopted(device, random((NUMEL,))), adopted(device, random((NUMEL,)))
    mirrors = [host_tensor(device, random((NUMEL,))) for _ in range(2)]
    device.reset_clock()
    device.clear_timeline()
    device.copy(device.h2d, up, mirrors[0])
    device.copy(device.d2h, mirrors[1], down)
    rows = device.timeline()
    device.synchronize()
    return rows


def test_half_duplex_copies_go_one_after_the_other() -> None:
    h2d, d2h = both_ways(EmulatedDevice("half-duplex"))
    assert (h2d.start_ns, h2d.end_ns) == (ISSUE_NS, ISSUE_NS + COPY_NS)
    assert (d2h.start_ns, d2h.end_ns) == (h2d.end_ns, h2d.end_ns + COPY_NS)


def test_full_duplex_copies_overlap() -> None:
    profile = replace(PROFILES["half-duplex"], full_duplex=True)
    h2d, d2h = both_ways(EmulatedDevice(profile))
    assert (h2d.start_ns, h2d.end_ns) == (ISSUE_NS, ISSUE_NS + COPY_NS)
    assert (d2h.start_ns, d2h.end_ns) == (2 * ISSUE_NS, 2 * ISSUE_NS + COPY_NS)


def test_rows_say_what_moved() -> None:
    h2d, d2h = both_ways(EmulatedDevice("half-duplex"))
    assert (h2d.stream, h2d.lane, h2d.operation, h2d.nbytes) == (
        "h2d stream",
        "h2d",
        "H2D",
        4 * NUMEL,
    )
    assert (d2h.stream, d2h.lane, d2h.operation, d2h.nbytes) == (
        "d2h stream",
        "d2h",
        "D2H",
        4 * NUMEL,
    )


def test_an_update_costs_its_launches_and_its_bytes(device: EmulatedDevice) -> None:
    gradient, state = adopted(device, random((NUMEL,))), adopted(device, random((NUMEL,)))
    device.reset_clock()
    device.clear_timeline()
    with device.updating("Adam", reads=[gradient], writes=[state], launches=1):
        pass
    (row,) = device.timeline()
    traffic = 3 * 4 * NUMEL
    assert (row.operation, row.lane, row.nbytes) == ("Adam", "compute", traffic)
    assert (row.start_ns, row.end_ns) == (ISSUE_NS, ISSUE_NS + traffic // 1000)
    assert device.now_ns == ISSUE_NS


def test_copies_hide_under_computation(device: EmulatedDevice) -> None:
    state, mirror = adopted(device, random((NUMEL,))), host_tensor(device, random((NUMEL,)))
    device.reset_clock()
    device.clear_timeline()
    start, end = device.new_event(timing=True), device.new_event(timing=True)
    start.record(device.compute_stream())
    device.compute("forward", 1e-3)
    device.copy(device.d2h, mirror, state)
    end.record(device.compute_stream())
    forward, d2h = device.timeline()
    assert d2h.end_ns < forward.end_ns == ISSUE_NS + 1_000_000
    assert start.elapsed_time(end) == pytest.approx((ISSUE_NS + 1_000_000) * 1e-6)
    device.synchronize()
    assert device.now_ns == forward.end_ns + 1_000


def test_a_stream_that_waits_begins_later(device: EmulatedDevice) -> None:
    state, mirror = adopted(device, random((NUMEL,))), host_tensor(device, random((NUMEL,)))
    device.reset_clock()
    device.clear_timeline()
    device.compute("backward", 1e-3)
    follow(device, device.d2h, device.compute_stream())
    device.copy(device.d2h, mirror, state)
    backward, d2h = device.timeline()
    assert d2h.start_ns == backward.end_ns
    device.synchronize()


def test_the_time_between_events_that_were_not_recorded_is_refused(
    device: EmulatedDevice,
) -> None:
    with pytest.raises(ValueError, match="both events must be recorded"):
        device.new_event().elapsed_time(device.new_event())


def test_two_runs_take_the_same_nanoseconds() -> None:
    assert both_ways(EmulatedDevice("ascend-910b")) == both_ways(EmulatedDevice("ascend-910b"))


def test_the_host_may_be_busy(device: EmulatedDevice) -> None:
    device.advance_host(1e-3)
    assert device.now_ns == 1_000_000
    with pytest.raises(ValueError, match="seconds must be 0 or more, found -1"):
        device.advance_host(-1)


def test_a_chrome_trace_has_a_track_per_stream_and_engine(
    device: EmulatedDevice, tmp_path: Path
) -> None:
    state, mirror = adopted(device, random((NUMEL,))), host_tensor(device, random((NUMEL,)))
    device.clear_timeline()
    with device.updating("Adam", reads=[], writes=[state], launches=1):
        pass
    follow(device, device.d2h, device.compute_stream())
    device.copy(device.d2h, mirror, state)
    device.synchronize()
    device.write_chrome_trace(tmp_path / "trace.json")

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    drawn = {
        (names[event["pid"], event["tid"]], event["name"]): event
        for event in events
        if event["ph"] == "X"
    }
    assert set(drawn) == {
        ("stream: compute stream", "Adam"),
        ("engine: compute", "Adam"),
        ("stream: d2h stream", "D2H"),
        ("engine: d2h", "D2H"),
        ("waits", "synchronize device"),
    }
    d2h = next(row for row in device.timeline() if row.lane == "d2h")
    event = drawn["engine: d2h", "D2H"]
    assert (event["ts"], event["dur"]) == (d2h.start_ns / 1000, (d2h.end_ns - d2h.start_ns) / 1000)
    assert event["args"]["nbytes"] == 4 * NUMEL
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {"host", "emulated half-duplex"}
