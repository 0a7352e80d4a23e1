"""The device a command runs on: a real accelerator, or the virtual one; and how it is measured."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch

from swapopt_torch.demo.observe import EventRecorder, Lane, RowRecorder, StepRow
from swapopt_torch.demo.settings import DemoError

REAL_TYPES = ("cuda", "npu", "xpu")
DEFAULT_PROFILE = "h200"


class DeviceChoice(Protocol):
    """What the user says about the device; the settings of a command."""

    @property
    def command(self) -> str:
        """The command's name."""

    @property
    def device(self) -> str:
        """The value of ``--device``."""

    @property
    def profile(self) -> str | None:
        """The value of ``--profile``."""


class Accelerator(ABC):
    """What the commands ask of a device.

    Attributes:
        device: with its index.
        title: its name, for people.
        reason: why it was taken.
        clock_name: whose time the figures are in.
    """

    is_virtual: bool

    def __init__(self, device: torch.device, title: str, reason: str, clock_name: str) -> None:
        self.device = device
        self.title = title
        self.reason = reason
        self.clock_name = clock_name
        self._module = torch.get_device_module(device)

    @abstractmethod
    def clock_seconds(self) -> float:
        """Return the host's time, in the time of this device; waits for nothing."""

    @abstractmethod
    def recorder(self) -> RowRecorder:
        """Return a recorder for one optimizer step."""

    @abstractmethod
    def pinned_nbytes(self) -> int | None:
        """Return the bytes of host memory pinned now; None where the device does not tell."""

    def synchronize(self) -> None:
        """Block the host until the device is idle."""
        self._module.synchronize(self.device)

    def synchronize_updates(self) -> None:
        """Block the host until the training stream is idle; copies may still be under way."""
        self._module.current_stream(self.device).synchronize()

    def active_nbytes(self) -> int:
        """Return the device bytes in use by tensors or by work that has yet to finish."""
        return int(self._module.memory_stats(self.device)["active_bytes.all.current"])

    def peak_active_nbytes(self) -> int:
        """Return the most bytes in use since `reset_peak`."""
        return int(self._module.memory_stats(self.device)["active_bytes.all.peak"])

    def reset_peak(self) -> None:
        """Let the peak begin anew at what is in use now."""
        self._module.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        """Give cached memory back to the device."""
        self._module.empty_cache()


class CardAccelerator(Accelerator):
    """A real card: wall time, and events on the streams."""

    is_virtual = False

    def clock_seconds(self) -> float:
        """Return wall time."""
        return time.perf_counter()

    def recorder(self) -> RowRecorder:
        """Return a recorder that puts events around every operator."""
        return EventRecorder(self.device)

    def pinned_nbytes(self) -> int | None:
        """Return None: no device module reports memory that was registered."""
        return None


class VirtualAccelerator(Accelerator):
    """The virtual accelerator: virtual time, and a timeline of its own."""

    is_virtual = True

    def clock_seconds(self) -> float:
        """Return the host's virtual time."""
        return float(self._module.now())

    def recorder(self) -> RowRecorder:
        """Return a recorder that reads the device's own timeline; costs no virtual time."""
        return _TimelineRecorder(self.device)

    def pinned_nbytes(self) -> int | None:
        """Return the bytes allocated pinned, rounded as pinned allocators do, or registered."""
        from swapopt_torch import virtual

        memory = virtual.host_memory()
        return memory.pinned_allocated_bytes + memory.registered_bytes


class _TimelineRecorder:
    """The virtual accelerator's timeline between entering and leaving."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_ns = 0

    def __enter__(self) -> _TimelineRecorder:
        from swapopt_torch import virtual

        virtual.clear_timeline()
        self._start_ns = virtual.now_ns()
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def rows(self) -> list[StepRow]:
        """Return what ran on the device, in order of start."""
        from swapopt_torch import virtual

        lanes: dict[str, Lane] = {"h2d": "h2d", "compute": "compute", "d2h": "d2h"}
        rows = [
            StepRow(
                lane=lanes[row.lane],
                operation=row.operation,
                nbytes=row.nbytes,
                start_seconds=(row.start_ns - self._start_ns) / 1e9,
                end_seconds=(row.end_ns - self._start_ns) / 1e9,
            )
            for row in virtual.timeline()
            if row.device_index == self._device.index and row.lane in lanes
        ]
        return sorted(rows, key=lambda row: row.start_seconds)


def _enable(profile: str) -> None:
    from swapopt_torch import virtual

    virtual.enable(profile, races="raise", late_copies=False, timeline=True)


def choose_accelerator(
    settings: DeviceChoice, enable: Callable[[str], None] = _enable
) -> Accelerator:
    """Return the device that the settings ask for, or the one that torch finds.

    Args:
        settings: what the user wants.
        enable: switches the virtual accelerator on, with a profile.

    Raises:
        DemoError: there is no such device, or the virtual one cannot be built here.
    """
    found = _find_card()
    wanted = settings.device
    if wanted == "virtual":
        return _virtual(settings, enable, "as --device asks")
    if wanted == "auto":
        if found is None:
            return _virtual(settings, enable, "torch finds no CUDA, NPU or XPU device")
        return _card(found, settings, "torch finds it")
    device_type, index = _parse_device(wanted, settings.command)
    if found is None or found.type != device_type:
        raise DemoError(
            f"--device {wanted}: {_why_not_found(device_type, found)}. Use --device auto or "
            "--device virtual, or install what torch needs for your accelerator."
        )
    return _card(torch.device(device_type, index), settings, "as --device asks")


def _find_card() -> torch.device | None:
    """Return the first device of a kind with streams, events and pinned memory."""
    if not torch.accelerator.is_available():
        return None
    current = torch.accelerator.current_accelerator()
    if current is None or current.type not in REAL_TYPES:
        return None
    return torch.device(current.type, 0)


def _parse_device(text: str, command: str) -> tuple[str, int]:
    """Return type and index; torch itself knows "npu" only where torch_npu is installed."""
    device_type, colon, index = text.partition(":")
    if device_type not in REAL_TYPES or (colon and not index.isdecimal()):
        raise DemoError(
            f"--device {text}: the {command} runs on auto, virtual, "
            f"{', '.join(REAL_TYPES)}, or one of these with an index (cuda:1)."
        )
    return device_type, int(index or 0)


def _why_not_found(device_type: str, found: torch.device | None) -> str:
    if device_type == "npu" and find_spec("torch_npu") is None:
        return "torch_npu, which brings NPU devices to torch, is not installed here"
    return f"torch finds {found or 'no CUDA, NPU or XPU device'} here"


def _card(device: torch.device, settings: DeviceChoice, reason: str) -> CardAccelerator:
    if settings.profile is not None:
        raise DemoError(
            f"--profile {settings.profile} describes the virtual accelerator, but the "
            f"{settings.command} would run on {device}. Drop --profile, or add --device virtual."
        )
    module = torch.get_device_module(device)
    if device.index >= module.device_count():
        raise DemoError(f"--device {device}: torch finds {module.device_count()} of them here.")
    torch.accelerator.set_device_index(device.index)
    return CardAccelerator(device, module.get_device_name(device), reason, "wall time")


def _virtual(
    settings: DeviceChoice, enable: Callable[[str], None], reason: str
) -> VirtualAccelerator:
    from swapopt_torch import virtual

    profile = settings.profile or DEFAULT_PROFILE
    if profile not in virtual.PROFILES:
        raise DemoError(
            f"--profile {profile}: the profiles are {', '.join(sorted(virtual.PROFILES))}."
        )
    try:
        enable(profile)
    except virtual.VirtualUnavailableError as error:
        raise DemoError(str(error)) from error
    virtual.clear_timeline()
    return VirtualAccelerator(
        torch.device("virtual", 0),
        f"virtual accelerator ({profile})",
        reason,
        f"virtual time of the {profile} profile",
    )
