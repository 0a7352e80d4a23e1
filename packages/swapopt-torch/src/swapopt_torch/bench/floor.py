"""What a step costs at least on a link, and what moving it in equal pieces costs at best.

Plain arithmetic on plain figures; nothing here knows of a device.
"""

from __future__ import annotations

from dataclasses import dataclass

ARENAS = 2
ISSUES_PER_PIECE = 3
"""Copy to the device, update, copy to the host."""
_BUDGET_NBYTES = 2**30
"""Smaller steps may take as much host time as one of so many bytes of states."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way between host and device.

    Attributes:
        source: where the figures are from.
        h2d_bytes_per_second, d2h_bytes_per_second: rates in each direction; where both directions
            can be used at once, the rates while they are.
        full_duplex: whether both directions work at once; otherwise they take turns.
        copy_overhead_seconds: time of a copy beside its bytes.
        host_issue_seconds: host time of one launch or copy.
        host_budget_share: the most host time a step should take, as a share of its floor.
    """

    source: str
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    full_duplex: bool
    copy_overhead_seconds: float
    host_issue_seconds: float
    host_budget_share: float

    def transfer_seconds(self, nbytes: float) -> float:
        """Return how long it takes at least to move so many bytes in and out again."""
        h2d_seconds = nbytes / self.h2d_bytes_per_second
        d2h_seconds = nbytes / self.d2h_bytes_per_second
        return max(h2d_seconds, d2h_seconds) if self.full_duplex else h2d_seconds + d2h_seconds


@dataclass(frozen=True, slots=True)
class Demand:
    """What one step has to do.

    Attributes:
        nbytes: bytes of states to move in each direction.
        update_seconds: time of the updates, on the device, with all states there.
        issue_seconds: host time to issue these updates.
    """

    nbytes: float
    update_seconds: float
    issue_seconds: float

    def floor_seconds(self, link: Link) -> float:
        """Return the time that no order of copies and updates can go below."""
        return max(link.transfer_seconds(self.nbytes), self.update_seconds)


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best number of equal pieces.

    Attributes:
        pieces: how many.
        seconds: what a step takes with them.
        ratio: that over the step's floor.
    """

    pieces: int
    seconds: float
    ratio: float


def step_seconds(link: Link, demand: Demand, pieces: int, in_flight: int) -> float:
    """Return the time of a step in equal pieces that are moved in, updated and moved out.

    The pieces pass three stages, each of which serves one at a time; a link that is not full
    duplex serves both copies as one stage. A piece is moved in once the memory of the one
    ``in_flight`` places before it is free. The host issues every stage of every piece, one after
    another.

    Args:
        link: rates and costs.
        demand: the whole step.
        pieces: how many pieces it is divided into.
        in_flight: how many pieces fit into the device memory, at least 1.
    """
    h2d = demand.nbytes / pieces / link.h2d_bytes_per_second + link.copy_overhead_seconds
    d2h = demand.nbytes / pieces / link.d2h_bytes_per_second + link.copy_overhead_seconds
    update = demand.update_seconds / pieces
    issue_update = max(demand.issue_seconds / pieces, link.host_issue_seconds)
    host = h2d_free = updates_free = d2h_free = 0.0
    moved_in: list[float] = []
    moved_out: list[float] = []

    def move_in(piece: int) -> None:
        nonlocal host, h2d_free, d2h_free
        host += link.host_issue_seconds
        memory_free = moved_out[piece - in_flight] if piece >= in_flight else 0.0
        h2d_free = max(host, h2d_free, memory_free) + h2d
        moved_in.append(h2d_free)
        if not link.full_duplex:
            d2h_free = h2d_free

    for piece in range(min(in_flight, pieces)):
        move_in(piece)
    for piece in range(pieces):
        # A long list is launched tensor by tensor: the device cannot be done before the host is.
        updates_free = max(updates_free, moved_in[piece], host + link.host_issue_seconds) + update
        host += issue_update
        updates_free = max(updates_free, host)
        host += link.host_issue_seconds
        d2h_free = max(host, d2h_free, updates_free) + d2h
        moved_out.append(d2h_free)
        if not link.full_duplex:
            h2d_free = d2h_free
        if piece + in_flight < pieces:
            move_in(piece + in_flight)
    return d2h_free


def most_pieces(link: Link, demand: Demand) -> int:
    """Return how many pieces the host may issue within its budget, updates included."""
    budget_nbytes = max(demand.nbytes, _BUDGET_NBYTES)
    floor_seconds = max(link.transfer_seconds(budget_nbytes), demand.update_seconds)
    budget_seconds = link.host_budget_share * floor_seconds
    if link.host_issue_seconds == 0:
        return 10_000
    if_launches_prevail = budget_seconds / (ISSUES_PER_PIECE * link.host_issue_seconds)
    # A list that is launched tensor by tensor takes its time in however many pieces.
    copies_seconds = (ISSUES_PER_PIECE - 1) * link.host_issue_seconds
    if_lists_prevail = (budget_seconds - demand.issue_seconds) / copies_seconds
    return max(0, int(min(if_launches_prevail, if_lists_prevail)))


def find_optimum(link: Link, demand: Demand, swap_times: int) -> Optimum:
    """Return the number of equal pieces with the shortest step.

    The pieces in flight take no more memory than two arenas of ``1 / swap_times`` of the bytes
    each, and the host issues no more than `most_pieces`.
    """
    counts = range(swap_times, max(swap_times, most_pieces(link, demand)) + 1)
    times = {
        pieces: step_seconds(link, demand, pieces, max(1, ARENAS * pieces // swap_times))
        for pieces in counts
    }
    best = min(times, key=times.__getitem__)
    return Optimum(best, times[best], times[best] / demand.floor_seconds(link))
