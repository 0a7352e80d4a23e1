"""An emulated device: swapping on a CPU, with memory limits, virtual time and a race detector.

For tests, for the demo, and for users who want to see memory and timeline before they have
hardware. Nothing that training needs imports it.
"""

from swapopt_mindspore.emulated.device import EmulatedDevice
from swapopt_mindspore.emulated.profiles import PROFILES, Profile
from swapopt_mindspore.emulated.shadow import Race, RaceError
from swapopt_mindspore.emulated.timeline import TimelineRow

__all__ = ["PROFILES", "EmulatedDevice", "Profile", "Race", "RaceError", "TimelineRow"]
