"""What the link between host and device can do: known of a profile, measured on a card."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swapopt_torch.bench.floor import Link

if TYPE_CHECKING:
    from swapopt_torch.virtual import Profile

MEASURED = "measured"
_MEASURED_NBYTES = 512 * 2**20
_REPETITIONS = 5
_SMALL_NBYTES = 4096
_SMALL_COPIES = 200
_HOST_BUDGET_SHARE = 0.02
# Where every launch is expensive, a step takes a larger part of the host's time whatever it does.
_HOST_BUDGET_SHARES = {"ascend-910b": 0.20, "npu": 0.20}


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """What was measured on a device, in bytes per second.

    Attributes:
        link: the rates while both directions are in use, and what a small copy costs.
        h2d_alone, d2h_alone: the rates of one direction while the other one rests.
    """

    link: Link
    h2d_alone_bytes_per_second: float
    d2h_alone_bytes_per_second: float


def link_of_profile(profile: Profile) -> Link:
    """Return the link of a virtual accelerator."""
    return Link(
        source=f"profile {profile.name}",
        h2d_bytes_per_second=profile.h2d_bytes_per_second,
        d2h_bytes_per_second=profile.d2h_bytes_per_second,
        full_duplex=profile.full_duplex,
        copy_overhead_seconds=profile.copy_overhead_seconds,
        host_issue_seconds=profile.host_issue_seconds,
        host_budget_share=_HOST_BUDGET_SHARES.get(profile.name, _HOST_BUDGET_SHARE),
    )


def measure_link(device: torch.device, nbytes: int = _MEASURED_NBYTES) -> MeasuredLink:
    """Copy large pinned buffers one way, the other way, and both ways at once.

    The best of several repetitions counts. A link whose directions take turns shows itself by
    its rates: both ways at once, each has a half.

    Args:
        device: a card, or the virtual accelerator.
        nbytes: size of a buffer.
    """
    lanes = _Lanes(device, nbytes)
    h2d_alone = nbytes / min(lanes.seconds(h2d=True, d2h=False)[0] for _ in range(_REPETITIONS))
    d2h_alone = nbytes / min(lanes.seconds(h2d=False, d2h=True)[1] for _ in range(_REPETITIONS))
    both = [lanes.seconds(h2d=True, d2h=True) for _ in range(_REPETITIONS)]
    small_seconds, issue_seconds = lanes.small_copy_seconds()
    link = Link(
        source=MEASURED,
        h2d_bytes_per_second=nbytes / min(seconds for seconds, _ in both),
        d2h_bytes_per_second=nbytes / min(seconds for _, seconds in both),
        full_duplex=True,
        copy_overhead_seconds=max(0.0, small_seconds - _SMALL_NBYTES / h2d_alone),
        host_issue_seconds=issue_seconds,
        host_budget_share=_HOST_BUDGET_SHARES.get(device.type, _HOST_BUDGET_SHARE),
    )
    return MeasuredLink(link, h2d_alone, d2h_alone)


class _Lanes:
    """Two streams with a pinned and a device buffer each."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._streams = [torch.Stream(device=device) for _ in range(2)]
        self._host = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._module.synchronize(device)

    def seconds(self, *, h2d: bool, d2h: bool) -> tuple[float, float]:
        """Return how long a copy in each direction took, 0 for one that was not asked for."""
        pairs = [(self._there[0], self._host[0]), (self._host[1], self._there[1])]
        events: list[tuple[torch.Event, torch.Event] | None] = [None, None]
        for lane, wanted in enumerate((h2d, d2h)):
            if wanted:
                start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
                with self._streams[lane]:
                    start.record(self._streams[lane])
                    pairs[lane][0].copy_(pairs[lane][1], non_blocking=True)
                    end.record(self._streams[lane])
                events[lane] = start, end
        self._module.synchronize(self._device)
        times = [pair[0].elapsed_time(pair[1]) * 1e-3 if pair else 0.0 for pair in events]
        return times[0], times[1]

    def small_copy_seconds(self) -> tuple[float, float]:
        """Return what a small copy takes on the device, and what it takes the host to issue."""
        small, there = self._host[0][:_SMALL_NBYTES], self._there[0][:_SMALL_NBYTES]
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        stream = self._streams[0]
        with stream:
            start.record(stream)
            began = self._clock_seconds()
            for _ in range(_SMALL_COPIES):
                there.copy_(small, non_blocking=True)
            issued = self._clock_seconds() - began
            end.record(stream)
        self._module.synchronize(self._device)
        return start.elapsed_time(end) * 1e-3 / _SMALL_COPIES, issued / _SMALL_COPIES

    def _clock_seconds(self) -> float:
        if self._device.type == "virtual":
            return float(self._module.now())
        return time.perf_counter()
