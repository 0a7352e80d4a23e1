"""Ranges of bytes in this process, and what is known of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Generic, NamedTuple, TypeVar

ValueT = TypeVar("ValueT")


class ByteRange(NamedTuple):
    """The bytes from address ``begin`` up to, not including, ``end``."""

    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many there are."""
        return self.end - self.begin

    def overlaps(self, other: ByteRange) -> bool:
        """Say whether a byte is in both."""
        return self.begin < other.end and other.begin < self.end

    def contains(self, other: ByteRange) -> bool:
        """Say whether every byte of ``other`` is in this range."""
        return self.begin <= other.begin and other.end <= self.end


class AddressMap(Generic[ValueT]):
    """Values by disjoint ranges of bytes, found by any address inside."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._entries: dict[int, tuple[ByteRange, ValueT]] = {}

    def add(self, where: ByteRange, value: ValueT) -> None:
        """Enter a range that overlaps none."""
        assert self.overlapping(where) is None, "ranges are disjoint"
        insort(self._begins, where.begin)
        self._entries[where.begin] = where, value

    def remove(self, where: ByteRange) -> ValueT:
        """Take a range out, and return its value."""
        found, value = self._entries.pop(where.begin)
        assert found == where, "only whole ranges are removed"
        del self._begins[bisect_left(self._begins, where.begin)]
        return value

    def find(self, address: int) -> tuple[ByteRange, ValueT] | None:
        """Return the range that holds ``address``, and its value."""
        index = bisect_right(self._begins, address)
        if index == 0:
            return None
        where, value = self._entries[self._begins[index - 1]]
        return (where, value) if address < where.end else None

    def overlapping(self, where: ByteRange) -> ByteRange | None:
        """Return a range that shares bytes with ``where``, if there is one."""
        index = bisect_left(self._begins, where.end)
        if index == 0:
            return None
        last, _ = self._entries[self._begins[index - 1]]
        return last if last.overlaps(where) else None
