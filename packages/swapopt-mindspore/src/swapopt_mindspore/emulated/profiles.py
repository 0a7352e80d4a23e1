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

    An operator takes ``kernel_overhead_seconds`` and the time its bytes need at
    ``memory_bytes_per_second`` (what it reads once, what it writes in place twice); floating
    point work is not modelled. A copy takes ``copy_overhead_seconds`` and the time its bytes need
    on the link. Every launch and copy costs the host ``host_issue_seconds``.

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
    kernel_overhead_seconds: float = 0.0
    sync_seconds: float = 1 * _US
    poll_seconds: float = 1 * _US
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for rate in ("h2d_bytes_per_second", "d2h_bytes_per_second", "memory_bytes_per_second"):
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
        self._check_sources()

    def _check_sources(self) -> None:
        unknown = set(self.sources) - {each.name for each in fields(self)}
        if unknown:
            raise ValueError(f"sources must name fields of Profile, found {sorted(unknown)}")

    def copy_ns(self, direction: Literal["h2d", "d2h"], nbytes: int) -> int:
        """Return the engine time of one copy, in nanoseconds."""
        rate = self.h2d_bytes_per_second if direction == "h2d" else self.d2h_bytes_per_second
        return _ns(self.copy_overhead_seconds + nbytes / rate)

    def update_ns(self, traffic_nbytes: int, launches: int) -> int:
        """Return the device time of operators with so many bytes read and written, in all."""
        seconds = launches * self.kernel_overhead_seconds
        return _ns(seconds + traffic_nbytes / self.memory_bytes_per_second)

    @property
    def host_issue_ns(self) -> int:
        """Host time per launch or copy, in nanoseconds."""
        return _ns(self.host_issue_seconds)

    @property
    def sync_ns(self) -> int:
        """Host time of a synchronisation beside the waiting, in nanoseconds."""
        return _ns(self.sync_seconds)

    @property
    def poll_ns(self) -> int:
        """Host time of one ``query()``, in nanoseconds."""
        return _ns(self.poll_seconds)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


_COSTS = (
    "host_issue_seconds",
    "copy_overhead_seconds",
    "kernel_overhead_seconds",
    "sync_seconds",
    "poll_seconds",
)

_ASSUMED = "assumption"
_SHARED_SOURCES = {
    "kernel_overhead_seconds": "not modelled: back-to-back kernels hide it",
    "sync_seconds": _ASSUMED,
    "poll_seconds": _ASSUMED,
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
    sources=_with_sources(
        h2d_bytes_per_second="measured by others, registered host memory",
        d2h_bytes_per_second="measured by others, registered host memory",
        full_duplex="two copy engines, one per direction",
        memory_bytes_per_second="measured with device copies",
        host_issue_seconds=_ASSUMED,
        copy_overhead_seconds=_ASSUMED,
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
    sources=_with_sources(
        h2d_bytes_per_second="910B4, registered host memory",
        d2h_bytes_per_second="910B4, registered host memory",
        full_duplex=_ASSUMED,
        memory_bytes_per_second=_ASSUMED,
        host_issue_seconds="816 fused launches took the 42.75 ms that the RFC reports",
        copy_overhead_seconds=_ASSUMED,
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
    sources=_with_sources(
        h2d_bytes_per_second="the worst case to design for, no particular card",
        d2h_bytes_per_second="the worst case to design for, no particular card",
        full_duplex="one engine for both directions, by definition",
        memory_bytes_per_second=_ASSUMED,
        host_issue_seconds=_ASSUMED,
        copy_overhead_seconds=_ASSUMED,
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
