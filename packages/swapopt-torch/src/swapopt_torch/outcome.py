"""What a failed step says of itself."""

from __future__ import annotations

from collections.abc import Sequence

from swapopt_common import SwapStepError
from swapopt_torch.movement import Progress, StepBatch
from swapopt_torch.units import Share


def outcome_of(batches: Sequence[StepBatch], error: BaseException) -> SwapStepError | None:
    """Return what to say of a failed step, or None if nothing was updated."""
    done = [i for i, batch in enumerate(batches) if batch.progress >= Progress.UPDATED]
    begun = [i for i, batch in enumerate(batches) if batch.progress is Progress.UPDATING]
    if not done and not begun:
        return None
    parts = [f"The step failed with {len(done)} of {len(batches)} batches updated"]
    if done:
        names = ", ".join(_name(position, batches[position]) for position in done)
        parts.append(f": {names}. Their parameters and states hold the new values")
    if begun:
        parts.append(
            f". Batch {_name(begun[0], batches[begun[0]])} was being updated: each of its "
            "parameters (or the range of it) holds the old or the new value, and its states with it"
        )
    parts.append(
        ". All others hold the old ones; every state is back in host memory. Cause: "
        f"{type(error).__name__}: {error}"
    )
    return SwapStepError("".join(parts), tuple(done), begun[0] if begun else None)


def _name(position: int, batch: StepBatch) -> str:
    first, last = batch.shares[0], batch.shares[-1]
    return f"{position} ({_share_name(first)} to {_share_name(last)})"


def _share_name(share: Share) -> str:
    elements = "" if share.is_whole else f"[{share.start}:{share.stop}]"
    return f"{share.unit.name}{elements}"
