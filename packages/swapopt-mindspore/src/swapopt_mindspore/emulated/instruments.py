"""What an emulated device shows beside what a real one does: time, races, a timeline."""

from __future__ import annotations

from os import PathLike

from mindspore import Tensor

from swapopt_mindspore.emulated.shadow import Race
from swapopt_mindspore.emulated.tensors import range_of
from swapopt_mindspore.emulated.timeline import TimelineRow, write_chrome_trace
from swapopt_mindspore.emulated.world import World


class Instruments:
    """Part of `EmulatedDevice`.

    Args:
        world: the machine.
        name: what traces call the device.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    @property
    def now_ns(self) -> int:
        """The virtual time of the host, in nanoseconds."""
        return self._world.scheduler.now_ns

    def advance_host(self, seconds: float) -> None:
        """Let the host be busy for ``seconds`` of virtual time.

        Raises:
            ValueError: a negative time.
        """
        self._world.scheduler.advance_host(_ns(seconds))

    def compute(self, operation: str, seconds: float) -> None:
        """Let the caller's stream be busy for ``seconds``, as a forward or backward would.

        Raises:
            ValueError: a negative time.
        """
        self._world.compute(operation, _ns(seconds))

    def reset_clock(self) -> None:
        """Host and streams start again at zero; all work issued so far counts as done."""
        self._world.scheduler.reset_clock()

    def timeline(self) -> list[TimelineRow]:
        """Return everything since the last `clear_timeline`, in the order of issue."""
        return self._world.scheduler.timeline()

    def clear_timeline(self) -> None:
        """Forget the rows so far."""
        self._world.scheduler.clear_timeline()

    def write_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write the timeline as a Chrome trace (JSON) that Perfetto and chrome://tracing open."""
        write_chrome_trace(self.timeline(), path, self._name)

    def take_races(self) -> list[Race]:
        """Return the races found since the last call, oldest first, raised or not."""
        return self._world.take_races()

    def host_access(self, tensor: Tensor, *, write: bool) -> None:
        """Tell the detector that the host reads or writes a tensor over a host buffer.

        It cannot see ``asnumpy()`` and operators on host tensors by itself.

        Raises:
            RaceError: nothing orders that and a copy.
        """
        self._world.host_access(range_of(tensor), write=write)


def _ns(seconds: float) -> int:
    if not seconds >= 0:
        raise ValueError(f"seconds must be 0 or more, found {seconds!r}")
    return round(seconds * 1e9)
