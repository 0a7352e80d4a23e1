"""A resource that does one thing at a time: the compute units, or a copy engine."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple


class _Booking(NamedTuple):
    start_ns: int
    end_ns: int


class Engine:
    """Bookings in virtual time, which do not overlap."""

    def __init__(self) -> None:
        self._busy: list[_Booking] = []

    def book(self, ready_ns: int, duration_ns: int, horizon_ns: int) -> int:
        """Book the first gap of ``duration_ns`` at or after ``ready_ns``; return its start.

        Nothing is ever booked before ``horizon_ns`` again, so what ended by then is forgotten.
        """
        self._busy = [booking for booking in self._busy if booking.end_ns > horizon_ns]
        start_ns = ready_ns
        index = bisect_right(self._busy, start_ns, key=_start)
        if index > 0:
            start_ns = max(start_ns, self._busy[index - 1].end_ns)
        while index < len(self._busy) and self._busy[index].start_ns < start_ns + duration_ns:
            start_ns = max(start_ns, self._busy[index].end_ns)
            index += 1
        if duration_ns > 0:
            self._busy.insert(index, _Booking(start_ns, start_ns + duration_ns))
        return start_ns

    def clear(self) -> None:
        """Forget every booking."""
        self._busy.clear()


def _start(booking: _Booking) -> int:
    return booking.start_ns
