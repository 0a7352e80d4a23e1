"""The virtual clock, profiles, the timeline and its trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swapopt_torch import virtual

GIB = 1 << 30
ROUND = virtual.Profile(
    name="round figures",
    h2d_bytes_per_second=1e9,
    d2h_bytes_per_second=0.5e9,
    full_duplex=True,
    memory_bytes_per_second=10e9,
    host_issue_seconds=10e-6,
    copy_overhead_seconds=5e-6,
    sync_seconds=0.0,
)


def elapsed_ns(work: Callable[[], object]) -> int:
    torch.virtual.synchronize()
    before = virtual.now_ns()
    work()
    torch.virtual.synchronize()
    return virtual.now_ns() - before


@pytest.fixture
def megabyte() -> tuple[torch.Tensor, torch.Tensor]:
    """A pinned and a device tensor of 1e6 bytes."""
    virtual.set_profile(ROUND)
    return (
        torch.zeros(1_000_000, dtype=torch.uint8).pin_memory(),
        torch.zeros(1_000_000, dtype=torch.uint8, device="virtual"),
    )


def test_copies_and_kernels_cost_what_the_profile_says(
    megabyte: tuple[torch.Tensor, torch.Tensor],
) -> None:
    host, device = megabyte
    assert elapsed_ns(lambda: device.copy_(host, non_blocking=True)) == 10_000 + 5_000 + 1_000_000
    assert elapsed_ns(lambda: host.copy_(device, non_blocking=True)) == 10_000 + 5_000 + 2_000_000
    assert elapsed_ns(device.clone) == 10_000 + 200_000
    assert elapsed_ns(lambda: device.add_(1)) == 10_000 + 200_000
    assert elapsed_ns(lambda: device.sum(dtype=torch.uint8)) == 10_000 + 100_000


@pytest.mark.parametrize(("full_duplex", "expected_ns"), [(True, 2_000_000), (False, 3_000_000)])
def test_opposite_copies_overlap_on_a_full_duplex_link(
    megabyte: tuple[torch.Tensor, torch.Tensor], full_duplex: bool, expected_ns: int
) -> None:
    host, device = megabyte
    virtual.set_profile(
        replace(ROUND, full_duplex=full_duplex, host_issue_seconds=0.0, copy_overhead_seconds=0.0)
    )
    other_host, other_device = host.clone().pin_memory(), device.clone()
    into, out = torch.virtual.Stream(), torch.virtual.Stream()

    def both() -> None:
        with torch.virtual.stream(into):
            device.copy_(host, non_blocking=True)
        with torch.virtual.stream(out):
            other_host.copy_(other_device, non_blocking=True)

    torch.virtual.synchronize()
    assert elapsed_ns(both) == expected_ns


@pytest.mark.parametrize(("list_launch", "launches"), [("one", 1), ("per_tensor", 20)])
def test_list_operators_launch_once_or_once_per_tensor(list_launch: str, launches: int) -> None:
    assert list_launch in ("one", "per_tensor")
    virtual.set_profile(replace(virtual.PROFILES["ascend-910b"], list_launch=list_launch))
    tensors = [torch.zeros(10, device="virtual") for _ in range(20)]
    before = virtual.now_ns()
    torch._foreach_add_(tensors, 1.0)
    assert virtual.now_ns() - before == launches * 52_400
    before = virtual.now_ns()
    torch.cat(tensors)
    assert virtual.now_ns() - before == 52_400


def test_the_figures_of_the_built_in_profiles() -> None:
    h200, ascend, half = (virtual.PROFILES[name] for name in ("h200", "ascend-910b", "half-duplex"))
    assert len(virtual.PROFILES) == 3
    assert (h200.h2d_bytes_per_second, h200.d2h_bytes_per_second) == (53e9, 53e9)
    assert h200.memory_bytes_per_second == 4.3e12
    assert (h200.host_issue_seconds, h200.copy_overhead_seconds) == (4e-6, 2e-6)
    assert (ascend.h2d_bytes_per_second, ascend.memory_bytes_per_second) == (23e9, 1.2e12)
    assert 816 * ascend.host_issue_seconds == pytest.approx(42.75e-3, rel=1e-3)
    assert (ascend.list_launch, h200.list_launch) == ("per_tensor", "one")
    assert (half.h2d_bytes_per_second, half.full_duplex) == (25e9, False)
    assert h200.interconnect_bytes_per_second == 900e9 / 2
    assert ascend.interconnect_bytes_per_second == 7 * 56e9 / 2
    assert half.interconnect_bytes_per_second == half.h2d_bytes_per_second
    for profile in virtual.PROFILES.values():
        figures = {name for name in vars(profile) if name not in ("name", "sources")}
        assert set(profile.sources) == figures


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"h2d_bytes_per_second": 0.0}, "h2d_bytes_per_second"),
        ({"memory_bytes_per_second": float("nan")}, "memory_bytes_per_second"),
        ({"interconnect_bytes_per_second": -1.0}, "interconnect_bytes_per_second"),
        ({"host_issue_seconds": -1e-6}, "host_issue_seconds"),
        ({"interconnect_latency_seconds": -1e-6}, "interconnect_latency_seconds"),
        ({"poll_seconds": 0.0}, "poll_seconds"),
        ({"list_launch": "many"}, "list_launch"),
        ({"sources": {"colour": "blue"}}, "colour"),
    ],
)
def test_profiles_are_validated(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(ROUND, **change)


def test_unknown_profile_name() -> None:
    with pytest.raises(ValueError, match=r"h100.*h200"):
        virtual.set_profile("h100")
    assert virtual.profile().name == "h200"


def test_events_measure_virtual_time(megabyte: tuple[torch.Tensor, torch.Tensor]) -> None:
    host, device = megabyte
    start = torch.virtual.Event(enable_timing=True)
    end = torch.virtual.Event(enable_timing=True)
    torch.virtual.synchronize()
    start.record()
    device.copy_(host, non_blocking=True)
    end.record()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) == pytest.approx(1.015)


def test_host_clock() -> None:
    virtual.reset_clock()
    assert virtual.now_ns() == 0
    virtual.advance_host(1.5e-3)
    assert virtual.now_ns() == 1_500_000
    assert torch.virtual.now() == pytest.approx(1.5e-3)
    with pytest.raises(ValueError, match="seconds must be 0 or more"):
        virtual.advance_host(-1.0)


def test_two_runs_take_the_same_nanoseconds() -> None:
    def run() -> tuple[int, list[virtual.TimelineRow]]:
        torch.virtual.synchronize()
        virtual.reset_clock()
        virtual.clear_timeline()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        model.to("virtual")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            model(torch.ones(4, 8, device="virtual")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.virtual.synchronize()
        return virtual.now_ns(), virtual.timeline()

    assert run() == run()


def test_timeline_rows() -> None:
    virtual.set_profile(ROUND)
    stream = torch.virtual.Stream(1)
    host = torch.zeros(1000, dtype=torch.uint8).pin_memory()
    with torch.virtual.stream(stream):
        device = torch.empty(1000, dtype=torch.uint8, device="virtual")
        device.copy_(host, non_blocking=True)
    stream.synchronize()
    copy, wait = virtual.timeline()[-2:]
    assert (copy.device_index, copy.stream_id, copy.lane) == (1, stream.stream_id, "h2d")
    assert (copy.operation, copy.nbytes) == ("copy host to device", 1000)
    assert copy.end_ns - copy.start_ns == 5_000 + 1_000
    assert (wait.device_index, wait.lane, wait.end_ns) == (-1, "host", copy.end_ns)
    virtual.clear_timeline()
    assert virtual.timeline() == []


def test_timeline_can_be_off() -> None:
    virtual.enable(races="collect", timeline=False)
    virtual.clear_timeline()
    torch.ones(10, device="virtual")
    assert virtual.timeline() == []


def test_chrome_trace_has_a_track_per_stream_and_engine(tmp_path: Path) -> None:
    stream = torch.virtual.Stream()
    with torch.virtual.stream(stream):
        torch.ones(1000, device="virtual").cpu()
    virtual.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {
        event["args"]["name"]
        for event in events
        if event["name"] in ("process_name", "thread_name")
    }
    assert {"virtual:0", "host", "host waits", f"stream {stream.stream_id}"} <= names
    assert {"engine: compute", "engine: d2h"} <= names
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in slices} >= {"copy device to host", "aten::fill_.Scalar"}
    rows = virtual.timeline()
    assert len(slices) == sum(1 if row.lane == "host" else 2 for row in rows)
    copy = next(event for event in slices if event["name"] == "copy device to host")
    assert copy["args"] == {"nbytes": 4000, "stream": stream.stream_id, "lane": "d2h"}
    assert copy["dur"] * 1000 == pytest.approx(2_000 + 4000 / 53, abs=1.0)


def test_operator_counts() -> None:
    tensor = torch.ones(3, device="virtual")
    virtual.clear_operator_counts()
    tensor.add_(1)
    tensor.add_(1)
    tensor.cpu()
    counts = virtual.operator_counts()
    assert counts["aten::add_.Tensor"] == 2
    assert counts["aten::_copy_from"] == 1
    virtual.clear_operator_counts()
    assert virtual.operator_counts() == {}
