"""Which swap_times to take: the trade of device memory for time, and a budget on the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from swapopt_torch import SwapOptimizerConfig
from swapopt_torch.plan.rehearsal import Rehearsal

TRIED_SWAP_TIMES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MOST_SWAP_TIMES = 4096


@dataclass(frozen=True)
class Trade:
    """The rehearsals of one case.

    Attributes:
        native: nothing swaps.
        swapped: by swap_times, ascending.
        chosen: the swap_times to take.
        budget_bytes: most that a step may need on the device beside what is there between steps;
            None: no limit.
        least_swap_times: the smallest that keeps within the budget; None without a budget.
    """

    native: Rehearsal
    swapped: Mapping[int, Rehearsal]
    chosen: int
    budget_bytes: int | None = None
    least_swap_times: int | None = None

    def fits(self, rehearsal: Rehearsal) -> bool:
        """Say whether it keeps within the budget."""
        return self.budget_bytes is None or rehearsal.staging_bytes <= self.budget_bytes


def least_fitting(needed_bytes: Callable[[int], int], budget_bytes: int, most: int) -> int | None:
    """Return the smallest n from 1 to ``most`` that needs no more than the budget, or None.

    Args:
        needed_bytes: does not grow with n.
        budget_bytes: the most that may be needed.
        most: the largest n to try.
    """
    if needed_bytes(most) > budget_bytes:
        return None
    too_few, enough = 0, 1
    while enough < most and needed_bytes(enough) > budget_bytes:
        too_few, enough = enough, min(2 * enough, most)
    while too_few + 1 < enough:
        middle = (too_few + enough) // 2
        if needed_bytes(middle) > budget_bytes:
            too_few = middle
        else:
            enough = middle
    return enough


def explore(
    rehearse: Callable[[int | None], Rehearsal],
    *,
    swap_times: int | None = None,
    budget_bytes: int | None = None,
) -> Trade:
    """Rehearse a range of swap_times, and choose one.

    Args:
        rehearse: returns the figures for a swap_times, or natively for None.
        swap_times: the one to choose; None: the fastest that keeps within the budget, and without
            a budget the default of SwapOptimizerConfig.
        budget_bytes: most that a step may need on the device beside what is there between steps.

    Raises:
        ValueError: no swap_times keeps within the budget.
    """
    known: dict[int, Rehearsal] = {}

    def at(count: int) -> Rehearsal:
        if count not in known:
            known[count] = rehearse(count)
        return known[count]

    native = rehearse(None)
    least = None
    if budget_bytes is not None:
        least = least_fitting(lambda count: at(count).staging_bytes, budget_bytes, MOST_SWAP_TIMES)
        if least is None:
            raise _no_room(at(MOST_SWAP_TIMES), budget_bytes)
    for count in TRIED_SWAP_TIMES:
        at(count)
    wanted = swap_times
    if wanted is None and budget_bytes is None:
        wanted = SwapOptimizerConfig().swap_times
    if wanted is not None:
        at(wanted)
    most = max(TRIED_SWAP_TIMES[-1], wanted or 1, least or 1)
    in_range = {count: found for count, found in known.items() if count <= most}
    trade = Trade(native, _different(in_range, wanted), wanted or 1, budget_bytes, least)
    return trade if wanted is not None else replace(trade, chosen=_fastest(trade))


def _different(known: Mapping[int, Rehearsal], wanted: int | None) -> dict[int, Rehearsal]:
    """Leave out those that made the batches of a smaller swap_times: there were no more to make.

    As many batches may be more or less memory, by how many of them are on the device at a time.
    """
    kept: dict[int, Rehearsal] = {}
    seen: set[tuple[int, int]] = set()
    for count, found in sorted(known.items()):
        made = (found.batches, found.staging_bytes)
        if made not in seen or count == wanted:
            kept[count] = found
            seen.add(made)
    return kept


def _fastest(trade: Trade) -> int:
    fitting = {count: found for count, found in trade.swapped.items() if trade.fits(found)}
    return min(fitting, key=lambda count: (fitting[count].step_ns, count))


def _no_room(least: Rehearsal, budget_bytes: int) -> ValueError:
    return ValueError(
        f"no swap_times keeps a step's own device memory below {budget_bytes:,} bytes: with "
        f"{least.batches} batches it is still {least.staging_bytes:,}. Allow that much, or divide "
        "the model over more shards."
    )
