"""Turning the virtual accelerator on, and its profile."""

from __future__ import annotations

import atexit
import sys
import time

import torch
from torch.utils import backend_registration

from . import collectives, device_module
from ._native import is_loaded, native, set_native
from .build import load_extension
from .memory import checked_limit, set_capacity
from .profiles import PROFILES, Profile, resolve_profile
from .races import RaceError, RaceMode, set_late_copies, set_race_mode

_MAX_DEVICES = 64


class _Settings:
    profile: Profile = PROFILES["h200"]


def enable(
    profile: str | Profile = "h200",
    *,
    device_count: int = 2,
    capacity_bytes: int | None = None,
    races: RaceMode = "raise",
    late_copies: bool = False,
    timeline: bool = True,
    dry: bool = False,
) -> None:
    """Give this process the device type ``virtual``; a later call only changes the settings.

    The first call on a machine compiles the extension (a minute or two) into a cache.

    Args:
        profile: what things cost: a name from `PROFILES`, or a `Profile`.
        device_count: how many virtual devices there are; fixed by the first call.
        capacity_bytes: the memory of each device; None: no limit.
        races: what happens when two accesses race, see `set_race_mode`.
        late_copies: see `set_late_copies`.
        timeline: whether to keep the rows of `timeline()`.
        dry: memory is address space only and operators compute nothing, yet cost what they cost:
            sizes and times of a program of any size, and no values; fixed by the first call.

    Raises:
        VirtualUnavailableError: no compiler, no ninja, no folder to build into, or a torch it is
            not known to work with.
        RuntimeError: another package already provides a device through the same door.
        ValueError: an argument is out of range, or differs from what the first call fixed.
    """
    chosen = resolve_profile(profile)
    checked_limit(capacity_bytes, "capacity_bytes")  # before a build that may take minutes
    if late_copies and dry:
        raise ValueError("late_copies need values to spoil, and a dry device has none: choose one")
    if not is_loaded():
        _start(device_count, dry=dry)
    elif device_count != native().device_count():
        raise _fixed("device_count", native().device_count(), device_count)
    elif dry != native().is_dry():
        raise _fixed("dry", native().is_dry(), dry)
    set_profile(chosen)
    set_race_mode(races)
    set_late_copies(late_copies)
    native().set_timeline(timeline)
    for index in range(device_count):
        set_capacity(capacity_bytes, index)


def _fixed(name: str, first: object, found: object) -> ValueError:
    return ValueError(f"{name} is fixed by the first enable(): it is {first}, found {found}")


def is_enabled() -> bool:
    """Whether `enable` succeeded in this process."""
    return is_loaded()


def is_dry() -> bool:
    """Whether `enable` was called with ``dry=True`` in this process."""
    return is_loaded() and native().is_dry()


def profile() -> Profile:
    """The profile in use."""
    return _Settings.profile


def set_profile(profile: str | Profile) -> None:
    """Change what things cost from now on; the clock goes on.

    Raises:
        ValueError: no built-in profile has this name.
    """
    chosen = resolve_profile(profile)
    native().set_profile(chosen.figures())
    _Settings.profile = chosen


def _start(device_count: int, *, dry: bool) -> None:
    if not 1 <= device_count <= _MAX_DEVICES:
        raise ValueError(f"device_count must be from 1 to {_MAX_DEVICES}, found {device_count}")
    _check_door_is_free()
    extension = set_native(load_extension())
    extension.start(device_count, dry, RaceError)
    backend_registration.rename_privateuse1_backend("virtual")
    device_module.install()
    collectives.register()
    atexit.register(_let_autograd_threads_rest)


def _let_autograd_threads_rest() -> None:
    """Wait at exit, for a moment, until no autograd thread wants the GIL any more.

    After the last backward() torch's thread for the device still drops its task, which holds
    Python objects; asking a Python that is going away for the GIL would abort the process.
    """
    time.sleep(0.05)


def _check_door_is_free() -> None:
    taken_by = "torch_npu" if "torch_npu" in sys.modules else None
    name = torch._C._get_privateuse1_backend_name()
    if taken_by is None and name not in ("privateuseone", "virtual"):
        taken_by = f"the backend {name!r}"
    if taken_by is not None:
        raise RuntimeError(
            f"{taken_by} already uses the one place torch has for devices from outside. "
            "Enable the virtual accelerator in a process that does not import it."
        )
