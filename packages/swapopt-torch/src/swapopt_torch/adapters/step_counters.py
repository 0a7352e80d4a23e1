"""Step counters on a device: advanced once per step for all parameters, in one launch.

torch's functional update launches that for every call, and would advance a counter twice whose
parameter is updated in two ranges. Here the kernels read counters that have been advanced; if the
step fails, those go back whose parameters were not updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from swapopt_torch.units import Share, TorchUnit

_Correction: TypeAlias = tuple[list[torch.Tensor], Sequence[torch.Tensor] | float]
"""Counters of one device, and what they have counted in excess."""


class StepCounters:
    """The counters of one optimizer's fused groups, in one step.

    What has been launched is noted in the statement that launches it: an interrupt may come right
    after any statement.

    Attributes:
        updated: the shares whose kernel has been launched in this step, list by list.
    """

    def __init__(self) -> None:
        self.updated: list[Sequence[Share]] = []
        self._counters: dict[TorchUnit, torch.Tensor] = {}
        self._advanced: list[torch.device] = []
        self._corrections: list[_Correction] = []
        self._corrected: list[None] = []
        self._found_inf: torch.Tensor | None = None

    def advance(
        self,
        units: Iterable[TorchUnit],
        states: Mapping[torch.Tensor, Mapping[str, Any]],
        found_inf: torch.Tensor | None,
    ) -> None:
        """Advance the counters of all units that this step updates; at its first update only.

        Runs on the caller's current stream of each device.
        """
        if self._counters:
            return
        self._found_inf = found_inf
        self._counters = {unit: states[unit.param]["step"] for unit in units}
        for device, row in _by_device(self._counters.values()).items():
            self._advanced.append((torch._foreach_add_(row, 1), device)[1])

    def of(self, shares: Sequence[Share]) -> list[torch.Tensor]:
        """Return the advanced counters of what a kernel updates."""
        return [self._counters[share.unit] for share in shares]

    def settle(self) -> None:
        """Take back what must not count: updates that a scaler skipped, or that did not happen.

        Called when the step is over, in whatever way; may be interrupted and called again.
        """
        if not self._counters:
            return
        if not self._corrections:
            self._corrections = self._find_corrections()
        for row, excess in self._corrections[len(self._corrected) :]:
            self._corrected.append(torch._foreach_sub_(row, excess))  # type: ignore[arg-type]
        self._counters, self._advanced, self._corrections = {}, [], []
        self.updated, self._corrected, self._found_inf = [], [], None

    def _find_corrections(self) -> list[_Correction]:
        updated = {share.unit for shares in self.updated for share in shares}
        left_out = _by_device(c for unit, c in self._counters.items() if unit not in updated)
        corrections: list[_Correction] = [
            (row, 1.0) for device, row in left_out.items() if device in self._advanced
        ]
        if self._found_inf is not None:
            counted = _by_device(c for unit, c in self._counters.items() if unit in updated)
            for device, row in counted.items():
                found_inf = self._found_inf.to(device, non_blocking=True)
                corrections.append((row, [found_inf] * len(row)))
        return corrections


def _by_device(counters: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    rows: dict[torch.device, list[torch.Tensor]] = {}
    for counter in counters:
        rows.setdefault(counter.device, []).append(counter)
    return rows
