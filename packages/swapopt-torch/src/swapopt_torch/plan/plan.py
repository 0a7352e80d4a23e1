"""A plan: the case, the host it runs on, and what was found by rehearsing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swapopt_torch.plan.case import Case, Host
from swapopt_torch.plan.rehearsal import Rehearsal, rehearse
from swapopt_torch.plan.search import Trade, explore
from swapopt_torch.virtual import PROFILES, Profile, enable, profile


@dataclass(frozen=True)
class Plan:
    """What was asked and what was found.

    Attributes:
        case: the rank.
        host: the host it shares with others.
        card: the profile of its device, before the host's limit.
        link: the profile that was rehearsed with, after it.
        trade: the rehearsals.
    """

    case: Case
    host: Host
    card: Profile
    link: Profile
    trade: Trade

    @property
    def chosen(self) -> Rehearsal:
        """The rehearsal with the chosen swap_times."""
        return self.trade.swapped[self.trade.chosen]

    @property
    def host_bytes(self) -> int:
        """Pinned on the host by all its ranks."""
        return self.chosen.host_bytes * self.host.ranks

    @property
    def link_ns(self) -> int:
        """What the copies of the chosen rehearsal need on the link, and no step can go below."""
        h2d_seconds = self.chosen.copied_bytes / self.link.h2d_bytes_per_second
        d2h_seconds = self.chosen.copied_bytes / self.link.d2h_bytes_per_second
        both = max if self.link.full_duplex else _sum
        return round(both(h2d_seconds, d2h_seconds) * 1e9)


def _sum(first: float, second: float) -> float:
    return first + second


def make_plan(
    case: Case,
    host: Host,
    profile_name: str,
    *,
    swap_times: int | None = None,
    budget_bytes: int | None = None,
    tell: Callable[[int | None], None] = lambda count: None,
) -> Plan:
    """Enable the dry virtual accelerator, rehearse, and choose a swap_times.

    Args:
        case: the rank.
        host: its host.
        profile_name: of the device.
        swap_times: see `explore`.
        budget_bytes: see `explore`.
        tell: called with the swap_times before it is rehearsed, None for native.

    Raises:
        ValueError: no swap_times keeps within the budget, or the virtual accelerator is enabled
            in this process already and not dry.
        VirtualUnavailableError: it cannot be built here.
    """
    card = PROFILES[profile_name]
    enable(host.limit(card), device_count=1, races="off", timeline=False, dry=True)

    def told(count: int | None) -> Rehearsal:
        tell(count)
        return rehearse(case, count)

    trade = explore(told, swap_times=swap_times, budget_bytes=budget_bytes)
    return Plan(case, host, card, profile(), trade)
