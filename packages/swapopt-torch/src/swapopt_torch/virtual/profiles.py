"""What the modelled accelerators cost: plain figures, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Literal

_GB = 1e9
_TB = 1e12
_US = 1e-6


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The costs of one accelerator and its link to the host.

    A kernel takes ``kernel_overhead_seconds`` and the time its bytes need at
    ``memory_bytes_per_second`` (read arguments once, arguments written in place twice); floating
    point work is not modelled. A copy takes ``copy_overhead_seconds`` and the time its bytes need
    on the link. Every launch, copy and collective costs the host ``host_issue_seconds``. A
    collective takes ``interconnect_latency_seconds`` and the time that the bytes which one member
    sends (or receives, if more) need at ``interconnect_bytes_per_second``.

    Attributes:
        name: how the profile is called in messages and reports.
        h2d_bytes_per_second, d2h_bytes_per_second: link rate in each direction.
        full_duplex: one copy engine per direction; otherwise one engine serves both.
        memory_bytes_per_second: device memory traffic, reads and writes together.
        host_issue_seconds: host time per launch, copy or scalar read.
        copy_overhead_seconds: engine time of a copy beside its bytes.
        kernel_overhead_seconds: device time of a launch beside its bytes.
        sync_seconds: host time of a synchronisation beside the waiting.
        poll_seconds: host time of one ``query()``.
        interconnect_bytes_per_second: what one device sends to others, while it receives as much.
        interconnect_latency_seconds: time of a collective or message beside its bytes.
        list_launch: whether a foreach or fused operator is one launch, or one per tensor of its
            first list.
        sources: for every figure, where it comes from.

    Raises:
        ValueError: a figure is out of range, or a source names no figure.
    """

    name: str
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    full_duplex: bool
    memory_bytes_per_second: float
    host_issue_seconds: float
    copy_overhead_seconds: float
    list_launch: Literal["one", "per_tensor"] = "one"
    kernel_overhead_seconds: float = 0.0
    sync_seconds: float = 1 * _US
    poll_seconds: float = 1 * _US
    interconnect_bytes_per_second: float = 25 * _GB
    interconnect_latency_seconds: float = 10 * _US
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for rate in _RATES:
            if not getattr(self, rate) > 0:
                raise ValueError(f"{rate} must be above 0, found {getattr(self, rate)!r}")
        for cost in _COSTS:
            if not getattr(self, cost) >= 0:
                raise ValueError(f"{cost} must be 0 or more, found {getattr(self, cost)!r}")
        if not self.poll_seconds > 0:
            raise ValueError(
                f"poll_seconds must be above 0, found {self.poll_seconds!r}: "
                "a loop over query() would never end"
            )
        if self.list_launch not in ("one", "per_tensor"):
            raise ValueError(
                f"list_launch must be 'one' or 'per_tensor', found {self.list_launch!r}"
            )
        self._check_sources()

    def _check_sources(self) -> None:
        unknown = set(self.sources) - {each.name for each in fields(self)}
        if unknown:
            raise ValueError(f"sources must name fields of Profile, found {sorted(unknown)}")

    def figures(self) -> dict[str, float]:
        """What the simulation works with: bytes per nanosecond, nanoseconds, and 0 or 1."""
        return {
            **{rate.replace("_second", "_ns"): getattr(self, rate) * 1e-9 for rate in _RATES},
            "full_duplex": float(self.full_duplex),
            "list_launch_per_tensor": float(self.list_launch == "per_tensor"),
            **{cost.replace("_seconds", "_ns"): getattr(self, cost) * 1e9 for cost in _COSTS},
        }


_RATES = (
    "h2d_bytes_per_second",
    "d2h_bytes_per_second",
    "memory_bytes_per_second",
    "interconnect_bytes_per_second",
)
_COSTS = (
    "host_issue_seconds",
    "copy_overhead_seconds",
    "kernel_overhead_seconds",
    "sync_seconds",
    "poll_seconds",
    "interconnect_latency_seconds",
)

_ASSUMED = "assumption"
_SHARED_SOURCES = {
    "kernel_overhead_seconds": "not modelled: back-to-back kernels hide it",
    "sync_seconds": _ASSUMED,
    "poll_seconds": _ASSUMED,
    "interconnect_latency_seconds": _ASSUMED,
}


def _with_sources(**sources: str) -> Mapping[str, str]:
    return MappingProxyType({**_SHARED_SOURCES, **sources})


H200 = Profile(
    name="h200",
    h2d_bytes_per_second=53 * _GB,
    d2h_bytes_per_second=53 * _GB,
    full_duplex=True,
    memory_bytes_per_second=4.3 * _TB,
    host_issue_seconds=4 * _US,
    copy_overhead_seconds=2 * _US,
    interconnect_bytes_per_second=450 * _GB,
    list_launch="one",
    sources=_with_sources(
        h2d_bytes_per_second="measured by others, registered host memory",
        d2h_bytes_per_second="measured by others, registered host memory",
        full_duplex="two copy engines, one per direction",
        memory_bytes_per_second="measured with device copies",
        host_issue_seconds=_ASSUMED,
        copy_overhead_seconds=_ASSUMED,
        interconnect_bytes_per_second="half of the 900 GB/s of NVLink in the data sheet",
        list_launch="foreach and fused operators are multi-tensor kernels",
    ),
)

ASCEND_910B = Profile(
    name="ascend-910b",
    h2d_bytes_per_second=23 * _GB,
    d2h_bytes_per_second=23 * _GB,
    full_duplex=True,
    memory_bytes_per_second=1.2 * _TB,
    host_issue_seconds=52.4 * _US,
    copy_overhead_seconds=8 * _US,
    interconnect_bytes_per_second=196 * _GB,
    list_launch="per_tensor",
    sources=_with_sources(
        h2d_bytes_per_second="910B4, registered host memory",
        d2h_bytes_per_second="910B4, registered host memory",
        full_duplex=_ASSUMED,
        memory_bytes_per_second=_ASSUMED,
        host_issue_seconds="816 fused launches took the 42.75 ms that the RFC reports",
        copy_overhead_seconds=_ASSUMED,
        interconnect_bytes_per_second="half of seven HCCS links of 56 GB/s",
        list_launch="its fused operators launch once per tensor",
    ),
)

HALF_DUPLEX = Profile(
    name="half-duplex",
    h2d_bytes_per_second=25 * _GB,
    d2h_bytes_per_second=25 * _GB,
    full_duplex=False,
    memory_bytes_per_second=1.0 * _TB,
    host_issue_seconds=10 * _US,
    copy_overhead_seconds=8 * _US,
    interconnect_bytes_per_second=25 * _GB,
    list_launch="one",
    sources=_with_sources(
        h2d_bytes_per_second="the worst case to design for, no particular card",
        d2h_bytes_per_second="the worst case to design for, no particular card",
        full_duplex="one engine for both directions, by definition",
        memory_bytes_per_second=_ASSUMED,
        host_issue_seconds=_ASSUMED,
        copy_overhead_seconds=_ASSUMED,
        interconnect_bytes_per_second="through the host, at the rate of its link",
        list_launch=_ASSUMED,
    ),
)

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {each.name: each for each in (H200, ASCEND_910B, HALF_DUPLEX)}
)


def resolve_profile(profile: str | Profile) -> Profile:
    """The profile itself, or the built-in one of that name.

    Raises:
        ValueError: no built-in profile has this name.
    """
    if isinstance(profile, Profile):
        return profile
    if profile not in PROFILES:
        raise ValueError(
            f"unknown profile {profile!r}: choose one of {sorted(PROFILES)} or pass a Profile"
        )
    return PROFILES[profile]
