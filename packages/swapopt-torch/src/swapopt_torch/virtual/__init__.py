"""A virtual accelerator: a real PyTorch device, on the CPU, to test accelerator code with.

``enable()`` gives this process the device type ``virtual`` and the module ``torch.virtual``. It
computes what the CPU computes; its memory is accounted, its time simulated, its streams watched
for races. Enabled dry, it takes no memory and computes nothing, and the accounts and the time stay
the same. Importing this package does nothing.
"""

from ._enable import enable, is_dry, is_enabled, profile, set_profile
from .build import VirtualUnavailableError
from .memory import HostMemory, host_memory, set_capacity, set_pinned_limit
from .profiles import PROFILES, Profile
from .races import Race, RaceError, host_access, races, set_late_copies, set_race_mode
from .timeline import (
    TimelineRow,
    advance_host,
    clear_operator_counts,
    clear_timeline,
    now_ns,
    operator_counts,
    reset_clock,
    timeline,
    write_chrome_trace,
)

__all__ = [
    "PROFILES",
    "HostMemory",
    "Profile",
    "Race",
    "RaceError",
    "TimelineRow",
    "VirtualUnavailableError",
    "advance_host",
    "clear_operator_counts",
    "clear_timeline",
    "enable",
    "host_access",
    "host_memory",
    "is_dry",
    "is_enabled",
    "now_ns",
    "operator_counts",
    "profile",
    "races",
    "reset_clock",
    "set_capacity",
    "set_late_copies",
    "set_pinned_limit",
    "set_profile",
    "set_race_mode",
    "timeline",
    "write_chrome_trace",
]
